"""The summary, for someone at three in the morning: which worker failed first, which followed."""

import signal

import pytest

from rdzv.agent.core.model import Assignment, Outcome
from rdzv.agent.workers.fates import LocalRound, NodeOutcome, Stop, WorkerFate
from rdzv.agent.workers.summary import ranges, root_cause_exit_code, summary
from rdzv.core.model import Failure

LOST = "RuntimeError: [gloo/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:3133"
LINE = Assignment("r", 3, 1, 2, 4, 8, 0, 8, "a", 1, True, 0, 1)
TERM = Stop(signal.SIGTERM, at_ms=1_000)


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
    local_rank: int, stopped: Stop | None = TERM, why_killed: str = "", **how: int
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


def test_a_worker_may_answer_the_signal_in_its_own_way() -> None:
    told = ended(
        failure(0, "n1", "E"),
        workers=(
            *(fate(n, exit_code=0) for n in range(4)),
            fate(4, exit_code=143),
            fate(5, Stop(signal.SIGKILL, 0), signal=9),
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
    never = LocalRound.begin(LINE, 2).told_to_end({0, 1}, TERM).workers
    assert ended(workers=never) == "job-7: the job has failed: no restart is left"


def test_success_says_nothing_of_single_workers() -> None:
    told = summary("job-7", NodeOutcome(0, "the job has succeeded", workers=(fate(0),)))
    assert told == "job-7: the job has succeeded"


def test_numbers_in_a_row_are_written_as_a_range() -> None:
    assert ranges([]) == ""
    assert ranges([1, 0]) == "0, 1"
    assert ranges([9, 4, 5, 6, 7, 1]) == "1, 4-7, 9"


# ------------------------------------------------------------------ what became of each worker


def test_a_worker_that_failed_before_it_was_told_to_end_has_failed() -> None:
    local = LocalRound.begin(LINE, 3).started(0, 70).started(1, 71).started(2, 72)
    local = local.ended(0, 1, None, 0, failed=True).told_to_end({1, 2}, TERM)
    local = local.ended(1, 1, None, 0, failed=True).ended(2, None, 15, 2_000, failed=False)
    assert [(w.rank, w.pid, w.failed, w.stopped) for w in local.workers] == [
        (4, 70, True, None),
        (5, 71, True, None),
        (6, 72, False, TERM),
    ]


def test_the_first_word_to_end_is_the_one_that_counts() -> None:
    local = LocalRound.begin(LINE, 1).told_to_end({0}, TERM)
    assert local.told_to_end({0}, Stop(signal.SIGKILL, 0)).workers[0].stopped == TERM


def test_a_worker_that_was_let_park_is_ended_by_the_next_word() -> None:
    local = LocalRound.begin(LINE, 1).told_to_end({0}, Stop(signal.SIGTERM, 0, may_park=True))
    assert local.told_to_end({0}, TERM).workers[0].stopped == TERM


def test_an_outcome_of_this_node_is_an_outcome() -> None:
    assert isinstance(NodeOutcome(0, ""), Outcome)


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
def test_a_root_causes_exit_code_is_told_from_ours(
    code: int, exited: dict[str, int], expected: int
) -> None:
    found, why = root_cause_exit_code(NodeOutcome(code, "", (failure(0, "n1", "", **exited),)))
    assert found == expected
    assert bool(why) == (code == expected == 1)


def test_a_failure_of_which_no_root_cause_is_known_exits_with_1() -> None:
    code, why = root_cause_exit_code(NodeOutcome(1, "no server for 600 s"))
    assert (code, "no exit of a worker is known" in why) == (1, True)
