"""Which nodes are quarantined: the rule, case by case.

Each case is a list of strikes, `at_s node run`, at a server that knows four daemons unless it says
otherwise; then the nodes that they quarantine, and the reason given for the last. A strike is the
machine's; with a `?` behind the run it is an exception, which may be the job's.
"""

from __future__ import annotations

import msgspec
import pytest

from rdzv.core.events import NodeStuck, RoundSettled
from rdzv.core.fleet.quarantine import (
    MAX_STRIKES,
    QuarantineRecord,
    QuarantineRules,
    Strike,
    judge,
    lift,
    strikes_in,
)
from rdzv.core.model import Cause, Failure
from rdzv.view.sentences import sentence

FOUR = ("n1", "n2", "n3", "n4")
EIGHT = (*FOUR, "n5", "n6", "n7", "n8")
HOUR_MS = 3_600_000


def after(
    strikes: str,
    daemons: tuple[str, ...] = FOUR,
    record: QuarantineRecord | None = None,
    **tuning: int,
) -> tuple[QuarantineRecord, str]:
    """Judge strikes one after the other; each ends its own round."""
    record, text = record or QuarantineRecord(), ""
    for round_, line in enumerate(filter(None, map(str.strip, strikes.split(";")))):
        at_s, node_id, run = line.split()
        at_ms = int(at_s) * 1000
        number, job = 100 * int(at_s) + round_, run.rstrip("?")
        machine = not run.endswith("?")
        strike = Strike(node_id, f"job-{job[0]}", job, number, at_ms, "exit code 3", machine)
        verdict = judge(record, strike, QuarantineRules(**tuning), daemons, at_ms)
        record, text = verdict.record, sentence(verdict.event) if verdict.event else ""
    return record, text


THRICE = "0 n2 a; 10 n2 a; 20 n2 a"

CASES = {
    "two strikes are not enough": ("0 n2 a; 10 n2 a", {}, [], ""),
    "three are": (
        THRICE,
        {},
        ["n2"],
        "n2 is quarantined for 12 h 0 min: at fault 3 times within 20 s, last in job-a: exit "
        "code 3",
    ),
    "of different nodes they do not add up": ("0 n1 a; 10 n2 a; 20 n3 a", {}, [], ""),
    "of different runs they do": ("0 n2 a; 10 n2 b; 20 n2 c", {}, ["n2"], "n2 is quarantined"),
    "those before the window do not count": ("0 n2 a; 10 n2 a; 3605 n2 a", {}, [], ""),
    "those within it do": (
        "0 n2 a; 3595 n2 a; 3599 n2 a",
        {},
        ["n2"],
        "within 59 min 59 s, last in job-a",
    ),
    "with failures = 1 the first is enough": ("0 n2 a", {"failures": 1}, ["n2"], ""),
    "with failures = 0 nobody is": (THRICE, {"failures": 0}, [], ""),
    "one run has one node quarantined": (
        f"{THRICE}; 30 n3 a; 40 n3 a; 50 n3 a",
        {"max_nodes": 4},
        ["n2"],
        "n3 is not quarantined (a round failed there 3 times within 20 s): a node was "
        "quarantined for this run of job-a already, so the job itself is more likely at fault",
    ),
    "its strikes count against no other, also beside another run's": (
        f"{THRICE}; 30 n3 a; 40 n3 b; 50 n3 b",
        {"max_nodes": 4},
        ["n2"],
        "",
    ),
    "nor do another run's count for what is said of it": (
        f"{THRICE}; 20 n3 b; 30 n3 a; 40 n3 b; 50 n3 a",
        {"max_nodes": 4},
        ["n2"],
        "",
    ),
    "only its own are told": (
        f"{THRICE}; 20 n3 b; 30 n3 a; 40 n3 a; 50 n3 a",
        {"max_nodes": 4},
        ["n2"],
        "n3 is not quarantined (a round failed there 3 times within 20 s)",
    ),
    "another run of the job is not the one that is blamed": (
        f"{THRICE}; 30 n3 a2; 40 n3 a2; 50 n3 a2",
        {"max_nodes": 4},
        ["n2", "n3"],
        "n3 is quarantined",
    ),
    "the exceptions of one job alone are the job's": (
        "0 n2 a?; 2 n2 a?; 4 n2 a?",
        {},
        [],
        "n2 is not quarantined (a round failed there 3 times within 4.0 s): only job-a "
        "failed there, and none of these failures is the machine's (a signal, a device error), so "
        "the job itself is more likely at fault",
    ),
    "also those of several of its runs": (
        "0 n2 a1?; 2 n2 a2?; 4 n2 a3?",
        {},
        [],
        "only job-a failed there",
    ),
    "those of two jobs are the node's": (
        "0 n2 a?; 2 n2 b?; 4 n2 a?",
        {},
        ["n2"],
        "n2 is quarantined for 12 h 0 min: at fault 3 times within 4.0 s, last in job-a",
    ),
    "but not before there are enough": ("0 n2 a?; 2 n2 b?", {}, [], ""),
    "nor if the other's were at another node": (
        "0 n3 b?; 2 n2 a?; 4 n2 a?; 5 n2 a?",
        {},
        [],
        "only job-a failed there",
    ),
    "an exception makes up for no failure of the machine": (
        "0 n2 a; 2 n2 a?; 4 n2 a",
        {},
        [],
        "only job-a failed there, and 2 of these failures are the machine's",
    ),
    "and takes nothing from those": (
        "0 n2 a; 2 n2 a?; 4 n2 a; 6 n2 a",
        {},
        ["n2"],
        "n2 is quarantined for 12 h 0 min: at fault 4 times within 6.0 s",
    ),
    "with failures = 1 two jobs are still needed": (
        "0 n2 a?; 2 n2 b?",
        {"failures": 1},
        ["n2"],
        "at fault 2 times within 2.0 s",
    ),
    "other runs may have another node quarantined": (
        f"{THRICE}; 30 n3 b; 40 n3 b; 50 n3 b",
        {"max_nodes": 4},
        ["n2", "n3"],
        "n3 is quarantined",
    ),
    "a quarter of the nodes at a time": (
        f"{THRICE}; 30 n3 b; 40 n3 b; 50 n3 b",
        {},
        ["n2"],
        "n2 is quarantined already, and at most 1 of 4 nodes may be",
    ),
    "the next one may be when the time of the first is over": (
        f"{THRICE}; 43230 n3 b; 43240 n3 b; 43250 n3 b",
        {},
        ["n3"],
        "n3 is quarantined",
    ),
    "until then it is blamed, long after the strikes themselves are forgotten": (
        f"{THRICE}; 43190 n3 a; 43200 n3 a; 43210 n3 a",
        {"max_nodes": 4},
        ["n2"],
        "a node was quarantined for this run of job-a already",
    ),
    "a run may have another one then": (
        f"{THRICE}; 43230 n3 a; 43240 n3 a; 43250 n3 a",
        {},
        ["n3"],
        "n3 is quarantined",
    ),
    "what still runs on a quarantined node changes nothing": (
        f"{THRICE}; 30 n2 b; 40 n2 b; 50 n2 b",
        {},
        ["n2"],
        "",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rule(case: str) -> None:
    strikes, tuning, quarantined, said = CASES[case]
    record, text = after(strikes, **tuning)
    at_ms = int(strikes.split(";")[-1].split()[0]) * 1000
    assert sorted(record.quarantined(at_ms)) == quarantined
    assert said in text
    assert bool(text) == (bool(said) or bool(quarantined and tuning.get("failures") == 1))


def test_two_of_eight_may_be_quarantined_at_a_time() -> None:
    record, _ = after("0 n2 a; 1 n2 a; 2 n2 a; 3 n3 b; 4 n3 b; 5 n3 b", EIGHT)
    assert sorted(record.quarantined(5_000)) == ["n2", "n3"]
    record, text = after("6 n4 c; 7 n4 c; 8 n4 c", EIGHT, record)
    assert sorted(record.quarantined(8_000)) == ["n2", "n3"]
    assert "n2, n3 are quarantined already, and at most 2 of 8 nodes may be" in text


def test_the_only_node_is_never_quarantined() -> None:
    record, text = after(THRICE, ("n2",), max_nodes=3)
    assert not record.quarantined(20_000)
    assert text.endswith(": no other node is known") and "is not quarantined" in text


def test_a_node_without_a_daemon_is_not_judged() -> None:
    record, text = after("0 laptop-4711 a; 1 laptop-4711 a; 2 laptop-4711 a")
    assert (record, text) == (QuarantineRecord(), "")


def test_a_strike_that_is_told_again_changes_nothing() -> None:
    strike = Strike("n2", "job-7", "a", 5, 1_000, "exit code 3", machine=True)
    record = judge(QuarantineRecord(), strike, QuarantineRules(), FOUR, 1_000).record
    for at_ms in (1_000, 2_000, 3_000):
        again = judge(record, strike, QuarantineRules(), FOUR, at_ms)
        assert again.record is record and not again.event
    tuning = QuarantineRules(failures=1)
    record = judge(QuarantineRecord(), strike, tuning, FOUR, 1_000).record
    assert judge(record, strike, tuning, FOUR, 2_000).record is record


def test_a_quarantine_ends_with_its_time() -> None:
    record, _ = after(THRICE)
    over_ms = 20_000 + 12 * HOUR_MS
    assert "n2" in record.quarantined(over_ms - 1)
    assert "n2" not in record.quarantined(over_ms)


def test_what_was_before_an_operator_lifted_it_does_not_count() -> None:
    record, _ = after(THRICE)
    record = lift(record, "n2")
    assert not record.quarantined(20_000)
    record, text = after("30 n2 b; 40 n2 b", record=record)
    assert not text
    # The run that it was quarantined for is still blamed.
    record, text = after("50 n3 a; 60 n3 a; 70 n3 a", record=record)
    assert "the job itself is more likely at fault" in text
    # Strikes of nodes that were never quarantined are forgotten as well.
    assert not [s for s in lift(record, "n2").strikes if s.node_id == "n2"]


@pytest.mark.slow
def test_what_is_remembered_is_bounded_and_forgotten_in_time() -> None:
    record = QuarantineRecord()
    tuning = QuarantineRules(failures=MAX_STRIKES * 2)
    for number in range(MAX_STRIKES + 10):
        strike = Strike("n2", "job-7", "a", number, number, "exit code 3")
        record = judge(record, strike, tuning, FOUR, number).record
    assert len(record.strikes) == MAX_STRIKES
    assert record.strikes[0].round == 10
    late = Strike("n2", "job-7", "a", 9_999, HOUR_MS * 3, "exit code 3")
    assert judge(record, late, tuning, FOUR, HOUR_MS * 3).record.strikes == (late,)


def test_the_record_is_stored_as_it_is() -> None:
    record, _ = after(f"{THRICE}; 30 n3 b")
    assert msgspec.json.decode(msgspec.json.encode(record), type=QuarantineRecord) == record
    assert msgspec.json.decode(b"{}", type=QuarantineRecord) == QuarantineRecord()


# ---------------------------------------------------------------- what is a strike


def failure(
    message: str, signal: int | None = None, exit_code: int | None = 3, traceback: str = "at x.py:1"
) -> Failure:
    return Failure(0, 1, 99, exit_code, signal, message, traceback, 5, node_id="n2")


def settled(cause: Cause, root_cause: Failure | None) -> RoundSettled:
    return RoundSettled(4, cause, "it was so", 1, 3, root_cause)


def test_the_node_of_the_root_cause_is_at_fault() -> None:
    events = [settled(Cause.WORKER_FAILURE, failure("uncorrectable\nECC  error"))]
    (strike,) = strikes_in("job-7", "a", events, 77)
    reason = "rank 1 (local_rank 0) on n2: exit code 3: uncorrectable ECC error"
    assert strike == Strike("n2", "job-7", "a", 4, 77, reason)


MACHINES = {
    "a signal": (failure("received SIGSEGV (pid 99)", 11, None, ""), True),
    "an exception": (failure("KeyError: 'lr'"), False),
    "an exit code": (failure("no error file", traceback=""), False),
    "a hang": (failure("hung: RANK 1 has not entered all_reduce", None, None), False),
    "a device": (failure("AcceleratorError: CUDA error: unspecified launch failure\nx"), True),
    "of an older torch": (failure("RuntimeError: CUDA error: uncorrectable ECC error"), True),
    "of the torch for AMD": (failure("RuntimeError: HIP error: unknown error"), True),
    "a refused value": (
        failure("AcceleratorError: CUDA error: device-side assert triggered"),
        False,
    ),
    "no memory left": (failure("OutOfMemoryError: CUDA out of memory. Tried to ..."), False),
    "none, by the driver": (failure("AcceleratorError: CUDA error: out of memory"), False),
    "words of a device": (failure("ValueError: CUDA error: no such thing"), False),
    "its words in the exit's": (failure("RuntimeError: CUDA error: x", traceback=""), False),
    "NCCL without memory": (
        failure("DistBackendError: x\nncclUnhandledCudaError: x.\nLast error:\nout of memory"),
        False,
    ),
    "NCCL on this node": (
        failure(
            "DistBackendError: NCCL error in: x.cpp:7, unhandled cuda error\n"
            "ncclUnhandledCudaError: Call to CUDA function failed."
        ),
        True,
    ),
}


@pytest.mark.parametrize("case", MACHINES)
def test_which_failures_are_the_machines(case: str) -> None:
    root, machine = MACHINES[case]
    (strike,) = strikes_in("job-7", "a", [settled(Cause.WORKER_FAILURE, root)], 77)
    assert strike.machine is machine


def test_what_can_not_be_killed_is_the_fault_of_its_node_once_a_round() -> None:
    stuck = NodeStuck("n2", 4, "workers survive SIGKILL (pid 99)")
    (strike,) = strikes_in("job-7", "a", [stuck], 77)
    assert strike == Strike("n2", "job-7", "a", 4, 77, "workers survive SIGKILL (pid 99)", True)
    both = [stuck, settled(Cause.WORKER_FAILURE, failure("killed"))]
    assert len(strikes_in("job-7", "a", both, 77)) == 1


@pytest.mark.parametrize(
    "event",
    [
        settled(Cause.NODE_LOST, None),
        settled(Cause.STORE_HOST, None),
        settled(Cause.WORKER_FAILURE, None),
        settled(Cause.WORKER_FAILURE, failure("DistNetworkError: Connection reset by peer")),
        settled(
            Cause.WORKER_FAILURE,
            failure("DistBackendError: NCCL error in: x.cpp:7\nncclRemoteError: A call failed"),
        ),
    ],
)
def test_nobody_is_at_fault(event: RoundSettled) -> None:
    assert strikes_in("job-7", "a", [event], 77) == ()


def test_a_long_reason_is_cut() -> None:
    (strike,) = strikes_in("job-7", "a", [settled(Cause.WORKER_FAILURE, failure("x" * 5_000))], 77)
    assert len(strike.reason) == 200
    assert strike.reason.endswith("...")
