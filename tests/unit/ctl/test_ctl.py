"""rdzvctl as its users see it: what it prints, where, and with which exit code."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from datetime import UTC
from pathlib import Path

import control_samples
import pytest
from fake_control import Capture, Ctl, FakeControl, serving

from rdzv.client import ControlClient, parse_endpoint
from rdzv.ctl import as_text
from rdzv.ctl.__main__ import run
from rdzv.ctl.layout import Page
from rdzv.runtime.log_format import harmless
from rdzv.v1 import rdzv_pb2 as pb

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "ctl"
NOON_S = 1_700_049_600.0
PAGE = Page(width=100, colour=False, now_s=NOON_S, zone=UTC)


def show(
    control: FakeControl, job: pb.JobStatus, *, page: Page = PAGE, everything: bool = False
) -> str:
    """Return the text shown for a job, requested over the network."""
    control.jobs[job.rdzv_id] = job
    with serving(control) as endpoint, ControlClient(parse_endpoint(endpoint)) as client:
        return as_text.status(client.status(job.rdzv_id), page, everything=everything) + "\n"


# ------------------------------------------------------------------------------------ for people


@pytest.mark.parametrize("width", [20, 50, 80, 100, 132])
def test_free_text_keeps_to_the_width(control: FakeControl, width: int) -> None:
    page = Page(width=width, colour=False, now_s=NOON_S, zone=UTC)
    reason = "waiting for 1 more node " * 12
    job = control_samples.joining()
    control_samples.give_reason(job, reason)
    job.reason.items.add(who="n1", cause="its workers survive SIGKILL " * 6)
    job.reason.items.add(who="n9", cause="waiting for nothing " * 12)
    lines = show(control, job, page=page).splitlines()
    assert max(len(line) for line in lines if "SIGKILL" in line) <= width
    assert max(len(line) for line in lines if "waiting for" in line) <= width


def test_a_terminal_without_a_width_breaks_nothing(control: FakeControl) -> None:
    for sample in (control_samples.joining(), control_samples.failed()):
        show(control, sample, page=Page(width=1, colour=True, now_s=NOON_S, zone=UTC))


def test_every_node_is_there_if_all_are_asked_for(control: FakeControl) -> None:
    text = show(control, control_samples.large(), everything=True)
    assert len(re.findall(r"^\S+ +node-\d+ ", text, re.MULTILINE)) == 500
    assert "--all" not in text


def test_an_abbreviated_table_keeps_who_is_not_seated(control: FakeControl) -> None:
    job = control_samples.large()
    for node in job.nodes:
        node.state = "lost"
    text = show(control, job)
    assert "500 lost; min:max" in text
    assert "... and 460 more nodes (460 lost); --all shows them" in text


def test_a_long_traceback_keeps_its_end(control: FakeControl) -> None:
    job = control_samples.failed()
    lines = [f"line {number}" for number in range(100)]
    job.last_failure.root_cause.traceback = "\n".join(lines)
    text = show(control, job)
    assert "    ... 40 lines before these are left out; --all shows them\n    line 40\n" in text
    assert "    line 99\n" in text
    assert "    line 0\n" in show(control, job, everything=True)


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (pb.WorkerFailure(signal=9), "signal 9 (SIGKILL)"),
        (pb.WorkerFailure(signal=40), "signal 40\n"),
        (pb.WorkerFailure(exit_code=0), "exit code 0"),
        (pb.WorkerFailure(), "how it ended is unknown"),
    ],
)
def test_how_a_worker_ended(control: FakeControl, failure: pb.WorkerFailure, text: str) -> None:
    job = control_samples.failed()
    job.last_failure.root_cause.CopyFrom(failure)
    assert text in show(control, job)


def test_an_age_that_is_none_breaks_nothing(control: FakeControl) -> None:
    job = control_samples.running()
    job.state_age_ms = 2**64 - 1
    assert "since ?" in show(control, job)


# ------------------------------------------------------------------------------------ harm

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e\u2028gone\n\x00next"


def test_escapes_from_outside_are_harmless(
    control: FakeControl, server: str, capsys: Capture
) -> None:
    job = control_samples.failed()
    job.rdzv_id = "job"
    job.state = job.run = job.master_addr = HOSTILE
    control_samples.give_reason(job, HOSTILE, HOSTILE)
    for who in (HOSTILE, "n9"):
        job.reason.items.add(who=who, state=HOSTILE, cause=HOSTILE, then=HOSTILE)
    for node in job.nodes:
        node.node_id = node.state = node.address = node.role = HOSTILE
    for failure in (job.last_failure.root_cause, *job.last_failure.others):
        failure.node_id = failure.address = HOSTILE
        failure.message = failure.traceback = HOSTILE
    control.jobs["job"] = job
    control.history = [pb.Event(unix_ms=2**64 - 1, name=HOSTILE, text=HOSTILE, run=HOSTILE)]
    for command in ("status job", "list", "events job", "status job -o json", f"status {HOSTILE}"):
        run(command.split(" "))
        output = "".join(capsys.readouterr())
        assert "gone" in output
        assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]", output) is None


@pytest.mark.quick
def test_harmless_text_is_as_it_was() -> None:
    assert harmless("größer: 日本 100 % → ok") == "größer: 日本 100 % → ok"
    assert harmless("\x1b[31m\t\n") == r"\x1b[31m\t\n"


# ------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize("command", ["status", "events"])
def test_an_unknown_job(command: str, server: str, ctl: Ctl) -> None:
    captured = ctl(command, "nix", code=1)
    assert captured.out == ""
    assert captured.err == f"rdzvctl: no job nix is known here (asked {server})\n"


def test_options_after_the_command_win(control: FakeControl, server: str, capsys: Capture) -> None:
    assert run(["--server", "no-such-host.invalid", "list", "--server", server]) == 0
    assert run(["list"]) == 0


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["lst"], "lst is not a command; did you mean `list`?"),
        (["xyz"], "xyz is not a command; see rdzvctl --help"),
        (["certs"], "Missing command; see rdzvctl certs --help"),
        (["certs", "shw"], "shw is not a command; did you mean `show`?"),
        (["list", "--al"], "--al is not an option; did you mean `--all`?"),
        (["status"], "JOB is missing; see rdzvctl status --help"),
        (["status", "a", "-o", "xml"], "--output=xml is not one of text, json, yaml; give one of"),
        (["completion", "bsh"], "bsh is not one of bash, zsh, fish; did you mean `bash`?"),
        (["--timeout", "x", "list"], "--timeout: 'x' is not a number; see rdzvctl --help"),
        (["--timeout", "0", "list"], "0.0 is not in the range"),
        (["--timeout", "nan", "list"], "timeout nan s cannot be used"),
        (["--server", "::1", "list"], "endpoint '::1' cannot be used"),
        (["events", "a", "-n", "0"], "0 is not in the range"),
    ],
)
def test_a_wrong_command_line_is_one_line_too(arguments: list[str], text: str, ctl: Ctl) -> None:
    captured = ctl(*arguments, code=2)
    assert captured.out == ""
    assert captured.err.startswith("rdzvctl: ")
    assert captured.err.count("\n") == 1
    assert text in captured.err


def test_without_a_command_it_prints_its_help_as_an_error(ctl: Ctl) -> None:
    text = ctl("--help").out
    captured = ctl(code=2)
    assert captured.out == ""
    assert captured.err == text


def test_the_help_of_a_command_is_about_the_command(ctl: Ctl) -> None:
    """The options that all commands share are explained once, by `rdzvctl --help`."""
    assert "--tls-cert FILE" in ctl("--help").out
    text = ctl("stop", "--help").out
    assert "--reason TEXT" in text
    assert text.count("--server") == 1
    assert "--tls-cert" not in text


@pytest.mark.quick
@pytest.mark.parametrize("group", ["tokens", "certs"])
def test_help_lists_commands_with_whole_sentences(group: str, ctl: Ctl) -> None:
    assert "..." not in ctl(group, "--help").out.partition("Commands:")[2]


# ------------------------------------------------------------------------------------ processes


def rdzvctl(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rdzv.ctl", *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_modules_of_the_users_own_are_not_in_the_way(
    control: FakeControl, server: str, tmp_path: Path
) -> None:
    for name in ("agent.py", "rendezvous.py", "client.py", "errors.py", "layout.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module was imported')\n")
    result = rdzvctl("list", cwd=tmp_path, env={"PYTHONPATH": "."})
    assert (result.returncode, result.stdout, result.stderr) == (0, f"no jobs at {server}\n", "")


def test_nothing_heavy_is_imported(server: str) -> None:
    """A command imports what it needs: people and scripts run many, one after another."""
    script = (
        "import sys; from rdzv.ctl.__main__ import run; run({!r});"
        "heavy = {{name.partition('.')[0] for name in sys.modules}} | sys.modules.keys();"
        "sys.exit(' '.join(sorted(heavy & {!r})) or 0)"
    )
    libraries = {"torch", "grpc", "google", "rich", "asyncio", "aiohttp", "yaml", "http", "email"}
    of_help = libraries | {"socket", "importlib.metadata", "rdzv.core", "rdzv.view", "rdzv.client"}
    for arguments, unwanted in (
        (["--version"], of_help | {"rdzv.ctl.commands", "rdzv.ctl.layout"}),
        (["--help"], of_help),
        (["status", "--help"], of_help | {"rdzv.ctl.commands.support", "rdzv.ctl.commands.nodes"}),
        (["submit", "--help"], {"torch", "grpc", "google", "asyncio", "yaml"}),
        (["list"], {"torch", "numpy", "rich", "sqlite3", "yaml"}),
    ):
        result = subprocess.run(
            [sys.executable, "-c", script.format(arguments, unwanted)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, "")


def test_a_reader_that_has_seen_enough(control: FakeControl, server: str) -> None:
    job = control_samples.large()
    control.jobs[job.rdzv_id] = job
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as broken:
        result = subprocess.run(
            [sys.executable, "-m", "rdzv.ctl", "status", job.rdzv_id, "--all"],
            stdout=broken,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_full_disk_is_one_line(server: str) -> None:
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "rdzv.ctl", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert result.returncode == 1
    assert result.stderr == b"rdzvctl: cannot write the output: No space left on device\n"


def in_terminal(arguments: list[str], width: int, env: Mapping[str, str]) -> str:
    """Run rdzvctl in a terminal of this many columns and return its output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    base = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "rdzv.ctl", *arguments],
        stdout=theirs,
        stderr=theirs,
        env={**base, "TERM": "xterm", **env},
    )
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65_536):
            output += chunk
    except OSError:
        pass  # Linux reports so that the other side has closed.
    finally:
        os.close(ours)
        process.wait(100)
    return output.decode().replace("\r\n", "\n")


def test_colours_and_width_are_for_terminals(control: FakeControl, server: str) -> None:
    job = control_samples.joining()
    control.jobs[job.rdzv_id] = job
    arguments = ["status", job.rdzv_id]
    coloured = in_terminal(arguments, 60, {})
    plain = in_terminal(arguments, 60, {"NO_COLOR": "1"})
    piped = rdzvctl(*arguments).stdout
    assert "\x1b[33mjoining\x1b[0m" in coloured
    assert "\x1b" not in plain
    assert "\x1b" not in piped
    assert "\x1b" not in in_terminal(arguments, 60, {"TERM": "dumb"})
    assert max(map(len, plain.splitlines())) <= 60
    assert f"{job.reason.headline}; gives up in 9 min 48 s" in piped.splitlines()
    assert all(line == line.rstrip() for line in piped.splitlines())


def test_an_empty_server_is_none_rather_than_the_default(server: str, ctl: Ctl) -> None:
    for words in (["--server=", "list"], ["list", "--server="], ["submit", "--server=", "t.py"]):
        assert "endpoint '' cannot be used: it names no host" in ctl(*words, code=2).err
