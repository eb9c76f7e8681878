"""Events as sentences, with one line for each event.

The caller prepends the job's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from rdzv.view import answers


def sentence(event: Kept) -> str:
    """Describe an event in one line.

    >>> sentence(events.NodeLost("n7", "lease ran out: nothing heard for 5.0 s"))
    'n7 was lost: lease ran out: nothing heard for 5.0 s'
    """
    return one_line(_of_round(event) or _of_node(event))


def sentence_of(name: str, fields: Fields) -> str:
    """Describe an event by its name and fields. For an unknown name, list the fields.

    >>> sentence_of("NodeSang", {"node_id": "n1", "verses": 3})
    'NodeSang: node_id n1, verses 3'
    """
    if (event := read(name, fields)) is not None:
        return sentence(event)
    return one_line(f"{name}: " + ", ".join(f"{key} {value}" for key, value in fields.items()))


def failure(event: history.WorkerFailed) -> str:
    return one_line(describe_failure(convert(Failure, event, traceback="", at_ms=0)))


def slowness(one: events.RankStraggles | Straggler) -> str:
    """Describe how slow a straggler is."""
    if one.late_ms is None:
        return f"{one.step_s or 0:.3g} s a step, where the median is {one.median_s or 0:.3g} s"
    error = f", as clocks go ± {one.clock_error_ms:.2g} ms" if one.clock_error_ms else ""
    return (
        f"it enters collectives {one.late_ms:.3g} ms after the others (95th percentile "
        f"{one.late_p95_ms or 0:.3g} ms{error}), which wait for it at least "
        f"{one.wait_share or 0:.0%} of the time"
    )


def _of_round(event: Kept) -> str:
    """Describe an event that concerns a run, a round or a worker. Returns "" for other events."""
    match event:
        case events.RunBegan():
            return f"run {event.run_number} ({event.run}) began: {event.reason}"
        case events.LastCallBegan():
            nodes = counted(event.nodes, "node")
            return f"last call: {nodes} at hand, more may come for {_seconds(event.for_ms)}"
        case history.RoundCompleted():
            return _round(event)
        case history.RoundAdopted():
            nodes = counted(event.nodes, "node")
            return f"round {event.round} of {nodes} goes on: its nodes told of it"
        case history.RoundEnded():
            return f"round {event.round} ended ({event.cause}): {event.reason}"
        case history.RoundSettled():
            charge = f"{event.cause}: {event.reason}"
            return f"round {event.round} is charged to {charge}{_budget(event)}"
        case history.WorkerFailed():
            return f"worker failed in round {event.round}: {failure(event)}"
        case events.JobScaled():
            return f"scaled to {event.min_nodes}:{event.max_nodes} nodes: {event.reason}"
        case history.NodesPlaced():
            return f"placed on {_listed(event.node_ids, event.nodes)}"
        case history.NodesWithdrawn():
            return f"withdrawn from {_listed(event.node_ids, event.nodes)}: {event.reason}"
        case events.JobQueued():
            return f"queued again: {event.reason}"
        case events.StacksTaken():
            return f"stacks of round {event.round}: {event.summary}"
        case events.HangOver():
            return f"no worker hangs any more in round {event.round}, which goes on"
        case events.RankStraggles():
            return f"RANK {event.rank} on {event.node_id} straggles: {slowness(event)}"
        case events.RankCaughtUp():
            return f"RANK {event.rank} on {event.node_id} no longer straggles"
        case events.WorkersStarted():
            return f"workers of round {event.round}: {started(event)}"
        case events.SnapshotsNotLoaded():
            node, number = event.node_id, event.round
            return f"{node} has not loaded snapshots in round {number}: {event.reason}"
        case events.FirstCollectiveMade():
            return f"first collective of round {event.round}, on {event.node_id}"
        case events.FirstStepMade():
            worker = f"RANK {event.rank} on {event.node_id}"
            return f"first step of round {event.round}: step {event.step} by {worker}"
        case events.LostStepsRedone():
            return f"round {event.round} is back at step {event.step}: no step is redone any more"
        case events.LastStepMade():
            ago = _seconds(event.age_ms)
            return f"last step of round {event.round}: step {event.step}, {ago} before its end"
        case history.RunEnded():
            return f"run {event.run} {event.result}: {event.reason}"
        case _:
            return ""


def _of_node(event: Kept) -> str:
    match event:
        case events.NodeJoined():
            workers = counted(event.local_world_size, "worker")
            return f"{event.node_id} joined from {event.address} with {workers}"
        case events.NodeStopped():
            parked = f"; {event.parked} parked" if event.parked else ""
            return f"{event.node_id} stopped its workers of round {event.round}{parked}"
        case events.NodeSucceeded():
            return f"{event.node_id} succeeded in round {event.round}"
        case events.NodeLeaving():
            return f"{event.node_id} leaves: {event.reason}"
        case events.NodeLeft():
            return f"{event.node_id} left: {event.reason}"
        case events.NodeWentAway():
            return f"{event.node_id} is away, its place is kept for {_seconds(event.for_ms)}"
        case events.NodeCameBack():
            return f"{event.node_id} is back after {_seconds(event.after_ms)}"
        case events.NodeLost():
            unheard = "; its workers may still run until it reports" if event.may_run else ""
            return f"{event.node_id} was lost: {event.reason}{unheard}"
        case events.NodeStuck():
            return f"{event.node_id} is stuck in round {event.round}: {event.reason}"
        case events.NodeAdopted():
            return f"{event.node_id} has GROUP_RANK {event.group_rank} in round {event.round}"
        case events.NodeDeclined():
            return f"{event.node_id} cannot run it: {event.reason}"
        case events.NodeQuarantined():
            return f"{event.node_id} is quarantined for {duration(event.for_ms)}: {event.reason}"
        case events.NodeNotQuarantined():
            return f"{event.node_id} was {event.fault}, and is not quarantined: {event.reason}"
        case events.NodeDrained():
            return f"{event.node_id} leaves within {duration(event.within_ms)}: {event.reason}"
        case events.NodeUndrained():
            return f"{event.node_id} may stay: its drain is lifted"
        case events.WorkersHang():
            return f"{event.node_id}: workers hang in round {event.round}: {event.reason}"
        case _:
            raise AssertionError(f"{type(event).__name__} has no sentence")


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
        return f"; all go on from the snapshots of step {event.loaded_step} in memory"
    if event.not_loaded:
        why = WHY_NOT_LOADED.get(event.not_loaded, event.not_loaded)
        return f"; snapshots in memory are not loaded: {why}"
    return ""


def started(event: events.WorkersStarted) -> str:
    """Describe how a round got its workers and why some of them are new or cold.

    >>> late = events.NewWorker(3, "n2", "warm", "it did not park in time")
    >>> started(events.WorkersStarted(1, kept=5, warm=1, cold=0, new=(late,)))
    '5 kept, 1 warm: RANK 3 on n2 is warm (it did not park in time)'
    """
    new = [f"RANK {one.rank} on {one.node_id} is {one.how} ({one.why})" for one in event.new]
    return ": ".join(part for part in (origins(event), "; ".join(new)) if part)


def origins(one: events.WorkersStarted | answers.NodeStatus) -> str:
    """Describe how many workers were kept, started warm, and started cold, omitting zeros."""
    found = ((one.kept, "kept"), (one.warm, "warm"), (one.cold, "cold"))
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
