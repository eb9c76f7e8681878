"""The runner with workers that park when their round ends: which stay, continue, or are ended.

The worker is `tests/support/linked_worker.py`, which implements its link by hand.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from runners import FOR_EVER_MS, PATIENCE_S, Node, marked, state_of, until
from test_runner import line_of, playing

from rdzv.agent.core.events import (
    Fenced,
    KeptExited,
    KeptGone,
    WorkerExited,
    WorkerNotKept,
    WorkerResumed,
    WorkersGone,
    WorkersStuck,
    WorkerStarted,
    WorkerSuspected,
)
from rdzv.agent.runner.held_connections import HELD_S
from rdzv.agent.runner.requests import EndKept, KeepSpec, RenewFence, StopWorkers, WorkerSpec
from rdzv.agent.runner.system import Identity, boottime_ms
from rdzv.core.model import KeptWorker
from tests.support.whole_lines import lines_of

WORKER = Path(__file__).parents[1] / "support" / "linked_worker.py"
KEEP_MS = 20_000


class Parking(Node):
    """A runner whose workers can be kept."""

    def worker(self, round_: int, local_rank: int, *does: str) -> WorkerSpec:
        spec = self.spec(sys.executable, "-S", WORKER, *does, local_rank=local_rank)
        folder = self.folder / f"round_{round_}" / str(local_rank)
        env = {
            **self.env,
            "RDZV_ROUND": str(round_),
            "LOCAL_RANK": str(local_rank),
            "RANK": str(local_rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "9",
        }
        out, err = (str(folder / name) for name in ("stdout.log", "stderr.log"))
        return replace(spec, env=env, stdout=out, stderr=err)

    async def begin(self, *does: str, ranks: int = 2) -> list[int]:
        """Start round 0; return the pids of its workers, which have said hello."""
        return await self.begin_with(*(self.worker(0, rank, *does) for rank in range(ranks)))

    async def begin_with(self, *workers: WorkerSpec) -> list[int]:
        self.link.start_workers(0, workers, KeepSpec((), None, None))
        for worker in workers:
            await self.printed(worker, "round 0")
        started = [
            await self.heard(WorkerStarted, round=0, local_rank=worker.local_rank)
            for worker in workers
        ]
        return [event.pid for event in started]

    async def printed(self, worker: WorkerSpec, text: str) -> str:
        """Wait until a worker has printed a line with this beginning, and return it."""
        assert worker.stdout is not None
        file, found = Path(worker.stdout), []

        def has_printed() -> bool:
            found[:] = [line for line in lines_of(file) if line.startswith(text)]
            return bool(found)

        await until(has_printed)
        return found[0]

    async def park(self, *not_kept: int, keep_ms: int = KEEP_MS) -> tuple[KeptWorker, ...]:
        self.link.ask(StopWorkers(0, FOR_EVER_MS, signal.SIGTERM, keep_ms, not_kept))
        return (await self.heard(WorkersGone, round=0)).kept

    async def go_on(
        self, *kept: int, charged: tuple[int, ...] = (), does: tuple[str, ...] = ()
    ) -> list[WorkerStarted]:
        """Start round 1 with these workers kept; return how its two workers were started."""
        workers = [self.worker(1, rank, *does) for rank in range(2)]
        self.link.start_workers(1, workers, KeepSpec(kept, 1, 7, charged, 5.0))
        return [await self.heard(WorkerStarted, round=1, local_rank=rank) for rank in range(2)]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Parking]:
    async with Parking(tmp_path).running() as node:
        yield node


def ranks_of(kept: tuple[KeptWorker, ...]) -> dict[int, int]:
    return {worker.local_rank: worker.pid for worker in kept}


# ------------------------------------------------------------------ kept


async def test_parked_workers_go_on_as_the_same_processes_and_write_to_the_new_files(
    node: Parking,
) -> None:
    pids = await node.begin()
    kept = await node.park()
    assert ranks_of(kept) == dict(enumerate(pids))
    assert all(worker.step for worker in kept)
    started = await node.go_on(0, 1)
    assert [(event.pid, event.how) for event in started] == [(pid, "kept") for pid in pids]
    for rank, pid in enumerate(pids):
        await node.heard(WorkerResumed, round=1, local_rank=rank)
        await node.printed(node.worker(1, rank), f"round 1 pid {pid}")
    await node.stop(1)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(PATIENCE_S)
        yield made


async def test_a_kept_workers_connections_end_when_all_have_left_the_round(
    node: Parking, listener: socket.socket
) -> None:
    """The worker has closed its own descriptors long before."""
    worker = node.worker(0, 0, f"holds:{listener.getsockname()[1]}")
    await node.begin_with(worker, node.worker(0, 1))
    await node.printed(worker, "the runner holds it")
    peer, _ = listener.accept()
    with peer:
        await node.park()
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        await node.go_on(0, 1)
        peer.settimeout(PATIENCE_S)
        assert peer.recv(1) == b""
    await node.stop(1)


async def test_a_killed_workers_connections_do_not_end_with_it(
    node: Parking, listener: socket.socket
) -> None:
    """Its peers' gloo would lose what it sends at that moment. After `HELD_S` they hear of it."""
    worker = node.worker(0, 0, f"holds:{listener.getsockname()[1]}")
    pid, _ = await node.begin_with(worker, node.worker(0, 1))
    await node.printed(worker, "the runner holds it")
    peer, _ = listener.accept()
    with peer:
        os.kill(pid, signal.SIGKILL)
        await node.heard(WorkerExited, round=0, local_rank=0)
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(1)
        peer.settimeout(HELD_S + PATIENCE_S)
        assert peer.recv(1) == b""
    await node.stop(0)


async def test_a_worker_with_one_file_writes_to_the_new_one(node: Parking) -> None:
    (pid,) = await node.begin_with(node.worker(0, 0))
    await node.park()
    worker = replace(node.worker(1, 0), stderr=None)
    node.link.start_workers(1, [worker], KeepSpec((0,), None, None))
    await node.printed(worker, f"round 1 pid {pid}")
    await node.stop(1)


async def test_new_files_are_opened_with_the_rights_of_the_workers_account(node: Parking) -> None:
    python = shutil.which("python3", path="/usr/bin:/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("this needs root, and an interpreter that every account may run")
    with tempfile.TemporaryDirectory() as name:
        node.folder = folder = Path(name)
        os.chmod(folder, 0o777)  # noqa: PTH101
        shutil.copy(WORKER, folder / "worker.py")
        nobody = Identity(uid=65534, gid=65534, umask=0o077)
        argv = (python, "-S", str(folder / "worker.py"))
        workers = [replace(node.worker(n, 0), argv=argv, identity=nobody) for n in range(2)]
        (pid,) = await node.begin_with(workers[0])
        await node.park()
        node.link.start_workers(1, [workers[1]], KeepSpec((0,), None, None))
        await node.printed(workers[1], f"round 1 pid {pid}")
        for stream in (workers[1].stdout, workers[1].stderr):
            assert stream is not None
            found = os.stat(stream)  # noqa: PTH116
            assert (found.st_uid, found.st_mode & 0o777) == (65534, 0o600)
        await node.stop(1)


async def test_a_worker_that_died_is_replaced_beside_those_that_stay(node: Parking) -> None:
    pids = await node.begin()
    os.kill(pids[1], signal.SIGKILL)
    await node.heard(WorkerExited, local_rank=1)
    assert ranks_of(await node.park()) == {0: pids[0]}
    first, second = await node.go_on(0)
    assert (first.pid, first.how) == (pids[0], "kept")
    assert second.pid != pids[1]
    assert second.how == "cold"


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_worker_that_does_not_park_is_killed_alone_in_time(
    node: Parking, is_stopped: bool
) -> None:
    pids = await node.begin(*([] if is_stopped else ["deaf:1"]))
    if is_stopped:
        os.kill(pids[1], signal.SIGSTOP)
    since = time.monotonic()
    assert ranks_of(await node.park(keep_ms=300)) == {0: pids[0]}
    assert 0.3 <= time.monotonic() - since < 5
    late = await node.heard(WorkerNotKept)
    assert (late.local_rank, late.pid) == (1, pids[1])
    assert late.reason == "it did not park in time"
    assert state_of(pids[1]) == ""
    assert not (await node.heard(WorkerExited, local_rank=1)).by_itself


async def test_a_culprit_is_killed_at_once(node: Parking) -> None:
    pids = await node.begin()
    assert ranks_of(await node.park(1)) == {0: pids[0]}


async def test_how_a_worker_ends_while_others_park_is_told_from_how_it_was_ended(
    node: Parking,
) -> None:
    pids = await node.begin("deaf:1", ranks=3)
    os.kill(pids[1], signal.SIGSTOP)
    node.link.ask(StopWorkers(0, FOR_EVER_MS, signal.SIGTERM, FOR_EVER_MS, (2,)))
    assert not (await node.heard(WorkerExited, local_rank=2)).by_itself
    await node.printed(node.worker(0, 0), "parked")
    os.kill(pids[1], signal.SIGKILL)
    assert (await node.heard(WorkerExited, local_rank=1)).by_itself


async def test_a_worker_without_a_link_is_stopped_as_ever_beside_one_that_stays(
    node: Parking,
) -> None:
    pids = await node.begin_with(node.worker(0, 0), node.worker(0, 1, "unlinked"))
    assert ranks_of(await node.park()) == {0: pids[0]}
    exit_ = await node.heard(WorkerExited, local_rank=1)
    assert exit_.signal == signal.SIGTERM


async def test_the_grace_of_workers_without_a_link_is_not_that_of_parking(node: Parking) -> None:
    pids = await node.begin_with(node.worker(0, 0), node.worker(0, 1, "unlinked", "stays"))
    node.link.ask(StopWorkers(0, 300, signal.SIGTERM, KEEP_MS))
    assert ranks_of((await node.heard(WorkersGone)).kept) == {0: pids[0]}


async def test_without_keep_in_the_request_there_is_no_link(node: Parking) -> None:
    node.link.start_workers(0, [node.worker(0, 0, "unlinked")])
    await node.printed(node.worker(0, 0), "round 0")
    (pid,) = marked(node.mark)
    environ = Path(f"/proc/{pid}/environ").read_bytes()  # noqa: ASYNC240
    assert b"RDZV_WORKER_" not in environ
    assert await node.park() == ()


# ------------------------------------------------------------------ suspects


async def test_a_suspect_parks_by_itself_and_is_kept(node: Parking) -> None:
    file = node.folder / "now"
    pids = await node.begin(f"suspect:{file}")
    file.touch()
    suspect = await node.heard(WorkerSuspected, local_rank=1)
    assert (suspect.pid, suspect.message) == (pids[1], "Connection reset by peer")
    assert ranks_of(await node.park()) == dict(enumerate(pids))


async def test_a_charged_suspect_raises_its_exception_and_is_replaced(node: Parking) -> None:
    file = node.folder / "now"
    pids = await node.begin(f"suspect:{file}")
    file.touch()
    await node.park()
    first, second = await node.go_on(0, charged=(1,))
    assert first.how == "kept"
    assert (second.how, second.pid != pids[1]) == ("cold", True)
    exit_ = await node.heard(KeptExited, pid=pids[1])
    assert exit_.exit_code == 1
    stderr = (node.folder / "round_0" / "1" / "stderr.log").read_text()
    assert "ConnectionResetError: Connection reset by peer" in stderr


# ------------------------------------------------------------------ what is not believed


async def test_a_worker_that_has_kept_a_connection_to_its_round_is_killed(node: Parking) -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        workers = [node.worker(0, 0), node.worker(0, 1, "connected")]
        env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        pids = await node.begin_with(*(replace(w, env={**w.env, **env}) for w in workers))
        assert ranks_of(await node.park()) == {0: pids[0]}
    late = await node.heard(WorkerNotKept, local_rank=1)
    assert late.reason == f"it has parked, but is still connected to 127.0.0.1:{port}"


NONSENSE = {
    "no JSON": "b'\\0\\0\\0\\x05nonse'",
    "too large": "b'\\x7f\\0\\0\\0' + bytes(100)",
    "a flood": 'frame(type="x") * 1000',
    "a wrong step": 'frame(type="parked", round=0, step=-1)',
    "a step that is a word": 'frame(type="parked", round=0, step="7")',
    "wrong connections": 'frame(type="parked", round=0, connections=[["a"]])',
    "an unknown protocol": 'frame(type="hello", protocol=9)',
}


@pytest.mark.parametrize("sent", NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_ends_the_possibility_to_be_kept_and_nothing_else(
    node: Parking, sent: str
) -> None:
    hello = "" if "protocol=9" in sent else 'link.sendall(frame(type="hello", protocol=1))'
    code = f"""
import json, os, socket, struct, time
def frame(**said):
    said = json.dumps(said).encode()
    return struct.pack(">I", len(said)) + said
link = socket.socket(fileno=int(os.environ["RDZV_WORKER_LINK"]))
{hello}
try:
    link.sendall({sent})
except OSError:
    pass
print("round 0", flush=True)
time.sleep(3600)
"""
    odd = replace(node.worker(0, 1), argv=(sys.executable, "-S", "-c", code))
    pids = await node.begin_with(node.worker(0, 0), odd)
    assert ranks_of(await node.park(keep_ms=2_000)) == {0: pids[0]}
    assert (await node.heard(WorkerExited, local_rank=1)).pid == pids[1]


# ------------------------------------------------------------------ descendants


async def test_what_a_kept_worker_has_started_lives_and_what_a_dead_one_has_left_does_not(
    node: Parking,
) -> None:
    pids = await node.begin("children")
    children = []
    for rank in range(2):
        line = await node.printed(node.worker(0, rank), "children")
        children.append([int(pid) for pid in line.split()[1:]])
    os.kill(pids[1], signal.SIGKILL)
    await node.park()
    assert [state_of(pid) for pid in children[1]] == ["", ""]
    assert all(state_of(pid) for pid in children[0])
    await node.go_on(0)
    assert all(state_of(pid) for pid in children[0])
    await node.stop(1)
    assert [state_of(pid) for pid in children[0]] == ["", ""]


async def test_a_parked_worker_that_ends_takes_its_descendants_with_it(node: Parking) -> None:
    await node.begin("children", ranks=1)
    line = await node.printed(node.worker(0, 0), "children")
    await node.park()
    node.link.ask(EndKept(FOR_EVER_MS))
    await node.heard(KeptGone)
    assert [state_of(int(pid)) for pid in line.split()[1:]] == ["", ""]


async def test_a_replacement_starts_when_the_old_worker_is_gone(node: Parking) -> None:
    pids = await node.begin("stays", "children")
    lines = [await node.printed(node.worker(0, rank), "children") for rank in range(2)]
    await node.park()
    first, second = await node.go_on(0)
    assert first.how == "kept"
    assert second.how == "cold"
    assert state_of(pids[1]) == ""
    assert [state_of(int(pid)) for pid in lines[1].split()[1:]] == ["", ""]
    assert all(state_of(int(pid)) for pid in lines[0].split()[1:])


# ------------------------------------------------------------------ while they are parked


async def test_a_parked_worker_that_dies_is_reported_and_replaced(node: Parking) -> None:
    pids = await node.begin()
    await node.park()
    os.kill(pids[0], signal.SIGKILL)
    exit_ = await node.heard(KeptExited)
    assert (exit_.local_rank, exit_.pid, exit_.signal) == (0, pids[0], signal.SIGKILL)
    first, second = await node.go_on(0, 1)
    assert (first.how, second.how) == ("cold", "kept")


async def test_a_worker_that_dies_as_it_parks_is_not_kept(node: Parking) -> None:
    pids = await node.begin_with(node.worker(0, 0), node.worker(0, 1, "dies"))
    kept = ranks_of(await node.park())
    if 1 in kept:  # It still existed when the round began.
        await node.heard(KeptExited, pid=pids[1])
    assert kept[0] == pids[0]


async def test_parked_workers_end_on_request_and_once_more(node: Parking) -> None:
    pids = await node.begin("stays")
    await node.park()
    node.link.ask(EndKept(FOR_EVER_MS))
    await node.heard(KeptGone)
    assert {event.pid for event in node.events if isinstance(event, KeptExited)} == set(pids)
    node.events.clear()
    node.link.ask(EndKept(0))
    await node.heard(KeptGone)


async def test_a_stop_that_keeps_none_ends_those_that_park(node: Parking) -> None:
    pids = await node.begin("deaf:1")
    node.link.ask(StopWorkers(0, FOR_EVER_MS, signal.SIGTERM, FOR_EVER_MS))
    await node.printed(node.worker(0, 0), "parked")
    node.link.ask(StopWorkers(0, FOR_EVER_MS, signal.SIGTERM))
    assert (await node.heard(WorkersGone)).kept == ()
    assert [state_of(pid) for pid in pids] == ["", ""]


async def test_a_round_that_is_stopped_before_it_begins_leaves_them_parked(node: Parking) -> None:
    pids = await node.begin()
    await node.park()
    node.link.ask(StopWorkers(1, 0, signal.SIGTERM))
    assert ranks_of((await node.heard(WorkersGone, round=1)).kept) == dict(enumerate(pids))


async def test_the_end_of_a_round_in_which_one_went_on(node: Parking) -> None:
    pids = await node.begin()
    await node.park()
    first, second = await node.go_on(0)
    await node.heard(WorkerResumed, local_rank=0)
    await node.printed(node.worker(1, 1), "round 1")
    node.link.ask(StopWorkers(1, FOR_EVER_MS, signal.SIGTERM, KEEP_MS))
    kept = ranks_of((await node.heard(WorkersGone, round=1)).kept)
    assert kept == {0: first.pid, 1: second.pid}
    assert first.pid == pids[0]


async def test_a_worker_that_survives_sigkill_takes_its_siblings_with_it(node: Parking) -> None:
    pids = await node.begin("deaf:1")
    with playing("tracer.py", str(pids[1])) as tracer:
        if line_of(tracer) != ["0"]:
            pytest.skip("ptrace is not permitted here")
        node.link.ask(StopWorkers(0, 300, signal.SIGTERM, 300))
        stuck = await node.heard(WorkersStuck)
        assert stuck.pids == (pids[1],)
        await until(lambda: not state_of(pids[0]))
    assert (await node.heard(WorkersGone)).kept == ()


async def test_a_parked_worker_that_survives_sigkill_is_reported(node: Parking) -> None:
    pids = await node.begin(ranks=1)
    await node.park()
    with playing("tracer.py", str(pids[0])) as tracer:
        if line_of(tracer) != ["0"]:
            pytest.skip("ptrace is not permitted here")
        node.link.ask(EndKept(0))
        assert (await node.heard(WorkersStuck)).pids == (pids[0],)
    await node.heard(KeptGone)


# ------------------------------------------------------------------ the fence


async def test_the_fence_ends_parked_workers(node: Parking) -> None:
    pids = await node.begin("stays")
    await node.park()
    node.link.ask(RenewFence(boottime_ms() + 300))
    await node.heard(KeptGone)
    assert [state_of(pid) for pid in pids] == ["", ""]


async def test_no_worker_goes_on_after_the_fence(node: Parking) -> None:
    pids = await node.begin()
    await node.park()
    os.kill(node.link.pid, signal.SIGSTOP)
    node.link.ask(RenewFence(boottime_ms() + 1))
    node.link.start_workers(1, [node.worker(1, n) for n in range(2)], KeepSpec((0, 1), None, None))
    await asyncio.sleep(0.01)
    os.kill(node.link.pid, signal.SIGCONT)
    await node.heard(WorkersGone, round=1)
    assert not [e for e in node.events if isinstance(e, WorkerStarted) and e.round == 1]
    assert [state_of(pid) for pid in pids] == ["", ""]


async def test_a_fence_that_comes_while_they_park_kills_all(node: Parking) -> None:
    await node.begin("deaf:1")
    node.link.ask(RenewFence(boottime_ms() + 500))
    node.link.ask(StopWorkers(0, FOR_EVER_MS, signal.SIGTERM, FOR_EVER_MS))
    await node.heard(Fenced)
    assert (await node.heard(WorkersGone)).kept == ()
