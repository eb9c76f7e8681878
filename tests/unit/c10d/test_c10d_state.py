"""torch's state is a pickle that anyone may have written: it is read, but no code in it runs."""

from __future__ import annotations

import base64
import datetime as dt
import faulthandler
import json
import os
import pickle
import random
import resource
import signal
import struct
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rdzv.c10d import store_server
from rdzv.c10d.observations import State
from rdzv.c10d.store_server import UnreadableError, read_state

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


def decode(value: bytes) -> State | None:
    """Read a value as the store's process does, and convert it as rdzvd does."""
    sent = json.dumps(read_state(value)[0])
    try:
        return msgspec.json.decode(sent, type=State | None)
    except msgspec.ValidationError as error:
        raise UnreadableError(str(error)) from error


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
    assert state.participants == {f"h{i}_{70_000 + i}_0": i for i in range(nodes)}
    assert state.waiting == {f"h{nodes}_{70_000 + nodes}_0"}
    assert state.spare == {f"h{nodes + 1}_{70_001 + nodes}_0"}
    assert len(set(state.heartbeats.values())) == nodes + 2


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
    with pytest.raises(UnreadableError):
        decode(stored(state, protocol))
    assert not path.exists()


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


STATE_CLASS = short(TORCH) + short("_RendezvousState") + b"\x93"
NODE_CLASS = short(TORCH) + short("_NodeDesc") + b"\x93"
DATETIME = short("datetime") + short("datetime") + b"\x93"


TIMEDELTA = short("datetime") + short("timedelta") + b"\x93"


@pytest.mark.parametrize(
    ("what", "value", "why"),
    [
        ("no base64", b"\xff\x00", "Error"),
        ("empty", b"", "EOFError"),
        ("text", base64.b64encode(b"hello"), "UnpicklingError"),
        ("nothing but a header", raw(), "EOFError"),
        ("no end", raw(b"N"), "EOFError"),
        ("nothing built", raw(b"."), "UnpicklingError"),
        ("more after the end", raw(b"N.N"), "_RendezvousState is expected"),
        ("None", raw(b"N."), "_RendezvousState is expected"),
        ("a class alone", raw(STATE_CLASS, b"."), "_RendezvousState is expected"),
        ("a state without attributes", raw(STATE_CLASS, b")\x81."), "no attribute 'round'"),
        ("a state with none of its own", raw(STATE_CLASS, b")\x81}b."), "does not have the attr"),
        ("a state that is no dict", raw(STATE_CLASS, b")\x81Nb."), "does not have the attributes"),
        ("a node in its place", raw(NODE_CLASS, b")\x81."), "_RendezvousState is expected"),
        ("a state with arguments", raw(STATE_CLASS, b"K\x01\x85\x81."), "takes no arguments"),
        ("a function of the same module", raw(short(TORCH), short("os.system"), b"\x93."), "place"),
        ("a method", raw(short("datetime"), short("datetime.now"), b"\x93."), "has no place"),
        ("a class by GLOBAL", raw(b"cos\nsystem\n."), "os.system has no place"),
        ("another module", raw(short("os"), short("_NodeDesc"), b"\x93."), "os._NodeDesc has no"),
        ("a class by numbers", raw(b"K\x01K\x01\x93."), "UnpicklingError"),
        ("an instance by INST", raw(b"(i" + b"os\nsystem\n."), "os.system has no place"),
        ("an escape for the terminal", raw(b"c\x1b[2J\nx\n."), r"\\x1b\[2J.x has no place"),
        ("a persistent id", raw(b"K\x01Q."), "persistent"),
        ("a persistent id as text", raw(b"Pid\n."), "persistent"),
        ("an extension", raw(b"\x82\x01."), "ValueError"),
        ("a buffer from outside", raw(b"\x97."), "buffers"),
        ("attributes of a class", raw(STATE_CLASS, b"}b."), "TypeError"),
        ("attributes of a class by setattr", raw(NODE_CLASS, b"N}\x8c\x04addrNs\x86b."), "TypeErr"),
        ("attributes of a C class", raw(DATETIME, b"N}\x8c\x03maxNs\x86b."), "TypeError"),
        ("items of a class", raw(STATE_CLASS, b"K\x01K\x02s."), "TypeError"),
        ("items of an instance", raw(STATE_CLASS, b")\x81(N\x90."), "no attribute 'add'"),
        ("a long text", raw(b"X" + struct.pack("<I", 2**31), b"x."), "UnpicklingError"),
        ("bytes for which there is no memory", raw(b"\x8e" + struct.pack("<Q", 2**40)), "Memory"),
        ("a memo for which there is no memory", raw(b"Nr\xff\xff\xff\x7f."), "MemoryError"),
        ("a text that is not UTF-8", raw(b"\x8c\x01\xff."), "UnicodeDecodeError"),
        ("a memo that is not there", raw(b"j\xff\xff\xff\x7f."), "Memo value not found"),
        ("a frame beyond the end", raw(b"\x95" + b"\xff" * 8), "Error"),
        ("a missing mark", raw(b"}u."), "UnpicklingError"),
        ("taking from below a mark", raw(b"N(\x85."), "UnpicklingError"),
        (
            "a time alone",
            raw(DATETIME, b"C\x0a\x07\xea\x01" + b"\xff" * 7 + b"\x85R."),
            "is expected",
        ),
        ("a time that is none", raw(DATETIME, b"C\x0a0123456789\x85R."), "TypeError"),
        ("a huge difference", raw(TIMEDELTA, b"\x8a\x20" + b"\x7f" * 32 + b"\x85R."), "Overflow"),
        ("many marks", raw(b"(" * 20_000, b"."), "UnpicklingError"),
        ("a key that cannot be hashed", raw(b"}}Ns."), "unhashable"),
        ("too long", b"A" * (store_server.MOST_STATE_BYTES + 1), "are the most"),
    ],
)
def test_what_is_no_state_is_refused(what: str, value: bytes, why: str) -> None:
    before = {known: dict(vars(known)) for known in store_server.ADMITTED.values()}
    with pytest.raises(UnreadableError, match=why):
        decode(value)
    assert before == {known: dict(vars(known)) for known in store_server.ADMITTED.values()}
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


DOUBLED = b")\x940" + b"".join(b"h%ch%c\x86\x940" % (n, n) for n in range(200)) + b"h\xc8"
"""A tuple of the same tuple twice, and so on, 200 levels deep."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "pickled", "ends"),
    [
        ("a key that takes for ever to hash", b"}" + DOUBLED + b"Ns.", signal.SIGPROF),
        ("a key too deep to hash", b"})" + b"\x85" * 1_400_000 + b"Ns.", signal.SIGSEGV),
        ("more sets than there is memory for", b"(" + b"\x8f" * 1_400_000 + b"t.", None),
        (
            "keys that collide",
            b"}("
            + b"".join(
                b"\x8a\x0a" + (n * (2**61 - 1)).to_bytes(10, "little") + b"N"
                for n in range(110_000)
            )
            + b"u.",
            signal.SIGPROF,
        ),
    ],
)
def test_a_pickle_can_at_most_end_the_process(
    what: str, pickled: bytes, ends: signal.Signals | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ends is signal.SIGPROF:
        monkeypatch.setattr(store_server, "MOST_READING_S", 0.5)
    value = raw(pickled)
    assert len(value) <= store_server.MOST_STATE_BYTES
    child = os.fork()
    if not child:
        faulthandler.disable()
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            decode(value)
        except UnreadableError:
            os._exit(7)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (-ends if ends else 7), what
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2**20


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
        _change(participants=[]),
        _change(participants={1: 1}),
        _change(wait_list={(1, 2)}),
        _change(more=1),
        _itself(),
    ],
    ids=lambda state: "",
)
def test_what_is_shaped_otherwise_is_refused(state: _RendezvousState) -> None:
    with pytest.raises(UnreadableError):
        decode(stored(state))


@pytest.mark.parametrize("name", sorted(vars(_RendezvousState())))
def test_every_attribute_is_needed(name: str) -> None:
    state = sample()
    delattr(state, name)
    with pytest.raises(UnreadableError, match="attributes"):
        decode(stored(state))


@pytest.mark.parametrize("node", [("h" * 2_000, 1, 0), 1, "h"])
def test_a_node_that_is_none_is_refused(node: Any) -> None:
    state = sample()
    state.wait_list = {_NodeDesc(*node) if isinstance(node, tuple) else node}
    with pytest.raises(UnreadableError):
        decode(stored(state))


def test_a_small_pickle_of_a_large_state_is_refused() -> None:
    """Every node refers to the same long address."""
    state = sample()
    addr = "\u202e" * 1_000
    state.participants = {_NodeDesc(addr, pid, 0): 0 for pid in range(1_000)}
    value = stored(state)
    assert len(value) < 100_000
    with pytest.raises(UnreadableError, match="as JSON; 2097152 are the most"):
        decode(value)


def test_an_address_that_cannot_be_sent_is_replaced() -> None:
    state = sample(0)
    state.wait_list = {_NodeDesc("h\udc80", 1, 2)}
    read = decode(stored(state))
    assert read is not None
    assert read.waiting == {"h?_1_2"}


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
        except UnreadableError:
            continue
    assert read > 0
