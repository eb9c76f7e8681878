"""Input from a machine's own files and sockets: configurations, runners, zygotes, workers' files.

A step is the file `rdzvd` or `agent`; a frame to a runner (`runner`); a runner's message to its
agent (`told`, `hello`, `kept`); a message to the runner from a zygote, which is the user's own
process; or a worker's error file, or its step.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from rdzv.agent.app.agent_config import read_config
from rdzv.agent.app.agent_settings import AgentSettings
from rdzv.agent.handover import handover_state
from rdzv.agent.observers.progress_files import read_step
from rdzv.agent.runner.channel import Channel, MalformedFrameError
from rdzv.agent.runner.child_exits import Child
from rdzv.agent.runner.frames import decode
from rdzv.agent.runner.requests import PROTOCOL_VERSION, RenewFence, Serve, StartWorkers, ZygoteSpec
from rdzv.agent.runner.runner import Runner
from rdzv.agent.runner.spawn import Program
from rdzv.agent.runner_link.found_runner import NotAdoptableError, read_hello
from rdzv.agent.runner_link.runner_events import EVENTS, decode_event, number_of
from rdzv.agent.system.error_files import read_error
from rdzv.server.settings.configuration import Configuration
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.settings.setting_types import settings_of
from tests.fuzz import surface
from tests.fuzz.surface import FoundError, Input, Step, Surface, Take, refusing

_WORDS = (
    *("type", "workers", "env", "argv", "cwd", "round", "local_rank", "pid", "cpus", "identity"),
    *(
        "uid",
        "gid",
        "groups",
        "umask",
        "limits",
        "grace_ms",
        "orphan_timeout_s",
        "socket",
        "number",
    ),
    *("version", "kept", "last_round", "store_hosts", "zygote", "modules", "reason", "message"),
    *("ready", "refused", "forked", "pids", "threads", "memory_kb", "seconds", "extraInfo"),
    *(
        "number",
        "fence_at_ms",
        "signum",
        "name",
        "value",
        "wait_s",
        "format",
        "placement",
        "fd",
        "port",
    ),
)
_REQUESTS = (
    *("start_workers", "stop_workers", "notify_workers", "stop_store_host", "renew_fence"),
    *("keep_zygote", "serve", "keep", "forget_events", "adopt", "no_such"),
)
_TOLD = tuple(EVENTS)
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "start_workers": {
        "round": 1,
        "grace_s": 1.0,
        "workers": [
            {
                "local_rank": 0,
                "argv": ["true"],
                "env": {"A": "b"},
                "cwd": None,
                "cpus": [0],
                "identity": {
                    "uid": 1,
                    "gid": 1,
                    "groups": [1],
                    "umask": 18,
                    "limits": [["a", 1, 1]],
                },
            }
        ],
    },
    "stop_workers": {"round": 1, "signum": 15, "grace_ms": 1_000},
    "notify_workers": {"round": 1, "signum": 10},
    "renew_fence": {"fence_at_ms": 2**52},
    "keep_zygote": {"argv": ["python"], "env": {}, "cwd": None, "modules": ["json"], "wait_s": 1.0},
    "serve": {"socket": "@socket", "orphan_timeout_s": 1.0, "grace_s": 1.0},
    "keep": {"name": "state", "value": "x"},
    "forget_events": {"number": 1},
    "hello": {
        "type": "hello",
        "version": PROTOCOL_VERSION,
        "pid": 4711,
        "last_round": 1,
        "workers": {"0": 4712},
        "store_hosts": [1],
        "kept": {"state": "{}"},
    },
    "zygote": {"ready": {"modules": ["json"], "threads": 1, "memory_kb": 1, "seconds": 0.5}},
    "error": {
        "message": {"message": "no", "extraInfo": {"py_callstack": "a\nb", "timestamp": "1"}}
    },
}
_ODD = (
    *(None, True, 0, -1, 2**31, 2**63, 2**70, 1.5, float("inf"), float("-inf"), float("nan")),
    *("", "a\0b", "\ud800", [], {}, [[]], {"": None}, "x" * 5_000, [None], "/etc/passwd"),
)


def _mangled(dice: random.Random, value: Any) -> Any:
    """Return a value with some of its parts replaced by other JSON values."""
    if dice.random() < 0.08:
        return dice.choice((*_ODD, surface.text(dice)))
    if isinstance(value, dict):
        made = {name: _mangled(dice, one) for name, one in value.items() if dice.random() < 0.97}
        if dice.random() < 0.1:
            made[dice.choice(_WORDS)] = dice.choice(_ODD)
        return made
    if isinstance(value, list):
        return [_mangled(dice, one) for one in value] * dice.choice((1, 1, 1, 0, 2))
    return value


def _json(dice: random.Random, shape: Mapping[str, Any]) -> bytes:
    if dice.random() < 0.02:
        return dice.choice((b"[" * 100_000, b"1" * 10_000, b'{"a":' * 50_000, b"\xff", b"", b"NaN"))
    data = json.dumps(_mangled(dice, dict(shape))).encode()
    return data[: dice.randint(0, len(data))] if dice.random() < 0.05 else data


def _frame(dice: random.Random) -> Step:
    name = dice.choice(_REQUESTS)
    data = _json(dice, {"type": name, **_SHAPES.get(name, {})})
    length = len(data) if dice.random() < 0.95 else dice.choice((0, 1, 2**31, 2**32 - 1))
    return "runner", struct.pack(">I", length) + data


def _toml(dice: random.Random, kind: str) -> Step:
    known = settings_of(RdzvdSettings if kind == "rdzvd" else AgentSettings)
    keys = [*known, "no_such", "job.args", "user"]
    lines = []
    for key in sorted(dice.choice(keys) for _ in range(dice.randint(1, 5))):
        value: Any = dice.choice(
            (surface.text(dice), 1, -1, 2**70, 1.5, True, [surface.text(dice)])
        )
        written = json.dumps(value)
        written = (
            dice.choice(("nan", "inf", "-inf", "1e999", "[" * 3_000))
            if dice.random() < 0.1
            else written
        )
        written = dice.choice(('"5 s"', '"-1 s"', '"9e99 d"', '"1 MiB"', '"127.0.0.1:0"', written))
        lines.append(f"{key} = {written}")
    return kind, "\n".join(lines).encode(errors="surrogatepass")


def _inputs(dice: random.Random) -> Input:
    kind = dice.choice(
        ("rdzvd", "agent", "runner", "runner", "told", "hello", "kept", "zygote", "error")
    )
    if kind in ("rdzvd", "agent"):
        return (_toml(dice, kind),)
    if kind == "runner":
        return tuple(_frame(dice) for _ in range(dice.randint(1, 5)))
    if kind == "told":
        fields = {dice.choice(_WORDS): dice.choice(_ODD) for _ in range(dice.randint(0, 4))}
        return ((kind, _json(dice, {"type": dice.choice(_TOLD), "round": 1, **fields})),)
    if dice.random() < 0.1:
        return (("step", dice.choice((b"12", b"-1", b"\xff", b"9" * 99, "٣".encode(), b" 7\n"))),)
    return ((kind, _json(dice, _SHAPES.get(kind, {"placement": {"rdzv_id": "j"}}))),)


# ------------------------------------------------------------------------------------ taking


def _configuration(folder: Path, read: Callable[[Path], object], data: bytes) -> None:
    path = folder / "some.toml"
    path.write_bytes(data)
    with refusing():
        read(path)


def _say(folder: Path, frames: bytes) -> None:
    """Let a runner read frames; requests to start programs are read, but not obeyed."""
    ours, theirs = socket.socketpair()
    made = Runner(Channel(theirs))
    serve = made.requests["serve"]

    def listen(request: Mapping[str, object]) -> None:
        said = request.get("socket")
        if isinstance(said, str) and said.startswith("@socket"):
            serve({**request, "socket": f"{folder}/{said[1:]}"})
        else:
            decode(Serve, request)

    made.requests |= {
        "serve": listen,
        "start_workers": lambda request: [*map(_prepared, decode(StartWorkers, request).workers)],
        "keep_zygote": lambda request: _prepared(decode(ZygoteSpec, request)),
        "renew_fence": lambda request: decode(RenewFence, request),
    }
    try:
        with suppress(BlockingIOError, BrokenPipeError):
            ours.setblocking(False)
            ours.sendall(frames)
        ours.shutdown(socket.SHUT_WR)
        while made.agent.connected:
            made.agent.read()
    finally:
        ours.close()
        made.close()


def _prepared(spec: Any) -> None:
    """Check what a process would be started with."""
    assert all(isinstance(word, str) for word in spec.argv)


class _Unkillable(Child):
    """A zygote that does not exist."""

    def kill(self) -> None:
        pass


def _hear_zygote(data: bytes) -> None:
    """Let a runner read a zygote's messages."""
    agent, of_runner = socket.socketpair()
    runner = Runner(Channel(of_runner))
    ends: list[socket.socket] = []

    def start(_name: str, program: Program, on_exit: Any, *, spared: bool) -> Child:
        ends.append(socket.socket(fileno=os.dup(next(iter(program.pass_fds)))))
        return _Unkillable(1, on_exit, spared=spared)

    runner.children.start = start  # type: ignore[method-assign, assignment]
    keeper = runner.forks.zygote
    keeper.keep(ZygoteSpec(("true",), {}, None, (), spare_forks=1))
    try:
        ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        with suppress(OSError):
            ends[0].send(struct.pack(">I", len(data)) + data[:100_000])
            for call in runner.loop.wait(0.0):
                call()
    finally:
        ends[0].close()
        keeper.give_up("its test is over")  # Closes the links of the forks that it requested.
        runner.close()
        agent.close()


def _hello(data: bytes) -> None:
    said = _decoded(data)
    if said is not None:
        with suppress(NotAdoptableError):
            read_hello(said)


def _told(data: bytes) -> None:
    said = _decoded(data)
    if said is not None:
        with suppress(MalformedFrameError):
            decode_event(said)
            number_of(said)


_SENT_AT_ONCE = 1 << 16
"""Less than a socket buffers."""


def _decoded(data: bytes) -> Mapping[str, object] | None:
    """Read a frame as a channel does."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        channel, frame = Channel(ours), struct.pack(">I", len(data)) + data
        for begin in range(0, len(frame), _SENT_AT_ONCE):
            theirs.sendall(frame[begin : begin + _SENT_AT_ONCE])
            while channel.receive():
                pass
        try:
            return channel.next_message()
        except MalformedFrameError:
            return None


def _kept(data: bytes) -> None:
    for read in (handover_state.decode_placement, handover_state.decode_state):
        with suppress(NotAdoptableError):
            read(data.decode(errors="replace"))


def _error(folder: Path, data: bytes) -> None:
    path = folder / "error.json"
    path.write_bytes(data)
    read_error(path, None, 4711)


def _step(data: bytes) -> None:
    with suppress(ValueError):
        step = read_step(data)
        if step is not None and step < 0:
            raise FoundError(f"{data!r} is step {step}")


@contextmanager
def _open(folder: Path) -> Iterator[Take]:
    def read_rdzvd(path: Path) -> None:
        Configuration(path, {})

    takes: Mapping[str, Callable[[bytes], None]] = {
        "rdzvd": partial(_configuration, folder, read_rdzvd),
        "agent": partial(_configuration, folder, read_config),
        "runner": partial(_say, folder),
        "zygote": _hear_zygote,
        "hello": _hello,
        "told": _told,
        "kept": _kept,
        "error": partial(_error, folder),
        "step": _step,
    }

    def take(steps: Input) -> None:
        frames = b"".join(data for kind, data in steps if kind == "runner")
        if frames:
            takes["runner"](frames)
        for kind, data in steps:
            if kind != "runner":
                takes[kind](data)

    yield take


DAMAGED = Surface(
    name="config",
    promise="what is damaged is refused in words; a runner and an agent go on",
    make=_inputs,
    open=_open,
)
