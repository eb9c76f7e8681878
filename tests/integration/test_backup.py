"""An operator's work with the data of an rdzvd: check it, back it up, restore it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cluster import run_forked
from etcd_cluster import EtcdCluster
from test_rdzvd import Rdzvd, attached, hello, rdzvd, status

from rdzv.errors import InvalidRequestError
from rdzv.server.replication import offline as offline_module
from rdzv.server.replication.offline import check, restore
from rdzv.server.settings.server_settings import Etcd, RdzvdSettings
from rdzv.stores import backup
from rdzv.stores.election import Election
from rdzv.stores.etcd import EtcdStore
from rdzv.stores.etcd_client import EtcdClient
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc as pb_grpc
from rdzv.view.answers import event_in
from tests.support.settings import rdzvd_settings


def run(program: str, *arguments: str | Path) -> tuple[int, str, str]:
    """Run a program to its end; return its exit code and output."""
    done = run_forked(program, [*map(str, arguments)], os.environ)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


async def rdzvctl(*arguments: str | Path) -> tuple[int, str, str]:
    return await asyncio.to_thread(run, "rdzvctl", *arguments)


async def offline(*arguments: str | Path) -> tuple[int, str, str]:
    return await asyncio.to_thread(run, "rdzvd", *arguments)


async def with_two_jobs(server: Rdzvd) -> None:
    async with attached(server.address, hello("n1")) as n1:
        for rdzv_id in ("job-7", "job-8"):
            await n1.join(rdzv_id, (1, 1))
            await n1.line()


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() if p.is_file() else b"" for p in directory.iterdir()}


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("store", ["sqlite", "memory"])
async def test_a_backup_of_a_running_server_is_restored_elsewhere(
    tmp_path: Path, store: str
) -> None:
    file, data = tmp_path / "backup", tmp_path / "elsewhere"
    with rdzvd(tmp_path, f"--store={store}") as server:
        await with_two_jobs(server)
        before = await status(server.address, "job-7")
        code, said, _ = await rdzvctl("backup", file, "--server", server.address)
        assert (code, said.startswith(f"{file}: 2 jobs, ")) == (0, True)
    assert file.stat().st_mode & 0o777 == 0o600
    with file.open("rb") as opened:
        saved = backup.verify(opened, "file")

    code, said, complaint = await offline("--restore", file, "--data-dir", data)
    assert (code, complaint) == (0, "")
    events = saved.trailer.events
    assert said.startswith(f"restored 2 job(s) and {events} event(s) into {data} (sqlite); ")

    (tmp_path / "new").mkdir()
    with rdzvd(tmp_path / "new", "--data-dir", str(data)) as server:
        after = await status(server.address, "job-7")
        assert (after.run, after.round, after.run_number) == (before.run, before.round, 1)
        code, said, _ = await rdzvctl("events", "job-8", "--server", server.address)
        assert "RoundCompleted" in said
        async with attached(server.address, hello("n2")) as n2:
            await n2.join("job-9", (1, 1))
            message = await n2.hear("round_completed")
            assert message.leadership > saved.header.leadership


async def test_a_file_that_was_cut_makes_no_store(tmp_path: Path) -> None:
    file, data = tmp_path / "backup", tmp_path / "elsewhere"
    with rdzvd(tmp_path) as server:
        await with_two_jobs(server)
        await rdzvctl("backup", file, "--server", server.address)
    file.write_bytes(file.read_bytes()[:-200])
    code, _, complaint = await offline("--restore", file, "--data-dir", data)
    assert (code, "it was cut" in complaint) == (1, True)
    assert not data.exists()


async def test_a_restore_that_is_killed_leaves_an_empty_store(tmp_path: Path) -> None:
    """The store takes everything in one commit, so half a file is never served."""
    script = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from rdzv.server.replication import offline\n"
        "from rdzv.server.settings.server_settings import RdzvdSettings\n"
        "from rdzv.transport.endpoints import Listen\n"
        "from rdzv.stores.sqlite import SqliteStore\n"
        "real = SqliteStore.append\n"
        "async def killed(self, rows):\n"
        "    await real(self, rows)\n"
        "    if rows: os.kill(os.getpid(), signal.SIGKILL)\n"
        "SqliteStore.append = killed\n"
        "config = RdzvdSettings(listen=Listen('127.0.0.1', 0), data_dir=Path(sys.argv[2]))\n"
        "asyncio.run(offline.restore(config, Path(sys.argv[1])))\n"
    )
    file, data = tmp_path / "backup", tmp_path / "elsewhere"
    with rdzvd(tmp_path) as server:
        await with_two_jobs(server)
        await rdzvctl("backup", file, "--server", server.address)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, file, data)
    assert await process.wait() == -signal.SIGKILL
    code, _, _ = await offline("--restore", file, "--data-dir", data)
    assert code == 0


# ---------------------------------------------------------------- what can go wrong with a backup


async def test_a_backup_replaces_nothing_unless_told_to(tmp_path: Path) -> None:
    file = tmp_path / "backup"
    file.write_text("mine")
    with rdzvd(tmp_path) as server:
        code, _, complaint = await rdzvctl("backup", file, "--server", server.address)
        assert (code, "already exists" in complaint) == (1, True)
        assert file.read_text() == "mine"
        code, said, _ = await rdzvctl("backup", file, "--force", "--server", server.address)
        assert (code, said.startswith(f"{file}: 0 jobs, 0 events")) == (0, True)


async def test_a_server_that_stops_answering_ends_the_backup(tmp_path: Path) -> None:
    with rdzvd(tmp_path) as server:
        await with_two_jobs(server)
        server.process.send_signal(signal.SIGSTOP)
        try:
            code, _, complaint = await rdzvctl(
                *("backup", tmp_path / "file", "--server", server.address, "--timeout", "0.5")
            )
        finally:
            server.process.send_signal(signal.SIGCONT)
    assert (code, "no answer within 0.5 s" in complaint) == (75, True)
    assert contents(tmp_path).keys() == {"data", "rdzvd.toml", "stderr"}


class CutService(pb_grpc.ControlServicer):
    """A server that shuts down normally in the middle of a backup."""

    async def Backup(  # type: ignore[override]  # noqa: N802
        self, request: pb.BackupRequest, context: object
    ) -> AsyncIterator[pb.BackupChunk]:
        line = backup.written_line(backup.BackupHeader("x", 1, 1))
        yield pb.BackupChunk(data=line)


async def test_half_a_backup_is_none(tmp_path: Path) -> None:
    server = grpc.aio.server()
    pb_grpc.add_ControlServicer_to_server(CutService(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    code, _, complaint = await rdzvctl("backup", tmp_path / "f", "--server", f"127.0.0.1:{port}")
    await server.stop(0)
    assert (code, "it was cut" in complaint) == (1, True)
    assert contents(tmp_path) == {}


def spoil(data: Path, membership: bytes) -> None:
    with closing(sqlite3.connect(data / "rdzv.db")) as db, db:
        db.execute("UPDATE job SET membership = ? WHERE rdzv_id = 'job-8'", (membership,))


# ---------------------------------------------------------------- check


async def test_a_check_says_what_is_there_also_beside_a_server(tmp_path: Path) -> None:
    data = tmp_path / "data"
    code, said, _ = await offline("--check", "--data-dir", data)
    assert (code, "holds no data yet" in said) == (0, True)
    assert not data.exists()

    with rdzvd(tmp_path) as server:
        await with_two_jobs(server)
        code, said, _ = await offline("--check", "--data-dir", data)
        assert code == 0
        assert (
            f"in use by: rdzvd pid {server.process.pid}; the check has read it at the same time"
            in said
        )
        assert "jobs: 2, of them 2 with an open run" in said
        assert (await status(server.address, "job-7")).rdzv_id == "job-7"
        server.process.kill()
        server.process.wait()

    # The server was killed, so its last commits are in the log beside the file.
    before = contents(data)
    code, said, _ = await offline("--check", "--data-dir", data)
    assert code == 0
    assert re.search(r"store: .*rdzv\.db, schema version \d+, \d+ KiB\n", said)
    assert "jobs: 2, of them 2 with an open run" in said
    assert said.endswith("all is in order\n")
    assert contents(data) == before


async def test_a_check_finds_what_is_wrong_and_changes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with rdzvd(tmp_path) as server:
        await with_two_jobs(server)
        server.stop()
    with closing(sqlite3.connect(data / "rdzv.db")) as db:
        query = "SELECT membership FROM job WHERE rdzv_id = 'job-8'"
        good: bytes = db.execute(query).fetchone()[0]
    for bad, says in (
        (b"{", "job job-8 in .* cannot be read"),
        (
            good.replace(b'"rdzv_id":"job-8"', b'"rdzv_id":"job-9"'),
            "job job-8: it is stored under this name, but is named job-9",
        ),
        (good.replace(b'"next_round":1', b'"next_round":0'), "round 0 is not below the next one"),
        (good.replace(b'"min_nodes":1,"max_nodes":1', b'"min_nodes":2,"max_nodes":2'), "barrier"),
    ):
        assert bad != good
        spoil(data, bad)
        before = contents(data)
        code, said, complaint = await offline("--check", "--data-dir", data)
        assert code == 1
        assert re.search(says, complaint)
        assert "1 problem(s) found" in said
        assert contents(data) == before
    (data / "rdzv.db").write_text("no database" * 100)
    code, _, complaint = await offline("--check", "--data-dir", data)
    assert (code, "is damaged: file is not a database" in complaint) == (1, True)


async def test_a_check_of_what_makes_no_sense_is_a_usage_error(tmp_path: Path) -> None:
    code, _, complaint = await offline("--check", "--listen", "0.0.0.0:1", "--data-dir", tmp_path)
    assert (code, "--insecure" in complaint) == (2, True)
    code, _, complaint = await offline("--check", "--restore", tmp_path / "x")
    assert (code, "give one of them" in complaint) == (2, True)


async def test_restoring_into_memory_is_refused(tmp_path: Path) -> None:
    code, _, complaint = await offline("--restore", tmp_path / "x", "--store=memory")
    assert (code, "forgets" in complaint) == (1, True)
    code, _, complaint = await offline("--restore", tmp_path / "x", "--data-dir", tmp_path / "d")
    assert (code, f"{tmp_path}/x cannot be read: No such file" in complaint) == (1, True)


# ---------------------------------------------------------------- etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster.running(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


def shared(cluster: EtcdCluster, prefix: str) -> RdzvdSettings:
    endpoints = tuple(str(member.endpoint) for member in cluster.members)
    return rdzvd_settings(store="etcd", etcd=Etcd(endpoints=endpoints, prefix=prefix))


async def test_a_backup_of_sqlite_is_restored_into_etcd(tmp_path: Path, etcd: EtcdCluster) -> None:
    file, config = tmp_path / "backup", shared(etcd, "/restored")
    with rdzvd(tmp_path) as server:
        await with_two_jobs(server)
        await rdzvctl("backup", file, "--server", server.address)
    said = await restore(config, file)
    assert said.startswith("restored 2 job(s)")
    found = await check(config)
    assert found.problems == ()
    assert "jobs: 2, of them 2 with an open run" in found.lines
    with pytest.raises(InvalidRequestError, match=r"holds 2 job\(s\) already"):
        await restore(config, file)
    with file.open("rb") as opened:
        number = backup.verify(opened, "file").header.leadership
    async with (
        EtcdClient.connected(etcd.config("/restored")) as client,
        Election.running(client, "here:1") as election,
    ):
        store = EtcdStore(client, await election.campaign())
        rows = await store.history("job-7", 100)
        assert any(event_in(row).text.startswith("round 0 complete") for row in rows)
        assert await store.take_over() > number


async def test_an_etcd_that_is_served_is_not_restored_into(
    tmp_path: Path, etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_module, "ELECTION_TIMEOUT_S", 1.0)
    file = tmp_path / "backup"
    with rdzvd(tmp_path) as server:
        await rdzvctl("backup", file, "--server", server.address)
    async with (
        EtcdClient.connected(etcd.config("/served")) as client,
        Election.running(client, "leader:29400") as election,
    ):
        await election.campaign()
        with pytest.raises(InvalidRequestError, match=r"is served by leader:29400; stop every"):
            await restore(shared(etcd, "/served"), file)
