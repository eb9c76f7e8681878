"""Submissions: from a job file or a request, through the server's checks, to a node.

A step is a request (`submit`), as it would be sent; the part that the server accepts goes to a
node, as `placed`, and the node prepares a launch from it. Or a job file (`file`), or a command
line.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import click
from google.protobuf.message import DecodeError

from rdzv import bounds
from rdzv.agent.launch.launch import check_startable
from rdzv.agent.node.submitted_launch import Share, Surroundings, make_launch
from rdzv.agent.output.run_folders import RunFolders, folder_name
from rdzv.client import Endpoint
from rdzv.core.commands import Submit
from rdzv.ctl import job_request
from rdzv.messages import Placed
from rdzv.server import wire
from rdzv.server.operations.handlers import submit_of
from rdzv.transport.wire import read
from rdzv.v1 import rdzv_pb2 as pb
from tests.fuzz import messages, surface
from tests.fuzz.surface import FoundError, Input, Step, Surface, Take, refusing

_ARGS = (
    *("--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=other", "--standalone"),
    *("--node-id=n9", "--log-dir=../../x", "--rdzv-endpoint=elsewhere:1", "--help", "--version"),
    *("--rdzv-conf=timeout=1e400", "--role=\x1b[2J", "--tee=3", "--redirects=0:3", "-r", "--"),
    *("--snapshot=/dev/../x", "--local-ranks-filter=0,1", "--nproc-per-node=auto", "--no-python"),
    *("train.py", "--", "--run-path", "--numa-binding=node", "--start-method=spawn", "--t=9" * 9),
)
_SETTINGS = pb.Settings(
    min_nodes=1, max_nodes=2, join_timeout_ms=60_000, max_restarts=3, scale_up=pb.SCALE_UP_EAGER
)
_KEYS = ("script", "args", "env", "env_from", "nnodes", "labels", "chdir", "rdzv_conf", "user", "x")


def _submit(dice: random.Random) -> Step:
    request = messages.make(dice, pb.SubmitJobRequest.DESCRIPTOR)
    request.run = dice.choice(("5f3a9c21", request.run))
    del request.spec.args[:]
    request.spec.args.extend(surface.text(dice, _ARGS) for _ in range(dice.randint(0, 4)))
    request.spec.args.append(surface.text(dice, ("train.py",)))
    if dice.random() < 0.8:
        # Otherwise hardly any would reach a node.
        request.settings.CopyFrom(_SETTINGS)
        request.spec.priority, request.spec.local_world_size = 0, 2
        request.spec.account = ""
    return "submit", request.SerializeToString()


def _file(dice: random.Random) -> Step:
    lines = []
    for _ in range(dice.randint(0, 6)):
        value: object = dice.choice((surface.text(dice), 1, True, 2**70, [surface.text(dice)], []))
        written = json.dumps(value)
        if dice.random() < 0.1:
            written = dice.choice(("[" * 5_000, "1" * 5_000, "{a = 1}", "nan", "1979-05-27", "'"))
        lines.append(f"{dice.choice(_KEYS)} = {written}")
    if dice.random() < 0.5:
        lines.append(f"[env]\n{json.dumps(surface.text(dice))} = {json.dumps(surface.text(dice))}")
    return "file", "\n".join(lines).encode(errors="surrogatepass")


def _line(dice: random.Random) -> Step:
    words = [surface.text(dice, _ARGS) for _ in range(dice.randint(1, 6))]
    words += dice.choice(((), ("--env", surface.text(dice)), ("--labels", surface.text(dice))))
    words = [word for word in words if not word.startswith("--file")]
    return "line", json.dumps(words).encode()


def _inputs(dice: random.Random) -> Input:
    make = dice.choice((_submit, _submit, _file, _line))
    return (make(dice),)


def _take(folder: Path, steps: Input) -> None:
    for number, (kind, data) in enumerate(steps):
        if kind == "submit":
            request = pb.SubmitJobRequest()
            try:
                request.ParseFromString(data)
            except DecodeError:
                continue
            _try(folder, request)
        else:
            _read(folder / f"job-{number}.toml", kind, data)


def _read(path: Path, kind: str, data: bytes) -> None:
    words = [f"--file={path}", "--dry-run"]
    if kind == "file":
        path.write_bytes(data)
    else:
        try:
            words = json.loads(data)
            assert all(isinstance(word, str) for word in words)
        except (ValueError, TypeError, AssertionError, RecursionError):
            return
    caller = job_request.CallerContext(str(path.parent), {"HOME": "/home/ada", "X": "\udcff"})
    with refusing(), suppress(click.ClickException, click.exceptions.Exit, SystemExit):
        asked = job_request.read(words, caller)
        # The command sends the server what it accepts.
        spec = asked.spec
        pb.JobSpec(args=spec.args, chdir=spec.chdir)


def _try(folder: Path, request: pb.SubmitJobRequest) -> None:
    """Follow a submission, as far as it is accepted."""
    with refusing():
        rdzv_id = bounds.rdzv_id_of(request.rdzv_id)
        command = submit_of(request)
        _place(folder, rdzv_id, command)


def _place(folder: Path, rdzv_id: str, command: Submit) -> None:
    told = Placed(rdzv_id, command.run, command.spec)
    message = wire.server_message([told], 1, "1.2.3", 0)
    placed = read(Placed, pb.ServerMessage.FromString(message.SerializeToString()).placed)
    if placed.spec != command.spec:
        raise FoundError(f"a node hears of another job than was submitted: {placed.spec!r:.300}")
    folders = RunFolders(folder)
    opened = folders.open(placed.rdzv_id, placed.run)
    inside = folder.resolve() / "runs"
    if opened.path.resolve().parent.parent != inside:
        raise FoundError(f"escape: the folder of {placed.rdzv_id!r} is {opened.path}")
    around = Surroundings("n1", (Endpoint("127.0.0.1", 29_400),), {"HOME": str(folder)})
    share = Share(gpus=("GPU-1",), run_dir=opened.path)
    try:
        # The number of workers is given: no program is started to count them.
        launch = asyncio.run(make_launch(placed, around, share, counted=2))
        check_startable(launch)
    finally:
        folders.release(opened)
    if launch.output.run_dir is not None and launch.output.run_dir != opened.path:
        raise FoundError(f"escape: {placed.rdzv_id!r} writes to {launch.output.run_dir}")


def _names(dice: random.Random) -> Input:
    return (("name", surface.text(dice).encode(errors="surrogatepass")),)


@contextmanager
def _open(folder: Path) -> Iterator[Take]:
    def take(steps: Input) -> None:
        for kind, data in steps:
            if kind == "name":
                spelled = folder_name(data.decode(errors="replace"))
                if len(Path(spelled).parts) != 1 or Path(spelled).name in ("", ".", ".."):
                    raise FoundError(f"escape: {data!r:.100} is spelled {spelled!r:.100}")
        partial(_take, folder)(tuple(step for step in steps if step[0] != "name"))

    yield take


JOBS = Surface(
    name="spec",
    promise="accepted or refused in words; a node hears what was submitted; no folder is left",
    make=lambda dice: _names(dice) if dice.random() < 0.1 else _inputs(dice),
    open=_open,
)
