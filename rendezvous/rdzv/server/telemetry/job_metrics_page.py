"""Writes the metrics for each job: its counters (`job_tallies`) and its current state.

This module writes the text itself, without prometheus-client, because there may be hundreds of
thousands of lines, during which nodes wait for the event loop. A job takes a fraction of a
millisecond.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low

from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stragglers import Straggler
from rdzv.core.life.failures import restarts_that_count
from rdzv.core.life.forming import FLAP_WINDOW_MS, completion_due_ms, holds, restart_due_ms
from rdzv.core.model import Cause, JobState, Membership, NodeState, State, job_state
from rdzv.core.snapshots import SnapshotsKnown
from rdzv.server.telemetry.job_tallies import CHANGES, JobTally, Sum
from rdzv.view.ledger import LedgerPhase

# ------------------------------------------------------------------ a job's current state


def node_states(state: State) -> Tally[NodeState]:
    """Count a job's nodes by the state that `status` shows, without building its full view."""
    membership, away = state.membership, state.away
    round_ = membership.round
    found: Tally[NodeState] = Tally()
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
    """Count the nodes that have recently been lost more than once."""
    newest = {departure.node_id: departure.at_ms for departure in state.membership.departures}
    since_ms = now_ms - FLAP_WINDOW_MS
    return sum(1 for node_id in holds(state) if newest[node_id] > since_ms)


def _not_running_ms(state: State, now_ms: int) -> int:
    round_ = state.membership.round
    since_ms = round_.end.at_ms if round_ and round_.end else state.membership.began_at_ms
    return max(now_ms - since_ms, 0)


# ------------------------------------------------------------------ the jobs as text

JOB_METRICS: Mapping[str, tuple[str, str]] = {
    "rdzv_job_state": ("gauge", "1 for the state that the job is in, 0 for the others."),
    "rdzv_job_nodes": ("gauge", "Nodes of the job by state."),
    "rdzv_job_min_nodes": ("gauge", "Nodes that a round needs."),
    "rdzv_job_max_nodes": ("gauge", "Nodes that a round may have."),
    "rdzv_job_missing_nodes": (
        "gauge",
        "Nodes that must still come before a round can complete; 0 while one is live.",
    ),
    "rdzv_job_flapping_nodes": ("gauge", "Nodes that were lost more than once recently."),
    "rdzv_job_round": ("gauge", "Number of the last round that was completed."),
    "rdzv_job_world_size": ("gauge", "Workers of the live round; 0 while none is live."),
    "rdzv_job_restarts_spent": ("gauge", "Restarts that count against max_restarts now."),
    "rdzv_job_max_restarts": ("gauge", "Restarts that the job may spend."),
    "rdzv_job_preemptions_spent": ("gauge", "Rounds that ended because a node was lost or left."),
    "rdzv_job_max_preemptions": ("gauge", "Preemptions that the job may have."),
    "rdzv_job_store_failures_spent": ("gauge", "Rounds that ended because a store host failed."),
    "rdzv_job_max_store_failures": ("gauge", "Failures of store hosts that the job may have."),
    "rdzv_job_restarts_in_vain": (
        "gauge",
        "Consecutive restarts without progress.",
    ),
    "rdzv_job_no_progress_restarts": (
        "gauge",
        "Consecutive restarts without progress after which the job fails.",
    ),
    "rdzv_job_run_age_seconds": ("gauge", "Time since the present run began."),
    "rdzv_job_not_running_seconds": (
        "gauge",
        "Time since a round was live, with the reason why none is; absent while one is.",
    ),
    "rdzv_job_min_step": ("gauge", "Step of the worker that is behind all others."),
    "rdzv_job_max_step": ("gauge", "Step of the worker that is ahead of all others."),
    "rdzv_job_median_step": ("gauge", "Step that half of the workers have reached."),
    "rdzv_job_steps_per_second": ("gauge", "Steps of the slowest worker whose rate is known."),
    "rdzv_job_median_steps_per_second": (
        "gauge",
        "Steps of the worker in the middle of those whose rate is known.",
    ),
    "rdzv_job_max_steps_per_second": ("gauge", "Steps of the fastest worker."),
    "rdzv_job_progress_age_seconds": ("gauge", "Time since any worker reported a step."),
    "rdzv_job_max_progress_age_seconds": (
        "gauge",
        "Time since the worker that has been silent longest reported a step.",
    ),
    "rdzv_job_straggling_ranks": (
        "gauge",
        "Workers that have been slow for a while, by their rate or by when they enter collectives.",
    ),
    "rdzv_job_straggler_wait_ratio": (
        "gauge",
        "Share of the time that the others wait for the latest straggler in collectives; 0: none.",
    ),
    "rdzv_job_snapshot_step": (
        "gauge",
        "Newest step for which participants hold every part in memory; absent if there is none.",
    ),
    "rdzv_job_snapshot_age_seconds": ("gauge", "Time since that step became whole."),
    "rdzv_job_snapshot_lost_steps": (
        "gauge",
        "Steps that would be redone if all workers failed now.",
    ),
    "rdzv_job_snapshot_step_without_a_node": (
        "gauge",
        "Newest step that would be whole after the loss of any one node; absent if there is none.",
    ),
    "rdzv_job_snapshots": (
        "gauge",
        "Snapshots that nodes hold in memory; absent if there are none.",
    ),
    "rdzv_job_snapshot_bytes": ("gauge", "Size of these snapshots."),
    "rdzv_job_progress_workers": ("gauge", "Workers that have reported a step in the live round."),
    "rdzv_job_rounds_completed_total": ("counter", "Rounds that were completed."),
    "rdzv_job_rounds_ended_total": (
        "counter",
        "Rounds that ended, by the cause that the end is charged to.",
    ),
    "rdzv_job_restarts_total": ("counter", "Restarts spent on worker failures."),
    "rdzv_job_membership_changes_total": (
        "counter",
        "Nodes that joined, left or were lost, and seats that another node took over.",
    ),
    "rdzv_job_worker_failures_total": ("counter", "Workers that failed."),
    "rdzv_job_running_seconds_total": ("counter", "Time in which a round was live."),
    "rdzv_job_elapsed_seconds_total": ("counter", "Time since this server knows of the run."),
    "rdzv_job_phase_seconds": (
        "gauge",
        "Time by what it was spent on, since this server knows of the job; corrected when a "
        "failure, or a first step, turns out to be older than its report.",
    ),
    "rdzv_job_goodput_ratio": ("gauge", "Training's share of that time."),
    "rdzv_job_node_seconds": ("gauge", "Time of all nodes that the job held, by how it was spent."),
    "rdzv_job_formation_seconds": (
        "summary",
        "Time from the first join, or the end of a round, to the next complete round.",
    ),
    "rdzv_job_recovery_seconds": (
        "summary",
        "Time after a round's end: until all have stopped, and from then to the next round.",
    ),
}
"""The type and help text of each job metric. The label `rdzv_id` names the job."""


class JobPage:
    """The metrics for all jobs as text. Jobs are added one at a time."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {name: [] for name in JOB_METRICS}

    def add_live(
        self, state: State, tally: JobTally, progress: Sequence[RankProgress], now_ms: int
    ) -> None:
        """Add the counters and the current state of a job that has not ended."""
        membership, add = state.membership, self._add
        job = _label("rdzv_id", membership.rdzv_id)
        self._add_counted(job, job_state(state), tally, now_ms)
        nodes = node_states(state)
        for node_state in NodeState:
            add("rdzv_job_nodes", f'{job},state="{node_state}"', nodes[node_state])
        add("rdzv_job_min_nodes", job, membership.min_nodes)
        add("rdzv_job_max_nodes", job, membership.max_nodes)
        add("rdzv_job_missing_nodes", job, missing_nodes(state))
        add("rdzv_job_flapping_nodes", job, _flapping(state, now_ms))
        round_ = membership.round
        if round_ is not None:
            add("rdzv_job_round", job, round_.number)
        add("rdzv_job_world_size", job, round_.world_size if round_ and round_.live else 0)
        if membership.settings.max_restarts is not None:
            add("rdzv_job_restarts_spent", job, restarts_that_count(membership, now_ms))
            add("rdzv_job_max_restarts", job, membership.settings.max_restarts)
        self._add_budgets(job, membership)
        add("rdzv_job_run_age_seconds", job, max(now_ms - membership.began_at_ms, 0) / 1000)
        if reason := why_not_running(state):
            labels = f'{job},reason="{reason}"'
            add("rdzv_job_not_running_seconds", labels, _not_running_ms(state, now_ms) / 1000)
        if progress:
            self._add_progress(job, progress)

    def _add_budgets(self, job: str, membership: Membership) -> None:
        """Add the job's budgets other than restarts, each with its limit and how much was spent."""
        spent, settings = membership.spent, membership.settings
        for name, value in (
            ("preemptions_spent", spent.preemptions),
            ("max_preemptions", settings.max_preemptions),
            ("store_failures_spent", spent.store_failures),
            ("max_store_failures", settings.max_store_failures),
            ("restarts_in_vain", spent.in_vain),
            ("no_progress_restarts", settings.no_progress_restarts or None),
        ):
            if value is not None:
                self._add(f"rdzv_job_{name}", job, value)

    def add_straggling(self, state: State, stragglers: Sequence[Straggler]) -> None:
        """Add how many of a live job's workers straggle, and how long others wait for one."""
        job = _label("rdzv_id", state.membership.rdzv_id)
        self._add("rdzv_job_straggling_ranks", job, len(stragglers))
        most = max((one.wait_share or 0.0 for one in stragglers), default=0.0)
        self._add("rdzv_job_straggler_wait_ratio", job, most)

    def add_snapshots(
        self, state: State, snapshots: SnapshotsKnown, progress: Sequence[RankProgress], now_ms: int
    ) -> None:
        """Add what is known about the snapshots of a live job's state in its nodes' memory."""
        job, add = _label("rdzv_id", state.membership.rdzv_id), self._add
        if (mark := snapshots.whole) is not None:
            add("rdzv_job_snapshot_step", job, mark.step)
            age_ms = max(now_ms - snapshots.whole_ms, 0)
            add("rdzv_job_snapshot_age_seconds", job, age_ms / 1000)
            if (lost := snapshots.lost_steps(one.step for one in progress)) is not None:
                add("rdzv_job_snapshot_lost_steps", job, lost)
        loss = snapshots.node_loss
        if loss is not None and loss.whole is not None:
            add("rdzv_job_snapshot_step_without_a_node", job, loss.whole.step)
        if held := snapshots.held.values():
            add("rdzv_job_snapshots", job, sum(one.snapshots for one in held))
            add("rdzv_job_snapshot_bytes", job, sum(one.bytes for one in held))

    def _add_progress(self, job: str, progress: Sequence[RankProgress]) -> None:
        """Add extremes and a median over a job's workers; a series for each would be too many."""
        add = self._add
        steps = sorted(one.step for one in progress)
        ages = [one.age_ms for one in progress]
        add("rdzv_job_min_step", job, steps[0])
        add("rdzv_job_median_step", job, median_low(steps))
        add("rdzv_job_max_step", job, steps[-1])
        add("rdzv_job_progress_age_seconds", job, min(ages) / 1000)
        add("rdzv_job_max_progress_age_seconds", job, max(ages) / 1000)
        add("rdzv_job_progress_workers", job, len(steps))
        if rates := sorted(one.rate for one in progress if one.rate):
            add("rdzv_job_steps_per_second", job, rates[0])
            add("rdzv_job_median_steps_per_second", job, median_low(rates))
            add("rdzv_job_max_steps_per_second", job, rates[-1])

    def add_ended(self, rdzv_id: str, tally: JobTally, now_ms: int) -> None:
        assert tally.final is not None, "only an ended job has no present state"
        self._add_counted(_label("rdzv_id", rdzv_id), tally.final, tally, now_ms)

    def add_phases(
        self, rdzv_id: str, phases: Mapping[str, int], of_nodes: Mapping[str, int]
    ) -> None:
        """Add the milliseconds that a job and its nodes have spent in each phase."""
        job, whole_ms = _label("rdzv_id", rdzv_id), sum(phases.values())
        for phase, ms in phases.items():
            self._add("rdzv_job_phase_seconds", f'{job},phase="{phase}"', ms / 1000)
        if whole_ms:
            goodput = phases[LedgerPhase.TRAINING] / whole_ms
            self._add("rdzv_job_goodput_ratio", job, round(goodput, 6))
        trained_ms = of_nodes.get(LedgerPhase.TRAINING, 0)
        for kind, ms in (("training", trained_ms), ("lost", sum(of_nodes.values()) - trained_ms)):
            self._add("rdzv_job_node_seconds", f'{job},kind="{kind}"', ms / 1000)

    def _add_counted(self, job: str, present: str, tally: JobTally, now_ms: int) -> None:
        add = self._add
        for state in JobState:
            add("rdzv_job_state", f'{job},state="{state}"', int(state is present))
        add("rdzv_job_rounds_completed_total", job, tally.completed)
        for cause in Cause:
            add("rdzv_job_rounds_ended_total", f'{job},cause="{cause}"', tally.ended[cause])
        add("rdzv_job_restarts_total", job, tally.restarts)
        for kind in CHANGES:
            labels = f'{job},kind="{kind}"'
            add("rdzv_job_membership_changes_total", labels, tally.changes[kind])
        add("rdzv_job_worker_failures_total", job, tally.failures)
        add("rdzv_job_running_seconds_total", job, tally.running_until(now_ms) / 1000)
        add("rdzv_job_elapsed_seconds_total", job, tally.elapsed_until(now_ms) / 1000)
        self._add_sum("rdzv_job_formation_seconds", job, tally.formation)
        for phase, times in tally.recovery.items():
            self._add_sum("rdzv_job_recovery_seconds", f'{job},phase="{phase}"', times)

    def _add_sum(self, name: str, labels: str, times: Sum) -> None:
        lines = self._lines[name]
        lines.append(f"{name}_count{{{labels}}} {times.count}\n")
        lines.append(f"{name}_sum{{{labels}}} {times.ms / 1000}\n")

    def _add(self, name: str, labels: str, value: float) -> None:
        self._lines[name].append(f"{name}{{{labels}}} {value}\n")

    def parts(self) -> Iterator[bytes]:
        """Yield each metric's text and free it, because freeing all of them at once takes long."""
        for name, (kind, text) in JOB_METRICS.items():
            head = f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
            yield (head + "".join(self._lines.pop(name))).encode()


def _label(name: str, value: str) -> str:
    r"""Format a label with its value, escaped as necessary.

    >>> print(_label("rdzv_id", 'a "b"\\c'))
    rdzv_id="a \"b\"\\c"
    """
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{name}="{escaped}"'
