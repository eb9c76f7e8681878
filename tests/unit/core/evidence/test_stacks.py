"""Where workers differ: most wait for one that is elsewhere, and the stacks say which one."""

from __future__ import annotations

import pytest

from rdzv.core.evidence.stacks import (
    SilentNode,
    StackFrame,
    ThreadStack,
    WorkerStack,
    as_traceback,
    grouped,
    odd_one_out,
    summarise,
)

SITE = "/venv/lib/python3.12/site-packages/torch/distributed"
TRAIN = "/home/ada/train.py"


def stack(rank: int, *frames: StackFrame, state: str = "S", **more: object) -> WorkerStack:
    threads = (ThreadStack("MainThread", True, frames),) if frames else ()
    return WorkerStack(rank, rank % 8, 100 + rank, state, threads, **more)  # type: ignore[arg-type]


def in_all_reduce(rank: int, line: int = 41, **more: object) -> WorkerStack:
    return stack(
        rank,
        StackFrame("all_reduce", f"{SITE}/distributed_c10d.py", 2930),
        StackFrame("wrapper", f"{SITE}/c10d_logger.py", 81),
        StackFrame("train", TRAIN, line),
        StackFrame("<module>", TRAIN, 90),
        **more,  # type: ignore[arg-type]
    )


def in_load(rank: int, **more: object) -> WorkerStack:
    return stack(
        rank,
        StackFrame("read", "/home/ada/data.py", 7),
        StackFrame("train", TRAIN, 40),
        **more,  # type: ignore[arg-type]
    )


def in_backward(rank: int) -> WorkerStack:
    engine = "/venv/lib/python3.12/site-packages/torch/autograd/graph.py"
    return stack(
        rank, StackFrame("_engine_run_backward", engine, 800), StackFrame("train", TRAIN, 44)
    )


CASES = [
    pytest.param(
        [in_all_reduce(0), in_load(1), in_all_reduce(2), in_all_reduce(3)],
        "RANK 0,2-3 in all_reduce at train.py:41; RANK 1 in read at data.py:7",
        1,
        id="one is in no collective",
    ),
    pytest.param(
        [in_all_reduce(0), in_load(1, state="T")],
        "RANK 0 in all_reduce at train.py:41; RANK 1 stopped by a signal, in read at data.py:7",
        1,
        id="one is stopped",
    ),
    pytest.param(
        [in_all_reduce(0), in_all_reduce(1, state="T")],
        "RANK 0 in all_reduce at train.py:41; "
        "RANK 1 stopped by a signal, in all_reduce at train.py:41",
        1,
        id="one is stopped where the others are",
    ),
    pytest.param(
        [in_load(0), in_load(1), in_load(2, state="D")],
        "RANK 0-1 in read at data.py:7; "
        "RANK 2 uninterruptible in the kernel (D state), in read at data.py:7",
        2,
        id="one is in D state",
    ),
    pytest.param(
        [in_all_reduce(0), in_load(1, state="T"), in_load(2, state="T")],
        "RANK 1-2 stopped by a signal, in read at data.py:7; RANK 0 in all_reduce at train.py:41",
        None,
        id="two are stopped: which of them is not told",
    ),
    pytest.param(
        [in_all_reduce(0, 41), in_all_reduce(1, 52), in_all_reduce(2, 52)],
        "RANK 1-2 in all_reduce at train.py:52; RANK 0 in all_reduce at train.py:41",
        0,
        id="one is at another collective",
    ),
    pytest.param(
        [in_all_reduce(0, 41), in_all_reduce(1, 52)],
        "RANK 0 in all_reduce at train.py:41; RANK 1 in all_reduce at train.py:52",
        None,
        id="two at different collectives: either may be wrong",
    ),
    pytest.param(
        [in_all_reduce(0), in_all_reduce(1)],
        "RANK 0-1 in all_reduce at train.py:41",
        None,
        id="all at one place",
    ),
    pytest.param([in_load(0)], "RANK 0 in read at data.py:7", None, id="one worker alone"),
    pytest.param(
        [in_all_reduce(0), in_load(1), in_backward(2)],
        "RANK 0 in all_reduce at train.py:41; RANK 1 in read at data.py:7; "
        "RANK 2 in _engine_run_backward at train.py:44",
        None,
        id="all are elsewhere",
    ),
    pytest.param(
        [in_all_reduce(0), stack(1, state="D", kernel=("nfs_wait_bit",), note="py-spy: refused")],
        "RANK 0 in all_reduce at train.py:41; "
        "RANK 1 uninterruptible in the kernel (D state), in the kernel at nfs_wait_bit",
        1,
        id="without Python frames the kernel tells",
    ),
    pytest.param(
        [in_all_reduce(0), in_all_reduce(1), stack(2, note="refused")],
        "RANK 0-1 in all_reduce at train.py:41; RANK 2 somewhere: its stack could not be read",
        2,
        id="no information about one",
    ),
    pytest.param([stack(0, state="Z")], "RANK 0 dead, and not reaped", 0, id="a zombie"),
    pytest.param([], "no stacks", None, id="nobody"),
]


@pytest.mark.parametrize(("stacks", "summary", "odd"), CASES)
def test_where_workers_differ_and_whom_they_wait_for(
    stacks: list[WorkerStack], summary: str, odd: int | None
) -> None:
    found = grouped(stacks)
    assert summarise(found) == summary
    assert odd_one_out(found) == odd
    assert [g.ranks for g in grouped(reversed(stacks))] == [g.ranks for g in found]


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/home/ada/train.py", True),
        ("/home/ada/python3/train.py", True),
        ("train.py", True),
        ("<string>", True),
        ("/venv/lib/python3.12/site-packages/torch/nn/functional.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False),
        ("/root/.pyenv/versions/3.11.7/lib/python3.11/threading.py", False),
        ("/usr/lib64/python3.9/selectors.py", False),
        ("<frozen runpy>", False),
    ],
)
def test_the_users_own_code_is_told_from_libraries(file: str, own: bool) -> None:
    assert StackFrame("f", file, 1).own is own


def test_the_same_place_in_different_folders_is_one_place() -> None:
    """Environments of nodes may lie in different folders; other files count as other places."""

    def at(rank: int, root: str, file: str) -> WorkerStack:
        wait = StackFrame("wait", f"{root}/lib/python3.11/threading.py", 3)
        return stack(rank, wait, StackFrame("f", f"{root}/{file}", 1))

    assert len(grouped([at(0, "/a", "x/y/t.py"), at(1, "/b", "x/y/t.py")])) == 1
    assert len(grouped([at(0, "/a", "x/y/t.py"), at(1, "/a", "x/z/t.py")])) == 2


def test_only_the_main_thread_tells_where_a_worker_is() -> None:
    side = ThreadStack("loader", False, (StackFrame("poll", "/home/ada/loader.py", 3),))
    main = ThreadStack("MainThread", True, (StackFrame("f", TRAIN, 1),))
    found = grouped([WorkerStack(0, 0, 1, "S", (side, main)), WorkerStack(1, 1, 2, "S", (main,))])
    assert [group.ranks for group in found] == [(0, 1)]


def test_a_summary_is_short_however_many_places_and_nodes_there_are() -> None:
    found = grouped([stack(rank, StackFrame(f"f{rank}", TRAIN, rank)) for rank in range(20)])
    silent = [SilentNode(f"n{number}", 0, 8, "not connected") for number in range(30)]
    told = summarise(found, silent)
    nodes = "n0, n1, n2, n3, n4, n5, n6, n7 and 22 more"
    assert told.endswith(f"; 12 more at 12 other places; no information about {nodes}")
    assert len(told) < 500


def test_a_stack_as_a_traceback_has_the_innermost_call_last() -> None:
    assert as_traceback(in_load(1, note="cut", kernel=("futex_wait",))) == (
        "Stack of the main thread (most recent call last):\n"
        '  File "/home/ada/train.py", line 40, in train\n'
        '  File "/home/ada/data.py", line 7, in read\n'
        "  in the kernel: futex_wait\n"
        "cut"
    )
    assert as_traceback(stack(1, note="refused")) == "refused"
