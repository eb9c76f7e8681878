"""Events as sentences, with one line for each event.

The caller prepends the job's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rdzv.core import events
from rdzv.core.evidence.stragglers import Straggler
from rdzv.core.kept_ranks import WHY_NEW
from rdzv.core.model import Failure
from rdzv.core.root_cause import describe_failure
from rdzv.core.snapshots import WHY_NOT_LOADED
from rdzv.core.words import counted, duration, ranks_text
from rdzv.transport.wire import convert
from rdzv.view import history
from rdzv.view.history import Fields, Kept, read


def sentence(event: Kept) -> str:
    """Describe an event in one line.

    >>> sentence(events.NodeLost("n7", "lease expired: no message for 5.0 s"))
    'n7 was lost: lease expired: no message for 5.0 s'
    """
    said = _SENTENCES[type(event)]
    return one_line(said.format(event) if isinstance(said, str) else said(event))


def sentence_of(name: str, fields: Fields) -> str:
    """Describe an event by its name and fields. For an unknown name, list the fields.

    >>> sentence_of("NodeSang", {"node_id": "n1", "verses": 3})
    'NodeSang: node_id n1, verses 3'
    """
    if (event := read(name, fields)) is not None:
        return sentence(event)
    return one_line(f"{name}: " + ", ".join(f"{key} {value}" for key, value in fields.items()))


def headline(event: Kept) -> str:
    """Describe the end of a round without its reason; other events as `sentence` does.

    >>> headline(history.RoundEnded(3, history.Cause.NODE_LOST, "n2: lease expired", True))
    'round 3 ended (node lost)'
    """
    match event:
        case history.RoundEnded():
            return f"round {event.round} ended ({event.cause})"
        case history.RoundSettled():
            worker, who = event.root_cause, event.cause_node_id
            who = f"RANK {worker.rank} on {worker.node_id}" if worker else who
            return one_line(
                f"round {event.round} is charged to {event.cause}{who and f' ({who})'}"
                f"{_budget(event)}"
            )
        case _:
            return sentence(event)


def failure(event: history.WorkerFailed) -> str:
    return one_line(describe_failure(convert(Failure, event, traceback="", at_ms=0)))


def slowness(one: events.RankStraggles | Straggler) -> str:
    if one.late_ms is None:
        return f"{one.step_s or 0:.3g} s a step, where the median is {one.median_s or 0:.3g} s"
    error = f", clock error ± {one.clock_error_ms:.2g} ms" if one.clock_error_ms else ""
    return (
        f"it enters collectives {one.late_ms:.3g} ms after the others (95th percentile "
        f"{one.late_p95_ms or 0:.3g} ms{error}), which wait for it at least "
        f"{one.wait_share or 0:.0%} of the time"
    )


def _budget(event: history.RoundSettled) -> str:
    if event.max_restarts is None:
        return ""
    return f"; restarts spent: {event.restarts} of {event.max_restarts}"


def _round(event: history.RoundCompleted) -> str:
    places = " ".join(
        f"{p.node_id}={_ranks(p.rank_first, p.local_world_size)}" for p in event.participants
    )
    more = event.nodes - len(event.participants)
    others = f" and {counted(more, 'more node')}" if more else ""
    return (
        f"round {event.round} complete: {places}{others}, world_size {event.world_size}, "
        f"MASTER {_host_port(event.master_addr, event.master_port)}{kept(event)}"
    )


def kept(event: history.RoundCompleted) -> str:
    """Describe which workers of a round are kept, why others are new, and what the new ones load.

    The result is empty if no worker could be kept and nothing is loaded.

    >>> torn = history.NotKept("failed", 1, (3,))
    >>> kept(history.RoundCompleted(1, 2, 4, (), "h", 1, None, 3, 0, 7, (torn,)))
    '; 3 of 4 workers kept, from step 7 of RANK 0; new: RANK 3 (failed in the last round)'
    """
    text = ""
    if event.kept or event.not_kept:
        text = f"; {event.kept} of {event.world_size} workers kept"
    if event.source is not None:
        text += f", from step {event.resume_step} of RANK {event.source}"
    new = "; ".join(
        f"RANK {ranks_text(one.ranks)}{_more(one.workers - len(one.ranks))} "
        f"({WHY_NEW.get(one.why, one.why)})"
        for one in event.not_kept
    )
    return text + (f"; new: {new}" if new else "") + _loaded(event)


def _loaded(event: history.RoundCompleted) -> str:
    if event.loaded_step is not None:
        return f"; all continue from the snapshots of step {event.loaded_step} in memory"
    if event.not_loaded:
        why = WHY_NOT_LOADED.get(event.not_loaded, event.not_loaded)
        return f"; snapshots in memory are not loaded: {why}"
    return ""


def started(event: events.WorkersStarted) -> str:
    """Describe how a round got its workers and why some of them are new or cold.

    >>> late = [events.NewWorker(rank, "n2", "warm", "it did not park in time") for rank in (2, 3)]
    >>> started(events.WorkersStarted(1, kept=4, warm=2, cold=0, new=tuple(late)))
    '4 kept, 2 warm: RANK 2-3 on n2 are warm (it did not park in time)'
    """
    alike: dict[tuple[str, str], dict[str, list[int]]] = {}
    for one in event.new:
        alike.setdefault((one.how, one.why), {}).setdefault(one.node_id, []).append(one.rank)
    new = []
    for (how, why), ranks in alike.items():
        who = ", ".join(f"RANK {ranks_text(on)} on {node}" for node, on in ranks.items())
        verb = "is" if sum(map(len, ranks.values())) == 1 else "are"
        new.append(f"{who} {verb} {how} ({why})")
    return ": ".join(part for part in (origins(event), "; ".join(new)) if part)


def origins(one: object) -> str:
    """Describe how many workers of a node or round were kept, hot, warm and cold."""
    found = [(getattr(one, how), how) for how in events.WorkerStart]
    return ", ".join(f"{number} {how}" for number, how in found if number)


def _more(number: int) -> str:
    return f" and {number} more" if number > 0 else ""


def _listed(names: Sequence[str], of: int) -> str:
    more = f" and {of - len(names)} more" if of > len(names) else ""
    return ", ".join(names) + more


def _ranks(first: int, count: int) -> str:
    return f"{first}..{first + count - 1}" if count > 1 else str(first)


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.3g} s"


def one_line(text: str) -> str:
    """Replace unprintable characters with blanks.

    This prevents text from forging log lines or moving the cursor.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " for char in text)


_SENTENCES: Mapping[type, str | Callable[[Any], str]] = {
    events.RunBegan: "run {0.run_number} ({0.run}) began: {0.reason}",
    events.LastCallBegan: lambda e: (
        f"last call: {counted(e.nodes, 'node')} ready; waiting up to {_seconds(e.for_ms)} for more"
    ),
    history.RoundCompleted: _round,
    history.RoundAdopted: lambda e: (
        f"round {e.round} of {counted(e.nodes, 'node')} resumed: its nodes reported it"
    ),
    history.RoundEnded: "round {0.round} ended ({0.cause}): {0.reason}",
    history.RoundSettled: lambda e: (
        f"round {e.round} is charged to {e.cause}: {e.reason}{_budget(e)}"
    ),
    history.WorkerFailed: lambda e: f"worker failed in round {e.round}: {failure(e)}",
    events.JobScaled: "scaled to {0.min_nodes}:{0.max_nodes} nodes: {0.reason}",
    history.NodesPlaced: lambda e: f"placed on {_listed(e.node_ids, e.nodes)}",
    history.NodesWithdrawn: lambda e: f"withdrawn from {_listed(e.node_ids, e.nodes)}: {e.reason}",
    events.JobQueued: "queued again: {0.reason}",
    events.StacksTaken: "stacks of round {0.round}: {0.summary}",
    events.WorkersHang: "{0.node_id}: workers hang in round {0.round}: {0.reason}",
    events.HangOver: "round {0.round} continues: no worker hangs any more",
    events.RankStraggles: lambda e: f"RANK {e.rank} on {e.node_id} straggles: {slowness(e)}",
    events.RankCaughtUp: "RANK {0.rank} on {0.node_id} no longer straggles",
    events.WorkersStarted: lambda e: f"workers of round {e.round}: {started(e)}",
    events.SnapshotsNotLoaded: (
        "{0.node_id} did not load snapshots in round {0.round}: {0.reason}"
    ),
    events.FirstCollectiveMade: "first collective of round {0.round}, on {0.node_id}",
    events.FirstStepMade: (
        "first step of round {0.round}: step {0.step} by RANK {0.rank} on {0.node_id}"
    ),
    events.LostStepsRedone: "round {0.round} is back at step {0.step}: all lost steps are redone",
    events.LastStepMade: lambda e: (
        f"last step of round {e.round}: step {e.step}, {_seconds(e.age_ms)} before its end"
    ),
    events.SnapshotsSaved: lambda e: (
        f"round {e.round} saved {counted(e.times, 'snapshot')}, which stopped training for "
        f"{_seconds(e.stopped_ms)}"
    ),
    history.RunEnded: "run {0.run} {0.result}: {0.reason}",
    events.NodeJoined: lambda e: (
        f"{e.node_id} joined from {e.address} with {counted(e.local_world_size, 'worker')}"
    ),
    events.NodeStopped: lambda e: (
        f"{e.node_id} stopped its workers of round {e.round}"
        + (f"; {e.parked} parked" if e.parked else "")
    ),
    events.NodeSucceeded: "{0.node_id} succeeded in round {0.round}",
    events.NodeLeaving: "{0.node_id} leaves: {0.reason}",
    events.NodeLeft: "{0.node_id} left: {0.reason}",
    events.NodeWentAway: lambda e: (
        f"{e.node_id} is away, its place is kept for {_seconds(e.for_ms)}"
    ),
    events.NodeCameBack: lambda e: f"{e.node_id} is back after {_seconds(e.after_ms)}",
    events.NodeLost: lambda e: (
        f"{e.node_id} was lost: {e.reason}"
        + ("; its workers may still run until it reports" if e.may_run else "")
    ),
    events.NodeStuck: "{0.node_id} is stuck in round {0.round}: {0.reason}",
    events.NodeAdopted: "{0.node_id} has GROUP_RANK {0.group_rank} in round {0.round}",
    events.NodeDeclined: "{0.node_id} cannot run it: {0.reason}",
    events.NodeQuarantined: lambda e: (
        f"{e.node_id} is quarantined for {duration(e.for_ms)}: {e.reason}"
    ),
    events.NodeNotQuarantined: ("{0.node_id} is not quarantined ({0.fault}): {0.reason}"),
    events.NodeDrained: lambda e: f"{e.node_id} leaves within {duration(e.within_ms)}: {e.reason}",
    events.NodeUndrained: "{0.node_id} is no longer drained",
}
"""The sentence about each kind of event, or a template for it."""
