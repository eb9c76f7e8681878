"""Notifications reach systemd, and no failure to send one reaches the program."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.runtime import systemd


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_hears_what_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    name = f"rdzv-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(60)
        listener.bind(f"\0{name}" if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if abstract else name)
        assert systemd.notify("READY=1", "STATUS=all is well")
        assert listener.recv(4096) == b"READY=1\nSTATUS=all is well"


def test_a_reload_says_when_it_began() -> None:
    begins, since = systemd.reloading().split("\n")
    assert begins == "RELOADING=1"
    assert int(since.removeprefix("MONOTONIC_USEC=")) > 0


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all", "/" + "x" * 500])
def test_nobody_who_listens_is_no_error(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not systemd.notify("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    assert not systemd.notify("READY=1")


@pytest.mark.slow
def test_a_systemd_that_does_not_read_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        heard = [systemd.notify(f"STATUS={number}") for number in range(10_000)]
        assert heard[0] and not heard[-1]


# ---------------------------------------------------------------------- the watchdog


@pytest.fixture(name="heard")
def _heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Listen as systemd does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(60)
        listener.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


@pytest.mark.slow
async def test_signs_of_life_come_from_the_event_loop(
    heard: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "60000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    with systemd.watched():
        for _ in range(3):
            assert await asyncio.to_thread(heard.recv, 4096) == b"WATCHDOG=1"
    heard.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            heard.recv(4096)
    await asyncio.sleep(0.05)
    with pytest.raises(BlockingIOError):
        heard.recv(4096)


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [{}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}],
    ids=["none", "another's", "nonsense"],
)
async def test_without_a_watchdog_there_are_none(
    heard: socket.socket, monkeypatch: pytest.MonkeyPatch, said: dict[str, str]
) -> None:
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    heard.setblocking(False)
    with systemd.watched():
        await asyncio.sleep(0.02)
    with pytest.raises(BlockingIOError):
        heard.recv(4096)


# ---------------------------------------------------------------------- what is planned


def systemctl(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace `systemctl` by a script."""
    program = folder / "systemctl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def of_unit(folder: Path, text: str = "0::/system.slice/rdzv-agent.service\n") -> Path:
    path = folder / "cgroup"
    path.write_text(text)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("job", ["stop", "restart"])
def test_what_systemd_is_about_to_do_with_this_unit_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: socket.socket, job: str
) -> None:
    said = f"7 other.service start waiting\n8 rdzv-agent.service {job} running"
    systemctl(tmp_path, monkeypatch, f'[ "$1" = list-jobs ] && echo "{said}"')
    assert systemd.queued_job(of_unit(tmp_path)) == job


def test_the_systemd_of_a_user_is_asked_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: socket.socket
) -> None:
    systemctl(tmp_path, monkeypatch, '[ "$1" = --user ] && echo "8 mine.service restart running"')
    path = "0::/user.slice/user-7.slice/user@7.service/app.slice/mine.service\n"
    assert systemd.queued_job(of_unit(tmp_path, path)) == "restart"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Failed to connect to bus' >&2; exit 1", "Failed to connect to bus"),
        ("exec sleep 60", "timed out"),
    ],
)
def test_a_systemd_that_does_not_answer_plans_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heard: socket.socket,
    caplog: pytest.LogCaptureFixture,
    script: str,
    why: str,
) -> None:
    monkeypatch.setattr(systemd, "ASK_TIMEOUT_S", 0.5)
    systemctl(tmp_path, monkeypatch, script)
    assert systemd.queued_job(of_unit(tmp_path)) == ""
    assert "cannot get the queued systemd job for rdzv-agent.service" in caplog.text
    assert why in caplog.text


def test_who_is_no_service_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl(tmp_path, monkeypatch, f"touch {tmp_path}/asked")
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert systemd.queued_job(of_unit(tmp_path)) == ""
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    assert systemd.queued_job(of_unit(tmp_path, "0::/user.slice/session-2.scope\n")) == ""
    assert systemd.queued_job(tmp_path / "missing") == ""
    assert not (tmp_path / "asked").exists()
