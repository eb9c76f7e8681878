"""Who hears what of an adopted run: everybody hears of the run before anything that is of it."""

from __future__ import annotations

from builders import Job, join, offer

from rdzv.core.commands import Resume
from rdzv.core.events import RunBegan
from rdzv.core.model import RecoveryReport, Settings
from rdzv.core.rendezvous import step
from rdzv.server.engine import announcements
from rdzv.server.messages import Assignment, Joined, RoundOver
from rdzv.structs import replace

SETTINGS = Settings(1, 3, last_call_timeout_ms=60_000)


def test_who_waited_hears_of_an_adopted_run_before_its_line() -> None:
    """In one step the run is adopted, its round ends, and the next one has both of them."""
    job = Job(SETTINGS)
    job.join("n1")
    recovery = RecoveryReport(2, 0, 1, 0, 1, 0, 1, "n2.net", 29501, True, 0, SETTINGS, offer("n2"))
    command = replace(
        join("n2", run="former", settings=SETTINGS, left_round=2, new_run="x"), recovery=recovery
    )
    before = job.state
    transition = step(before, command, job.now_ms)
    assert any(isinstance(event, RunBegan) for event in transition.events)
    heard = [
        message
        for node_id, message in announcements.news(before, transition.state, transition.events, 0)
        if node_id == "n1"
    ]
    assert isinstance(heard[0], Joined)
    assert isinstance(heard[-1], Assignment)
    assert {getattr(message, "run", "") for message in heard} == {"former"}


def test_who_runs_a_round_that_a_later_one_has_followed_elsewhere_hears_so() -> None:
    job = Job(SETTINGS)
    job.join("n1", "n2", "n3")
    run = job.membership.run
    recovery = RecoveryReport(9, 0, 1, 0, 1, 0, 1, "n4.net", 29501, True, 0, SETTINGS, offer("n4"))
    before = job.state
    transition = step(before, Resume("n4", 1, run, 9, recovery), job.now_ms)
    heard = dict(announcements.news(before, transition.state, transition.events, 0))
    assert heard.keys() == {"n1", "n2", "n3"}
    for message in heard.values():
        assert isinstance(message, RoundOver)
        assert (message.round, message.end.reason) == (0, "round 9 has followed it")
