"""What a stream omits because it was sent before, and what it sends again."""

from __future__ import annotations

from rdzv.core.model import Cause, RoundEnd
from rdzv.messages import Announcement, Joined, RoundOver
from tests.support.driven import a_stream

OVER = RoundOver("job-7", "run-1", 3, RoundEnd(Cause.NODE_LEFT, "n2 leaves", 0, broken=False))


def said(*messages: Announcement) -> list[Announcement]:
    """Return these messages as the receiver gets them."""
    stream = a_stream()
    for message in messages:
        stream.send(message)
    return stream.outbox.take_now()


async def test_what_only_repeats_the_last_message_about_a_job_is_left_out() -> None:
    assert said(OVER, OVER) == [OVER]


async def test_what_was_said_before_the_node_knew_its_run_is_said_again() -> None:
    joined = Joined("job-7", "run-1", 1)
    assert said(OVER, joined, OVER) == [OVER, joined, OVER]
