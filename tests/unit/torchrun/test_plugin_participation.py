"""What a node under torchrun believes of its job, round after round."""

from __future__ import annotations

import signal

import pytest

from rdzv.core.model import Settings
from rdzv.torchrun.conversation import Part, PartPhase, Talk
from rdzv.v1 import rdzv_pb2 as pb


@pytest.fixture
def part() -> Part:
    return Part("job-7", Settings(1, 2), pb.Offer(address="10.0.0.1"))


def hear_round(part: Part, number: int) -> pb.Assignment:
    line = pb.Assignment(rdzv_id="job-7", run="feed", round=number, group_world_size=1)
    part.hear(pb.ServerMessage(round_completed=line))
    return line


def hear_end(part: Part, number: int, reason: str) -> None:
    ended = pb.RoundOver(round=number, cause=pb.NODE_LOST, reason=reason)
    part.hear(pb.ServerMessage(round_ended=ended))


def test_a_round_is_over_once_for_its_first_reason_and_the_next_one_is_not(part: Part) -> None:
    for number in (4, 5):
        part.say_join(4711)
        hear_round(part, number)
        assert (part.phase, part.over) == (PartPhase.RUNNING, "")
        hear_end(part, number - 1, "an earlier one")
        assert part.over == ""
        hear_end(part, number, f"n{number} is gone")
        hear_end(part, number, "and another")
        assert part.over == f"node lost: n{number} is gone"


def test_a_round_is_taken_only_while_joining_and_never_one_before(part: Part) -> None:
    hear_round(part, 1)
    assert part.line is None
    part.say_join(1)
    hear_round(part, 3)
    part.say_join(2)
    for number in (2, 3):
        hear_round(part, number)
        assert (part.phase, part.line and part.line.round) == (PartPhase.JOINING, 3)
    assert hear_round(part, 4) == part.line


@pytest.mark.parametrize("workers_gone", [False, True])
def test_the_first_reason_to_leave_is_kept(part: Part, workers_gone: bool) -> None:
    part.say_join(1)
    hear_round(part, 3)
    part.say_leave(pb.Leave.SIGNAL, "received SIGTERM", workers_gone=False)
    again = part.say_leave(pb.Leave.FAILED, "its workers failed", workers_gone=workers_gone)
    assert (again.leave.cause, again.leave.reason) == (pb.Leave.SIGNAL, "received SIGTERM")
    assert again.leave.HasField("left_round") is workers_gone
    (belief,) = part.beliefs()
    assert (belief.phase, belief.leave) == (pb.Belief.LEAVING, again.leave)


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
    released = 0

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def talk(part: Part) -> Talk:
    made = Talk(part, Socket())  # type: ignore[arg-type]
    made.stream = Said()  # type: ignore[assignment]
    part.say_join(1)
    hear_round(part, 3)
    return made


def test_the_first_signal_is_the_one_that_counts(talk: Talk) -> None:
    talk.on_signal(signal.SIGTERM)
    talk.on_signal(signal.SIGINT)
    assert talk.signalled is signal.SIGTERM
    assert talk.round_is_over
    leaves = [message.leave for message in talk.stream.messages]  # type: ignore[union-attr]
    assert {leave.reason for leave in leaves} == {"received SIGTERM"}


def test_after_it_has_hung_up_it_says_nothing_more(talk: Talk) -> None:
    talk.end(pb.Leave.FAILED, "its workers failed")
    said = talk.stream
    assert isinstance(said, Said)
    assert [message.leave.left_round for message in said.messages] == [3]
    talk.at_exit()
    talk.on_signal(signal.SIGTERM)
    talk.abandon()
    assert (len(said.messages), said.closed) == (1, 1)
    assert talk.store_socket.released == 1  # type: ignore[attr-defined]


def test_success_is_said_of_a_round_that_runs_and_of_no_other(talk: Talk, part: Part) -> None:
    hear_end(part, 3, "n2 is gone")
    talk.on_success()
    assert talk.stream.messages == []  # type: ignore[union-attr]
    assert part.phase is PartPhase.RUNNING
    part.say_join(1)
    hear_round(part, 4)
    talk.on_success()
    talk.on_success()
    (said,) = talk.stream.messages  # type: ignore[union-attr]
    assert (said.succeeded.round, part.phase) == (4, PartPhase.SUCCEEDED)


def test_why_a_round_is_over_is_said_of_that_round(talk: Talk, part: Part) -> None:
    line = part.line
    assert line is not None
    assert talk.why_over(line) == ""
    hear_end(part, 3, "n2 is gone")
    assert talk.why_over(line) == "node lost: n2 is gone"
    part.say_join(1)
    hear_round(part, 4)
    assert talk.why_over(line) == "a newer one has begun"
    part.hear(pb.ServerMessage(closed=pb.Closed(reason="stopped by ada")))
    assert talk.why_over(line) == "stopped by ada"
    assert part.beliefs() == []
