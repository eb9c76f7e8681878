"""The stacks of workers, and where they differ.

A job that hangs has as many stacks as workers, and nearly all of them are alike: the workers are
waiting for one that is elsewhere. Workers are therefore grouped by their innermost frames, from the
interpreter's current position to the first line of the user's own code, and summarized in one line:

    RANK 0,2-3 in all_reduce at train.py:41; RANK 1 in load at data.py:7
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Annotated

from rdzv.bounds import Cut, Elapsed, First, Part, Sentence
from rdzv.core.evidence.collectives import FINISHED, Evidence, GroupRecord, HangCause
from rdzv.core.words import listed, ranks_text
from rdzv.structs import struct

STOPPED, TRACED, UNINTERRUPTIBLE, ZOMBIE = "T", "t", "D", "Z"
"""Process states, as in /proc, in which a process does not run on its own."""
EXITED = "X"
"""The state of a worker that has ended and whose last record shows it in a collective."""

MAX_FRAMES = 128
"""The number of frames kept for each thread. Others are omitted."""
MAX_GROUPS_TOLD = 8

_ODD_STATES = {
    STOPPED: "stopped by a signal",
    TRACED: "held by a debugger",
    UNINTERRUPTIBLE: "uninterruptible in the kernel (D state)",
    ZOMBIE: "dead, and not reaped",
    EXITED: "ended in a collective",
    FINISHED: "exited with 0",
}

_LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/(python|pypy)[0-9.]+/|/rdzv/agent/job_programs/|^<(?!string>)"
)
"""Matches files that are not the user's own: installed packages, standard library, frozen modules.
"""

_COLLECTIVE = re.compile(r"(^|/)torch/(distributed|nn/parallel)/")
_LOADER = re.compile(r"(^|/)torch/utils/data/")


@struct(frozen=True)
class StackFrame:
    """One call in a stack. `line` is None if unknown."""

    name: Part
    file: Part
    line: int | None

    @property
    def own(self) -> bool:
        """Whether the frame belongs to the user's own code, judging by its file."""
        return _LIBRARY.search(self.file) is None


@struct(frozen=True)
class ThreadStack:
    """One thread of a worker, with its frames, innermost first."""

    name: Part
    main: bool
    frames: Annotated[tuple[StackFrame, ...], First(MAX_FRAMES)]
    holds_gil: bool = False


@struct(frozen=True)
class WorkerStack:
    """The stack of one worker. `state` is the state of its process, as in /proc."""

    rank: int
    local_rank: int
    pid: int
    state: Annotated[str, Cut(itemgetter(slice(1)))] | None = None
    """None if it could not be read, and `0` if the worker has exited with 0."""
    threads: Annotated[tuple[ThreadStack, ...], First(64)] = ()
    """The worker's threads, or empty if Python's frames could not be read."""
    note: Sentence | None = None
    """The reason why part of the stack is missing, and how to fix it."""
    kernel: Annotated[tuple[Part, ...], First(MAX_FRAMES)] = ()
    """The kernel frames in which the process sleeps, innermost first, as far as permissions allow.
    """
    node_id: str = ""
    collectives: Annotated[tuple[GroupRecord, ...], First(64)] = ()
    no_record: Sentence | None = None
    exited_ms: Elapsed | None = None
    """How long ago the worker exited, if it has `FINISHED` and that is known."""

    @property
    def frames(self) -> tuple[StackFrame, ...]:
        """The frames of the main thread, innermost first."""
        return next((thread.frames for thread in self.threads if thread.main), ())

    @property
    def place(self) -> tuple[StackFrame, ...]:
        """The innermost frames up to the first of the user's own code, or all if there is none."""
        frames = self.frames
        for depth, frame in enumerate(frames, start=1):
            if frame.own:
                return frames[:depth]
        return frames

    @property
    def waits_for_others(self) -> bool:
        """Whether the worker is inside a collective and may be waiting for a worker that is not."""
        return any(_COLLECTIVE.search(frame.file) for frame in self.place)


@struct(frozen=True)
class Group:
    """A group of workers that are at the same place in their code."""

    ranks: tuple[int, ...]
    where: str
    """The place in the code, such as `in all_reduce at train.py:41`."""
    state: str = ""
    """The process state that prevents these workers from running, if any."""
    waits_for_others: bool = False


@struct(frozen=True)
class SilentNode:
    """A node that has not responded."""

    node_id: str
    rank_first: int
    local_world_size: int
    reason: str


@struct(frozen=True)
class CollectedStacks:
    """The stacks of one round's workers at one moment."""

    rdzv_id: str
    run: str
    round: int
    at_ms: int
    reason: str
    groups: tuple[Group, ...] = ()
    stacks: tuple[WorkerStack, ...] = ()
    """Stacks by RANK, with at least one from each group."""
    left_out: int = 0
    """The number of workers that are in a group but not in `stacks`."""
    silent: tuple[SilentNode, ...] = ()
    cause: HangCause | None = None

    @property
    def summary(self) -> str:
        """A one-line summary of which workers the others wait for and where workers differ."""
        places = summarise(self.groups, self.silent)
        return f"{self.cause.sentence}; {places}" if self.cause is not None else places


Key = tuple[str, tuple[tuple[str, str, int | None], ...], tuple[str, ...]]


def key_of(stack: WorkerStack) -> Key:
    state = stack.state if stack.state and stack.state in _ODD_STATES else ""
    place = tuple((frame.name, _short(frame.file), frame.line) for frame in stack.place)
    return state, place, () if place else stack.kernel[:1]


def where(stack: WorkerStack) -> str:
    """Describe a worker's position.

    >>> main = ThreadStack("MainThread", True, (StackFrame("load", "/home/ada/data.py", 7),))
    >>> where(WorkerStack(1, 1, 99, "S", (main,))), where(WorkerStack(1, 1, 99, "T", (main,)))
    ('in load at data.py:7', 'stopped by a signal, in load at data.py:7')
    """
    place = stack.place
    if place:
        at = place[-1]
        line = f":{at.line}" if at.line else ""
        text = f"in {place[0].name} at {_base(at.file)}{line}"
    elif stack.kernel:
        text = f"in the kernel at {stack.kernel[0]}"
    else:
        text = "" if stack.state in _ODD_STATES else "somewhere: its stack could not be read"
    odd = _ODD_STATES.get(stack.state or "", "")
    return ", ".join(filter(None, (odd, text)))


def evidence(stack: WorkerStack) -> Evidence:
    frames, known = stack.frames, bool(stack.frames)
    busy = ""
    if any(_LOADER.search(frame.file) for frame in frames):
        busy = "loader"
    elif any(thread.holds_gil for thread in stack.threads):
        busy = "gil_held"
    return Evidence(
        rank=stack.rank,
        records=stack.collectives or None,
        state=stack.state or "",
        exited_ms=stack.exited_ms,
        busy=busy,
        where=where(stack) if known else "",
        in_collective=stack.waits_for_others if known else None,
    )


def groups(ranks: Mapping[Key, Sequence[int]], one_of: Mapping[Key, WorkerStack]) -> list[Group]:
    """Return the groups, largest first. Groups of equal size are ordered by their RANKs.

    `one_of` contains one worker's stack for each group.
    """
    found = [
        Group(
            tuple(sorted(members)),
            where(one_of[key]),
            key[0],
            one_of[key].waits_for_others,
        )
        for key, members in ranks.items()
    ]
    return sorted(found, key=lambda group: (-len(group.ranks), group.ranks))


def grouped(stacks: Iterable[WorkerStack]) -> list[Group]:
    ranks: dict[Key, list[int]] = {}
    one_of: dict[Key, WorkerStack] = {}
    for stack in stacks:
        key = key_of(stack)
        ranks.setdefault(key, []).append(stack.rank)
        one_of.setdefault(key, stack)
    return groups(ranks, one_of)


def odd_one_out(found: Sequence[Group]) -> int | None:
    """Return the RANK that the others are waiting for, or None if the stacks do not show it.

    The first of these that exists is returned:

    1. the only worker that cannot run: stopped, held by a debugger, in D state, or dead;
    2. the only worker outside any collective, if all others are in one;
    3. the only worker in a group by itself, if the others are in groups of at least two.
    """
    held = [rank for group in found if group.state for rank in group.ranks]
    if held:
        return held[0] if len(held) == 1 else None
    absent = [rank for group in found if not group.waits_for_others for rank in group.ranks]
    if len(absent) == 1 and len(found) > 1:
        return absent[0]
    alone = [group.ranks[0] for group in found if len(group.ranks) == 1]
    return alone[0] if len(alone) == 1 and len(found) > 1 else None


def summarise(found: Sequence[Group], silent: Sequence[SilentNode] = ()) -> str:
    """Describe in one line where workers differ, and which nodes have not reported."""
    parts = [f"RANK {ranks_text(group.ranks)} {group.where}" for group in found[:MAX_GROUPS_TOLD]]
    if more := found[MAX_GROUPS_TOLD:]:
        workers = sum(len(group.ranks) for group in more)
        parts.append(f"{workers} more at {len(more)} other places")
    if silent:
        parts.append(f"no information about {listed(node.node_id for node in silent)}")
    return "; ".join(parts) or "no stacks"


def as_traceback(stack: WorkerStack) -> str:
    """Format a worker's main thread like a Python traceback, with the innermost call last."""
    lines = ["Stack of the main thread (most recent call last):"] if stack.frames else []
    lines += [
        f'  File "{frame.file}", line {frame.line or "?"}, in {frame.name}'
        for frame in reversed(stack.frames)
    ]
    lines += [f"  in the kernel: {place}" for place in stack.kernel]
    return "\n".join([*lines, *([stack.note] if stack.note else [])])


def _short(file: str) -> str:
    """Return the end of a path, because a file may be in different folders on different nodes."""
    return "/".join(file.rsplit("/", 3)[-3:])


def _base(file: str) -> str:
    return file.rsplit("/", 1)[-1]
