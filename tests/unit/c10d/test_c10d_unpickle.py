"""torch's state is a pickle that anyone may have written: it is read, but no code in it runs."""

from __future__ import annotations

import base64
import datetime as dt
import os
import pickle
import random
import struct
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rdzv.c10d import unpickle
from rdzv.c10d.unpickle import Node, decode
from rdzv.errors import RendezvousStateError

TORCH = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"


@dataclass(eq=True, order=True, frozen=True)
class _NodeDesc:
    """As in torch."""

    addr: str
    pid: int
    local_id: int


class _RendezvousState:
    """As in torch."""

    def __init__(self) -> None:
        self.round = 0
        self.complete = False
        self.deadline: dt.datetime | None = None
        self.closed = False
        self.participants: dict[Any, int] = {}
        self.wait_list: set[Any] = set()
        self.redundancy_list: set[Any] = set()
        self.last_heartbeats: dict[Any, dt.datetime] = {}


@pytest.fixture(autouse=True)
def _as_in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the two classes above be pickled under torch's names."""
    for name in [".".join(TORCH.split(".")[:n]) for n in range(1, 6)]:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for known in (_NodeDesc, _RendezvousState):
        monkeypatch.setattr(known, "__module__", TORCH)
        setattr(sys.modules[TORCH], known.__name__, known)
    yield


def stored(value: object, protocol: int = 4) -> bytes:
    return base64.b64encode(pickle.dumps(value, protocol))


def raw(*parts: bytes) -> bytes:
    return base64.b64encode(b"\x80\x04" + b"".join(parts))


def sample(nodes: int = 3) -> _RendezvousState:
    """A complete round of all but the last two nodes: one of those waits, the other is a spare."""
    state = _RendezvousState()
    now = dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.UTC)
    descriptions = [_NodeDesc(f"h{i}", 70_000 + i, 0) for i in range(nodes + 2)]
    state.round, state.complete, state.deadline = 300, True, now
    state.participants = {node: rank for rank, node in enumerate(descriptions[:nodes])}
    state.wait_list, state.redundancy_list = {descriptions[nodes]}, {descriptions[nodes + 1]}
    state.last_heartbeats = {n: now + dt.timedelta(seconds=i) for i, n in enumerate(descriptions)}
    return state


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 300, pytest.param(2_500, marks=pytest.mark.slow)])
def test_a_state_is_read_as_it_was_written(nodes: int, protocol: int) -> None:
    written = sample(nodes)
    state = decode(stored(written, protocol))
    assert state is not None
    assert (state.round, state.complete, state.closed, state.last_call) == (300, True, False, True)
    assert state.participants == {Node(f"h{i}", 70_000 + i, 0): i for i in range(nodes)}
    assert state.waiting == {Node(f"h{nodes}", 70_000 + nodes, 0)}
    assert state.spare == {Node(f"h{nodes + 1}", 70_001 + nodes, 0)}
    assert len(set(state.heartbeats.values())) == nodes + 2
    assert str(Node("h0", 70_000, 0)) == "h0_70000_0"


def test_a_new_and_a_closed_state() -> None:
    new = decode(stored(_RendezvousState()))
    assert new is not None
    assert (new.round, new.complete, new.last_call, new.participants) == (0, False, False, {})
    closed = _RendezvousState()
    closed.closed = True
    read = decode(stored(closed))
    assert read is not None
    assert read.closed


def test_what_torch_writes_before_the_first_state() -> None:
    assert decode(b"Y2FuaW1hZGFt") is None


def test_a_heartbeat_without_a_time_zone_is_read() -> None:
    state = sample(1)
    state.last_heartbeats = {n: at.replace(tzinfo=None) for n, at in state.last_heartbeats.items()}
    read = decode(stored(state))
    assert read is not None
    assert len(read.heartbeats) == 3


# ------------------------------------------------------------------------------------ harm


class Harm:
    """Leaves a file behind if it is unpickled."""

    def __init__(self, how: str, path: Path) -> None:
        self.how = how
        self.path = path

    def __reduce__(self) -> Any:
        if self.how == "system":
            return os.system, (f"touch {self.path}",)
        if self.how == "eval":
            return eval, (f"open({str(self.path)!r}, 'w')",)
        if self.how == "open":
            return open, (str(self.path), "w")
        return getattr, (Path(str(self.path)), "touch")


@pytest.mark.parametrize("how", ["system", "eval", "open", "getattr"])
@pytest.mark.parametrize(
    "protocol", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2, 3, 5))]
)
@pytest.mark.parametrize("place", ["root", "field", "node", "heartbeat"])
def test_nothing_is_ever_run(how: str, protocol: int, place: str, tmp_path: Path) -> None:
    path = tmp_path / "harm"
    harm: Any = Harm(how, path)
    state: Any = sample()
    match place:
        case "root":
            state = harm
        case "field":
            state.round = harm
        case "node":
            state.participants[harm] = 3
        case "heartbeat":
            state.last_heartbeats[_NodeDesc("h0", 70_000, 0)] = harm
    with pytest.raises(RendezvousStateError):
        decode(stored(state, protocol))
    assert not path.exists()


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


STATE_CLASS = short(TORCH) + short("_RendezvousState") + b"\x93"
NODE_CLASS = short(TORCH) + short("_NodeDesc") + b"\x93"
DATETIME = short("datetime") + short("datetime") + b"\x93"


@pytest.mark.parametrize(
    ("what", "value", "why"),
    [
        ("no base64", b"\xff\x00", "base64"),
        ("empty", b"", "cut off"),
        ("text", base64.b64encode(b"hello"), "not a pickle"),
        ("nothing but a header", raw(), "cut off"),
        ("no end", raw(b"N"), "cut off"),
        ("nothing built", raw(b"."), "does not end where it should"),
        ("two values", raw(b"NN."), "does not end where it should"),
        ("more after the end", raw(b"N.N"), "does not end where it should"),
        ("None", raw(b"N."), "_RendezvousState is expected"),
        ("a class alone", raw(STATE_CLASS, b"."), "_RendezvousState is expected"),
        ("a state without attributes", raw(STATE_CLASS, b")\x81."), "is expected"),
        ("a state with none of its own", raw(STATE_CLASS, b")\x81}b."), "does not have the attr"),
        ("a state that is given twice", raw(STATE_CLASS, b")\x81}b}b."), "takes none"),
        ("a node in its place", raw(NODE_CLASS, b")\x81}b."), "_RendezvousState is expected"),
        ("a class that is called", raw(STATE_CLASS, b")R."), "not a point in time"),
        ("a point in time by NEWOBJ", raw(DATETIME, b")\x81."), "made of a wrong class"),
        ("a class by GLOBAL", raw(b"cos\nsystem\n."), "opcode 0x63"),
        ("a class of the wrong module", raw(short("os"), short("_NodeDesc"), b"\x93."), "os._Node"),
        ("a class by numbers", raw(b"K\x01K\x01\x93."), "name of a class is not a text"),
        ("a persistent id", raw(b"K\x01Q."), "opcode 0x51"),
        ("an extension", raw(b"\x82\x01."), "opcode 0x82"),
        ("an instance", raw(b"(i" + b"os\nsystem\n."), "opcode 0x69"),
        ("a long text", raw(b"X" + struct.pack("<I", 2**31), b"x."), "too long"),
        ("a text beyond the end", raw(b"X" + struct.pack("<I", 1_000), b"x."), "cut off"),
        ("a text that is none", raw(b"\x8c\x01\xff."), "not UTF-8"),
        ("surrogates", raw(b"\x8c\x03\xed\xa0\x80."), "not UTF-8"),
        ("a huge number", raw(b"\x8a\xff" + b"\x01" * 255, b"."), "too large"),
        ("a huge number of another kind", raw(b"\x8b" + struct.pack("<i", 2**31 - 1)), "0x8b"),
        ("a memo that is not there", raw(b"j\xff\xff\xff\x7f."), "does not exist"),
        ("a memo of a number of its own", raw(b"Nr\xff\xff\xff\x7f."), "opcode 0x72"),
        ("memoizing nothing", raw(b"\x94."), "more values than there are"),
        ("a frame beyond the end", raw(b"\x95" + b"\xff" * 8), "cut off"),
        ("a missing mark", raw(b"}u."), "mark is missing"),
        ("a mark that is not used", raw(b"(."), "does not end where it should"),
        ("taking from below a mark", raw(b"N(\x85."), "more values than there are"),
        ("items in no dict", raw(b"NNNs."), "not a dict"),
        ("half an item", raw(b"}(Nu."), "not a dict"),
        ("items in no set", raw(b"}(N\x90."), "not a set"),
        pytest.param(
            "a deep tuple",
            raw(b")" + b"\x85" * 100_000, b"."),
            "_RendezvousState is expected",
            marks=pytest.mark.slow,
        ),
        ("a deep stack", raw(b"N" * 20_000, b"."), "too deep"),
        ("many marks", raw(b"(" * 20_000, b"."), "too deep"),
        pytest.param(
            "many memos",
            raw(b"N", b"\x94" * 300_000, b"."),
            "too many values",
            marks=pytest.mark.slow,
        ),
        ("too long", b"A" * (unpickle.MOST_BYTES + 1), "are the most"),
    ],
)
def test_what_is_no_state_is_refused(what: str, value: bytes, why: str) -> None:
    with pytest.raises(RendezvousStateError, match=why):
        decode(value)


def _change(**attributes: object) -> _RendezvousState:
    state = sample()
    vars(state).update(attributes)
    return state


def _itself() -> _RendezvousState:
    state: Any = sample()
    state.participants[_NodeDesc("h9", 1, 0)] = state
    state.wait_list = {1, 2}
    return state  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "state",
    [
        _change(round=-1),
        _change(round=2**32),
        _change(round=True),
        _change(round="1"),
        _change(complete=1),
        _change(closed=None),
        _change(deadline=1.5),
        _change(deadline=dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1)))),
        _change(deadline=dt.date(2026, 1, 1)),
        _change(participants=[]),
        _change(participants={1: 1}),
        _change(wait_list={}),
        _change(wait_list={(1, 2)}),
        _change(redundancy_list=frozenset()),
        _change(more=1),
        _itself(),
    ],
    ids=lambda state: "",
)
def test_what_is_shaped_otherwise_is_refused(state: _RendezvousState) -> None:
    with pytest.raises(RendezvousStateError):
        decode(stored(state))


@pytest.mark.parametrize("name", sorted(vars(_RendezvousState())))
def test_every_attribute_is_needed(name: str) -> None:
    state = sample()
    delattr(state, name)
    with pytest.raises(RendezvousStateError, match="attributes"):
        decode(stored(state))


@pytest.mark.parametrize(
    "node", [("", 1, 0), (1, 1, 0), ("h", -1, 0), ("h", 1, 2**40), ("h", 1, "")]
)
def test_a_node_that_is_none_is_refused(node: tuple[Any, Any, Any]) -> None:
    state = sample()
    state.wait_list = {_NodeDesc(*node)}
    with pytest.raises(RendezvousStateError):
        decode(stored(state))


def test_too_many_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickle, "MOST_NODES", 5)
    assert decode(stored(sample(3))) is not None
    with pytest.raises(RendezvousStateError, match="at most 5"):
        decode(stored(sample(4)))


@pytest.mark.slow
def test_damaged_states_are_refused_or_read_but_nothing_else() -> None:
    """Bytes that are changed, cut or doubled at random; the seed is fixed."""
    dice = random.Random(4711)
    whole = pickle.dumps(sample(2), 4)
    read = 0
    for _ in range(5_000):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(2, len(damaged))] = dice.randrange(256)
        if dice.random() < 0.2:
            del damaged[dice.randrange(2, len(damaged)) :]
        try:
            read += decode(base64.b64encode(damaged)) is not None
        except RendezvousStateError:
            continue
    assert read > 0


@pytest.mark.slow
def test_a_value_that_stands_for_a_huge_one_is_not_followed() -> None:
    """With memos, a small pickle can describe something huge."""
    doubled: tuple[Any, ...] = ()
    for _ in range(200):
        doubled = (doubled, doubled)
    for name in vars(_RendezvousState()):
        with pytest.raises(RendezvousStateError):
            decode(stored(_change(**{name: doubled})))
    with pytest.raises(RendezvousStateError, match="made of a wrong class"):
        decode(raw(STATE_CLASS, b")\x94" + b"h\x00h\x00\x86" * 3, b"\x81."))
