"""What an agent records of a job's workers, and the summary of it, for someone at 3 a.m."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rdzv.agent.core import begin, events, step
from rdzv.agent.core.model import AgentState, JobTerms
from rdzv.agent.launch.launch import EventSink, Launch
from rdzv.agent.workers.event_log import EventLog
from rdzv.agent.workers.fates import (
    FateRecorder,
    NodeOutcome,
    StopOrder,
    WorkerFate,
    ranges,
    root_cause_exit_code,
    summary,
)
from rdzv.core.model import (
    Assignment,
    Cause,
    Ended,
    Failure,
    KeptWorker,
    Result,
    RoundEnd,
    Settings,
)
from rdzv.core.root_cause import describe_failure
from rdzv.messages import Closed, Joined, RoundOver

LINE = Assignment("job-7", "r", 3, 1, 2, 4, 8, 2, 6, "a", 1, True, 0, 1)


class Recorder:
    """Stands in for the handler's process."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []

    def send(self, event: Mapping[str, Any]) -> bool:
        self.events.append(json.loads(json.dumps(event)))
        return True


class Play:
    """An agent core and the recorder that observes it; the test moves the clock."""

    def __init__(self, size: int = 2, keep_timeout_ms: int = 0) -> None:
        job = JobTerms(
            "job-7",
            "n1",
            Settings(2, 2),
            local_world_size=size,
            shutdown_timeout_ms=7_000,
            keep_timeout_ms=keep_timeout_ms,
        )
        launch = Launch(job, "t.py", role="r0", python="/x/python", event_log=EventSink("h", "b"))
        self.now_ms = 0
        self.recorder = Recorder()
        self.event_log = EventLog(
            launch,
            self.now_ms,
            lambda rank: Path(f"/e/{rank}"),
            self.recorder,  # type: ignore[arg-type]
        )
        self.fates = FateRecorder(self.event_log, size, lambda: self.now_ms)
        self.state: AgentState = begin(job, 0)
        self.outcome: NodeOutcome | None = None

    def see(self, *happened: events.Event) -> None:
        for event in happened:
            found = step(self.state, event, self.now_ms)
            self.state = found.state
            self.fates.note(event, found.state, found.commands)
            for command in found.commands:
                if hasattr(command, "outcome"):
                    self.outcome = self.fates.outcome(command.outcome)

    def run(self, line: Assignment = LINE) -> None:
        self.see(line)
        for local_rank in range(self.state.job.local_world_size):
            self.fates.worker_started(local_rank, 70 + local_rank)

    def exit(self, local_rank: int, code: int | None, signum: int | None = None) -> None:
        line = self.state.assignment
        assert line is not None
        pid = 70 + local_rank
        self.see(events.WorkerExited(line.round, local_rank, pid, code, signum, 0, message="E"))

    def close(self, result: Result, *failures: Failure) -> None:
        self.see(Closed("job-7", "r", Ended(result, "why", failures=failures)))

    def recorded(self) -> list[tuple[str, str]]:
        return [
            (event["source"], event["name"].rpartition(".")[2]) for event in self.recorder.events
        ]


@pytest.fixture
def play() -> Play:
    return Play()


def test_a_job_that_succeeds_is_recorded_as_torchrun_records_it(play: Play) -> None:
    play.now_ms = 1_250
    play.run()
    play.exit(0, 0)
    play.exit(1, 0)
    play.see(events.WorkersGone(3))
    play.now_ms = 61_900
    play.close(Result.SUCCEEDED)
    assert play.recorded() == [
        ("AGENT", "RENDEZVOUS"),
        ("AGENT", "ASSIGN_WORKER_RANKS"),
        ("WORKER", "START"),
        ("WORKER", "START"),
        ("WORKER", "SUCCEEDED"),
        ("WORKER", "SUCCEEDED"),
        ("AGENT", "SUCCEEDED"),
    ]
    first, *_, last_worker, agent = play.recorder.events
    assert first["metadata"]["duration_ms"] == 1_250
    assert first["metadata"]["group_rank"] is None
    assert last_worker == {
        "name": "torchelastic.worker.status.SUCCEEDED",
        "source": "WORKER",
        "metadata": {
            "run_id": "job-7",
            "global_rank": 5,
            "group_rank": 1,
            "worker_id": "71",
            "role": "r0",
            "hostname": "",
            "state": "SUCCEEDED",
            "total_run_time": 61,
            "rdzv_backend": "b",
            "raw_error": None,
            "metadata": json.dumps(
                {
                    "group_world_size": 2,
                    "entry_point": "python",
                    "local_rank": [1],
                    "role_rank": [3],
                    "role_world_size": [6],
                    "exit_code": [None],
                    "worker_pid": [None],
                }
            ),
            "agent_restarts": 0,
            "duration_ms": None,
        },
        "error_file": None,
        "exit_code": None,
    }
    assert (agent["metadata"]["group_rank"], agent["metadata"]["global_rank"]) == (1, None)


def test_starts_are_recorded_by_local_rank_whichever_worker_runs_first(play: Play) -> None:
    play.see(LINE)
    play.fates.worker_started(1, 71)
    assert ("WORKER", "START") not in play.recorded()
    play.fates.worker_started(0, 70)
    starts = [e["metadata"] for e in play.recorder.events if e["name"].endswith("START")]
    assert [start["global_rank"] for start in starts] == sorted(s["global_rank"] for s in starts)
    assert len(starts) == 2


def test_a_worker_that_the_agent_has_ended_is_terminated_and_has_not_failed(play: Play) -> None:
    play.run()
    play.exit(0, None, 11)
    play.exit(1, None, 15)
    play.see(events.WorkersGone(3))
    play.close(Result.FAILED)
    assert play.recorded()[-3:] == [
        ("WORKER", "FAILED"),
        ("WORKER", "TERMINATED"),
        ("AGENT", "SUCCEEDED"),
    ]
    failed = play.recorder.events[-3]
    assert (failed["error_file"], failed["exit_code"]) == ("/e/0", -11)
    assert '"exit_code": [-11], "worker_pid": [70]' in failed["metadata"]["metadata"]
    assert play.outcome is not None
    assert [worker.failed for worker in play.outcome.workers] == [True, False]
    assert play.outcome.workers[1].stopped == StopOrder(signal.SIGTERM, at_ms=0)


def test_who_leaves_by_a_signal_has_failed_with_the_reason(play: Play) -> None:
    play.run()
    play.see(events.Signalled(signal.SIGINT, "SIGINT"))
    play.exit(0, None, 2)
    play.exit(1, 0)
    play.see(events.WorkersGone(3))
    assert play.recorded()[4:] == [("AGENT", "FAILED")]
    error = play.recorder.events[-1]["metadata"]["raw_error"]
    assert error.startswith("its agent received SIGINT; no server could be informed")
    assert play.outcome is not None
    assert {worker.stopped for worker in play.outcome.workers} == {
        StopOrder(signal.SIGINT, at_ms=0)
    }


def test_who_never_had_a_round_has_failed_without_workers(play: Play) -> None:
    play.close(Result.FAILED)
    assert play.recorded() == []  # Not for a run that it has received.
    play.see(Joined("job-7", "r", 1))
    play.close(Result.FAILED)
    assert play.recorded() == [("AGENT", "FAILED")]


def test_a_restart_tells_of_the_round_before_until_its_workers_start(play: Play) -> None:
    play.run()
    play.exit(0, 1)
    play.exit(1, None, 15)
    play.now_ms = 9_000
    play.see(events.WorkersGone(3))
    play.now_ms = 9_700
    again = Assignment("job-7", "r", 4, 0, 1, 0, 2, 0, 2, "a", 1, True, 1, 1)
    play.run(again)
    rendezvous, start = play.recorder.events[4], play.recorder.events[6]
    assert rendezvous["metadata"]["duration_ms"] == 700
    assert [event["metadata"]["group_rank"] for event in (rendezvous, start)] == [1, 0]
    assert [event["metadata"]["agent_restarts"] for event in (rendezvous, start)] == [1, 1]


def test_a_round_that_ends_elsewhere_ends_the_workers_here(play: Play) -> None:
    play.run()
    play.see(
        RoundOver("job-7", "r", 3, RoundEnd(Cause.NODE_LOST, "lost", broken=False, keep=False))
    )
    play.exit(0, 0)
    play.exit(1, None, 9)
    play.see(events.WorkersGone(3))
    stopped = [worker.stopped for worker in play.fates.workers]
    assert stopped == [StopOrder(signal.SIGTERM, at_ms=0)] * 2


def test_what_the_handler_does_not_take_is_counted_not_waited_for(play: Play) -> None:
    play.recorder.send = lambda event: False  # type: ignore[method-assign]
    play.run()
    assert play.event_log.missed == 4


def test_a_parked_worker_that_is_ended_with_the_job_has_its_exit() -> None:
    p = Play(keep_timeout_ms=10_000)
    p.run()
    p.exit(1, None, 9)
    p.now_ms = 400
    p.see(
        events.WorkersGone(3, kept=(KeptWorker(0, pid=70),)),
        Closed("job-7", "r", Ended(Result.FAILED, "no restart is left")),
        events.KeptExited(0, 70, 0, None),
        events.KeptGone(),
    )
    assert p.outcome is not None
    first, second = p.outcome.workers
    assert (first.exit_code, first.failed, first.stopped) == (0, False, StopOrder(15, at_ms=400))
    assert (second.signal, second.failed) == (9, True)


def test_the_time_between_two_signals_is_what_passed_not_what_was_allowed(play: Play) -> None:
    play.run()
    play.see(events.Signalled(signal.SIGINT, "SIGINT"))
    play.now_ms = 1_500
    play.see(events.Signalled(signal.SIGINT, "SIGINT"))  # Cuts the grace of 7 s short.
    play.exit(0, None, 9)
    play.exit(1, 0)
    play.see(events.WorkersGone(3))
    assert play.outcome is not None
    assert "local_rank 0: SIGINT, and SIGKILL 1.5 s later" in summary("job-7", play.outcome)


def ends_of(p: Play) -> list[str]:
    """Let a failed job end, and return how the summary says that its two workers ended."""
    p.see(events.WorkersGone(3))
    p.close(Result.FAILED)
    assert p.outcome is not None
    return summary("job-7", p.outcome).splitlines()[-2:]


def test_a_hung_worker_is_killed_without_a_signal_before() -> None:
    p = Play(keep_timeout_ms=10_000)
    p.run()
    hung = RoundOver(
        "job-7",
        "r",
        3,
        RoundEnd(Cause.WORKER_FAILURE, "rank 4 hangs", broken=True, keep=True),
        (0,),
    )
    p.see(hung)
    p.now_ms = 2_000
    p.exit(0, None, 9)
    p.exit(1, None, 15)
    assert ends_of(p) == ["  local_rank 0: SIGKILL", "  local_rank 1: SIGTERM"]


def test_a_worker_killed_because_it_did_not_park_says_so() -> None:
    p = Play(keep_timeout_ms=10_000)
    p.run()
    p.see(RoundOver("job-7", "r", 3, RoundEnd(Cause.NODE_LOST, "lost", broken=True, keep=True)))
    p.now_ms = 10_000
    p.fates.worker_not_kept(0, 70, "it did not park in time")
    p.fates.worker_not_kept(1, 4711, "it is another process")
    p.exit(0, None, 9)
    p.exit(1, None, 9)
    assert ends_of(p) == [
        "  local_rank 0: SIGKILL: it did not park in time",
        "  local_rank 1: SIGTERM, and SIGKILL 10 s later",
    ]


def test_a_charged_suspect_has_failed_and_was_not_ended_by_the_agent() -> None:
    p = Play(keep_timeout_ms=10_000)
    p.run()
    charged = Failure(0, 4, 70, None, None, "connection reset", "", 0, node_id="n1")
    p.see(
        events.WorkerSuspected(3, 0, 70, "connection reset", "", age_ms=0),
        events.WorkersGone(3, kept=(KeptWorker(0, pid=70), KeptWorker(1, pid=71))),
        Closed("job-7", "r", Ended(Result.FAILED, "no restart is left", failures=(charged,))),
        events.KeptExited(0, 70, 1, None),
        events.KeptExited(1, 71, None, 15),
        events.KeptGone(),
    )
    assert p.outcome is not None
    assert [(worker.failed, worker.stopped) for worker in p.outcome.workers] == [
        (True, None),
        (False, StopOrder(signal.SIGTERM, at_ms=0)),
    ]
    assert p.recorded()[-3:-1] == [("WORKER", "FAILED"), ("WORKER", "TERMINATED")]


# ------------------------------------------------------------------ the summary

LOST = "RuntimeError: [gloo/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:3133"
TERM = StopOrder(signal.SIGTERM, at_ms=1_000)


def failure(rank: int, node: str, message: str, traceback: str = "", **how: int) -> Failure:
    return Failure(
        node_id=node,
        address=f"{node}.net",
        local_rank=rank % 4,
        rank=rank,
        pid=4000 + rank,
        exit_code=None if "signal" in how else how.get("exit_code", 1),
        signal=how.get("signal"),
        message=message,
        traceback=traceback,
        at_ms=0,
    )


def fate(
    local_rank: int, stopped: StopOrder | None = TERM, why_killed: str = "", **how: int
) -> WorkerFate:
    return WorkerFate(
        local_rank,
        rank=local_rank,
        role_rank=local_rank,
        pid=1,
        exit_code=how.get("exit_code"),
        signal=how.get("signal"),
        ended_ms=how.get("ended_ms", 1_000),
        why_killed=why_killed,
        failed=stopped is None,
        stopped=stopped,
    )


def ended(*failures: Failure, workers: tuple[WorkerFate, ...] = (), code: int = 1) -> str:
    text = "the job has failed: no restart is left"
    return summary("job-7", NodeOutcome(code, text, failures, workers=workers))


def test_the_first_failure_those_that_followed_and_those_that_were_ended_are_told_apart() -> None:
    told = ended(
        failure(5, "n2", "ValueError: no such column", "Traceback ...\nValueError: no such column"),
        failure(4, "n2", "received SIGSEGV (pid 4004)", signal=11),
        failure(0, "n1", LOST, f"Traceback ...\n{LOST}"),
        workers=(
            fate(0, stopped=None, exit_code=1),
            fate(1, signal=15),
            fate(2, signal=15),
            fate(3, signal=9, ended_ms=6_020),
        ),
    )
    assert (
        told
        == f"""\
job-7: the job has failed: no restart is left
Root cause, the first failure of the last round:
  rank 5 (local_rank 1) on n2 (n2.net), pid 4005: exit code 1
  ValueError: no such column
  Traceback ...
  ValueError: no such column
Failed because of it, when their connections broke:
  rank 0 (local_rank 0) on n1 (n1.net), pid 4000: exit code 1: {LOST}
Failed at the same time, perhaps because of it:
  rank 4 (local_rank 0) on n2 (n2.net), pid 4004: signal 11 (SIGSEGV): received SIGSEGV (pid 4004)
Ended by this node's agent (3 workers of 4):
  local_rank 1, 2: SIGTERM
  local_rank 3: SIGTERM, and SIGKILL 5.0 s later"""
    )


def test_the_error_is_left_to_the_root_cause() -> None:
    first = failure(5, "n2", "ValueError: no such column")
    text = f"the job has failed: worker failure: {describe_failure(first)}; restarts spent: 1 of 1"
    told = summary("job-7", NodeOutcome(1, text, (first, failure(0, "n1", LOST))))
    assert told.splitlines()[0] == (
        "job-7: the job has failed: worker failure: RANK 5 on n2; restarts spent: 1 of 1"
    )
    assert told.count("ValueError: no such column") == 1


def test_a_worker_may_answer_the_signal_in_its_own_way() -> None:
    told = ended(
        failure(0, "n1", "E"),
        workers=(
            *(fate(n, exit_code=0) for n in range(4)),
            fate(4, exit_code=143),
            fate(5, StopOrder(signal.SIGKILL, 0), signal=9),
            fate(6),
            fate(7, why_killed="it did not park in time", signal=9),
            fate(8, why_killed="it did not park in time", signal=15),
        ),
    )
    assert (
        told.partition("Ended by")[2]
        == """\
 this node's agent (9 workers of 9):
  local_rank 0-3: SIGTERM, which it answered with exit code 0
  local_rank 4: SIGTERM, which it answered with exit code 143
  local_rank 5: SIGKILL
  local_rank 6: SIGTERM; not seen to end
  local_rank 7: SIGKILL: it did not park in time
  local_rank 8: SIGTERM"""
    )


def test_a_broken_connection_as_the_first_failure_points_to_its_other_end() -> None:
    told = ended(failure(0, "n1", LOST), failure(1, "n1", LOST))
    assert "It is itself a broken connection: look at its other end.\n" in told
    assert "Failed because of it, when their connections broke:\n  rank 1" in told


def test_after_restarts_it_says_that_the_failure_was_not_the_first_of_the_job() -> None:
    of = (failure(0, "n1", "E"),)
    told = summary("job-7", NodeOutcome(1, "it has failed", of, restarts=2))
    assert told.endswith(
        "\nWorkers had failed before (2 restarts): see `round N ended` above, or `rdzvctl explain`."
    )
    assert "had failed before" not in summary("job-7", NodeOutcome(1, "it has failed", of))


def test_workers_that_were_never_started_were_not_ended_either() -> None:
    never = tuple(WorkerFate(n, n, n, stopped=TERM) for n in range(2))
    assert ended(workers=never) == "job-7: the job has failed: no restart is left"


def test_success_says_nothing_of_single_workers() -> None:
    told = summary("job-7", NodeOutcome(0, "the job has succeeded", workers=(fate(0),)))
    assert told == "job-7: the job has succeeded"


def test_numbers_in_a_row_are_written_as_a_range() -> None:
    assert ranges([]) == ""
    assert ranges([1, 0]) == "0, 1"
    assert ranges([9, 4, 5, 6, 7, 1]) == "1, 4-7, 9"


@pytest.mark.parametrize(
    ("code", "exited", "expected"),
    [
        (1, {"exit_code": 3}, 3),
        (1, {"signal": 9}, 137),
        # A worker's own code must not be taken for ours, nor ours be hidden by a worker's.
        *((1, {"exit_code": ours}, 1) for ours in (75, 77, 93)),
        *((ours, {"exit_code": 3}, ours) for ours in (0, 2, 75, 77, 93, 143)),
    ],
)
def test_a_root_cause_is_told_from_ours(code: int, exited: dict[str, int], expected: int) -> None:
    found, why = root_cause_exit_code(NodeOutcome(code, "", (failure(0, "n1", "", **exited),)))
    assert found == expected
    assert bool(why) == (code == expected == 1)


def test_a_failure_of_which_no_root_cause_is_known_exits_with_1() -> None:
    code, why = root_cause_exit_code(NodeOutcome(1, "no server for 600 s"))
    assert (code, "no exit of a worker is known" in why) == (1, True)
