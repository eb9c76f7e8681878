"""What a node under torchrun believes of its job, round after round."""

from __future__ import annotations

import signal

import pytest

from rdzv.core.model import Settings
from rdzv.torchrun.conversation import PartPhase, Talk
from rdzv.torchrun.plugin_options import PluginOptions
from rdzv.v1 import rdzv_pb2 as pb


class Said:
    """A stream that notes what it is to send."""

    def __init__(self) -> None:
        self.messages: list[pb.NodeMessage] = []
        self.closed = 0

    def say(self, message: pb.NodeMessage) -> None:
        self.messages.append(message)

    def close(self, within_s: float, *, wait: bool) -> None:
        self.closed += 1


class Socket:
    port = 4711
    released = 0

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def talk() -> Talk:
    made = Talk(PluginOptions("job-7", "n1", (), Settings(1, 2), local_addr="10.0.0.1"))
    made.stream = Said()  # type: ignore[assignment]
    made.store_socket = Socket()  # type: ignore[assignment]
    return made


@pytest.fixture
def running(talk: Talk) -> Talk:
    """A node in round 3, whose messages so far do not count."""
    talk.join()
    hear_round(talk, 3)
    said_by(talk).clear()
    return talk


def said_by(talk: Talk) -> list[pb.NodeMessage]:
    assert isinstance(talk.stream, Said)
    return talk.stream.messages


def hear_round(talk: Talk, number: int) -> pb.Assignment:
    line = pb.Assignment(rdzv_id="job-7", run="feed", round=number, group_world_size=1)
    talk.hear(pb.ServerMessage(round_completed=line))
    return line


def hear_end(talk: Talk, number: int, reason: str) -> None:
    ended = pb.RoundOver(round=number, cause=pb.NODE_LOST, reason=reason)
    talk.hear(pb.ServerMessage(round_ended=ended))


def test_a_round_is_over_once_for_its_first_reason_and_the_next_one_is_not(talk: Talk) -> None:
    for number in (4, 5):
        talk.join()
        hear_round(talk, number)
        assert (talk.phase, talk.over) == (PartPhase.RUNNING, "")
        hear_end(talk, number - 1, "an earlier one")
        assert talk.over == ""
        hear_end(talk, number, f"n{number} is gone")
        hear_end(talk, number, "and another")
        assert talk.over == f"node lost: n{number} is gone"


def test_a_round_is_taken_only_while_joining_and_never_one_before(talk: Talk) -> None:
    hear_round(talk, 1)
    assert talk.line is None
    talk.join()
    hear_round(talk, 3)
    talk.join()
    for number in (2, 3):
        hear_round(talk, number)
        assert (talk.phase, talk.line and talk.line.round) == (PartPhase.JOINING, 3)
    assert hear_round(talk, 4) == talk.line


@pytest.mark.parametrize("workers_gone", [False, True])
def test_the_first_reason_to_leave_is_kept(running: Talk, workers_gone: bool) -> None:
    running.leave(pb.Leave.SIGNAL, "received SIGTERM", workers_gone=False)
    running.leave(pb.Leave.FAILED, "its workers failed", workers_gone=workers_gone)
    again = said_by(running)[-1].leave
    assert (again.cause, again.reason) == (pb.Leave.SIGNAL, "received SIGTERM")
    assert again.HasField("left_round") is workers_gone
    (belief,) = running.beliefs()
    assert (belief.phase, belief.leave) == (pb.Belief.LEAVING, again)


def test_the_first_signal_is_the_one_that_counts(running: Talk) -> None:
    running.on_signal(signal.SIGTERM)
    running.on_signal(signal.SIGINT)
    assert running.signalled is signal.SIGTERM
    assert running.round_is_over
    leaves = [message.leave for message in said_by(running)]
    assert {leave.reason for leave in leaves} == {"received SIGTERM"}


def test_after_it_has_hung_up_it_says_nothing_more(running: Talk) -> None:
    running.end(pb.Leave.FAILED, "its workers failed")
    said = running.stream
    assert isinstance(said, Said)
    assert [message.leave.left_round for message in said.messages] == [3]
    running.at_exit()
    running.on_signal(signal.SIGTERM)
    running.abandon()
    assert (len(said.messages), said.closed) == (1, 1)
    assert running.store_socket.released == 1  # type: ignore[attr-defined]


def test_success_is_said_of_a_round_that_runs_and_of_no_other(running: Talk) -> None:
    hear_end(running, 3, "n2 is gone")
    running.on_success()
    assert said_by(running) == []
    assert running.phase is PartPhase.RUNNING
    running.join()
    hear_round(running, 4)
    running.on_success()
    running.on_success()
    _, said = said_by(running)
    assert (said.succeeded.round, running.phase) == (4, PartPhase.SUCCEEDED)


def test_why_a_round_is_over_is_said_of_that_round(running: Talk) -> None:
    line = running.line
    assert line is not None
    assert running.why_over(line) == ""
    hear_end(running, 3, "n2 is gone")
    assert running.why_over(line) == "node lost: n2 is gone"
    running.join()
    hear_round(running, 4)
    assert running.why_over(line) == "a newer one has begun"
    running.hear(pb.ServerMessage(closed=pb.Closed(reason="stopped by ada")))
    assert running.why_over(line) == "stopped by ada"
    assert running.beliefs() == []
