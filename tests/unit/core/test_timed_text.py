"""Times in texts keep their position, and advance."""

from __future__ import annotations

import pytest

from rdzv.core.explain import explain, view
from rdzv.core.model import JobSpec, Membership, Offer, Settings, State, Submission, Waiting
from rdzv.core.timed_text import LAST_CALL, TimedText, TimeInText, later, left, past, times_of
from rdzv.structs import replace

SETTINGS = Settings(1, 3, join_timeout_ms=600_000, last_call_timeout_ms=30_000)
NOBODY = State(Membership("a", "r", 1, SETTINGS, began_at_ms=0), short_since_ms=0)


def at(text: str) -> list[str]:
    """Return the words at which a text has its times."""
    return [text[time.at : time.at + time.length] for time in times_of(text)]


def test_texts_that_are_added_keep_their_times() -> None:
    text = "a " + past(12_000) + " ago; in " + left(588_000, "join timeout") + "." + "" + "!"
    assert text == "a 12 s ago; in 9 min 48 s.!"
    assert at(text) == ["12 s", "9 min 48 s"]
    assert at(text + text) == ["12 s", "9 min 48 s"] * 2
    assert [time.waits_for for time in times_of(text)] == [None, "join timeout"]
    assert times_of("12 s ago") == ()
    assert type(str(text)) is str


def test_they_go_on_and_can_be_asked_again() -> None:
    text = "lost " + past(59_000) + " ago: after 5 s; gives up in " + left(60_000)
    soon = later(text, times_of(text), 2_000)
    assert soon == "lost 1 min 1 s ago: after 5 s; gives up in 58 s"
    assert at(soon) == ["1 min 1 s", "58 s"]
    assert later(soon, soon.times, 600_000) == "lost 11 min 1 s ago: after 5 s; gives up in 0.0 s"
    assert later(text, times_of(text), 0) == text


@pytest.mark.parametrize(
    "times",
    [
        (TimeInText(at=90, length=1, ms=1, grows=True),),
        (TimeInText(at=0, length=90, ms=1, grows=True),),
        (
            TimeInText(at=3, length=1, ms=1, grows=True),
            TimeInText(at=1, length=1, ms=1, grows=True),
        ),
    ],
)
def test_times_that_do_not_fit_their_text_harm_nothing(times: tuple[TimeInText, ...]) -> None:
    assert later("abcdef", times, 0) in ("abcdef", "abc0.0 sef")


def test_a_reason_has_its_deadline_and_what_it_is_for() -> None:
    (deadline,) = times_of(explain(NOBODY, 12_000))
    assert (deadline.ms, deadline.grows, deadline.waits_for) == (588_000, False, "join timeout")
    submission = Submission(JobSpec(("t.py",)), "ada", at_ms=0, placed=("n1",))
    placed = replace(NOBODY.membership, submission=submission)
    said = view(replace(NOBODY, membership=placed), 12_000).reason
    assert said.endswith("; is queued again in 9 min 48 s")
    assert at(said) == ["9 min 48 s"]
    waiting = {"n1": Waiting(1, Offer("10.0.0.1"), 0)}
    one = replace(NOBODY, waiting=waiting, short_since_ms=None, enough_since_ms=0)
    (deadline,) = times_of(explain(one, 10_000))
    assert (deadline.ms, deadline.waits_for) == (20_000, LAST_CALL)


def test_formatted_it_is_a_plain_text() -> None:
    assert times_of(f"in {left(5)}") == ()
    assert isinstance("in " + left(5), TimedText)
