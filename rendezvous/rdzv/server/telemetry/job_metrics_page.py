"""Writes the metrics of jobs: what is counted of each, and its state at the scrape.

This is text, written without prometheus-client, because there may be hundreds of thousands of
lines, during which nodes wait for the event loop. A job takes a fraction of a millisecond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low

from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stragglers import Straggler
from rdzv.core.life.failures import restarts_that_count
from rdzv.core.life.forming import FLAP_WINDOW_MS, completion_due_ms, holds, restart_due_ms
from rdzv.core.model import NO_STANDBY, Cause, JobState, Membership, NodeState, State, job_state
from rdzv.core.snapshots import SnapshotsKnown
from rdzv.server.telemetry import server_metrics
from rdzv.view.ledger import LedgerPhase

JOB_METRICS: Mapping[str, str] = {
    "state": "1 for the state that the job is in, 0 for the others.",
    "nodes": "Nodes of the job by state.",
    "min_nodes": "Nodes that a round needs.",
    "max_nodes": "Nodes that a round may have.",
    "missing_nodes": "Nodes that must still come before a round can complete; 0 while one is live.",
    "flapping_nodes": "Nodes that were lost more than once recently.",
    "standbys": "Nodes that wait by the state of their standby workers, if their job can have any.",
    "round": "Number of the last round that was completed.",
    "world_size": "Workers of the live round; 0 while none is live.",
    "restarts_spent": "Restarts that count against max_restarts now.",
    "max_restarts": "Restarts that the job may spend.",
    "preemptions_spent": "Rounds that ended because a node was lost or left.",
    "max_preemptions": "Preemptions that the job may have.",
    "store_failures_spent": "Rounds that ended because a store host failed.",
    "max_store_failures": "Failures of store hosts that the job may have.",
    "restarts_without_progress": "Consecutive restarts without progress.",
    "no_progress_restarts": "Consecutive restarts without progress after which the job fails.",
    "run_age_seconds": "Time since the present run began.",
    "not_running_seconds": "Time since a round was live, with the reason why none is; absent while "
    "one is.",
    "min_step": "Step of the worker that is behind all others.",
    "max_step": "Step of the worker that is ahead of all others.",
    "median_step": "Step that half of the workers have reached.",
    "steps_per_second": "Steps of the slowest worker whose rate is known.",
    "median_steps_per_second": "Steps of the worker in the middle of those whose rate is known.",
    "max_steps_per_second": "Steps of the fastest worker.",
    "progress_age_seconds": "Time since any worker reported a step.",
    "max_progress_age_seconds": "Time since the worker that has been silent longest reported a "
    "step.",
    "straggling_ranks": "Workers that have been slow for a while, by their rate or by when they "
    "enter collectives.",
    "straggler_wait_ratio": "Share of the time that the others wait for the latest straggler in "
    "collectives; 0: none.",
    "snapshot_step": "Newest step for which participants hold every part in memory; absent if "
    "there is none.",
    "snapshot_age_seconds": "Time since that step became whole.",
    "snapshot_lost_steps": "Steps that would be redone if all workers failed now.",
    "snapshot_step_without_a_node": "Newest step that would be whole after the loss of any one "
    "node; absent if there is none.",
    "snapshots": "Snapshots that nodes hold in memory; absent if there are none.",
    "snapshot_bytes": "Size of these snapshots.",
    "progress_workers": "Workers that have reported a step in the live round.",
    "rounds_completed_total": "Rounds that were completed.",
    "rounds_ended_total": server_metrics.ROUNDS_ENDED,
    "restarts_total": "Restarts spent on worker failures.",
    "membership_changes_total": server_metrics.MEMBERSHIP_CHANGES,
    "worker_failures_total": "Workers that failed.",
    "running_seconds_total": "Time in which a round was live.",
    "elapsed_seconds_total": "Time since this server knows of the run.",
    "phase_seconds": "Time by what it was spent on, since this server knows of the job; corrected "
    "when a failure, or a first step, turns out to be older than its report.",
    "goodput_ratio": "Training's share of that time.",
    "node_seconds": "Time of all nodes that the job held, by how it was spent.",
    "formation_seconds": server_metrics.FORMATION,
    "recovery_seconds": server_metrics.RECOVERY,
}
"""The help text of each job metric, named without `rdzv_job_`. The label `rdzv_id` names the job.
"""


def node_states(state: State) -> Counter[NodeState]:
    membership, away = state.membership, state.away
    round_ = membership.round
    found: Counter[NodeState] = Counter()
    seated = NodeState.SEATED if round_ is not None and round_.live else NodeState.STOPPING
    for node_id, seat in state.seats.items():
        if node_id in away:
            found[NodeState.AWAY] += 1
        else:
            found[NodeState.SUCCEEDED if seat.succeeded else seated] += 1
    full = len(state.seats) >= membership.max_nodes
    found[NodeState.STOPPING] += len(state.stuck)
    for node_id in state.waiting:
        if node_id in away:
            found[NodeState.AWAY] += 1
        else:
            found[NodeState.SPARE if full else NodeState.WAITING] += 1
    latest = {departure.node_id: departure.state for departure in membership.departures}
    for node_id, departed in latest.items():
        if not state.present(node_id):
            found[departed] += 1
    return found


def _standbys(state: State) -> Counter[str]:
    here = (one.standby for node_id, one in state.waiting.items() if node_id not in state.away)
    return Counter(standby.state for standby in here if standby != NO_STANDBY)


def missing_nodes(state: State) -> int:
    """Return how many more nodes a job needs to complete a round.

    The result is 0 while a round is live and after the run has ended.
    """
    if job_state(state) not in (JobState.QUEUED, JobState.JOINING, JobState.STOPPING):
        return 0
    stays = sum(1 for n, seat in state.seats.items() if not seat.leaving and n not in state.away)
    return max(state.membership.min_nodes - state.ready - stays, 0)


def why_not_running(state: State) -> str:
    """Return a few words on why no round is live; empty if one is or if the run has ended.

    For a full sentence about the same state, see `explain`.
    """
    match job_state(state):
        case JobState.QUEUED | JobState.STOPPING as present:
            return present
        case JobState.JOINING:
            pass
        case _:
            return ""
    if completion_due_ms(state) is None:
        return "too few nodes" if missing_nodes(state) else "nodes away"
    membership = state.membership
    if membership.round is None:
        return "last call" if membership.resumed_at_ms is None else "adoption"
    backs_off = membership.store_failures or completion_due_ms(state) == restart_due_ms(state)
    return "back-off" if backs_off else "gathering"


def _flapping(state: State, now_ms: int) -> int:
    newest = {departure.node_id: departure.at_ms for departure in state.membership.departures}
    since_ms = now_ms - FLAP_WINDOW_MS
    return sum(1 for node_id in holds(state) if newest[node_id] > since_ms)


Value = float | server_metrics.Sum | None


class JobPage:
    """The metrics for all jobs as text. Jobs are added one at a time."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {name: [] for name in JOB_METRICS}

    def add_counted(
        self,
        rdzv_id: str,
        present: JobState,
        tally: server_metrics.JobTally,
        phases: tuple[Mapping[str, int], Mapping[str, int]],
        now_ms: int,
    ) -> None:
        """Add what is counted of a job, and the time that it and its nodes spent in each phase."""
        spent, of_nodes = phases
        spent_ms, trained_ms = sum(spent.values()), of_nodes.get(LedgerPhase.TRAINING, 0)
        lost_ms = sum(of_nodes.values()) - trained_ms
        counts = tally.counts
        self._add(
            rdzv_id,
            state=_by("state", {state: int(state is present) for state in JobState}),
            rounds_completed_total=tally.completed,
            rounds_ended_total=_by("cause", {c: counts["rounds_ended_total", c] for c in Cause}),
            restarts_total=counts["restarts_total",],
            membership_changes_total=_by(
                "kind",
                {kind: counts["membership_changes_total", kind] for kind in server_metrics.CHANGES},
            ),
            worker_failures_total=counts["worker_failures_total",],
            running_seconds_total=tally.running_until(now_ms) / 1000,
            elapsed_seconds_total=tally.elapsed_until(now_ms) / 1000,
            phase_seconds=_by("phase", {phase: ms / 1000 for phase, ms in spent.items()}),
            goodput_ratio=round(spent[LedgerPhase.TRAINING] / spent_ms, 6) if spent_ms else None,
            node_seconds=_by("kind", {"training": trained_ms / 1000, "lost": lost_ms / 1000}),
            formation_seconds=tally.formation,
            recovery_seconds=_by("phase", tally.recovery),
        )

    def add_live(
        self,
        state: State,
        now_ms: int,
        progress: Sequence[RankProgress],
        stragglers: Sequence[Straggler],
    ) -> None:
        """Add the state of a job that has not ended.

        Of its workers these are extremes and medians; a series for each would be too many.
        """
        membership, round_ = state.membership, state.membership.round
        nodes = node_states(state)
        live = round_ is not None and round_.live
        since_ms = round_.end.at_ms if round_ and round_.end else membership.began_at_ms
        reason = why_not_running(state)
        not_running = {reason: max(now_ms - since_ms, 0) / 1000} if reason else {}
        steps = sorted(one.step for one in progress)
        rates = sorted(one.rate for one in progress if one.rate)
        ages = [one.age_ms for one in progress]
        self._add(
            membership.rdzv_id,
            nodes=_by("state", {one: nodes[one] for one in NodeState}),
            min_nodes=membership.min_nodes,
            max_nodes=membership.max_nodes,
            missing_nodes=missing_nodes(state),
            flapping_nodes=_flapping(state, now_ms),
            standbys=_by("state", _standbys(state)),
            round=round_.number if round_ else None,
            world_size=round_.world_size if round_ and live else 0,
            run_age_seconds=max(now_ms - membership.began_at_ms, 0) / 1000,
            not_running_seconds=_by("reason", not_running),
            straggling_ranks=len(stragglers),
            straggler_wait_ratio=max((one.wait_share or 0.0 for one in stragglers), default=0.0),
        )
        self._add_budgets(membership, now_ms)
        if progress:
            self._add(
                membership.rdzv_id,
                min_step=steps[0],
                median_step=median_low(steps),
                max_step=steps[-1],
                progress_age_seconds=min(ages) / 1000,
                max_progress_age_seconds=max(ages) / 1000,
                progress_workers=len(steps),
            )
        if rates:
            self._add(
                membership.rdzv_id,
                steps_per_second=rates[0],
                median_steps_per_second=median_low(rates),
                max_steps_per_second=rates[-1],
            )

    def _add_budgets(self, membership: Membership, now_ms: int) -> None:
        settings, spent = membership.settings, membership.spent
        restarts = restarts_that_count(membership, now_ms)
        self._add(
            membership.rdzv_id,
            restarts_spent=None if settings.max_restarts is None else restarts,
            max_restarts=settings.max_restarts,
            preemptions_spent=spent.preemptions,
            max_preemptions=settings.max_preemptions,
            store_failures_spent=spent.store_failures,
            max_store_failures=settings.max_store_failures,
            restarts_without_progress=spent.without_progress,
            no_progress_restarts=settings.no_progress_restarts or None,
        )

    def add_snapshots(
        self, state: State, snapshots: SnapshotsKnown, progress: Sequence[RankProgress], now_ms: int
    ) -> None:
        whole, loss, held = snapshots.whole, snapshots.node_loss, snapshots.held.values()
        lost_steps = snapshots.lost_steps(one.step for one in progress) if whole else None
        self._add(
            state.membership.rdzv_id,
            snapshot_step=whole.step if whole else None,
            snapshot_age_seconds=max(now_ms - snapshots.whole_ms, 0) / 1000 if whole else None,
            snapshot_lost_steps=lost_steps,
            snapshot_step_without_a_node=loss.whole.step if loss and loss.whole else None,
            snapshots=sum(one.snapshots for one in held) if held else None,
            snapshot_bytes=sum(one.bytes for one in held) if held else None,
        )

    def _add(self, rdzv_id: str, **found: Value | Mapping[str, Value]) -> None:
        job = f'rdzv_id="{_escaped(rdzv_id)}"'
        for name, value in found.items():
            several = value if isinstance(value, Mapping) else {"": value}
            for label, one in several.items():
                labels = f"{{{job},{label}}}" if label else f"{{{job}}}"
                if isinstance(one, server_metrics.Sum):
                    self._lines[name] += (
                        f"rdzv_job_{name}_count{labels} {one.count}\n",
                        f"rdzv_job_{name}_sum{labels} {one.ms / 1000}\n",
                    )
                elif one is not None:
                    self._lines[name].append(f"rdzv_job_{name}{labels} {one}\n")

    def parts(self) -> Iterator[bytes]:
        """Yield each metric's text and free it, because freeing all of them at once takes long."""
        for name, text in JOB_METRICS.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            if name in ("formation_seconds", "recovery_seconds"):
                kind = "summary"
            head = f"# HELP rdzv_job_{name} {text}\n# TYPE rdzv_job_{name} {kind}\n"
            yield (head + "".join(self._lines.pop(name))).encode()


def _by(label: str, values: Mapping[str, Value]) -> Mapping[str, Value]:
    return {f'{label}="{name}"': value for name, value in values.items()}


def _escaped(value: str) -> str:
    r"""Escape a label's value.

    >>> print(_escaped('a "b"\\c'))
    a \"b\"\\c
    """
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
