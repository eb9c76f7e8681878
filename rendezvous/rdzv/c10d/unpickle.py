"""Reads the state of torch's rendezvous without executing anything in it.

`torch.distributed.elastic.rendezvous.dynamic_rendezvous` keeps `base64(pickle(_RendezvousState))`
under one key for each job. Anyone who can reach the store can write that key, and unpickling can
call any function. Our own virtual machine therefore runs the pickle: it knows only the opcodes that
Python writes for this one class, compares class names with five known names, and builds values
defined here. It imports and calls nothing by name, hashes no value before checking its type, and
limits sizes, depth and counts. It refuses anything that is not exactly such a state.

The machine parses the bytes itself: `pickletools.genops` takes twice as long (200 ms for 4,096
nodes), and also parses opcodes that are refused here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from rdzv.errors import RendezvousStateError
from rdzv.structs import struct

MOST_BYTES = 2 * 1024 * 1024
"""The size of the largest value accepted from the store. The state of 4,096 nodes takes 508 KB."""
MOST_NODES = 10_000
"""The maximum number of nodes in each part of a state."""
_MOST_MEMOS = 200_000
"""The maximum number of values that a pickle may refer back to. A node takes six."""
_DEEPEST = 10_000
"""The maximum size of the stack. Python writes a dict or set in batches of a thousand items."""
_LONGEST = 1_024
"""The maximum number of bytes in one string. A host name has at most 255."""

_NO_STATE = b"Y2FuaW1hZGFt"
"""Written by torch before the first state, because reading a missing key would block."""


@struct(frozen=True, order=True)
class Node:
    """A node in torch's sense: one start of torchrun."""

    addr: str
    pid: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.addr}_{self.pid}_{self.local_id}"


@struct(frozen=True)
class State:
    """The state shared by a job's nodes. Timestamps are kept as written."""

    round: int
    complete: bool
    closed: bool
    last_call: bool
    """Whether enough nodes have joined, so that the round completes at a deadline by the nodes' own
    clocks."""
    participants: Mapping[Node, int]
    """The participants and their GROUP_RANKs, which are valid once the round is complete."""
    waiting: frozenset[Node]
    spare: frozenset[Node]
    heartbeats: Mapping[Node, bytes]
    """The last heartbeat of each node, by its own clock; used only to detect new heartbeats."""


def decode(value: bytes) -> State | None:
    """Decode the value of a job's key; return None if no node has written a state yet.

    Raises:
        RendezvousStateError: the value is not such a state, or exceeds a limit.

    """
    if value == _NO_STATE:
        return None
    if len(value) > MOST_BYTES:
        raise RendezvousStateError(f"it has {len(value)} bytes; {MOST_BYTES} are the most")
    try:
        pickled = base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise RendezvousStateError(f"it is not base64: {error}") from error
    return _state(_Machine(pickled).run())


# ------------------------------------------------------------------------------------ the machine


class _Class(Enum):
    """The classes that occur in a pickled state. Only their names are compared."""

    STATE = ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_RendezvousState")
    NODE = ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_NodeDesc")
    DATETIME = ("datetime", "datetime")
    TIMEZONE = ("datetime", "timezone")
    TIMEDELTA = ("datetime", "timedelta")


_CLASSES = {known.value: known for known in _Class}
_WITH_STATE = (_Class.STATE, _Class.NODE)
_WITH_ARGUMENTS = (_Class.DATETIME, _Class.TIMEZONE, _Class.TIMEDELTA)


@dataclass(slots=True, eq=False)
class _Dict:
    """A dict's items in order; keys are not hashed before their types have been checked."""

    items: list[tuple[object, object]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Set:
    """A set's items in order."""

    items: list[object] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Object:
    """A placeholder for an instance, with its class and arguments."""

    kind: _Class
    arguments: tuple[object, ...] = ()
    state: _Dict | None = None


class _Machine:
    """Runs one pickle of protocol 4 or 5, using only the opcodes that a state needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: list[object] = []
        self._operations: Mapping[int, Callable[[], None]] = {
            0x95: self._frame,
            0x8C: lambda: self._push(self._text(1)),  # SHORT_BINUNICODE
            0x58: lambda: self._push(self._text(4)),  # BINUNICODE
            0x43: lambda: self._push(self._take(self._number(1))),  # SHORT_BINBYTES
            0x4B: lambda: self._push(self._number(1)),  # BININT1
            0x4D: lambda: self._push(self._number(2)),  # BININT2
            0x4A: lambda: self._integer(4),  # BININT
            0x8A: lambda: self._integer(self._number(1)),  # LONG1
            0x4E: lambda: self._push(None),
            0x88: lambda: self._push(True),
            0x89: lambda: self._push(False),
            0x29: lambda: self._push(()),  # EMPTY_TUPLE
            0x85: lambda: self._tuple(1),
            0x86: lambda: self._tuple(2),
            0x87: lambda: self._tuple(3),
            0x7D: lambda: self._push(_Dict()),  # EMPTY_DICT
            0x8F: lambda: self._push(_Set()),  # EMPTY_SET
            0x28: self._mark,
            0x73: lambda: self._set_items([self._pop(), self._pop()][::-1]),  # SETITEM
            0x75: lambda: self._set_items(self._since_mark()),  # SETITEMS
            0x90: self._add_items,
            0x94: self._memoize,
            0x68: lambda: self._recall(self._number(1)),  # BINGET
            0x6A: lambda: self._recall(self._number(4)),  # LONG_BINGET
            0x93: self._class,
            0x81: self._new,
            0x52: self._reduce,
            0x62: self._build,
        }

    def run(self) -> object:
        """Return the value that the pickle builds.

        Raises:
            RendezvousStateError: the pickle does anything that a state does not need.

        """
        if self._take(1) != b"\x80" or self._number(1) not in (4, 5):
            raise self._refusal("it is not a pickle of protocol 4 or 5")
        while (code := self._number(1)) != 0x2E:
            operation = self._operations.get(code)
            if operation is None:
                raise self._refusal(f"opcode {code:#04x} has no place in it")
            operation()
        if len(self._stack) != 1 or self._marks or self._at != len(self._data):
            raise self._refusal("it does not end where it should")
        return self._stack[0]

    def _refusal(self, why: str) -> RendezvousStateError:
        return RendezvousStateError(f"{why} (at byte {self._at})")

    # ---------------------------------------------------------------- reading

    def _take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise self._refusal("it is cut off")
        self._at += count
        return taken

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _text(self, width: int) -> str:
        if (length := self._number(width)) > _LONGEST:
            raise self._refusal(f"a text of {length} bytes is too long")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._refusal("a text is not UTF-8") from None

    def _integer(self, width: int) -> None:
        if width > 8:
            raise self._refusal("a number is too large")
        self._push(int.from_bytes(self._take(width), "little", signed=True))

    def _frame(self) -> None:
        # The size of the next frame, for readers of a file. Here, all bytes are in memory.
        self._take(8)

    # ---------------------------------------------------------------- the stack

    def _push(self, value: object) -> None:
        if len(self._stack) >= _DEEPEST:
            raise self._refusal("its stack is too deep")
        self._stack.append(value)

    def _pop(self) -> object:
        floor = self._marks[-1] if self._marks else 0
        if len(self._stack) <= floor:
            raise self._refusal("it takes more values than there are")
        return self._stack.pop()

    def _mark(self) -> None:
        if len(self._marks) >= _DEEPEST:
            raise self._refusal("its stack is too deep")
        self._marks.append(len(self._stack))

    def _since_mark(self) -> list[object]:
        if not self._marks:
            raise self._refusal("a mark is missing")
        mark = self._marks.pop()
        values = self._stack[mark:]
        del self._stack[mark:]
        return values

    def _tuple(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(values)))

    def _memoize(self) -> None:
        if len(self._memo) >= _MOST_MEMOS:
            raise self._refusal("it has too many values")
        value = self._pop()
        self._memo.append(value)
        self._push(value)

    def _recall(self, number: int) -> None:
        if number >= len(self._memo):
            raise self._refusal("it refers to a value that does not exist")
        self._push(self._memo[number])

    # ---------------------------------------------------------------- building

    def _set_items(self, values: list[object]) -> None:
        target = self._pop()
        if not isinstance(target, _Dict) or len(values) % 2:
            raise self._refusal("items are set in a value that is not a dict")
        target.items += zip(values[::2], values[1::2], strict=True)
        self._push(target)

    def _add_items(self) -> None:
        values = self._since_mark()
        target = self._pop()
        if not isinstance(target, _Set):
            raise self._refusal("items are added to a value that is not a set")
        target.items += values
        self._push(target)

    def _class(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self._refusal("the name of a class is not a text")
        known = _CLASSES.get((module, name))
        if known is None:
            # Escaped for the log, because it may contain newlines or terminal control codes.
            raise self._refusal(f"{f'{module}.{name}'!a} has no place in it")
        self._push(known)

    def _new(self) -> None:
        arguments, kind = self._pop(), self._pop()
        if kind not in _WITH_STATE or arguments != ():
            raise self._refusal("an object is made of a wrong class, or with arguments")
        assert isinstance(kind, _Class)
        self._push(_Object(kind))

    def _reduce(self) -> None:
        arguments, kind = self._pop(), self._pop()
        if kind not in _WITH_ARGUMENTS or not isinstance(arguments, tuple):
            raise self._refusal("a class is called that is not a point in time")
        assert isinstance(kind, _Class)
        self._push(_Object(kind, arguments))

    def _build(self) -> None:
        state, target = self._pop(), self._pop()
        fits = isinstance(target, _Object) and target.kind in _WITH_STATE and target.state is None
        if not fits or not isinstance(state, _Dict):
            raise self._refusal("a state is given to a value that takes none")
        assert isinstance(target, _Object)
        target.state = state
        self._push(target)


# ------------------------------------------------------------------------------------ the values

# Each function descends one level, so a value that contains itself does no harm.


def _state(value: object) -> State:
    names = ("round", "complete", "deadline", "closed", "participants", "wait_list")
    fields = _fields(value, _Class.STATE, (*names, "redundancy_list", "last_heartbeats"))
    participants, heartbeats = _dict(fields["participants"]), _dict(fields["last_heartbeats"])
    if (deadline := fields["deadline"]) is not None:
        _moment(deadline)
    return State(
        round=_integer(fields["round"]),
        complete=_boolean(fields["complete"]),
        closed=_boolean(fields["closed"]),
        last_call=deadline is not None,
        participants={_node(node): _integer(rank) for node, rank in participants},
        waiting=frozenset(map(_node, _set(fields["wait_list"]))),
        spare=frozenset(map(_node, _set(fields["redundancy_list"]))),
        heartbeats={_node(node): _moment(at) for node, at in heartbeats},
    )


def _node(value: object) -> Node:
    fields = _fields(value, _Class.NODE, ("addr", "pid", "local_id"))
    addr = fields["addr"]
    if not isinstance(addr, str) or not addr:
        raise RendezvousStateError("a node's address is not a text")
    return Node(addr, _integer(fields["pid"]), _integer(fields["local_id"]))


def _fields(value: object, kind: _Class, names: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(value, _Object) or value.kind is not kind or value.state is None:
        raise RendezvousStateError(f"{kind.value[1]} is expected")
    items = value.state.items
    if len(items) == len(names):
        found = {key: content for key, content in items if isinstance(key, str)}
        if found.keys() == set(names):
            return found
    raise RendezvousStateError(f"{kind.value[1]} does not have the attributes that torch gives it")


def _dict(value: object) -> list[tuple[object, object]]:
    if not isinstance(value, _Dict) or len(value.items) > MOST_NODES:
        raise RendezvousStateError(f"a dict of at most {MOST_NODES} nodes is expected")
    return value.items


def _set(value: object) -> list[object]:
    if not isinstance(value, _Set) or len(value.items) > MOST_NODES:
        raise RendezvousStateError(f"a set of at most {MOST_NODES} nodes is expected")
    return value.items


def _integer(value: object) -> int:
    # A bool is also an int, but torch never writes one where the other is expected.
    if type(value) is not int or not 0 <= value < 2**32:
        raise RendezvousStateError("a number from 0 to 4294967295 is expected")
    return value


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise RendezvousStateError("True or False is expected")
    return value


def _moment(value: object) -> bytes:
    """Return the ten bytes of a `datetime` that is in UTC or has no time zone."""
    if isinstance(value, _Object) and value.kind is _Class.DATETIME:
        match value.arguments:
            case (bytes() as written,) if len(written) == 10:
                return written
            case (bytes() as written, zone) if len(written) == 10 and _is_utc(zone):
                return written
    raise RendezvousStateError("a point in time is expected, in UTC")


def _is_utc(value: object) -> bool:
    if not isinstance(value, _Object) or value.kind is not _Class.TIMEZONE:
        return False
    match value.arguments:
        case (_Object(kind=_Class.TIMEDELTA, arguments=(0, 0, 0)),):
            return True
    return False
