"""torch's own store, as the c10d facade reads it: pickled states, and any names.

A step is the state of one job, `state:NAME`, as it is found in the store, base64 or not; or
`answer`, a message to rdzvd from the process that serves the store.
"""

from __future__ import annotations

import base64
import json
import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rdzv.c10d.facade import Answer
from rdzv.c10d.observations import Watch
from rdzv.c10d.store_server import PREFIX, Looks
from rdzv.ctl import as_text
from rdzv.ctl.layout import Page
from rdzv.server.operations.job_operations import with_workers
from rdzv.transport.wire import read, write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import JobStatus
from tests.fuzz import surface
from tests.fuzz.surface import Input, Step, Surface, Take, check_text

_TORCH = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_PAGE = Page(width=80, colour=False, now_s=1_000.0)


def _short(text: str) -> bytes:
    data = text.encode()[:255]
    return b"\x8c" + bytes((len(data),)) + data


_CLASS = {
    "state": _short(_TORCH) + _short("_RendezvousState") + b"\x93",
    "node": _short(_TORCH) + _short("_NodeDesc") + b"\x93",
    "datetime": _short("datetime") + _short("datetime") + b"\x93",
    "system": _short("os") + _short("system") + b"\x93",
}
_OPCODES = (
    *(b"N", b"\x88", b"\x89", b")", b"\x85", b"\x86", b"\x87", b"}", b"\x8f", b"(", b"s", b"u"),
    *(b"\x90", b"\x94", b"h\x00", b"h\x01", b"j\x00\x00\x00\x00", b"\x81", b"R", b"b", b"."),
    *(b"K\x01", b"M\xff\xff", b"J\xff\xff\xff\xff", b"\x8a\x08" + b"\xff" * 8, b"C\x0a0123456789"),
    *(b"0", b"2", b"q\x00", b"c os\nsystem\n", b"\x82\x01", b"i", b"o", b"\x95" + b"\0" * 8),
    *_CLASS.values(),
)


def _node(host: str, pid: int) -> bytes:
    fields = _short("addr") + _short(host) + _short("pid") + b"M" + pid.to_bytes(2, "little")
    return _CLASS["node"] + b")\x81}(" + fields + _short("local_id") + b"K\x00ub"


def _state(dice: random.Random) -> bytes:
    """Write a state as torch does, of nodes with any names."""
    nodes = [_node(surface.text(dice, ("h1", "h2")), n) for n in range(dice.randint(0, 3))]
    ranked = b"".join(node + b"K" + bytes((n,)) for n, node in enumerate(nodes))
    heard = b"".join(node + _CLASS["datetime"] + b"C\x0a0123456789\x85R" for node in nodes)
    fields = {
        "round": b"K\x01",
        "complete": dice.choice((b"\x88", b"\x89")),
        "deadline": b"N",
        "closed": dice.choice((b"\x88", b"\x89")),
        "participants": b"}(" + ranked + b"u",
        "wait_list": b"\x8f(" + (nodes[0] if nodes else b"") + b"\x90",
        "redundancy_list": b"\x8f",
        "last_heartbeats": b"}(" + heard + b"u",
    }
    if dice.random() < 0.3:
        fields[dice.choice(list(fields))] = dice.choice(_OPCODES)
    body = b"".join(_short(name) + value for name, value in fields.items())
    return b"\x80\x04" + _CLASS["state"] + b")\x81}(" + body + b"ub."


def _value(dice: random.Random) -> bytes:
    which = dice.random()
    if which < 0.4:
        pickled = _state(dice)
    elif which < 0.7:
        made = b"".join(dice.choice(_OPCODES) for _ in range(dice.randint(0, 40)))
        pickled = b"\x80\x04" + made + b"."
    elif which < 0.8:
        pickled = pickle.dumps([surface.text(dice), {1: (None, 2.5)}, {surface.text(dice)}], 4)
    else:
        return dice.choice((b"", b"\xff", b"=", b"Y2FuaW1hZGFt", dice.randbytes(30)))
    if dice.random() < 0.4:
        damaged = bytearray(pickled)
        for _ in range(dice.randint(1, 5)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        pickled = bytes(damaged)
    return base64.b64encode(pickled)


_STATES = (
    {"round": 1},
    {
        **{"round": -1, "complete": True, "closed": False, "last_call": False},
        **{"participants": {"x": 7}, "waiting": ["_"], "spare": ["x"], "heartbeats": {"y": "z"}},
    },
)


def _answer(dice: random.Random) -> bytes:
    said = {
        "states": dice.choice(
            ({surface.text(dice): dice.choice(_STATES)}, {"j": None}, [], {1: 2})
        ),
        "unreadable": dice.choice(({surface.text(dice): "a reason"}, {"j": 1})),
        "gone": dice.choice(([], [surface.text(dice)], "x", [1])),
        "left_out": dice.choice((0, -1, 2**70, "1", 1e400)),
        "error": surface.text(dice, ("",)),
        "more": 1,
    }
    text = json.dumps(said)
    return (text[: dice.randint(0, len(text))] if dice.random() < 0.3 else text).encode()


def _inputs(dice: random.Random) -> Input:
    steps: list[Step] = []
    for _ in range(dice.randint(1, 4)):
        if dice.random() < 0.2:
            steps.append(("answer", _answer(dice)))
        else:
            steps.append((f"state:{surface.text(dice, ('job-7', 'job-8'))}", _value(dice)))
    return tuple(steps)


class _Store:
    """The methods of torch's store that the process that serves the real one uses."""

    def __init__(self, values: Mapping[str, bytes]) -> None:
        self._values = values

    def num_keys(self) -> int:
        return len(self._values)

    def list_keys(self) -> list[str]:
        return list(self._values)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self._values[key] for key in keys]

    def get(self, key: str) -> bytes:
        return self._values[key]


def _take(steps: Input) -> None:
    values = {}
    for kind, data in steps:
        if kind == "answer":
            try:
                _look(msgspec.json.decode(data, type=Answer))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        else:
            values[PREFIX + kind.partition(":")[2]] = data
    said = json.dumps(Looks(_Store(values)).answer()).encode()
    _look(msgspec.json.decode(said, type=Answer))


def _look(answer: Answer) -> None:
    """Pass an answer to the facade, and show the result."""
    states, unreadable = answer.read()
    for why in answer.unreadable.values():
        check_text("why a state is not shown", why)
    watch = Watch()
    watch.take(states, (*answer.gone, *unreadable), 1_000)
    for view in watch.views(2_000):
        message = write(pb.JobStatus(), with_workers(view, 2_000))
        message = pb.JobStatus.FromString(message.SerializeToString())
        check_text("a job that is watched", as_text.status(read(JobStatus, message), _PAGE))


@contextmanager
def _open(_: Path) -> Iterator[Take]:
    yield _take


STORE = Surface(
    name="c10d",
    promise="a state is read or refused, nothing of it is run, and what is shown is harmless",
    make=_inputs,
    open=_open,
)
