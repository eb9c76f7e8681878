"""Formats results as text.

The job and its reason come first; the last failure comes last, near the prompt.
"""

from __future__ import annotations

import math
import shlex
import signal
from collections import Counter
from collections.abc import Mapping, Sequence

from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stragglers import Straggler
from rdzv.core.model import JobSpec, NodeState, Settings, StandbyState
from rdzv.core.reason import Reason
from rdzv.core.words import counted, duration, listed, size_text
from rdzv.ctl.layout import Cell, Columns, Page, Text, bold, dim
from rdzv.runtime.log_format import harmless
from rdzv.view.answers import (
    ENDED,
    OWN_BACKEND,
    JobStatus,
    JobSummary,
    LastFailure,
    NodeLoss,
    NodeStatus,
    Submission,
    WorkerFailure,
)
from rdzv.view.sentences import origins, slowness

_MOST_NODES = 40
_MOST_FAILURES = 10
_MOST_TRACEBACK_LINES = 60

_STEADY_MS = 60_000
"""A rate is not shown once its worker has been silent for longer than this and for several steps.
"""
_BEHIND_MS = 10_000
"""The slowest worker is named once its report is older than the newest report by this much."""

UNKNOWN = "-"
_STATE_STYLES = {
    **dict.fromkeys(("running", "seated", "succeeded", "connected"), "green"),
    **dict.fromkeys(("queued", "joining", "stopping", "stopped", "waiting", "away"), "yellow"),
    **dict.fromkeys(("draining", "drained"), "yellow"),
    **dict.fromkeys(("failed", "lost", "gone"), "red"),
}

EVENT_STYLES = {
    "WorkerFailed": "red",
    "NodeLost": "red",
    "NodeStuck": "red",
    "NodeWentAway": "yellow",
    "RoundEnded": "yellow",
    "RoundCompleted": "green",
}

_BY_CONCERN = ("lost", "away", "stopping", "waiting", "left", "spare", "succeeded", "seated")
"""Node states, most urgent first."""


def status(job: JobStatus, page: Page, *, everything: bool = False) -> str:
    """Format one job: its state and the reason for it, its nodes, and its last failure.

    Long lists and tracebacks are abbreviated, with a note, unless `everything` is set.
    """
    lines = [headline(job, page)]
    lines += reason(job, page)
    lines += ["", *facts(job, page)]
    if job.submission:
        lines += ["", *submission(job, job.submission, page)]
    if job.nodes:
        lines += ["", *node_table(job, page, most=None if everything else _MOST_NODES)]
    if job.last_failure:
        lines += ["", *_last_failure(job.last_failure, job.reason, page, everything)]
    return "\n".join(lines)


def reason(job: JobStatus, page: Page) -> list[str]:
    """Format why a job is in its state, without what the table of its nodes says."""
    rows = {node.node_id for node in job.nodes}
    items = [str(item) for item in job.reason.items if item.who not in rows]
    lines = page.sentence(job.reason.line or "(the server gives no reason)")
    return lines + [line for item in items for line in page.sentence(item, indent=2)]


def scaled(before: JobStatus, job: JobStatus) -> str:
    text = (
        f"{job.rdzv_id} has min_nodes {job.min_nodes} and max_nodes {job.max_nodes} now "
        f"(before: {before.min_nodes} and {before.max_nodes})"
    )
    seated = sum(node.group_rank is not None for node in before.nodes if node.state == "seated")
    if job.min_nodes is None or job.max_nodes is None or before.state != "running":
        return harmless(text)
    if seated > job.max_nodes:
        text += f"; of {seated} seated, {job.max_nodes} stay: the group re-forms"
    elif seated < job.min_nodes:
        more = counted(job.min_nodes - seated, "more node")
        text += f"; the {seated} seated continue until their round ends, and the next needs {more}"
    return harmless(text)


def only_watched(job: JobStatus | JobSummary) -> bool:
    """Return whether another backend forms the group, so that rdzvctl cannot change the job."""
    return job.backend != OWN_BACKEND


# ------------------------------------------------------------------------------------ one job


def headline(job: JobStatus, page: Page) -> str:
    age, at = duration(job.state_age_ms), page.ago(job.state_age_ms)
    since = f"{age} ago, at {at}" if job.state in ENDED else f"for {age}, since {at}"
    mark = f"{job.backend}, read-only" if only_watched(job) else ""
    return page.line(bold(job.rdzv_id), state_cell(job.state), since, dim(mark))


def facts(job: JobStatus, page: Page) -> list[str]:
    return page.facts(
        {
            "backend" if only_watched(job) else "run": _run(job),
            "owner": job.owner or "",
            "round": "none is complete yet" if job.round is None else str(job.round),
            "nodes": _node_counts(job),
            "WORLD_SIZE": _of_round(number_text(job.world_size), job),
            "restarts": _restarts(job),
            "budgets": budgets(job),
            "MASTER_ADDR": _of_round(_master(job), job),
            "workers": workers(job),
            "progress": progress(job) if job.progress else "",
            **snapshots(job),
            "straggling": Cell(straggling(job), "yellow"),
        }
    )


def _run(job: JobStatus) -> str:
    began = f"{duration(job.run_age_ms)} ago"
    if only_watched(job):
        return f"{job.backend}, which forms the group; rdzvd only watches it, first seen {began}"
    number = UNKNOWN if job.run_number is None else str(job.run_number)
    return f"{number} (uid {job.run or UNKNOWN}), began {began}"


def _of_round(value: str, job: JobStatus) -> str:
    """Append the number of the round that a value belongs to, unless the job is running."""
    if job.state == "running" or value == UNKNOWN or job.round is None:
        return value
    return f"{value} in round {job.round}"


def _node_counts(job: JobStatus) -> str:
    # A spare that cannot have a standby replaces a lost node as slowly as any newcomer.
    counts = Counter(f"cold {n.state}" if _is_cold_spare(n) else n.state for n in job.nodes)
    # Seated nodes come first; a newer server's states, unknown here, come last.
    known = [state for state in reversed(_BY_CONCERN) if state in counts]
    states = known + [state for state in counts if state not in known]
    have = ", ".join(f"{counts[state]} {state}" for state in states) or "none"
    if job.min_nodes is None or job.max_nodes is None:
        return f"{have}; min:max is unknown"
    return f"{have}; min:max is {job.min_nodes}:{job.max_nodes}"


def _is_cold_spare(node: NodeStatus) -> bool:
    standby = node.standby if node.state == NodeState.SPARE else None
    return standby is not None and standby.state is StandbyState.COLD


def _restarts(job: JobStatus) -> Text:
    if job.restarts is None or job.max_restarts is None:
        return "counted by each node's own agent"
    if job.max_restarts == 0:
        return "none allowed (max_restarts is 0)"
    spent = f"{job.restarts} of {job.max_restarts} spent"
    if job.budgets is not None and job.budgets.restart_window_ms:
        spent += f" in the last {duration(job.budgets.restart_window_ms)}"
    return spent if job.restarts < job.max_restarts else Cell(f"{spent}, none left", "yellow")


def budgets(job: JobStatus) -> str:
    has, parts = job.budgets, []
    if has is None:
        return ""
    if has.preemptions or has.max_preemptions is not None:
        parts.append(f"preemptions {_of(has.preemptions, has.max_preemptions)}")
    if has.store_failures or has.max_store_failures is not None:
        parts.append(f"store failures {_of(has.store_failures, has.max_store_failures)}")
    if has.restarts_without_progress or has.no_progress_restarts:
        step = "" if has.furthest_step is None else f", furthest step {has.furthest_step}"
        vain = _of(has.restarts_without_progress, has.no_progress_restarts or None)
        parts.append(f"restarts without progress {vain}{step}")
    return "; ".join(parts)


def _of(spent: int, most: int | None) -> str:
    """Format the amount spent, with the limit if there is one.

    >>> _of(2, 3), _of(4, 3), _of(2, None)
    ('2 of 3', '3 of 3', '2')
    """
    return str(spent) if most is None else f"{min(spent, most)} of {most}"


def workers(job: JobStatus) -> str:
    kept = f"{job.kept} kept" if job.kept else ""
    if kept and job.source is not None:
        kept += f" from step {job.resume_step} of RANK {job.source}"
    new = {"hot": job.hot, "warm": job.warm, "cold": job.cold}
    if kept and job.warm is None and job.world_size is not None:
        new = {"new": job.world_size - job.kept}
    parts = [kept] * bool(kept) + [f"{number} {how}" for how, number in new.items() if number]
    return _of_round(", ".join(parts), job) if parts else ""


def _master(job: JobStatus) -> str:
    if job.master_addr is None:
        return UNKNOWN
    host = f"[{job.master_addr}]" if ":" in job.master_addr else job.master_addr
    return f"{host}:{job.master_port or UNKNOWN}"


def progress(job: JobStatus) -> str:
    """Describe the workers' progress, at the slowest worker's rate."""
    newest_ms = min(one.age_ms for one in job.progress)
    slowest = max(job.progress, key=lambda one: (one.behind, one.age_ms))
    rates = [rate for one in job.progress if (rate := _present_rate(one)) is not None]
    text = f"step {_steps(job.progress, job)}"
    if len(rates) == len(job.progress):
        text += f", {min(rates):.3g} steps/s"
    text += f", last {duration(newest_ms)} ago"
    silent = slowest.age_ms - newest_ms >= _BEHIND_MS
    if silent or slowest.behind:
        since = f", {duration(slowest.age_ms)} ago" if silent else ""
        text += f" (slowest: RANK {slowest.rank}{since})"
    if job.world_size is not None and len(job.progress) < job.world_size:
        text += f"; reported by {len(job.progress)} of {job.world_size} workers"
    return text


def snapshots(job: JobStatus) -> dict[str, str]:
    """Describe the snapshots in memory by the three questions of docs/snapshots.md."""
    newest = job.snapshot
    if newest is None:
        return {}
    whole = f"step {newest.step}, whole in memory for {duration(newest.age_ms)}"
    if newest.parts > 1:
        whole += f", in {newest.parts} parts"
    if held := [node for node in job.nodes if node.snapshots]:
        amount = size_text(sum(node.snapshot_bytes for node in held))
        whole += f" ({amount} on {counted(len(held), 'node')})"
    loss, costs = newest.node_loss, []
    if newest.lost_steps is not None:
        costs.append(f"{counted(newest.lost_steps, 'step')} if all workers fail")
    if loss is not None and loss.lost_steps == newest.lost_steps is not None:
        costs[0] += ", also if a node is lost"
    elif loss is not None and loss.lost_steps is not None:
        lost = counted(loss.lost_steps, "step")
        costs.append(f"at most {lost} if all workers fail and a node is lost")
    return {
        "newest step": whole,
        "cost now": "; ".join(costs),
        "survives": "" if loss is None else _survives(newest.step, loss),
    }


def _survives(newest: int, loss: NodeLoss) -> str:
    if loss.step is None:
        text = "perhaps no step, if one node is lost"
    else:
        text = f"step {loss.step}, if any one node is lost"
    if loss.sole_holders:
        names = ", ".join(f"{one.node_id} ({one.reason})" for one in loss.sole_holders)
        more = loss.sole_holder_count - len(loss.sole_holders)
        names += f" and {counted(more, 'other node')}" if more else ""
        text += f"; step {newest} is whole only with {names}"
    return text


def straggling(job: JobStatus) -> str:
    def least_first(one: Straggler) -> float:
        return -(one.wait_share or (one.step_s or 0) / (one.median_s or math.inf))

    return listed(
        f"RANK {one.rank} (for {duration(one.age_ms)}: {slowness(one)})"
        for one in sorted(job.stragglers, key=least_first)
    )


def _steps(progress: Sequence[RankProgress], job: JobStatus) -> str:
    """Describe the workers' steps as of the leading worker's report.

    For a worker whose rate is unknown, its last reported step is used.
    """
    most = max(one.step for one in job.progress)
    steps = [one.step if one.rate is None else most - one.behind for one in progress]
    first, last = min(steps), max(steps)
    return f"{first}..{last}" if last > first else str(first)


def _present_rate(one: RankProgress) -> float | None:
    if one.rate is None:
        return None
    missed = one.rate * one.age_ms / 1000
    return None if one.age_ms > _STEADY_MS and missed > 3 else one.rate


# ------------------------------------------------------------------------------------ its nodes


def node_table(
    job: JobStatus,
    page: Page,
    *,
    most: int | None,
    one_line: bool = False,
    hint: str = "; --all shows them",
) -> list[str]:
    """Format the nodes, one per line; if there are more than `most`, show the most urgent ones.

    `hint` says how to show the others.
    """
    nodes = list(job.nodes)
    if most is not None and len(nodes) > most:
        nodes = sorted(nodes, key=_concern)[:most]
    by_rank = {one.rank: one for one in job.progress}
    whys = job.reason.by_node
    # Usually all nodes have the same role, which is not worth a column.
    with_role = len({node.role for node in job.nodes}) > 1
    columns: Columns[NodeStatus] = {
        "GROUP_RANK": lambda node: number_text(node.group_rank),
        "NODE": lambda node: node.node_id,
        "STATE": lambda node: state_cell(node.state),
        "FOR": lambda node: duration(node.state_age_ms),
        "RANK": _ranks,
        "STEP": lambda node: _node_steps(node, job, by_rank),
        # Split into kept, warm and cold if known.
        "WORKERS": lambda node: origins(node) or number_text(node.local_world_size),
        "ROLE": lambda node: (node.role or UNKNOWN) if with_role else "",
        "ADDRESS": lambda node: node.address or UNKNOWN,
        "WHY": lambda node: whys.get(node.node_id, ""),
    }
    expendable = ("STEP", "ADDRESS", "WORKERS", "ROLE")
    lines = page.table(nodes, columns, expendable=expendable, one_line=one_line)
    if left_out := Counter(node.state for node in job.nodes) - Counter(n.state for n in nodes):
        states = ", ".join(f"{number} {state}" for state, number in left_out.items())
        lines.append(page.line(dim(f"... and {left_out.total()} more nodes ({states}){hint}")))
    return lines


def _concern(node: NodeStatus) -> int:
    """Return a node's sort key for an abbreviated table; unknown states count as urgent."""
    return _BY_CONCERN.index(node.state) if node.state in _BY_CONCERN else 0


def _ranks(node: NodeStatus) -> str:
    if node.rank_first is None:
        return UNKNOWN
    rank_last = node.rank_first + (node.local_world_size or 1) - 1
    return f"{node.rank_first}..{rank_last}" if rank_last > node.rank_first else str(rank_last)


def _node_steps(node: NodeStatus, job: JobStatus, by_rank: Mapping[int, RankProgress]) -> str:
    """Describe a node's steps; empty, which hides the column, if the job reports no steps."""
    if node.rank_first is None or not by_rank:
        return ""
    ranks = range(node.rank_first, node.rank_first + (node.local_world_size or 1))
    # Search the reports, not the RANKs, because a server may claim any number of workers.
    reports = [one for rank, one in sorted(by_rank.items()) if rank in ranks]
    return _steps(reports, job) if reports else UNKNOWN


# ---------------------------------------------------------------------------------- its submission


def submitted(job: JobStatus, server: str | None, page: Page, *, followed: bool = False) -> str:
    """Describe a submitted job: what it waits for and, unless `followed`, how to follow it."""
    lines = [page.line(bold(job.rdzv_id), "is submitted")]
    lines += page.sentence(job.reason.line or "(the server gives no reason)")
    lines += [line for item in job.reason.items for line in page.sentence(str(item), indent=2)]
    if not followed:
        program = f"rdzvctl --server={server}" if server else "rdzvctl"
        lines += page.fact("follow it", f"{program} logs -f {job.rdzv_id}")
        lines += page.fact("see it", f"{program} status -w {job.rdzv_id}")
    return "\n".join(lines)


def to_submit(rdzv_id: str, settings: Settings, spec: JobSpec, page: Page) -> str:
    each = str(spec.local_world_size) if spec.local_world_size else "as many as each node counts"
    first = page.line(bold(rdzv_id), "would be submitted; nothing was sent")
    facts = {
        "nodes": f"{settings.min_nodes}:{settings.max_nodes}",
        "workers": f"{each} on each node",
        "restarts": str(settings.max_restarts),
        **_wanted(spec, spec.chdir, dict(spec.labels), [name for name, _ in spec.env]),
    }
    return "\n".join([first, *page.facts(facts)])


def submission(job: JobStatus, made: Submission, page: Page) -> list[str]:
    by = made.submitted_by or "-"
    if made.submitter:
        by += f" [{made.submitter}]"
    lines = page.facts(
        {
            "submitted": f"by {by}, {duration(made.age_ms)} ago",
            **_wanted(made, made.chdir, made.labels, made.env_names),
            "waits behind": counted(made.jobs_before, "job") if made.jobs_before else "",
            "placed": f"{listed(coming)}; not joined yet" if (coming := awaited(job)) else "",
        }
    )
    for node in made.declined:
        lines += page.fact("declined", Cell(f"{node.node_id}: {node.reason}", "yellow"))
    return lines


def awaited(job: JobStatus) -> list[str]:
    """List the nodes on which a submitted job is placed but which have not joined yet.

    A job that has ended awaits no nodes; its nodes may have joined and left.
    """
    if job.state in ENDED:
        return []
    # The job may have been placed again on a node that had left.
    here = {node.node_id for node in job.nodes if node.state not in ("left", "lost")}
    placed = job.submission.placed if job.submission else ()
    return [node_id for node_id in placed if node_id not in here]


def _wanted(
    job: JobSpec | Submission,
    chdir: str | None,
    labels: Mapping[str, str],
    env_names: Sequence[str],
) -> dict[str, str]:
    gpus = job.gpus_per_node
    return {
        "runs": shlex.join(job.args),
        "in": chdir or "the folder that the node chooses",
        "environment": f"{', '.join(env_names)} (values are not shown)" if env_names else "",
        "labels": ", ".join(f"{name}={value}" for name, value in labels.items()),
        "GPUs": "" if gpus is None else f"{gpus} on each node",
        "priority": str(job.priority or ""),
        "account": job.account or "",
    }


# ------------------------------------------------------------------------------------ its failure


def one_line_of(failure: LastFailure) -> str:
    when = "" if failure.age_ms is None else f", {duration(failure.age_ms)} ago"
    cause = failure.root_cause
    message = f": {cause.message}" if cause.message else ""
    return f"{_who(cause)}{when}: {_how(cause)}{message}"


def _last_failure(failure: LastFailure, reason: Reason, page: Page, everything: bool) -> list[str]:
    cause, others = failure.root_cause, failure.others
    when = "" if failure.age_ms is None else f", {duration(failure.age_ms)} ago"
    lines = [page.line(bold(f"last failure{when}"))]
    lines += page.fact("who", _who(cause))
    lines += page.fact("how", Cell(_how(cause), "red"))
    if cause.message and cause.message not in str(reason):
        lines += page.fact("message", cause.message)
    if cause.traceback:
        last = None if everything else _MOST_TRACEBACK_LINES
        lines += ["", *page.block(cause.traceback, indent=4, last=last)]
    if others:
        lines += ["", *_failed_too(others, page, everything)]
    return lines


def _who(failure: WorkerFailure) -> str:
    host = f"{failure.node_id} ({failure.address})" if failure.address else failure.node_id
    pid = "" if failure.pid is None else f", pid {failure.pid}"
    return f"RANK {failure.rank} on {host}, LOCAL_RANK {failure.local_rank}{pid}"


def _how(failure: WorkerFailure) -> str:
    """Describe how a worker ended.

    >>> _how(WorkerFailure("n1", None, 0, 0, None, None, 9, None, None))
    'signal 9 (SIGKILL)'
    """
    if failure.signal is not None:
        return f"signal {failure.signal}{_signal_name(failure.signal)}"
    if failure.exit_code is not None:
        return f"exit code {failure.exit_code}"
    if failure.suspect:
        return "a collective failed in it"
    hung = (failure.message or "").startswith("hung: ")
    return "it hung" if hung else "how it ended is unknown"


def _signal_name(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:  # A real-time signal without a name.
        return ""


def _failed_too(others: Sequence[WorkerFailure], page: Page, everything: bool) -> list[str]:
    shown = others if everything else others[:_MOST_FAILURES]
    columns: Columns[WorkerFailure] = {
        "RANK": lambda other: str(other.rank),
        "NODE": lambda other: other.node_id,
        "LOCAL_RANK": lambda other: str(other.local_rank),
        "HOW": _how,
        "MESSAGE": lambda other: other.message or "",
    }
    lines = [page.line(bold("failed within half a second of it"))]
    lines += page.table(shown, columns, one_line=not everything)
    if len(shown) < len(others):
        lines.append(page.line(dim(f"... and {len(others) - len(shown)} more; --all shows them")))
    return lines


def state_cell(state: str) -> Cell:
    return Cell(state or UNKNOWN, _STATE_STYLES.get(state, ""))


def number_text(number: int | None) -> str:
    return UNKNOWN if number is None else str(number)
