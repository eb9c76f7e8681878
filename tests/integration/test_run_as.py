"""Workers under another account than their runner: their rights, and what they cannot do to it."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from runners import Node, marked, state_of, until

from rdzv.agent.core.events import (
    StartFailed,
    StoreHostExited,
    WorkerExited,
    WorkersGone,
    ZygoteLost,
)
from rdzv.agent.runner.requests import WorkerSpec, ZygoteSpec
from rdzv.agent.runner_link.runner_link import RunnerLink
from tests.support.accounts import (
    ADA,
    SECRET,
    needs_root,
    own_folder,
    passable_folder,
    roots_secret,
)

pytestmark = needs_root


@pytest.fixture
def shared() -> Iterator[Path]:
    with passable_folder() as folder:
        yield folder


@pytest.fixture
def home(shared: Path) -> Path:
    return own_folder(shared, "home")


@pytest.fixture
async def node(shared: Path) -> AsyncIterator[Node]:
    made = Node(shared)
    made.patience_s = 60.0
    made.link = await RunnerLink.spawn(made.hear)
    try:
        yield made
    finally:
        await made.link.close(10.0)
        assert marked(made.mark) == []


def shell(node: Node, home: Path, script: str, **changes: object) -> WorkerSpec:
    """Return how to run a script as the account; its output goes to `said`."""
    spec = node.spec("/bin/sh", "-c", script)
    usual = replace(spec, cwd=str(home), stdout=str(home / "said"), identity=ADA)
    return replace(usual, **changes)  # type: ignore[arg-type]


async def exit_code(node: Node, number: int, spec: WorkerSpec) -> int | None:
    node.link.start_workers(number, [spec])
    exited = await node.heard(WorkerExited, round=number)
    await node.stop(number)
    return exited.exit_code


async def said(node: Node, home: Path, spec: WorkerSpec, number: int = 1) -> list[str]:
    assert await exit_code(node, number, spec) == 0
    return read(home / "said").splitlines()


def read(path: Path) -> str:
    return path.read_text()


async def test_a_worker_is_its_account_with_its_groups_limits_and_umask(
    node: Node, home: Path
) -> None:
    identity = replace(ADA, limits=(("nofile", 60, 70), ("core", 0, 0)))
    script = "id -u; id -g; id -G; umask; pwd; ulimit -Sn; ulimit -Hn; ulimit -c; "
    script += "cat /proc/self/status"
    found = await said(node, home, shell(node, home, script, identity=identity))
    assert found[:8] == ["64321", "64322", "64322 64323", "0027", str(home), "60", "70", "0"]
    status = dict(line.split(":", 1) for line in found[8:])
    assert status["Uid"].split() == ["64321"] * 4, "real, effective, saved and of files"
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    assert int(status["CapAmb"], 16) == 0


async def test_what_a_worker_writes_is_its_own(node: Node, home: Path) -> None:
    log = home / "logs" / "0" / "stdout.log"
    assert await exit_code(node, 1, shell(node, home, "echo x", stdout=str(log))) == 0
    assert owner(log) == ADA.uid
    assert read(log) == "x\n"


async def test_what_goes_to_no_file_does_not_go_to_the_agents_log(node: Node, home: Path) -> None:
    """The runner's own streams are root's log."""
    script = "readlink /proc/$$/fd/2"
    assert await said(node, home, shell(node, home, script)) == ["/dev/null"]


def owner(path: Path) -> int:
    return path.stat().st_uid


async def test_a_log_that_leads_elsewhere_is_not_written(
    node: Node, home: Path, shared: Path
) -> None:
    secret = roots_secret(shared)
    trap = home / "trap.log"
    trap.symlink_to(secret)
    node.link.start_workers(1, [shell(node, home, "echo broken", stdout=str(trap))])
    failed = await node.heard(StartFailed)
    assert "Permission denied" in failed.reason
    await node.heard(WorkersGone)
    assert read(secret) == SECRET


async def test_a_worker_starts_nowhere_that_its_account_can_not_enter(
    node: Node, home: Path, shared: Path
) -> None:
    private = shared / "private"
    private.mkdir(mode=0o700)
    node.link.start_workers(1, [shell(node, home, "true", cwd=str(private))])
    failed = await node.heard(StartFailed)
    assert f"cwd '{private}': Permission denied" in failed.reason
    await node.heard(WorkersGone)


async def test_a_worker_can_not_end_its_runner_and_its_runner_ends_all_of_it(
    node: Node, home: Path
) -> None:
    script = (
        f"kill -9 {node.link.pid} || echo refused; kill -STOP {node.link.pid} || echo refused; "
        "setsid sleep 1000 & echo $! > daemon; wait"
    )
    node.link.start_workers(1, [shell(node, home, script)])
    await until(lambda: is_written(home / "daemon"), 60.0)
    daemon = int(read(home / "daemon"))
    await node.stop(1, grace_ms=0)
    assert state_of(daemon) == ""
    assert read(home / "said").splitlines().count("refused") == 2


def is_written(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


async def test_an_account_that_can_not_be_had_is_said(node: Node, home: Path) -> None:
    identity = replace(ADA, limits=(("nofile", 10, 5),))
    node.link.start_workers(1, [shell(node, home, "true", identity=identity)])
    failed = await node.heard(StartFailed)
    assert "user 64321, with its groups and limits" in failed.reason
    await node.heard(WorkersGone)


async def test_the_store_host_is_its_accounts(node: Node, home: Path, shared: Path) -> None:
    python = shared / "python"
    python.write_text(f"#!/bin/sh\nid -u > {home}/store\n")
    python.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        node.link.start_store_host(1, listening, str(python), node.env, ADA)
    await node.heard(StoreHostExited, round=1)
    assert read(home / "store") == "64321\n"


HOSTILE = """#!/usr/bin/python3 -IS
import json, os, socket, struct, time
order = json.loads(os.environ["RDZV_ZYGOTE"])
control = socket.socket(fileno=order["fd"])
control.send(struct.pack('>I', len(WORDS)) + WORDS)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    "words",
    [
        {"ready": {"type": "exited", "round": 1, "local_rank": 0}},
        {"ready": []},
        {"forked": 1, "pids": ["../tmp/pipe"], "reason": ""},
        ["ready"],
    ],
    ids=str,
)
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="there is no /usr/bin/python3")
async def test_a_zygote_that_lies_is_given_up(
    node: Node, home: Path, shared: Path, words: object
) -> None:
    """It runs the user's imports, so it may send anything to a runner that is root."""
    program = shared / "python"
    program.write_text(HOSTILE.replace("WORDS", repr(json.dumps(words).encode())))
    program.chmod(0o755)
    zygote = ZygoteSpec((str(program),), node.env, str(home), ("m",), identity=ADA)
    node.link.ask(zygote)
    lost = await node.heard(ZygoteLost)
    assert "it sent" in lost.reason
    assert await exit_code(node, 1, shell(node, home, "true")) == 0
