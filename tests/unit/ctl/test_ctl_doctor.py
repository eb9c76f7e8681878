"""`rdzvctl doctor`: what each check finds, and two machines that try each other's ports."""

from __future__ import annotations

import resource
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_control import Capture, Ctl, FakeControl, serving
from tls_files import Files

from rdzv.ctl import doctor
from rdzv.ctl.__main__ import run
from rdzv.ctl.doctor import Finding, Verdict
from rdzv.structs import replace
from rdzv.transport.channels import Credentials
from rdzv.version import VERSION
from rdzv.view.answers import Node, Server

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM
SERVER = Server("n0:29400", True, 3, "memory", VERSION, 1_000, unix_ms=1_000_000)
NODE = Node(
    "n1", "connected", 1, "rdzv-agent", "10.0.0.1", VERSION, None, None, (), False, None, None
)


def found(findings: Iterator[Finding], check: str) -> Finding:
    (finding,) = (finding for finding in findings if finding.check == check)
    return finding


# ---------------------------------------------------------------------- this machine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "verdict", "said"),
    [
        ("#!/bin/sh\necho a banner\necho 2.13.0 8\n", OK, "2.13.0 in {}, 8 GPUs"),
        ("#!/bin/sh\necho No module named torch >&2\nexit 1\n", PROBLEM, "No module named torch"),
        ("#!/nowhere/python\n", PROBLEM, "cannot import it: [Errno 2] No such file"),
        (None, PROBLEM, "is not a program"),
    ],
)
def test_an_interpreter_is_asked_for_its_torch(
    tmp_path: Path, script: str | None, verdict: Verdict, said: str
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(script)
        python.chmod(0o755)
    finding = doctor.check_torch(str(python))
    assert (finding.verdict, finding.check) == (verdict, "torch")
    assert said.format(python) in finding.text


@pytest.mark.parametrize(
    ("soft", "verdict"), [(1_024, WARNING), (65_536, OK), (resource.RLIM_INFINITY, OK)]
)
def test_few_open_files_are_warned_of(soft: int, verdict: Verdict) -> None:
    finding = doctor.check_open_files(soft, 1 << 20)
    assert finding.verdict is verdict
    assert ("ulimit -n" in finding.text) == (verdict is WARNING)


def test_a_small_shm_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = {"total": 64 << 20, "used": 0, "free": 64 << 20}
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: type("Usage", (), usage))
    finding = doctor.check_shm(tmp_path)
    assert finding.verdict is WARNING
    assert finding.text.startswith("64 MiB free of 64 MiB; enlarge it (docker: --shm-size)")
    monkeypatch.undo()
    assert doctor.check_shm(tmp_path / "nowhere").verdict is PROBLEM


def test_a_name_that_leads_to_loopback_is_warned_of() -> None:
    finding = doctor.check_name("localhost")
    assert finding.verdict is WARNING
    assert "only to loopback" in finding.text
    assert doctor.check_name("no-such-host.invalid").verdict is WARNING


def test_a_name_that_leads_to_this_machine_is_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.5", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    finding = doctor.check_name("n1")
    assert (finding.verdict, finding.text) == (OK, "n1 is 10.0.0.5")


# ---------------------------------------------------------------------- the server


def judged(*servers: Server, took_ms: float = 10, now: int = 1_000_005) -> list[Finding]:
    return list(doctor.judge_servers("n0", servers, took_ms, now))


def test_a_server_that_is_well() -> None:
    assert [finding.verdict for finding in judged(SERVER)] == [OK, OK]


@pytest.mark.parametrize(
    ("change", "check", "verdict", "text"),
    [
        ({"leads": False}, "server", PROBLEM, "no server leads"),
        ({"version": "0.0.1"}, "version", WARNING, "0.0.1"),
        ({"insecure": "nothing is encrypted"}, "access", WARNING, "nothing is encrypted"),
        ({"store_away": "the disk is full"}, "store", PROBLEM, "the disk is full"),
        ({"unix_ms": 900_000}, "clock", WARNING, "ahead of"),
        ({"unix_ms": 1_100_000}, "clock", WARNING, "behind"),
    ],
)
def test_what_is_wrong_with_a_server(
    change: dict[str, object], check: str, verdict: Verdict, text: str
) -> None:
    finding = found(iter(judged(replace(SERVER, **change))), check)  # type: ignore[arg-type]
    assert finding.verdict is verdict
    assert text in finding.text


def test_a_slow_answer_is_no_wrong_clock() -> None:
    """The server may have read its clock at any time while the answer was on its way."""
    late = replace(SERVER, unix_ms=1_000_000)
    assert found(iter(judged(late, took_ms=8_000, now=1_008_000)), "clock").verdict is OK
    assert found(iter(judged(late, took_ms=10, now=1_008_000)), "clock").verdict is WARNING


@pytest.mark.slow
@pytest.mark.parametrize(
    ("days", "verdict"), [(20, OK), (7, WARNING), (-1, PROBLEM)], ids=["long", "soon", "expired"]
)
def test_a_certificate_is_judged_by_its_time(tmp_path: Path, days: int, verdict: Verdict) -> None:
    credentials = Files(tmp_path, "localhost").client("ada")
    assert credentials.cert is not None
    until = doctor.read_certificate(credentials.cert.read_bytes(), "it").not_after
    (finding,) = doctor.check_certificate(credentials, until - timedelta(days=days))
    assert finding.verdict is verdict
    assert not list(doctor.check_certificate(Credentials(), datetime.now(UTC)))


# ---------------------------------------------------------------------- the nodes


def test_nodes_are_judged_by_what_the_server_knows() -> None:
    nodes = (
        NODE,
        replace(NODE, node_id="n2", state="away"),
        replace(NODE, node_id="n3", unhealthy="disk /data has 1 % free"),
        replace(NODE, node_id="n4", agent_version="0.0.1"),
        replace(NODE, node_id="n6", quarantine="3 failures within 1 h"),
    )
    texts = [f"{f.check}: {f.text}" for f in doctor.check_nodes(nodes)]
    assert texts[:2] == ["nodes: 4 nodes of 5 connected", "nodes: not connected: n2"]
    assert "node n3: disk /data has 1 % free" in texts
    assert "node n6: 3 failures within 1 h" in texts
    assert any(text.endswith("n4 (0.0.1)") for text in texts)
    assert [f.verdict for f in doctor.check_nodes(())] == [WARNING]


# ---------------------------------------------------------------------- two machines


def meeting(visits: bool) -> tuple[Finding, list[Finding]]:
    """Return the findings of the listening doctor, and of the visiting one."""
    visited: list[Finding] = []

    def say(port: int) -> None:
        if visits:
            visit = lambda: visited.append(doctor.visit("127.0.0.1", port))  # noqa: E731
            threading.Thread(target=visit).start()

    finding = doctor.wait_for_visit(0, 20 if visits else 0.05, say)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(20)
    return finding, visited


def test_two_machines_that_reach_each_other() -> None:
    finding, visited = meeting(visits=True)
    assert (finding.verdict, [f.verdict for f in visited]) == (OK, [OK])


def test_a_way_back_that_is_closed_is_told_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "try_port", lambda *_: "No route to host")
    finding, visited = meeting(visits=True)
    assert (finding.verdict, [f.verdict for f in visited]) == (PROBLEM, [PROBLEM])
    assert "this machine, but not vice versa: No route to host" in finding.text
    assert "cannot reach this machine: No route to host" in visited[0].text


def test_nobody_comes_and_nobody_is_there() -> None:
    assert meeting(visits=False)[0].verdict is PROBLEM
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # A listener that is no doctor says nothing useful, and the wait for it is bounded.
        taken.listen(0)
    assert "cannot be reached" in doctor.visit("127.0.0.1", port).text


def test_a_port_that_nobody_listens_at_is_said_in_words_without_a_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert doctor.try_port("127.0.0.1", port) == ""
    assert doctor.try_port("127.0.0.1", port) == "Connection refused"


# ---------------------------------------------------------------------- the command


def test_a_problem_is_exit_code_1_and_warnings_are_not(
    capsys: Capture, ctl: Ctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_torch", lambda python: Finding(OK, "torch", python))
    said = ctl("--server", "127.0.0.1:1", "doctor", code=1).out
    assert "problem  server" in said
    assert sys.executable in said
    with serving(FakeControl()) as endpoint:
        code = run(["--server", endpoint, "doctor", "--python", "/opt/python"])
        said = capsys.readouterr().out
    assert "/opt/python" in said
    assert code == (1 if "problem" in said else 0)


@pytest.mark.parametrize(
    ("of_server", "reached"),
    [
        ([Finding(OK, "server", ""), Finding(WARNING, "clock", "")], True),
        ([Finding(PROBLEM, "server", "")], False),
    ],
    ids=["its clock is wrong", "it does not answer"],
)
def test_a_server_is_asked_for_its_nodes_if_it_answers(
    of_server: list[Finding], reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_machine", lambda _: ())
    monkeypatch.setattr(doctor, "check_server", lambda _: of_server)
    client: Any = SimpleNamespace(nodes=lambda: (NODE,))
    findings = list(doctor.examine(client, Credentials(), "python", with_nodes=True))
    assert any(finding.check == "nodes" for finding in findings) is reached


@pytest.mark.parametrize("words", [["--reach", "n1"], ["--listen", "1", "--reach", "n1:1"]])
def test_a_command_line_that_makes_no_sense(words: list[str]) -> None:
    assert run(["doctor", *words]) == 2
