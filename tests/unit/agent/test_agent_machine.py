"""The agent's rules: when the workers of one node start and stop, and how the node exits.

Each story drives the pure core event by event. `Node` records the commands it gets; after every
event it checks the invariants (see `broken_promises`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from rdzv.agent.core import begin, events, step
from rdzv.agent.core.commands import (
    Command,
    Exit,
    SayJoin,
    StartWorkers,
    StopStoreHost,
    StopWorkers,
)
from rdzv.agent.core.events import Event
from rdzv.agent.core.machine import Decision
from rdzv.agent.core.model import AgentState, JobTerms, Leaving, Outcome, Phase
from rdzv.agent.core.stopping import rejoin
from rdzv.core.commands import Fail, Leave, ReportStoreHost, ReportStuck, Succeed
from rdzv.core.model import (
    UNMOVED,
    Assignment,
    Cause,
    Ended,
    Failure,
    LeaveCause,
    Moved,
    Result,
    RoundEnd,
    Settings,
)
from rdzv.messages import Closed, Joined, Refused, RoundOver, Withdrawn
from rdzv.structs import replace
from tests.support.builders import odd_replica

SETTINGS = Settings(min_nodes=1, max_nodes=2, max_restarts=3, join_timeout_ms=100_000)
JOB = JobTerms("job-7", "n1", SETTINGS, local_world_size=2)
SIGINT, SIGTERM = 2, 15


def line(round_: int = 0, run: str = "r1", group_rank: int = 1, **changes: Any) -> Assignment:
    """Return this node's assignment in a round of two; by default the other hosts the store."""
    assignment = Assignment(
        "job-7",
        run=run,
        round=round_,
        group_rank=group_rank,
        group_world_size=2,
        rank_first=group_rank * 2,
        world_size=4,
        role_rank_first=group_rank * 2,
        role_world_size=4,
        master_addr="10.0.0.1",
        master_port=4711,
        use_agent_store=True,
        restarts=0,
        max_restarts=3,
    )
    return replace(assignment, **changes)


def ended(round_: int = 0, run: str = "r1", *, broken: bool = False) -> RoundOver:
    return RoundOver(
        "job-7", run, round_, RoundEnd(Cause.NODES_JOINED, "n3 waits", broken=broken, keep=False)
    )


def closed(
    result: Result = Result.SUCCEEDED,
    run: str = "r1",
    *,
    retry: bool = False,
    no_progress: bool = False,
) -> Closed:
    ended = Ended(result, "so it is", retry_sensible=retry, no_progress=no_progress)
    return Closed("job-7", run, ended)


def leave_of(run: str, leaving: Leaving, left_round: int | None) -> Leave:
    why = (leaving.cause, leaving.reason)
    return Leave("n1", 0, run, *why, left_round, leaving.exited_zero)


def exited(
    local_rank: int = 0,
    exit_code: int | None = 0,
    round_: int = 0,
    age_ms: int = 0,
    *,
    by_itself: bool = False,
) -> events.WorkerExited:
    signum = 9 if exit_code is None else None
    text = "" if exit_code == 0 else "ValueError: no"
    return events.WorkerExited(
        round_, local_rank, 100 + local_rank, exit_code, signum, age_ms, by_itself, text, text
    )


def gone(round_: int = 0) -> events.WorkersGone:
    return events.WorkersGone(round_)


def signalled(signum: int = SIGTERM) -> events.Signalled:
    return events.Signalled(signum, {SIGINT: "SIGINT", SIGTERM: "SIGTERM"}[signum])


CONNECTED = events.ServerConnected()
LOST = events.ServerLost("the server ended the stream")
JOINED = Joined("job-7", "r1", 1)
TICKED = events.Ticked()
RUNNER_LOST = events.RunnerLost("its runner exited unexpectedly (1)")


def broken_promises(state: AgentState, event: Event, now_ms: int, after: Decision) -> list[str]:
    """Return which invariants a step has broken."""
    starts = [c for c in after.commands if isinstance(c, StartWorkers)]
    stops = [c for c in after.commands if isinstance(c, StopWorkers)]
    exits = [c for c in after.commands if isinstance(c, Exit)]
    says = [c for c in after.commands if hasattr(c, "run")]
    new = after.state
    before = -1 if state.assignment is None else state.assignment.round
    current = None if new.assignment is None else new.assignment.round
    has_workers = not new.workers_gone
    waits_for_server = new.phase in (Phase.JOINING, Phase.SUCCEEDED)
    promises = {
        "workers are started only by a completed round": not starts
        or isinstance(event, Assignment),
        "workers are started once, when those before are gone": len(starts) <= 1
        and (not starts or state.workers_gone),
        "rounds grow": all(c.assignment.round > before for c in starts),
        "only the workers of the present round are stopped": all(c.round == before for c in stops),
        "after the exit nothing is done": state.phase is not Phase.ENDED
        or (not after.commands and new == state),
        "it exits at most once, without workers, and last": len(exits) <= 1
        and (not exits or (new.workers_gone and not new.kept and after.commands[-1] == exits[0])),
        "it has ended if, and only if, it exits": (new.phase is Phase.ENDED)
        == bool(exits or state.phase is Phase.ENDED),
        "the timer is set only for what is due, later": after.wake_at_ms is None
        or after.wake_at_ms > now_ms,
        "without workers it waits for the server, or for a deadline, or has ended": has_workers
        or new.phase is Phase.ENDED
        or new.ending_kept
        or (
            waits_for_server and (new.disconnected_since_ms is None or after.wake_at_ms is not None)
        ),
        "workers run only in phases that have some": has_workers
        or new.phase not in (Phase.RUNNING, Phase.STOPPING, Phase.LEAVING)
        or (new.phase is Phase.LEAVING and new.ending_kept),
        "workers are parked only beside none that take part": not new.kept or new.workers_gone,
        "joining means that nobody is left": new.phase is not Phase.JOINING
        or (
            new.workers_gone
            and (current is None or (new.left_round is not None and new.left_round >= current))
        ),
        "what is said names the run": all(c.run == new.run for c in says),
        "the run changes by admission, or the node joins anew, and never under workers": new.run
        == state.run
        or (state.workers_gone and isinstance(event, Joined | Assignment))
        or (not new.has_workers and new == replace(new, run="", phase=Phase.JOINING)),
        "a stop is always on its way once the workers are to go": not has_workers
        or new.phase not in (Phase.STOPPING, Phase.LEAVING)
        or new.stopping_since_ms is not None
        or state.phase is Phase.SUCCEEDED
        or state.phase is new.phase,
        "workers that need not stop are not stopped": not stops
        or new.phase in (Phase.STOPPING, Phase.LEAVING, Phase.SUCCEEDED),
    }
    return [promise for promise, holds in promises.items() if not holds]


class Node:
    """One job on one node, driven by the test; time stands still unless it is moved."""

    def __init__(self, job: JobTerms = JOB) -> None:
        self.now_ms = 1_000
        self.state = begin(job, self.now_ms)
        self.wake_at_ms: int | None = None
        self.hear(TICKED)

    def hear(self, *heard: Event) -> list[Command]:
        """Apply events in order; return the commands they led to."""
        told: list[Command] = []
        for event in heard:
            after = step(self.state, event, self.now_ms)
            assert not broken_promises(self.state, event, self.now_ms, after), event
            self.state, self.wake_at_ms = after.state, after.wake_at_ms
            told += after.commands
        return told

    def wait(self, ms: int) -> list[Command]:
        """Let time pass, waking up when requested."""
        told: list[Command] = []
        end_ms = self.now_ms + ms
        while self.wake_at_ms is not None and self.wake_at_ms <= end_ms:
            self.now_ms = self.wake_at_ms
            told += self.hear(TICKED)
        self.now_ms = end_ms
        return told

    @property
    def phase(self) -> Phase:
        return self.state.phase


def joining() -> Node:
    node = Node()
    assert node.hear(CONNECTED, JOINED) == []
    return node


def running(round_: int = 0, **changes: Any) -> Node:
    node = joining()
    assignment = line(round_, **changes)
    assert node.hear(assignment) == [StartWorkers(assignment)]
    node.now_ms += 1_000
    return node


def stopping() -> Node:
    node = running()
    node.hear(ended())
    return node


def sweeping() -> Node:
    """Return a node whose workers have all exited 0, while leftover processes are being ended."""
    node = running()
    node.hear(exited(0), exited(1))
    return node


def at_barrier() -> Node:
    node = sweeping()
    node.hear(gone())
    return node


def rejoining() -> Node:
    node = stopping()
    node.hear(gone())
    return node


def leaving() -> Node:
    node = running()
    node.hear(signalled())
    return node


PHASES = {
    "joining": joining,
    "running": running,
    "stopping": stopping,
    "sweeping": sweeping,
    "at_barrier": at_barrier,
    "rejoining": rejoining,
    "leaving": leaving,
}
every_phase = pytest.mark.parametrize("make", PHASES.values(), ids=PHASES)


WITHDRAWN = Withdrawn("job-7", "r1", "it was placed elsewhere")
UNWELL = events.Unhealthy(0, "disk /data has 1 % free")
WITH_WORKERS = PHASES.keys() - {"joining", "rejoining"}
"""The phases with workers, or with their success."""
NEXT = "in the next round"
UNCHANGED: list[tuple[str, Iterable[str], Event]] = [
    ("a round announced again", PHASES.keys() - {"joining"}, line()),
    ("a round of another run", PHASES, line(9, run="r2")),
    ("a newer round that it has not joined", WITH_WORKERS, line(1)),
    ("admission to another run", ["running"], Joined("job-7", "r2", 2)),
    ("the end of a round of another run", PHASES, ended(0, "r2")),
    ("the end of a later round of another run", PHASES, ended(7, "r2")),
    ("the end of another round", WITH_WORKERS, ended(7)),
    ("the end of a round again", ["stopping", "rejoining", "leaving"], ended(broken=True)),
    ("a late end of the round before", [NEXT], ended()),
    ("a late exit of the round before", [NEXT], exited(0, 1)),
    ("a late report that workers are gone", [NEXT], gone()),
    ("a late report of stuck workers", [NEXT], events.WorkersStuck(0, (9,))),
    ("a late report of a start", [NEXT], events.StartFailed(0, "late")),
    ("a late exit of the store host", [NEXT], events.StoreHostExited(0, "late")),
    ("the end of another run", PHASES, closed(run="r2")),
    ("a withdrawal from another run", PHASES, replace(WITHDRAWN, run="r2")),
    ("a withdrawal while it leaves", ["leaving"], WITHDRAWN),
    ("an early tick", PHASES, TICKED),
    ("a notice lifted that was never given", PHASES, events.NoticeLifted()),
    ("a fence after success", ["sweeping", "at_barrier"], events.Fenced(0, 1_000)),
    ("a fence of a round that is over", ["joining", "rejoining"], events.Fenced(0, 1_000)),
    ("a fence of no round", ["joining", "rejoining"], events.Fenced(7, 1_000)),
    ("ill health without a failure", ["running", "stopping"], UNWELL),
    ("ill health of another round", ["running"], events.Unhealthy(3, "no")),
    (
        "the exit of a store host that nobody needs",
        ["joining", "rejoining", "stopping", "leaving"],
        events.StoreHostExited(0, "exit code 0"),
    ),
    *(
        (f"a refusal of what was said, {code}", WITH_WORKERS, Refused("job-7", code, "no"))
        for code in ("InvalidRequestError", "SettingsMismatchError", "DeniedError", "Unheard")
    ),
]


@pytest.mark.parametrize(
    ("phase", "event"),
    [
        pytest.param(phase, event, id=f"{news}, {phase}")
        for news, phases, event in UNCHANGED
        for phase in sorted(phases)
    ],
)
def test_what_does_not_concern_a_node_changes_nothing(phase: str, event: Event) -> None:
    node = rejoining() if phase == NEXT else PHASES[phase]()
    if phase == NEXT:
        node.hear(line(1))
    before = node.state
    assert node.hear(event, event) == []
    assert node.state == before


def outcome_of(told: list[Command]) -> Outcome:
    (exit_,) = [command for command in told if isinstance(command, Exit)]
    return exit_.outcome


# ------------------------------------------------------------------ forming a round


def test_the_first_join_is_in_the_hello_and_need_not_be_said() -> None:
    assert step(begin(JOB, 5), CONNECTED, 5).commands == ()


def test_a_completed_round_starts_the_workers() -> None:
    node = running()
    assert node.phase is Phase.RUNNING
    assert node.state.alive == {0, 1}
    assert not node.state.workers_gone


def test_a_round_starts_workers_also_if_the_admission_was_not_heard() -> None:
    node = Node()
    assert node.hear(CONNECTED, line()) == [StartWorkers(line())]
    assert node.state.run == "r1"


def test_an_older_round_than_the_one_left_starts_nothing() -> None:
    node = running(round_=4)
    node.hear(ended(4), gone(4))
    assert node.hear(line(0), line(3), line(4)) == []
    assert node.hear(line(5)) == [StartWorkers(line(5))]


# ------------------------------------------------------------------ the end of a round


@pytest.mark.parametrize(("broken", "grace_ms"), [(False, 30_000), (True, 5_000)])
def test_a_round_that_ends_stops_workers_and_they_rejoin(broken: bool, grace_ms: int) -> None:
    node = running()
    assert node.hear(ended(broken=broken)) == [StopWorkers(0, grace_ms)]
    assert node.hear(exited(0, 143), exited(1, None)) == []
    assert node.hear(gone()) == [StopStoreHost(0), SayJoin("r1", 0, ())]
    assert node.phase is Phase.JOINING
    assert node.state.left_round == 0


def test_workers_that_survive_sigkill_are_reported_and_waited_for() -> None:
    node = stopping()
    assert node.hear(events.WorkersStuck(0, (7, 8))) == [ReportStuck("n1", 0, "r1", 0, (7, 8))]
    assert node.phase is Phase.STOPPING
    assert node.hear(line(1)) == []
    assert node.hear(gone()) == [StopStoreHost(0), SayJoin("r1", 0, ())]


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize("server", [CONNECTED, LOST])
def test_a_failure_stops_the_group_with_or_without_a_server(server: Event) -> None:
    node = running(rank_first=6)
    node.hear(server)
    told = node.hear(exited(1, 3, age_ms=40))
    failure = node.state.failures[0]
    assert (failure.local_rank, failure.rank, failure.exit_code) == (1, 7, 3)
    assert failure.at_ms == node.now_ms - 40
    assert told == [Fail("n1", 0, "r1", 0, (failure,)), StopWorkers(0, 5_000)]
    assert node.hear(exited(0, 143), gone()) == [StopStoreHost(0), SayJoin("r1", 0, (failure,))]


def test_a_worker_that_fails_after_another_succeeded_is_a_failure() -> None:
    node = running()
    assert node.hear(exited(0, 0)) == []
    assert [type(command) for command in node.hear(exited(1, None))] == [Fail, StopWorkers]
    assert node.state.failures[0].signal == 9


def test_a_second_stop_does_not_turn_stopped_workers_into_failures() -> None:
    node = stopping()
    node.now_ms += 1_000
    node.hear(signalled())
    node.now_ms += 1_000
    node.hear(signalled())
    node.hear(exited(0, None, age_ms=1_500), exited(1, None, age_ms=500))
    assert node.state.failures == ()


@pytest.mark.parametrize(("age_ms", "failed"), [(500, []), (501, [0])])
def test_a_stopped_worker_failed_only_if_it_did_before(age_ms: int, failed: list[int]) -> None:
    node = stopping()
    node.now_ms += 500
    assert node.hear(exited(0, 1, age_ms=age_ms), exited(1, None, age_ms=100)) == []
    failures = node.state.failures
    assert [failure.local_rank for failure in failures] == failed
    assert node.hear(gone()) == [StopStoreHost(0), SayJoin("r1", 0, failures)]


def test_an_exit_that_is_reported_twice_counts_once() -> None:
    node = running()
    node.hear(exited(0, 1, age_ms=5), exited(0, 1, age_ms=5))
    assert len(node.state.failures) == 1


def test_failures_are_forgotten_when_the_next_round_starts() -> None:
    node = running()
    node.hear(exited(0, 1), gone(), line(1))
    assert node.state.failures == ()
    assert node.state.stopping_since_ms is None
    node.now_ms += 10_000
    assert [type(command) for command in node.hear(exited(0, 1, round_=1))] == [
        Fail,
        StopWorkers,
    ]


# ------------------------------------------------------------------ success


def test_success_sweeps_what_the_workers_left_and_waits_at_the_barrier() -> None:
    node = running()
    assert node.hear(exited(1)) == []
    assert node.hear(exited(0)) == [Succeed("n1", 0, "r1", 0), StopWorkers(0, 0)]
    assert node.hear(gone()) == []
    assert node.phase is Phase.SUCCEEDED
    assert node.wait(10**9) == []


def test_a_round_that_ends_after_success_has_no_workers_to_stop() -> None:
    for node, end in ((at_barrier(), [ended()]), (sweeping(), [ended(), gone()])):
        assert node.hear(*end) == [StopStoreHost(0), SayJoin("r1", 0, node.state.finished)]
        assert node.hear(line(1)) == [StartWorkers(line(1))]


def test_a_worker_that_exited_with_0_is_told_with_the_failures_of_others() -> None:
    """They may need it still. In the next round it has not."""
    node = running()
    assert node.hear(exited(1, 0, age_ms=300)) == []
    say, _ = node.hear(exited(0, 1))
    assert isinstance(say, Fail)
    failed, finished = say.failures
    assert (failed.local_rank, failed.exit_code) == (0, 1)
    assert (finished.local_rank, finished.rank, finished.exit_code) == (1, 3, 0)
    assert failed.at_ms - finished.at_ms == 300
    assert node.hear(gone())[-1] == SayJoin("r1", 0, (failed, finished))
    node.hear(line(1))
    assert node.state.evidence == ()


def test_also_where_no_worker_of_this_node_fails_but_not_if_it_was_told_to_end() -> None:
    node = running()
    node.hear(exited(1, 0))
    node.hear(ended(), exited(0, 0))
    (join,) = [say for say in node.hear(gone()) if isinstance(say, SayJoin)]
    assert [(one.local_rank, one.exit_code) for one in join.failures] == [(1, 0)]


# ------------------------------------------------------------------ the end of the run


@pytest.mark.parametrize("name", ["joining", "rejoining", "at_barrier"])
@pytest.mark.parametrize(
    ("event", "exit_code", "text"),
    [
        (closed(Result.SUCCEEDED), 0, "the job has succeeded: so it is"),
        (closed(Result.FAILED), 1, "the job has failed: so it is"),
        (closed(Result.FAILED, retry=True), 75, "the job has failed: so it is"),
        (closed(Result.FAILED, no_progress=True), 93, "the job has failed: so it is"),
        (closed(Result.STOPPED), 1, "the job was stopped: so it is"),
    ],
)
def test_the_exit_code_of_a_node_without_workers_tells_how_the_job_ended(
    name: str, event: Closed, exit_code: int, text: str
) -> None:
    outcome = outcome_of(PHASES[name]().hear(event))
    assert outcome == Outcome(exit_code, text, (), event.ended.result)


@pytest.mark.parametrize("name", ["stopping", "sweeping", "leaving"])
@pytest.mark.parametrize(("result", "exit_code"), [(Result.FAILED, 1), (Result.SUCCEEDED, 0)])
def test_workers_that_stop_already_are_not_told_again_when_the_run_ends(
    name: str, result: Result, exit_code: int
) -> None:
    node = PHASES[name]()
    assert node.hear(closed(result), closed(result)) == []
    assert outcome_of(node.hear(gone())).exit_code == exit_code


def test_running_workers_are_stopped_when_the_run_ends() -> None:
    node = running()
    assert node.hear(closed(Result.STOPPED)) == [StopWorkers(0, 30_000)]
    assert node.hear(closed(Result.STOPPED)) == []
    assert node.hear(exited(0, 143), exited(1, 143)) == []
    assert node.hear(gone())[:-1] == [StopStoreHost(0)]
    assert node.state.outcome is not None and node.state.outcome.exit_code == 1


OTHER_RUN = closed(Result.STOPPED, retry=True)
"""A server without memory does not know the run, and others have begun another."""


def test_a_node_whose_run_is_not_known_stops_its_workers_and_joins_anew() -> None:
    """It ended with 1, "the job was stopped", although the job went on with the others."""
    node = running(3)
    assert node.hear(OTHER_RUN) == [StopWorkers(3, 30_000)]
    assert node.hear(OTHER_RUN, exited(0, 143), exited(1, 143)) == []
    assert node.hear(gone(3)) == [StopStoreHost(3), SayJoin("", 3, ())]
    assert node.hear(line(3, run="r2")) == [], "rounds grow, also from run to run"
    joined, start = Joined("job-7", "r2", 1), [StartWorkers(line(4, "r2"))]
    assert node.hear(joined, line(4, run="r2")) == start
    assert node.hear(closed(Result.FAILED, run="r2")) == [StopWorkers(4, 30_000)]
    assert outcome_of(node.hear(gone(4))).exit_code == 1


def test_a_waiting_node_whose_run_is_not_known_joins_anew_at_once() -> None:
    assert joining().hear(OTHER_RUN) == [SayJoin("", None, ())]
    assert rejoining().hear(OTHER_RUN) == [StopStoreHost(0), SayJoin("", 0, ())]


@pytest.mark.parametrize("name", ["sweeping", "at_barrier", "leaving"])
def test_a_node_that_has_finished_or_leaves_does_not_join_anew(name: str) -> None:
    node = PHASES[name]()
    told = node.hear(OTHER_RUN)
    assert outcome_of(told if name == "at_barrier" else node.hear(gone())).exit_code == 75


def test_a_run_that_was_placed_here_is_not_exchanged_for_another() -> None:
    placed = begin(JOB, 0, run="r1")
    assert outcome_of(list(step(placed, OTHER_RUN, 0).commands)).exit_code == 75


def test_a_node_that_was_admitted_to_no_run_does_not_end_with_that_of_its_predecessor() -> None:
    node = Node()
    assert node.hear(CONNECTED, closed(Result.FAILED, run="r0")) == []
    assert node.hear(JOINED, line()) == [StartWorkers(line())]


def test_the_root_cause_reaches_the_user() -> None:
    failure = Failure(0, 2, 9, 1, None, "ValueError: no", "Traceback", 0, node_id="n2")
    event = closed(Result.FAILED)
    event = replace(event, ended=replace(event.ended, failures=(failure,)))
    assert outcome_of(joining().hear(event)).failures == (failure,)


# ------------------------------------------------------------------ signals and withdrawals

GIVEN_BACK = Leaving(LeaveCause.SIGNAL, "it was placed elsewhere", 75)
LEAVES = [
    (signalled(signum), Leaving(LeaveCause.SIGNAL, f"its agent received {name}", 128 + signum))
    for signum, name in ((SIGINT, "SIGINT"), (SIGTERM, "SIGTERM"))
] + [(WITHDRAWN, GIVEN_BACK)]


@pytest.mark.parametrize(("event", "leaving"), LEAVES)
@pytest.mark.parametrize("name", ["placed", "joining", "rejoining", "at_barrier"])
def test_a_node_without_workers_leaves_at_once(name: str, event: Event, leaving: Leaving) -> None:
    node = Node() if name == "placed" else PHASES[name]()
    if name == "placed":
        node.state = begin(JOB, 0, "r1")
    told = node.hear(event)
    assert leave_of("r1", leaving, 0 if node.state.assignment else None) in told
    assert outcome_of(told).exit_code == leaving.exit_code
    assert outcome_of(told).text.startswith(leaving.reason)


@pytest.mark.parametrize(("event", "leaving"), LEAVES)
@pytest.mark.parametrize("name", ["running", "stopping", "sweeping"])
def test_a_node_with_workers_says_at_once_that_it_leaves_and_lets_them_save(
    name: str, event: Event, leaving: Leaving
) -> None:
    node = PHASES[name]()
    signum = event.signum if isinstance(event, events.Signalled) else None
    told = node.hear(event)
    assert told == [leave_of("r1", leaving, None), StopWorkers(0, 30_000, signum)]
    node.now_ms += 100
    assert node.hear(exited(0, 143), exited(1, None)) == []
    assert node.state.failures == ()
    told = node.hear(gone())
    assert told[:2] == [StopStoreHost(0), leave_of("r1", leaving, 0)]
    assert outcome_of(told) == Outcome(leaving.exit_code, leaving.reason)


@pytest.mark.parametrize(
    ("make", "first", "exit_code", "result"),
    [
        pytest.param(running, signalled(SIGINT), 130, None, id="a second signal"),
        pytest.param(running, closed(Result.STOPPED), 1, Result.STOPPED, id="the run has ended"),
        pytest.param(sweeping, closed(), 0, Result.SUCCEEDED, id="the run has succeeded"),
        pytest.param(running, OTHER_RUN, 75, Result.STOPPED, id="it would join anew"),
    ],
)
def test_a_signal_while_workers_end_cuts_their_grace_short_and_keeps_the_result(
    make: type[Node], first: Event, exit_code: int, result: Result | None
) -> None:
    node = make()
    node.hear(first)
    assert node.hear(signalled()) == [StopWorkers(0, 0, SIGTERM)]
    outcome = outcome_of(node.hear(gone()))
    assert (outcome.exit_code, outcome.result) == (exit_code, result)


def test_neither_a_withdrawal_nor_a_lost_runner_changes_the_result_of_an_ended_run() -> None:
    node = running()
    node.hear(closed(Result.STOPPED))
    assert node.hear(WITHDRAWN) == []
    assert outcome_of(node.hear(RUNNER_LOST)).result is Result.STOPPED


def test_a_node_that_leaves_while_there_is_no_server_says_that_nobody_knows() -> None:
    node = running()
    node.hear(events.ServerLost("connection refused"), signalled(SIGINT))
    text = outcome_of(node.hear(gone())).text
    assert text.startswith("its agent received SIGINT; no server could be informed")
    assert "(connection refused)" in text


# ------------------------------------------------------------------ a submitted job


def test_a_node_that_was_placed_asks_for_that_run_from_the_first() -> None:
    state = begin(JOB, 0, "r1")
    assert rejoin(state) == SayJoin("r1", None, ())
    closed_before = step(state, closed(Result.STOPPED), 0)
    assert outcome_of(list(closed_before.commands)).result is Result.STOPPED


# ------------------------------------------------------------------ this node cannot go on


def test_workers_that_can_not_be_started_make_the_node_leave_with_the_reason() -> None:
    node = stopping()
    node.hear(events.StartFailed(0, "no such file"))
    assert outcome_of(node.hear(gone())).exit_code == 1
    node = running()
    leave = Leaving(LeaveCause.START_FAILED, "no such file", 1)
    told = node.hear(events.StartFailed(0, "no such file"))
    assert told == [leave_of("r1", leave, None), StopWorkers(0, 0)]
    assert node.hear(events.StartFailed(0, "no such file")) == []
    told = node.hear(gone())
    assert told[:2] == [StopStoreHost(0), leave_of("r1", leave, 0)]
    assert outcome_of(told) == Outcome(1, "no such file")


@every_phase
def test_a_lost_runner_is_the_end_in_every_phase(make: type[Node]) -> None:
    node = make()
    was_leaving = node.phase is Phase.LEAVING
    told = node.hear(RUNNER_LOST)
    (leave,) = [command for command in told if isinstance(command, Leave)]
    assert leave.left_round == (0 if node.state.assignment else None)
    # The job may go on without this node; that is no failure of the job.
    assert leave.cause is (LeaveCause.SIGNAL if was_leaving else LeaveCause.TIMEOUT)
    assert outcome_of(told).exit_code == (143 if was_leaving else 75)
    assert StartWorkers not in {type(command) for command in told}


# ------------------------------------------------------------------ the store host


def hosting() -> Node:
    return running(group_rank=0)


def test_only_who_hosts_the_store_waits_for_it() -> None:
    assert hosting().wake_at_ms == 1_000 + 60_000
    assert running().wake_at_ms is None
    assert running(group_rank=0, use_agent_store=False).wake_at_ms is None


def test_a_store_host_that_is_not_ready_in_time_is_reported_once() -> None:
    node = hosting()
    node.hear(events.StoreHostReady(0))
    assert node.wait(10**9) == []
    node = hosting()
    say = ReportStoreHost("n1", 0, "r1", 0, "not ready within 60 s")
    assert node.wait(10**9) == [say]
    assert node.hear(events.StoreHostExited(0, "exit code 1"), TICKED) == []
    assert node.phase is Phase.RUNNING


@pytest.mark.parametrize("name", ["running", "sweeping", "at_barrier"])
def test_a_store_host_that_dies_while_the_round_may_need_it_is_reported(name: str) -> None:
    node = PHASES[name]()
    died = events.StoreHostExited(0, "signal 9 (SIGKILL)")
    assert node.hear(died) == [ReportStoreHost("n1", 0, "r1", 0, "signal 9 (SIGKILL)")]
    assert node.hear(died) == []


def test_a_dead_store_host_stops_nobody_before_the_server_ends_the_round() -> None:
    node = hosting()
    node.hear(events.StoreHostExited(0, "exit code 1"))
    assert node.phase is Phase.RUNNING
    assert node.hear(ended(broken=True)) == [StopWorkers(0, 5_000)]


def test_a_store_host_that_failed_without_a_server_is_reported_when_there_is_one() -> None:
    node = hosting()
    node.hear(LOST, events.StoreHostExited(0, "exit code 1"))
    assert node.hear(CONNECTED) == [ReportStoreHost("n1", 0, "r1", 0, "exit code 1")]
    node.hear(ended(), gone())
    assert node.hear(CONNECTED) == []


@pytest.mark.parametrize("event", [ended(), signalled(), closed(), exited(0, 1)])
def test_the_deadline_of_the_store_host_ends_with_the_round(event: Event) -> None:
    node = hosting()
    node.hear(event)
    assert node.wake_at_ms is None
    assert node.wait(100_000) == []


def test_the_store_host_of_the_next_round_starts_with_a_clean_record() -> None:
    node = hosting()
    node.hear(events.StoreHostExited(0, "exit code 1"), ended(), gone(), line(1, group_rank=0))
    assert node.wake_at_ms == node.now_ms + 60_000
    assert node.hear(events.StoreHostReady(0)) == []
    assert node.wake_at_ms is not None
    assert node.wait(60_000) == [ReportStoreHost("n1", 0, "r1", 1, "not ready within 60 s")]


# ------------------------------------------------------------------ without a server


@pytest.mark.parametrize(
    ("make", "heard", "exit_code", "why"),
    [
        pytest.param(sweeping, [], 0, "workers: all exited 0", id="all have succeeded"),
        pytest.param(running, [exited(0, 1)], 1, "workers: ValueError: no", id="one has failed"),
        pytest.param(stopping, [], 75, "", id="they were stopped"),
        pytest.param(
            running,
            [events.Fenced(0, 1_000), exited(0, None), exited(1, None)],
            75,
            "they were killed because of --fence-after",
            id="they were fenced",
        ),
    ],
)
def test_without_a_server_the_own_workers_tell_how_it_ends(
    make: type[Node], heard: list[Event], exit_code: int, why: str
) -> None:
    node = make()
    node.hear(LOST, *heard, gone())
    assert node.wait(599_999) == []
    outcome = outcome_of(node.wait(1))
    assert outcome.exit_code == exit_code
    assert outcome.text.endswith(why)


def test_a_server_that_is_back_ends_the_wait() -> None:
    node = Node()
    node.wait(99_999)
    node.hear(CONNECTED, JOINED)
    assert node.wait(10**9) == []
    node.hear(LOST)
    assert node.wake_at_ms == node.now_ms + 100_000


@pytest.mark.parametrize(
    ("heard", "why"),
    [
        pytest.param([], "none has answered yet", id="none answers"),
        pytest.param([LOST], LOST.reason, id="attempts fail"),
        # Its Welcome comes before the refusal, so each attempt looked like a server that is back.
        pytest.param([CONNECTED, events.ServerLost("in use by n1")], "in use by n1", id="refused"),
    ],
)
def test_a_node_that_is_not_admitted_gives_up_in_time(heard: list[Event], why: str) -> None:
    node = Node()
    for _ in range(9):
        assert node.wait(11_000) == []
        assert node.hear(*heard) == []
    assert node.wait(999) == []
    outcome = Outcome(75, f"no server admitted this node within 100 s: {why}")
    assert outcome_of(node.wait(1)) == outcome


@pytest.mark.parametrize("name", ["running", "stopping", "leaving", "sweeping"])
def test_workers_go_on_without_a_server(name: str) -> None:
    node = PHASES[name]()
    assert node.hear(LOST) == []
    assert node.wait(10**9) == []


def test_a_round_that_was_never_heard_of_is_given_back() -> None:
    """Its completion was lost with the stream, and it has ended since: nothing ran here."""
    node = joining()
    assert node.hear(ended(0, run="another")) == []
    assert node.hear(ended(0)) == [SayJoin("r1", 0, ())]
    assert node.hear(ended(0)) == []
    late = line(0)
    assert node.hear(late) == []
    after = line(1)
    assert node.hear(after) == [StartWorkers(after)]


def test_a_fresh_instance_confirms_nothing_for_its_former_self() -> None:
    node = Node()
    assert node.hear(CONNECTED, ended(0)) == []


@pytest.mark.parametrize("last", [exited(1, 0), exited(1, 1)], ids=["success", "failure"])
def test_the_server_timeout_counts_from_when_no_worker_was_left(last: Event) -> None:
    node = running()
    node.hear(LOST, exited(0, 0))
    node.wait(5_000_000)
    node.hear(last)
    node.wait(1_000)
    assert Exit not in {type(command) for command in node.hear(gone())}
    assert node.wait(599_999) == []
    assert outcome_of(node.wait(1)).exit_code == (0 if last == exited(1, 0) else 1)


def test_a_server_that_comes_back_in_time_decides() -> None:
    node = at_barrier()
    node.hear(LOST)
    node.wait(599_999)
    join = SayJoin("r1", 0, node.state.finished)
    assert node.hear(CONNECTED, ended()) == [StopStoreHost(0), join]


# ------------------------------------------------------------------ the fence


def fenced(round_: int = 0, at_ms: int = 1_000) -> events.Fenced:
    return events.Fenced(round_, at_ms)


def test_a_fenced_node_joins_again_and_no_worker_of_it_has_failed() -> None:
    node = running()
    assert node.hear(LOST, fenced(), exited(0, None), exited(1, None)) == []
    assert node.hear(gone()) == [StopStoreHost(0), SayJoin("r1", 0, (), fenced=True)]
    assert (node.phase, node.state.left_round) == (Phase.JOINING, 0)
    assert node.hear(CONNECTED) == []
    assert node.hear(line(1)) == [StartWorkers(line(1))]
    assert not node.state.fenced


def test_a_worker_that_failed_before_the_fence_has_failed() -> None:
    node = running()
    [said, _] = node.hear(exited(1, 1))
    assert isinstance(said, Fail)
    node.hear(fenced(), exited(0, None))
    *_, join = node.hear(gone())
    assert isinstance(join, SayJoin) and [f.local_rank for f in join.failures] == [1]
    assert not join.fenced


def test_a_worker_that_had_failed_when_the_fence_came_has_failed_though_heard_of_later() -> None:
    node = running()
    node.hear(fenced(at_ms=node.now_ms - 10), exited(1, 1, age_ms=11))
    *_, join = node.hear(gone())
    assert isinstance(join, SayJoin) and len(join.failures) == 1 and not join.fenced


def test_workers_that_break_on_the_killed_ones_have_not_failed_though_all_is_heard_late() -> None:
    """The agent was stopped: by its error file, the worker failed long before the agent saw it."""
    node = running()
    node.wait(60_000)
    assert (
        node.hear(fenced(at_ms=node.now_ms - 50_000), exited(0, None), exited(1, 1, age_ms=49_990))
        == []
    )
    assert node.hear(gone()) == [StopStoreHost(0), SayJoin("r1", 0, (), fenced=True)]


def test_a_fence_while_the_workers_stop_changes_nothing_about_the_end() -> None:
    node = stopping()
    assert node.hear(fenced(), gone()) == [StopStoreHost(0), SayJoin("r1", 0, ())]
    node = leaving()
    told = node.hear(fenced(), gone())
    assert outcome_of(told).exit_code == 128 + SIGTERM


def test_after_a_stop_and_a_fence_a_late_exit_is_judged_by_the_stop() -> None:
    """The fence came later, and does not change the time that counts as stopped."""
    node = stopping()
    stopped_ms = node.now_ms
    node.now_ms += 5_000
    node.hear(fenced(at_ms=node.now_ms))
    node.now_ms += 2_000
    # It ended by itself before the fence, in answer to the stop.
    node.hear(exited(0, 1, age_ms=node.now_ms - (stopped_ms + 3_000)), exited(1, None))
    assert node.state.failures == ()
    assert node.hear(gone()) == [StopStoreHost(0), SayJoin("r1", 0, ())]


def test_a_worker_that_failed_before_the_stop_has_failed_whatever_the_fence_did_since() -> None:
    node = stopping()
    stopped_ms = node.now_ms
    node.now_ms += 5_000
    node.hear(fenced(at_ms=node.now_ms))
    node.hear(exited(0, 1, age_ms=node.now_ms - stopped_ms + 1))
    assert [failure.local_rank for failure in node.state.failures] == [0]


def test_workers_that_survive_the_fence_are_reported_to_the_server_that_comes_back() -> None:
    node = running()
    node.hear(LOST, fenced(), events.WorkersStuck(0, (101,)))
    assert node.hear(CONNECTED) == [ReportStuck("n1", 0, "r1", 0, (101,))]
    node.hear(gone())
    assert node.hear(LOST, CONNECTED) == []


# ------------------------------------------------------------------ refusals

REFUSALS = {
    "InvalidRequestError": 2,
    "SettingsMismatchError": 2,
    "NodeSupersededError": 2,
    "RendezvousClosedError": 1,
    "DeniedError": 77,
    "UnauthenticatedError": 77,
}


@pytest.mark.parametrize(("code", "exit_code"), REFUSALS.items())
def test_a_refused_launch_is_a_usage_error_unless_it_has_run(code: str, exit_code: int) -> None:
    refused = Refused("job-7", code, "the reason")
    assert outcome_of(joining().hear(refused)) == Outcome(exit_code, "the reason")
    exit_code = 77 if exit_code == 77 else 1
    assert outcome_of(rejoining().hear(refused)) == Outcome(exit_code, "the reason")


@pytest.mark.parametrize("code", ["RendezvousClosedError", "NodeSupersededError"])
def test_workers_without_a_place_are_stopped(code: str) -> None:
    node = running()
    assert node.hear(Refused("job-7", code, "the reason")) == [StopWorkers(0, 30_000)]
    assert node.hear(Refused("job-7", code, "again")) == []
    assert outcome_of(node.hear(gone())) == Outcome(1, "the reason")


# ------------------------------------------------------------------ everything, to a small depth

ALPHABET: tuple[Event, ...] = (
    CONNECTED,
    LOST,
    JOINED,
    line(0, group_rank=0),
    line(1),
    line(1, run="r2"),
    ended(0),
    ended(1, broken=True),
    ended(0, "r2"),
    closed(Result.FAILED),
    closed(run="r2"),
    Refused("job-7", "NodeSupersededError", "no"),
    Refused("job-7", "InvalidRequestError", "no"),
    exited(0, 0),
    exited(1, 0),
    exited(1, 1, age_ms=500),
    exited(0, 0, round_=1),
    gone(0),
    gone(1),
    events.Fenced(0, 900),
    events.StartFailed(0, "no"),
    events.StoreHostReady(0),
    events.StoreHostExited(0, "no"),
    RUNNER_LOST,
    signalled(),
    Withdrawn("job-7", "r1", "no"),
    events.NoticeGiven(1_500, "drained"),
    events.NoticeLifted(),
    TICKED,
)
REPEATABLE = tuple(
    event
    for event in ALPHABET
    # A second signal is a new event; a stuck worker may be reported each time it is seen.
    if not isinstance(event, events.Signalled)
)
STEP_MS = 700
DEPTH = 6


@pytest.mark.slow
def test_no_order_of_events_breaks_a_promise() -> None:
    """Apply every event in every state that any five events lead to, while time passes."""
    job = replace(JOB, store_host_timeout_ms=1_000, server_timeout_ms=2_000)
    job = replace(job, settings=replace(SETTINGS, join_timeout_ms=3_000))
    edge = {begin(job, 0)}
    seen = set(edge)
    for depth in range(1, DEPTH + 1):
        now_ms = depth * STEP_MS
        found = set()
        for state in edge:
            for event in ALPHABET:
                after = step(state, event, now_ms)
                broken = broken_promises(state, event, now_ms, after)
                assert not broken, (state, event, after)
                found.add(after.state)
        edge = found - seen
        seen |= edge
    phases = {state.phase for state in seen}
    assert phases == set(Phase)


@pytest.mark.slow
def test_an_event_that_is_repeated_at_once_changes_nothing() -> None:
    edge = {begin(JOB, 0)}
    for depth in range(1, DEPTH - 1):
        now_ms = depth * STEP_MS
        once = {event: {step(state, event, now_ms) for state in edge} for event in REPEATABLE}
        for event, transitions in once.items():
            for first in transitions:
                again = step(first.state, event, now_ms)
                repeats = [c for c in again.commands if not isinstance(c, ReportStoreHost)]
                assert (again.state, repeats) == (first.state, []), (event, first)
        edge = {first.state for transitions in once.values() for first in transitions}


# ------------------------------------------------------------------ a node that is not well


def test_a_node_that_is_not_well_leaves_and_its_failure_remains_one() -> None:
    node = running()
    node.hear(exited(1, 3))
    leaving = Leaving(LeaveCause.FAILED, "unhealthy: disk /data has 1 % free", 75)
    assert node.hear(UNWELL) == [leave_of("r1", leaving, None)]
    assert node.phase is Phase.LEAVING
    told = node.hear(gone())
    assert told == [StopStoreHost(0), leave_of("r1", leaving, 0), Exit(Outcome(75, leaving.reason))]


@pytest.mark.parametrize("make", [running, stopping], ids=["running", "stopping"])
def test_a_node_whose_replica_is_odd_reports_it_and_leaves(make: Callable[[], Node]) -> None:
    """Also if a peer, which knows it too, has ended the round before."""
    node, odd = make(), odd_replica()
    told = node.hear(
        replace(exited(0, 1, by_itself=True), message=odd.message, traceback=odd.traceback)
    )
    (fail,) = (one for one in told if isinstance(one, Fail))
    assert [one.message for one in fail.failures] == [odd.message]
    reason = "unhealthy: replica digest: after step 300, model.weight of rank 0 differs"
    leaving = Leaving(LeaveCause.FAILED, reason, 75)
    assert told[-1] == leave_of("r1", leaving, None)
    assert node.hear(gone())[1:] == [leave_of("r1", leaving, 0), Exit(Outcome(75, reason))]


def test_one_that_was_stuck_is_looked_at_as_well() -> None:
    node = stopping()
    node.hear(events.WorkersStuck(0, (7,)))
    assert isinstance(node.hear(UNWELL)[0], Leave)


# ------------------------------------------------------------------ how far it came


def test_the_join_says_how_far_the_workers_had_come_and_so_does_each_repetition() -> None:
    moved, node = Moved(furthest_step=120, snapshot_changed=True), running()
    node.hear(exited(0, 1), exited(1, None))
    [say] = [c for c in node.hear(events.WorkersGone(0, moved)) if isinstance(c, SayJoin)]
    assert say.moved == moved
    assert rejoin(node.state).moved == moved


def test_what_one_round_had_come_to_is_not_said_of_the_next() -> None:
    node = running()
    node.hear(
        exited(0, 1), exited(1, None), events.WorkersGone(0, Moved(furthest_step=120)), line(1)
    )
    assert node.state.moved == UNMOVED
    node.hear(ended(1), gone(1))
    assert rejoin(node.state).moved == UNMOVED
    node.hear(line(2), ended(2), events.WorkersGone(2, Moved(furthest_step=7)))
    # It has never received round 3, which has ended.
    node.hear(ended(3))
    assert rejoin(node.state).moved == UNMOVED


def test_a_node_whose_workers_had_succeeded_says_so_too_when_another_ends_the_round() -> None:
    node = sweeping()
    node.hear(events.WorkersGone(0, Moved(furthest_step=7)))
    [say] = [c for c in node.hear(ended(broken=True)) if isinstance(c, SayJoin)]
    assert say.moved == Moved(furthest_step=7)
