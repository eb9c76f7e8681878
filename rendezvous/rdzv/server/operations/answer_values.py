"""Converts the server's own values to the answers shared by gRPC and HTTP.

An unknown value is None in every answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rdzv.core.evidence.progress_lag import RankProgress, lags
from rdzv.core.evidence.stacks import Report
from rdzv.core.evidence.stragglers import Straggler
from rdzv.core.model import NodeState
from rdzv.core.snapshots import NodeHolding, SnapshotsKnown
from rdzv.server.diagnosis.worker_starts import Starts
from rdzv.server.security.tokens import Token
from rdzv.structs import replace
from rdzv.transport.wire import convert
from rdzv.view import answers

SUMMARY_ITEMS = 4
"""How many items of its reason a job has in a list."""
NO_SNAPSHOTS = SnapshotsKnown()
_HERE = (NodeState.SEATED, NodeState.SUCCEEDED, NodeState.AWAY, NodeState.STOPPING)


def with_workers(
    status: answers.JobStatus,
    now_ms: int,
    progress: Sequence[RankProgress] = (),
    stragglers: Iterable[Straggler] = (),
    starts: Mapping[str, Starts] | None = None,
    snapshots: SnapshotsKnown = NO_SNAPSHOTS,
) -> answers.JobStatus:
    """Add to a job's status what is known about its workers and snapshots."""
    starts = starts or {}
    told = sum(one.kept + one.warm + one.cold for one in starts.values())
    known = list(starts.values()) if told == (status.world_size or 0) else []
    return replace(
        status,
        nodes=tuple(
            _job_node(node, starts.get(node.node_id), snapshots.held.get(node.node_id))
            for node in status.nodes
        ),
        progress=tuple(
            replace(one, behind=steps) for one, steps in zip(progress, lags(progress), strict=True)
        ),
        stragglers=tuple(
            convert(answers.Straggler, one, age_ms=max(now_ms - one.since_ms, 0))
            for one in stragglers
        ),
        warm=sum(one.warm for one in known) if known else None,
        cold=sum(one.cold for one in known) if known else None,
        snapshot=_whole_snapshot(snapshots, progress, now_ms),
    )


def _whole_snapshot(
    snapshots: SnapshotsKnown, progress: Sequence[RankProgress], now_ms: int
) -> answers.WholeSnapshot | None:
    mark = snapshots.whole
    if mark is None:
        return None
    age_ms, steps = max(now_ms - snapshots.whole_ms, 0), [one.step for one in progress]
    node_loss = None
    if (found := snapshots.node_loss) is not None:
        node_loss = convert(
            answers.NodeLoss,
            found,
            step=None if found.whole is None else found.whole.step,
            lost_steps=snapshots.lost_steps_with_node(steps),
        )
    lost_steps = snapshots.lost_steps(steps)
    return answers.WholeSnapshot(
        mark.lineage, mark.step, mark.shards, age_ms, lost_steps, node_loss
    )


def _job_node(
    node: answers.NodeStatus, started: Starts | None, held: NodeHolding | None
) -> answers.NodeStatus:
    if started is not None:
        node = replace(node, kept=started.kept, warm=started.warm, cold=started.cold)
    if held is not None:
        node = replace(node, snapshots=held.snapshots, snapshot_bytes=held.bytes)
    return node


def job_summary(status: answers.JobStatus, hangs: str) -> answers.JobSummary:
    """Return the answer for one line in a list; `hangs` names the hanging workers, if any."""
    return convert(
        answers.JobSummary,
        status,
        reason=replace(status.reason, items=status.reason.items[:SUMMARY_ITEMS]),
        nodes=sum(1 for n in status.nodes if n.group_rank is not None and n.state in _HERE),
        hangs=hangs or None,
    )


def token(token: Token, now_ms: int) -> answers.Token:
    expires_ms, used_ms = token.expires_ms, token.used_ms
    return answers.Token(
        id=token.id,
        name=token.name,
        roles=tuple(token.roles),
        age_ms=max(now_ms - token.created_ms, 0),
        expires_in_ms=None if expires_ms is None else max(expires_ms - now_ms, 0),
        used_age_ms=None if used_ms is None else max(now_ms - used_ms, 0),
    )


def stack_report(report: Report, now_ms: int) -> answers.StackReport:
    """Return the answer for the stacks of a round's workers."""
    return convert(answers.StackReport, report, age_ms=max(now_ms - report.at_ms, 0))
