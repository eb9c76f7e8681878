"""`rdzvctl logs` and `forget`: what they print, which failures they survive, what they request."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import control_samples
import grpc
import pytest
from fake_control import Ctl, FakeControl, serving

from rdzv import client as client_module
from rdzv.client import ControlClient, parse_endpoint
from rdzv.ctl.__main__ import run
from rdzv.errors import InvalidRequestError, RendezvousConnectionError
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view import log_lines
from rdzv.view.answers import LogLines
from rdzv.view.log_lines import Printer

pytestmark = pytest.mark.slow

Answer = list[pb.LogLines | grpc.StatusCode]


class LogControl(FakeControl):
    """Sends the answers it was given, one per call; a status ends the call."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs["bert"] = control_samples.running()
        self.answers: list[Answer] = []
        self.asked: list[pb.ReadLogsRequest] = []
        self.forgotten: list[str] = []

    def ReadLogs(  # noqa: N802
        self, request: pb.ReadLogsRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.LogLines]:
        self._misbehave(context)
        self.asked.append(request)
        for lines in self.answers.pop(0):
            if isinstance(lines, grpc.StatusCode):
                context.abort(lines, "cut")
            else:
                yield lines

    def ForgetJob(  # noqa: N802
        self, request: pb.ForgetJobRequest, context: grpc.ServicerContext
    ) -> pb.ForgetJobResponse:
        self._misbehave(context)
        self.forgotten.append(request.rdzv_id)
        return pb.ForgetJobResponse()


@pytest.fixture
def control() -> LogControl:
    return LogControl()


def lines(
    data: bytes = b"", *, node: str = "n1", rank: int = 0, offset: int = 0, **more: object
) -> pb.LogLines:
    return pb.LogLines(
        node_id=node,
        run="feed",
        rank=rank,
        offset=offset,
        data=data,
        **more,  # type: ignore[arg-type]
    )


# ------------------------------------------------------------------ what is printed


def test_lines_of_several_ranks_are_whole_and_say_whose_they_are(
    control: LogControl, server: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    control.answers = [
        [
            lines(b"one\ntw", rank=0),
            lines(b"three\r\nfo", rank=1, node="n2"),
            lines(b"o\xff\x1b[2J\n", rank=0, offset=6),
            lines(b"ur", rank=1, node="n2", offset=9),
        ]
    ]
    assert run(["logs", "bert"]) == 0
    out, err = capfdbinary.readouterr()
    expected = [b"[rank 0] one", b"[rank 1] three", b"[rank 0] two\xff\x1b[2J", b"[rank 1] four"]
    assert out.splitlines() == expected
    assert not err


@pytest.mark.quick
def test_one_stream_of_one_rank_is_passed_on_as_it_is(
    control: LogControl, server: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    control.answers = [[lines(b"\x00 50%\r"), lines(b"51%\r\n\xff, no end")]]
    assert run(["logs", "bert", "--rank=0", "--stdout"]) == 0
    assert capfdbinary.readouterr().out == b"\x00 50%\r51%\r\n\xff, no end"


def test_both_streams_of_one_rank_do_not_meet_within_a_line(
    control: LogControl, server: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    control.answers = [[lines(b"lo"), lines(b"warn\n", stderr=True), lines(b"ss\n", offset=2)]]
    assert run(["logs", "bert", "--rank=0"]) == 0
    assert capfdbinary.readouterr().out == b"warn\nloss\n"


def test_what_is_missing_is_said_on_stderr_and_by_the_exit_code(
    control: LogControl, server: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    note = lines(node="n2", note="its agent is not connected\x1b[2J")
    control.answers = [[lines(b"x\n"), note, lines(b"y\n", offset=2)]]
    assert run(["logs", "bert"]) == 1
    out, err = capfdbinary.readouterr()
    assert out == b"[rank 0] x\n[rank 0] y\n"
    assert err == b"rdzvctl: n2: its agent is not connected\\x1b[2J\n"


def test_a_terminal_obeys_nothing_that_a_log_holds(control: LogControl, server: str) -> None:
    control.answers = [[lines("a\tb\x1b]0;x\x07 ä\u202e".encode() + b"\xff 5%\r6%\n")]]
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "rdzv.ctl", "logs", "bert", "--rank=0", "--stdout"]
    environ = {**os.environ, "RDZV_SERVER": server}
    with subprocess.Popen(command, stdout=follower, stderr=follower, env=environ) as process:
        os.close(follower)
        with os.fdopen(leader, "rb", buffering=0) as screen:
            text = b""
            try:
                while chunk := screen.read(4_096):
                    text += chunk
            except OSError:
                pass  # The other side has ended.
        assert process.wait(100) == 0, text
    shown = ["a\tb\\x1b]0;x\\x07 ä\\u202e\\xff 5%", "6%"]
    assert text.decode().split("\r\n") == [*shown, ""]


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_come_out_the_same_however_they_are_cut(size: int) -> None:
    text = b"one\n\r\n50%\r51%\r\r\nend\n\xff" + b"no end"
    whole = [b"one", b"", b"50%", b"51%", b"", b"end", b"\xffno end"]
    out = io.BytesIO()
    printer = Printer(out, prefixed=True, escaped=False, as_it_comes=False)
    for start in range(0, len(text), size):
        printer.take(LogLines("n1", "r", 3, data=text[start : start + size]))
    printer.end()
    assert out.getvalue() == b"".join(b"[rank 3] " + line + b"\n" for line in whole)


@pytest.mark.quick
def test_a_line_without_an_end_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "LINE_BYTES", 10)
    out = io.BytesIO()
    printer = Printer(out, prefixed=True, escaped=False, as_it_comes=False)
    for number in (0, 1):
        printer.take(LogLines("n1", "r", round=number, data=b"x" * 15))
    # A round is over when its node is in another.
    shown = [line.removeprefix(b"[rank 0] ") for line in out.getvalue().splitlines()]
    assert shown == [b"x" * 10, b"x" * 5, b"x" * 10]


# ------------------------------------------------------------------ what is asked for


def test_the_options_reach_the_server(control: LogControl, server: str) -> None:
    control.answers = [[], [], []]
    assert run(["logs", "bert", "-f", "--rank=3", "--round=2", "--stderr", "--tail=100"]) == 0
    assert run(["logs", "bert", "--tail=64k"]) == 0
    assert run(["logs", "bert", "--stdout", "--stderr", "--round=0"]) == 0
    first, second, third = control.asked
    assert first == pb.ReadLogsRequest(
        rdzv_id="bert", follow=True, rank=3, round=2, stderr=True, tail_lines=100
    )
    assert second == pb.ReadLogsRequest(rdzv_id="bert", stdout=True, stderr=True, tail_bytes=65_536)
    assert third == pb.ReadLogsRequest(rdzv_id="bert", stdout=True, stderr=True, round=0)


@pytest.mark.quick
@pytest.mark.parametrize("tail", ["0", "-1", "k", "1.5k", "10x", "4294967296", "٣"])
def test_a_tail_that_makes_no_sense_is_refused(tail: str, ctl: Ctl) -> None:
    assert "give, for example, 100 or 64k" in ctl("logs", "bert", f"--tail={tail}", code=2).err


def test_a_job_that_is_not_known_is_an_error(control: LogControl, server: str, ctl: Ctl) -> None:
    assert "no job nobody is known here" in ctl("logs", "nobody", code=1).err


def test_forget_names_the_job(control: LogControl, server: str, ctl: Ctl) -> None:
    assert ctl("forget", "bert").out == "bert is forgotten\n"
    control.error = InvalidRequestError("it has not ended")
    assert run(["forget", "bert"]) == 1
    assert control.forgotten == ["bert"]


# ------------------------------------------------------------------ a stream that is cut


def test_a_stream_that_is_cut_goes_on_where_it_was(
    control: LogControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "WATCH_RETRY_S", 0.01)
    control.answers = [
        [
            lines(round=4),
            lines(b"12", round=4),
            lines(b"ab", round=4, local_rank=1, stderr=True, offset=50),
            lines(node="n2", round=4),
            lines(node="n3", note="is away"),
            grpc.StatusCode.UNAVAILABLE,
        ],
        [grpc.StatusCode.UNAVAILABLE],
        [lines(b"3", offset=2, round=4), lines(round=5), grpc.StatusCode.UNAVAILABLE],
        [lines(b"4", round=5)],
    ]
    with serving(control) as endpoint, ControlClient(parse_endpoint(endpoint)) as client:
        found = list(client.logs("bert", follow=True, tail_lines=7))
    assert [piece.data for piece in found if piece.data] == [b"12", b"ab", b"3", b"4"]
    assert [piece.note for piece in found if piece.note] == ["is away"]
    first, second, third, fourth = control.asked
    assert (first.run, first.HasField("round"), len(first.positions)) == ("", False, 0)
    assert second == third
    assert (second.run, second.round, second.tail_lines) == ("feed", 4, 7)
    places = [
        (at.node_id, at.round, at.local_rank, at.stderr, at.offset) for at in second.positions
    ]
    assert places == [("n1", 4, 0, False, 2), ("n1", 4, 1, True, 52), ("n2", 4, 0, False, 0)]
    places = [(at.node_id, at.round, at.offset) for at in fourth.positions]
    assert places == [("n1", 5, 0), ("n2", 4, 0)]


def test_a_server_that_does_not_come_back_is_given_up(
    control: LogControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "WATCH_RETRY_S", 0.01)
    monkeypatch.setattr(client_module, "WATCH_TIMEOUT_S", 0.1)
    control.answers = [[lines(b"12"), grpc.StatusCode.UNAVAILABLE]]
    control.answers += [[grpc.StatusCode.UNAVAILABLE]] * 1_000
    with serving(control) as endpoint, ControlClient(parse_endpoint(endpoint)) as client:
        pieces = client.logs("bert", follow=True)
        assert next(pieces).data == b"12"
        with pytest.raises(RendezvousConnectionError):
            next(pieces)
