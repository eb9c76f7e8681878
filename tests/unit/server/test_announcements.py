"""Which nodes learn what of an adopted run: the run is announced before anything else of it."""

from __future__ import annotations

from builders import RUN, Job, join, offer, report

from rdzv.core.commands import Fail, Resume
from rdzv.core.events import RunBegan
from rdzv.core.model import Assignment, KeptWorker, RecoveryReport, Settings
from rdzv.core.rendezvous import step
from rdzv.messages import Belief, Joined, RoundOver
from rdzv.server.sessions import announcements
from rdzv.structs import replace

SETTINGS = Settings(1, 3, last_call_timeout_ms=60_000)


def reported_alone(node_id: str, round_: int) -> RecoveryReport:
    line = ("job", "former", round_, 0, 1, 0, 1, 0, 1, f"{node_id}.net", 29501, True, 0, 0)
    return RecoveryReport(Assignment(*line), SETTINGS, offer(node_id))


def test_who_waited_hears_of_an_adopted_run_before_its_line() -> None:
    """In one step the run is adopted, its round ends, and both join the next one."""
    job = Job(SETTINGS)
    job.join("n1")
    recovery = reported_alone("n2", 2)
    command = replace(
        join("n2", run="former", settings=SETTINGS, left_round=2, new_run="x"), recovery=recovery
    )
    before = job.state
    transition = step(before, command, job.now_ms)
    assert any(isinstance(event, RunBegan) for event in transition.events)
    heard = [
        message
        for node_id, message in announcements.after_step(
            before, transition.state, transition.events, 0
        )
        if node_id == "n1"
    ]
    assert isinstance(heard[0], Joined)
    assert isinstance(heard[-1], Assignment)
    assert {getattr(message, "run", "") for message in heard} == {"former"}


def test_who_runs_a_round_that_a_later_one_has_followed_elsewhere_hears_so() -> None:
    job = Job(SETTINGS)
    job.join("n1", "n2", "n3")
    run = job.membership.run
    recovery = reported_alone("n4", 9)
    before = job.state
    transition = step(before, Resume("n4", 1, run, 9, recovery), job.now_ms)
    heard = dict(announcements.after_step(before, transition.state, transition.events, 0))
    assert heard.keys() == {"n1", "n2", "n3"}
    for message in heard.values():
        assert isinstance(message, RoundOver)
        assert (message.round, message.end.reason) == (0, "round 9 has followed it")


def test_a_node_hears_which_of_its_workers_are_not_kept() -> None:
    """A hang is reported in place of its node, whose other workers are to park."""
    job = Job(replace(SETTINGS, min_nodes=2, max_nodes=2, max_restarts=3))
    job.join("n1", "n2", local_world_size=2)
    before, hung = job.state, report(3, None, "hung: RANK 3", local_rank=1)
    transition = step(before, Fail("n2", 1, RUN, 0, (hung,)), job.now_ms)
    heard = dict(announcements.after_step(before, transition.state, transition.events, 0))
    assert {n: m.culprits for n, m in heard.items() if isinstance(m, RoundOver)} == {
        "n1": (),
        "n2": (1,),
    }
    assert all(isinstance(m, RoundOver) and m.end.keep for m in heard.values())
    # One that was away at that moment receives the same when it comes back.
    belief = Belief("job-7", RUN, 0, has_workers=True)
    (over,) = announcements.missed(transition.state, "n2", belief, 0)
    assert isinstance(over, RoundOver)
    assert (over.culprits, over.end.keep) == ((1,), True)


def test_workers_of_a_round_that_another_has_followed_need_not_park() -> None:
    job = Job(replace(SETTINGS, min_nodes=1, max_nodes=2))
    job.join("n1", "n2")
    job.lost("n2")
    job.stopped("n1")
    belief = Belief("job-7", RUN, 0, has_workers=True)
    (over,) = announcements.missed(job.state, "n2", belief, 0)
    assert isinstance(over, RoundOver)
    assert (job.round.number, over.round, over.end.keep) == (1, 0, False)


def test_a_server_that_takes_over_says_again_who_is_kept() -> None:
    """Also which suspect has to end: its node may know of neither."""
    job = Job(replace(SETTINGS, min_nodes=2, max_nodes=2, max_restarts=3))
    job.join("n1", "n2", local_world_size=2)
    job.fail("n2", report(2, None, suspect=True))
    for node_id in ("n1", "n2"):
        offers = (KeptWorker(0, 70), KeptWorker(1, 69, torn=True))
        job.stopped(node_id, local_world_size=2, kept=offers)
    job.crash()
    belief = Belief("job-7", RUN, 0, has_workers=False)
    told = {n: announcements.missed(job.state, n, belief, 0)[-1] for n in ("n1", "n2")}
    lines = {n: line for n, line in told.items() if isinstance(line, Assignment)}
    assert {n: (line.kept, line.charged_suspects) for n, line in lines.items()} == {
        "n1": ((0, 1), ()),
        "n2": ((1,), (0,)),
    }
    assert {(line.source, line.resume_step) for line in lines.values()} == {(0, 70)}
