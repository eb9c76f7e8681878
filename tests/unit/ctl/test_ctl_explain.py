"""`rdzvctl explain`: jobs that a real server has decided on, explained in sentences.

The golden files in `golden/explain` show the output: after an intended change, `pytest --rewrite`
rewrites them; then review them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_control import Ctl
from stories import STORIES, crashing, told

from rdzv.core.commands import Fail
from rdzv.core.model import KeptWorker
from rdzv.core.reason import Reason
from rdzv.ctl import as_text
from rdzv.ctl.as_text_story import explain
from rdzv.messages import StartedWorker, WorkersStarted
from rdzv.structs import replace
from rdzv.view.answers import Event
from tests.support.builders import report
from tests.support.driven import join
from tests.unit.core.test_small_scope import SETTINGS
from tests.unit.server.test_metrics import Scraped, history

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "explain"


@pytest.mark.parametrize("name", sorted(STORIES))
async def test_a_job_is_explained(name: str, request: pytest.FixtureRequest) -> None:
    story, rdzv_id = STORIES[name]
    of = await told(story, rdzv_id)
    text = explain(of.status, of.history, of.page()) + "\n"
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--rewrite"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "review the diff, then: pytest --rewrite"


@pytest.mark.quick
async def test_into_a_pipe_each_fact_is_one_line() -> None:
    of = await told(history)
    lines = explain(of.status, of.history, of.page(width=None)).splitlines()
    (ended,) = [line for line in lines if "Round 0 ended" in line]
    assert "rank 0 (local_rank 0) on n2: exit code 1: no." in ended
    assert "Restarts spent: 1 of 3. The next began 0.8 s later: " in ended


async def test_times_of_another_day_have_a_column_of_their_own() -> None:
    of = await told(history)
    page = of.page(width=100)
    later = replace(page, now_s=page.now_s + 86_400)
    lines = explain(of.status, of.history, later).splitlines()
    (began,) = [line for line in lines if "Run 1 began" in line]
    day = f"{later.at(of.history[0].unix_ms)[:16]}"
    assert began.startswith(f"  {day}  Run 1 began")
    assert lines[lines.index(began) + 1].startswith((f"  {day}  ", " " * 20))


def started(number: int, *how: str) -> WorkersStarted:
    workers = [
        StartedWorker(rank, one, "it was late" if rank else "") for rank, one in enumerate(how)
    ]
    return WorkersStarted("job-7", "run-1", number, tuple(workers))


@pytest.mark.parametrize("nodes_say", [False, True])
async def test_who_is_kept_is_told_and_why_others_are_not(*, nodes_say: bool) -> None:
    async def story(s: Scraped) -> None:
        settings = replace(SETTINGS, min_nodes=2, max_nodes=2, max_restarts=3)
        n1, n2 = await s.connect("n1"), await s.connect("n2")
        for node in (n1, n2):
            await s.say(node, join(node, (1, 1), settings=settings))
        suspect = report(exit_code=None, message="connection closed", pid=98, suspect=True)
        await s.say(n1, Fail("n1", n1.incarnation, "run-1", 0, (suspect,)))
        failed = report(rank=2, message="no", pid=99)
        await s.say(n2, Fail("n2", n2.incarnation, "run-1", 0, (failed,)))
        for node, kept in ((n1, (KeptWorker(0, 70),)), (n2, ())):
            again = join(node, (1, 1), settings=settings, run="run-1", left_round=0)
            await s.say(node, replace(again, kept=kept))
        if nodes_say:
            s.driver.reports.take(n1, started(1, "kept", "warm"))
            s.driver.reports.take(n2, started(1, "cold", "cold"))

    of = await told(story)
    said = (
        "1 of 4 workers kept, from step 70 of RANK 0; new: RANK 1,3 (ended, or not parked in "
        "time); RANK 2 (failed in the last round)"
    )
    text = explain(of.status, of.history, of.page(width=None))
    assert f"Round 1 is complete: 4 workers on n1, n2; {said}." in text
    began = "1 kept, 1 warm, 2 cold: RANK 1 on n1 is warm (it was late); RANK 3 on n2 is cold (it "
    assert (f"Its workers: {began}was late)." in text) is nodes_say
    assert "rank 0 (local_rank 0) on n1: a collective failed: connection closed" in text
    (row,) = [row for row in of.history if row.name == "RoundCompleted" and "kept" in row.text]
    assert row.fields is not None
    assert (row.fields["kept"], row.fields["source"], row.fields["resume_step"]) == (1, 0, 70)
    assert row.fields["not_kept"][1] == {"why": "failed", "workers": 1, "ranks": [2]}
    lines = as_text.status(of.status, of.page(width=None)).splitlines()
    new = "1 warm, 2 cold" if nodes_say else "3 new"
    assert f"  workers      1 kept from step 70 of RANK 0, {new}" in lines
    (row_of_n1, row_of_n2) = (line for line in lines if " seated " in line)
    assert ("1 kept, 1 warm" in row_of_n1, "2 cold" in row_of_n2) == (nodes_say, nodes_say)


async def test_a_queued_job_is_queued_and_says_so_once() -> None:
    of = await told(history)
    queued = replace(of.status, state="queued", reason=Reason("needs 2 nodes, none is free"))
    text = explain(queued, of.history, of.page(width=None))
    assert ": needs 2 nodes, none is free." in text.partition("It is queued (for ")[2]


async def test_a_history_whose_beginning_is_gone_says_so() -> None:
    of = await told(crashing, limit=30)
    text = explain(of.status, of.history, of.page(width=None))
    assert "The recorded history begins here" in text
    assert "The run stopped after" in text


async def test_a_job_without_a_history_says_what_it_does_now() -> None:
    of = await told(history)
    text = explain(of.status, (), of.page(width=None))
    assert "The server has no history of it." in text
    assert "It runs (for 12 s): 2 nodes and 4 workers run round 2" in text


async def test_events_of_a_later_version_are_told_as_they_are() -> None:
    of = await told(history)
    at_ms = of.history[-1].unix_ms
    later = Event(at_ms, of.status.run, "NodeSangASong", "n1 sang: la la")
    odd = Event(at_ms, of.status.run, "RoundCompleted", "round three came to be")
    text = explain(of.status, (*of.history, later, odd), of.page(width=None))
    assert "n1 sang: la la." in text
    assert "round three came to be." in text


async def test_hostile_texts_can_not_reach_the_terminal() -> None:
    of = await told(history)
    bad = replace(of.history[-1], name="Odd", text="\x1b[2Jgone")
    assert "\x1b" not in explain(of.status, (*of.history, bad), of.page())


@pytest.mark.quick
def test_the_command(server: str, ctl: Ctl) -> None:
    assert "nobody" in ctl("explain", "nobody", code=1).err
