"""SIGHUP to a real rdzvd: what changes at once, what waits, and that nothing else is disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from test_rdzvd import PATIENT, Node, Rdzvd, attached, control, hello, rdzvd

from rdzv.v1 import rdzv_pb2 as pb

USUAL = f"{PATIENT}[limits]\njobs = 1\n[retention]\n"


async def logged(server: Rdzvd, text: str, times: int = 1) -> None:
    """Wait until a text occurs this often in the log."""
    async with asyncio.timeout(100):
        while server.stderr.read_text().count(text) < times:
            assert server.process.poll() is None, server.stderr.read_text()
            await asyncio.sleep(0.02)


def write(file: Path, text: str) -> None:
    file.write_text(text)


async def reload(server: Rdzvd, file: Path, text: str) -> None:
    """Write the file, and wait until the server has read it."""
    already = server.stderr.read_text().count("the configuration")
    write(file, text)
    server.process.send_signal(signal.SIGHUP)
    await logged(server, "the configuration", already + 1)


async def refusal(node: Node, rdzv_id: str) -> str:
    await node.join(rdzv_id, (1, 1))
    return (await node.hear("refused")).refused.message


async def names(server: Rdzvd) -> set[str]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        return {job.rdzv_id for job in (await control(channel).ListJobs(pb.ListJobsRequest())).jobs}


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, text: str = USUAL) -> AsyncIterator[tuple[Rdzvd, Path]]:
    soon = {"rdzv.server.engine.forgetting.PRUNE_EVERY_MS": 1_000}
    with rdzvd(tmp_path, config=text, constants=soon) as server:
        assert server.ready, server.stderr.read_text()
        yield server, tmp_path / "rdzvd.toml"


async def test_a_limit_is_raised_while_nodes_stay_connected(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, file), attached(server.address, hello("n1")) as n1:
        await n1.join("job-1", (1, 1))
        await n1.line()
        assert "this server holds 1" in await refusal(n1, "job-2")
        await reload(server, file, 'http = "127.0.0.1:0"\n' + USUAL.replace("= 1\n", "= 2\n"))
        await n1.join("job-2", (1, 1))
        assert (await n1.line()).rdzv_id == "job-2"
        assert "this server holds 2" in await refusal(n1, "job-3")
        log = server.stderr.read_text()
        assert "configuration: limits.jobs is now 2 (it was 1)" in log
        assert 'http is to be "127.0.0.1:0" (it is not set): that needs a restart' in log


async def test_the_log_level_and_the_retention_change_at_once(tmp_path: Path) -> None:
    text = USUAL.replace("jobs = 1", "jobs = 9") + "ended_jobs = 10\n"
    async with serving(tmp_path, text) as (server, file):
        async with attached(server.address, hello("n1")) as n1:
            for name in ("a", "b", "c"):
                await n1.join(name, (1, 1))
                line = await n1.line()
                await n1.say(succeeded=pb.Succeeded(rdzv_id=name, run=line.run, round=line.round))
                await n1.hear("closed")
        assert await names(server) == {"a", "b", "c"}
        # At the next check, a second later at most, only the newest is kept.
        await reload(server, file, text.replace("ended_jobs = 10", "ended_jobs = 1"))
        await logged(server, "forgot job", times=2)
        assert await names(server) == {"c"}
        await reload(server, file, f'log_level = "debug"\nlog_format = "json"\n{text}')
        await logged(server, '"level": "')


async def test_the_default_outlives_a_hang_up_without_a_file(tmp_path: Path) -> None:
    with rdzvd(tmp_path, config=None) as server:
        server.process.send_signal(signal.SIGHUP)
        await logged(server, "reloaded the configuration")
        assert server.stop() == 0


async def test_systemd_is_told_of_start_reload_and_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(path))
        systemd.settimeout(100)

        async def told() -> list[str]:
            return (await asyncio.to_thread(systemd.recv, 4096)).decode().splitlines()

        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        async with serving(tmp_path) as (server, file):
            assert (await told())[0] == "READY=1"
            await reload(server, file, USUAL)
            reloading, monotonic = await told()
            assert reloading == "RELOADING=1" and monotonic.startswith("MONOTONIC_USEC=")
            assert await told() == ["READY=1", "STATUS=configuration reloaded"]
            await reload(server, file, "nonsense = 1")
            await told()
            assert (await told())[1] == "STATUS=the configuration has errors, see the log"
            assert server.stop() == 0
            assert await told() == ["STOPPING=1"]


async def test_nobody_who_listens_for_systemd_harms_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    async with serving(tmp_path) as (server, _):
        assert server.stop() == 0
