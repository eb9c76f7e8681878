"""Which of many failures was the first, if the others followed from it."""

from __future__ import annotations

from typing import Any

import pytest

from rdzv.core.model import Failure, Settings
from rdzv.core.root_cause import (
    MAX_FAILURES,
    describe_failure,
    is_connection_error,
    keep_earliest,
    names_of_end,
    referring,
    root_cause,
    why_not_restarted,
)
from rdzv.structs import replace

RESET = "RuntimeError: [/src/gloo/transport/tcp/pair.cc:553] Connection reset by peer"


def failure(
    node_id: str,
    at_ms: int,
    message: str = "",
    traceback: str = "",
    signal: int | None = None,
    local_rank: int = 0,
) -> Failure:
    return Failure(
        node_id=node_id,
        address="",
        local_rank=local_rank,
        rank=0,
        pid=1,
        exit_code=None if signal else 1,
        signal=signal,
        message=message,
        traceback=traceback,
        at_ms=at_ms,
    )


def names(failures: tuple[Failure, ...]) -> list[str]:
    return [f.node_id for f in failures]


@pytest.mark.parametrize(
    ("why", "failures", "order"),
    [
        ("nothing failed", [], []),
        ("the earliest of its like", [failure("b", 2), failure("a", 1)], ["a", "b"]),
        (
            "a traceback wins over an earlier connection error",
            [failure("a", 1, RESET, "Traceback"), failure("b", 9, "ValueError", "Traceback")],
            ["b", "a"],
        ),
        (
            "a traceback wins over an earlier silent death",
            [failure("a", 1, signal=9), failure("b", 9, "ValueError", "Traceback")],
            ["b", "a"],
        ),
        (
            "a silent death wins over an earlier connection error, which follows from something",
            [failure("a", 1, RESET, "Traceback"), failure("b", 9, signal=11)],
            ["b", "a"],
        ),
        (
            "what came more than half a second later is not shown, whatever it says",
            [failure("a", 0, RESET, "Traceback"), failure("b", 501, "ValueError", "Traceback")],
            ["a"],
        ),
        (
            "what came exactly half a second later is",
            [failure("a", 0, RESET), failure("b", 500, "ValueError", "Traceback")],
            ["b", "a"],
        ),
        ("at one instant, by node", [failure("b", 1), failure("a", 1)], ["a", "b"]),
        ("only connection errors: the earliest", [failure("b", 1, RESET)], ["b"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_order(why: str, failures: list[Failure], order: list[str]) -> None:
    assert names(root_cause(failures)) == order
    assert names(root_cause(reversed(failures))) == order


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("torch.distributed.DistBackendError: NCCL error ... remote process exited", True),
        ("RuntimeError: [../gloo/pair.cc:534] Connection closed by peer [10.0.0.7]:33001", True),
        ("RuntimeError: Gloo connectFullMesh failed with [../gloo/x.cc:144] no error", True),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", True),
        ("DistStoreError: wait timeout after 300000ms, keys: /worker/0", True),
        ("ncclRemoteError: A call failed possibly due to a network error", True),
        (
            "DistNetworkError: The server socket has failed to listen on any local network "
            "address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address "
            "already in use",
            False,
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: x.cc:77, unhandled cuda error\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.",
            False,
        ),
        ("OSError: s3://bucket/shard-7: Read timed out. Connection reset by peer", False),
        ("RuntimeError: socket timeout; Broken pipe; DistNetworkError", False),
        ("ValueError: loss is nan", False),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory", False),
        ("", False),
    ],
)
def test_connection_errors_are_told_by_their_types(text: str, is_one: bool) -> None:
    """In the chain of a traceback as well."""
    assert is_connection_error(failure("n1", 0, text)) is is_one
    assert is_connection_error(failure("n1", 0, "failed", f"Traceback\n{text}")) is is_one


def test_of_pythons_own_connection_errors_only_the_last_in_a_chain_counts() -> None:
    """Scripts catch them, and try again."""
    broken = "BrokenPipeError: [Errno 32] Broken pipe"
    assert is_connection_error(failure("n1", 0, broken, broken))
    assert not is_connection_error(failure("n1", 0, "KeyError: 'x'", f"{broken}\n\nKeyError: 'x'"))


def test_an_address_in_use_is_the_cause_of_the_connections_that_break() -> None:
    in_use = "DistNetworkError: port: 29500, code: -98, name: EADDRINUSE, message: in use"
    failures = [failure("a", 1, RESET, RESET), failure("b", 2, in_use, in_use)]
    assert names(root_cause(failures)) == ["b", "a"]


def finished(node_id: str, at_ms: int, rank: int = 3) -> Failure:
    return replace(failure(node_id, at_ms), exit_code=0, rank=rank)


def test_a_worker_that_exited_with_0_is_the_cause_of_the_connections_that_break_after_it() -> None:
    lost = [replace(failure(n, 5_000, RESET, RESET), rank=i) for i, n in enumerate("abc")]
    found = root_cause([finished("d", 100), *lost, finished("e", 90, 4)])
    assert names(found) == ["e", "a", "b", "c"]
    assert describe_failure(found[0]) == (
        "rank 4 (local_rank 0) on e: exited with 0, 4.9 s before; then collectives or connections "
        "of RANK 0-2 failed"
    )
    suspects = [replace(one, suspect=True) for one in lost]
    assert names(root_cause([finished("d", 100), *suspects]))[0] == "d"


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([failure("a", 50, RESET, RESET)], id="a connection that broke before"),
        pytest.param([failure("a", 5_000, "KeyError: 'x'", "KeyError: 'x'")], id="an exception"),
        pytest.param([failure("a", 5_000, signal=9)], id="a kill"),
    ],
)
def test_it_is_not_the_cause_of(others: list[Failure]) -> None:
    assert names(root_cause([finished("d", 100), *others])) == ["a"]


def test_of_those_that_exited_with_0_the_first_is_kept_whatever_the_number_of_failures() -> None:
    many = [failure(f"n{i}", 1_000 + i) for i in range(500)]
    kept = keep_earliest([finished("y", 9), *many, finished("z", 8)])
    assert (len(kept), names(kept)[-1]) == (MAX_FAILURES + 1, "z")


def test_one_failure_is_kept_for_each_worker_the_first_that_was_told() -> None:
    first, again = failure("n1", 5, "first"), failure("n1", 6, "again")
    other = failure("n1", 4, "other", local_rank=1)
    assert keep_earliest([first, again, other]) == (other, first)


def test_the_earliest_are_kept_when_there_are_many() -> None:
    many = [failure(f"n{i}", 1_000 - i) for i in range(500)]
    kept = keep_earliest(many)
    assert len(kept) == MAX_FAILURES
    assert max(f.at_ms for f in kept) == 1_000 - 500 + MAX_FAILURES


def test_a_failure_is_described_in_one_line() -> None:
    assert describe_failure(failure("n1", 0, "boom")) == (
        "rank 0 (local_rank 0) on n1: exit code 1: boom"
    )
    assert describe_failure(failure("n1", 0, signal=9)).endswith("on n1: signal 9")


def test_a_text_may_name_the_worker_of_a_failure_without_its_error() -> None:
    boom, other = failure("n1", 0, "boom"), failure("n2", 0, "boom")
    text = f"worker failure: {describe_failure(boom)}; restarts spent: 1 of 1"
    assert referring(text, boom) == "worker failure: RANK 0 on n1; restarts spent: 1 of 1"
    assert referring(text, other) == text


def test_a_suspect_is_no_fault_of_its_node() -> None:
    suspect = replace(failure("a", 0, "ValueError: no", "trace"), suspect=True, exit_code=None)
    assert is_connection_error(suspect)
    assert describe_failure(suspect).endswith("on a: a collective failed: ValueError: no")


TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 7, in step
    loss.backward()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 9, in <module>
    step()
    ^^^^^^
torch.OutOfMemoryError: CUDA out of memory.
ValueError: is only a word of the text"""
MEMORY = "OutOfMemoryError: CUDA out of memory. ValueError: is only a word of the text"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"exit_code": 3}, ["3"]),
        ({"signal": 9, "exit_code": None}, ["137"]),
        ({"exit_code": 137}, ["137"]),
        ({"exit_code": None}, []),
        (
            {"message": MEMORY, "traceback": TRACEBACK},
            ["1", "torch.OutOfMemoryError", "OutOfMemoryError"],
        ),
        # The server keeps the end of a long traceback.
        (
            {"message": MEMORY, "traceback": TRACEBACK[TRACEBACK.index("ne 9, in <m") :]},
            ["1", "torch.OutOfMemoryError", "OutOfMemoryError"],
        ),
        ({"message": "ValueError", "traceback": "Traceback"}, ["1", "ValueError"]),
        # The text of an exception, of sys.exit("text") and of a hang may be anything.
        ({"message": MEMORY, "traceback": ""}, ["1"]),
        ({"message": "no batch: ValueError: x", "traceback": TRACEBACK}, ["1"]),
        ({"message": "hung: 9 s", "traceback": TRACEBACK, "exit_code": None}, []),
        ({"message": "exited: early", "traceback": TRACEBACK, "exit_code": 0}, ["0"]),
        ({"message": "137: x", "traceback": TRACEBACK}, ["1"]),
        # A suspect has not exited, and its exception is known all the same.
        (
            {"message": "DistError: x", "traceback": "T", "exit_code": None, "suspect": True},
            ["DistError"],
        ),
    ],
)
def test_how_a_worker_ended_has_names(how: dict[str, Any], expected: list[str]) -> None:
    assert list(names_of_end(replace(failure("a", 1), **how))) == expected


OF_MEMORY = replace(failure("a", 1), message=MEMORY, traceback=TRACEBACK)
KILLED = failure("a", 1, signal=9)


@pytest.mark.parametrize(
    ("root", "restart_on", "no_restart_on", "why"),
    [
        (failure("a", 1), (), (), ""),
        (failure("a", 1), (), ("3",), ""),
        (failure("a", 1), (), ("1",), "exit code 1 is listed in --no-restart-on"),
        (KILLED, (), ("137",), "signal 9 is listed in --no-restart-on"),
        (OF_MEMORY, (), ("OutOfMemoryError",), "OutOfMemoryError is listed in --no-restart-on"),
        (
            OF_MEMORY,
            (),
            ("torch.OutOfMemoryError",),
            "torch.OutOfMemoryError is listed in --no-restart-on",
        ),
        (OF_MEMORY, (), ("ValueError", "KeyError", "my.OutOfMemoryError"), ""),
        (KILLED, ("137", "3"), (), ""),
        (OF_MEMORY, ("OutOfMemoryError",), (), ""),
        (
            OF_MEMORY,
            ("137",),
            (),
            "--restart-on does not list exit code 1, torch.OutOfMemoryError",
        ),
        # Given both, --no-restart-on wins.
        (OF_MEMORY, ("1",), ("OutOfMemoryError",), "OutOfMemoryError is listed in --no-restart-on"),
        # What is not known is in no list.
        (None, (), ("1",), ""),
        (None, ("1",), (), "how it ended is not known, so --restart-on does not list it"),
    ],
)
def test_which_ends_of_a_worker_are_restarted(
    root: Failure | None, restart_on: tuple[str, ...], no_restart_on: tuple[str, ...], why: str
) -> None:
    settings = Settings(1, 1, restart_on=restart_on, no_restart_on=no_restart_on)
    assert why_not_restarted(settings, root) == why
