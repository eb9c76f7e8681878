"""`rdzvctl report`: where the time of jobs went, as text, as JSON, and as an HTML page."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC
from html.parser import HTMLParser
from pathlib import Path

import control_samples
import pytest
from failing_jobs import Policy, a_world, lived
from fake_control import Capture, Ctl, FakeControl
from past_events import a_summary, an_event
from stories import STORIES, told

from rdzv.ctl import as_text_report, report_page
from rdzv.ctl.__main__ import run
from rdzv.ctl.command_line import parse_duration
from rdzv.ctl.commands.history import servers_now_ms
from rdzv.ctl.layout import Page
from rdzv.errors import InvalidRequestError
from rdzv.structs import replace
from rdzv.transport.wire import write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import Event
from rdzv.view.ledger import Ledger, LedgerPhase, ledgers_of
from rdzv.view.life import Run
from rdzv.view.reports import Report, report, spent, spent_by
from rdzv.view.restart_picture import picture
from tests.unit.view.test_ledger import TABLE, ledger_of

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "report"
PAGE = Page(width=100, colour=False, now_s=61, zone=UTC)
FAILS_TWICE = "a round that fails before it has redone all owes that to the failure before"


def of_table(name: str) -> Ledger:
    story, now_s, _ = TABLE[name]
    return ledger_of(story, now_s)


def texts() -> dict[str, str]:
    fails = of_table(FAILS_TWICE)
    before = replace(of_table("a drain costs the stop and the next start, and nothing to detect"))
    queued = of_table("a node that declines costs the wait for it, and the queue after it")
    every = [
        spent_by(a_summary("night"), [before, fails], 20_000),
        spent_by(a_summary("eval"), [queued], 20_000),
    ]
    all_jobs = report(every, 20_000, 61_000)
    nothing = report([], 0, 61_000)
    world = a_world(4, failures=12, bad=6)
    told = [an_event(kept, at_ms=at_ms) for at_ms, kept in lived(world, Policy(0, 500)).past]
    failing = a_summary("night", world.least, world.most)

    def advised(past: list[Event]) -> Report:
        found = [spent_by(a_summary("eval"), [queued], 0)]
        found += [spent(failing, past, 0, world.span_ms)]
        return report(found, 0, world.span_ms)

    return {
        "advice": as_text_report.advice(advised(told), PAGE),
        "advice_unpriced": as_text_report.advice(
            advised([one for one in told if one.name != "SnapshotsSaved"]), PAGE
        ),
        "no_advice": as_text_report.advice(nothing, PAGE),
        "fails_twice": as_text_report.ledger("night", fails, [before], PAGE),
        "no_steps": as_text_report.ledger("eval", queued, [], PAGE),
        "all": as_text_report.report(all_jobs, PAGE),
        "none": as_text_report.report(nothing, PAGE),
    }


@pytest.mark.quick
@pytest.mark.parametrize(
    "name",
    ["fails_twice", "no_steps", "all", "none", "advice", "advice_unpriced", "no_advice"],
)
def test_a_report_is_read_by_people(name: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / f"{name}.txt"
    text = texts()[name] + "\n"
    if request.config.getoption("--rewrite"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "review the diff, then: pytest --rewrite"


@pytest.mark.parametrize("name", sorted(STORIES))
async def test_what_a_server_has_decided_adds_up(name: str) -> None:
    story, rdzv_id = STORIES[name]
    of = await told(story, rdzv_id)
    for ledger in ledgers_of(of.history, of.now_ms, of.status.state):
        assert sum(ledger.phases.values()) == ledger.wall_ms
        assert sum(one.ms for one in ledger.intervals) == ledger.wall_ms
        assert as_text_report.ledger(rdzv_id, ledger, [], of.page())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "ms"),
    [("90m", 5_400_000), ("12 h", 43_200_000), ("7d", 604_800_000), ("1w", 604_800_000)],
)
def test_how_far_to_look_back(text: str, ms: int) -> None:
    assert parse_duration("--since", text) == ms


@pytest.mark.quick
@pytest.mark.parametrize("text", ["", "7", "0d", "-1d", "7 days", "d", "0.0001ms", "9999999d"])
def test_what_is_no_time_to_look_back(text: str) -> None:
    """The same holds for --expires of tokens, where 0 would be a token that never expires."""
    with pytest.raises(InvalidRequestError, match=f"--since={text} is not a time; give one"):
        parse_duration("--since", text)


# ------------------------------------------------------------------ the page


class _Reader(HTMLParser):
    """Checks that every element is closed, and collects what a browser would draw or load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.rects: list[dict[str, str | None]] = []
        self.loads: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        if tag == "rect":
            self.rects.append(dict(attrs))
        self.loads += [name for name, _ in attrs if name in ("src", "href")]
        if tag in ("script", "link", "img", "iframe"):
            self.loads.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_needs_nothing_else() -> None:
    fails = of_table(FAILS_TWICE)
    read = _Reader(report_page.ledger("night", fails, [fails], picture(Run("r", 0), 0)))
    assert read.loads == []
    text = " ".join(read.text)
    assert "worker failure" in text
    assert "url(" not in text
    both = [report_page.report(report([spent_by(a_summary("night"), [fails], 0)], 0, 61_000))]
    both.append(report_page.report(report([], 0, 1)))
    for page in both:
        assert _Reader(page).loads == []


def test_the_band_is_as_long_as_the_run() -> None:
    """Each interval is drawn in its place, also thousands that are too short to be seen."""
    fails = of_table(FAILS_TWICE)
    read = _Reader(report_page.ledger("night", fails, [], ""))
    band = [rect for rect in read.rects if rect["y"] == "0"]
    assert len(band) == len(fails.intervals)
    assert sum(float(rect["width"] or 0) for rect in band) == pytest.approx(1_000, abs=1)
    one = fails.intervals[0]
    many = tuple(
        replace(one, from_unix_ms=at_ms, until_unix_ms=at_ms + 1) for at_ms in range(30_000)
    )
    read = _Reader(report_page.ledger("night", replace(fails, intervals=many), [], ""))
    band = [rect for rect in read.rects if rect["y"] == "0"]
    assert len(band) <= 5_001
    assert sum(float(rect["width"] or 0) for rect in band) == pytest.approx(1_000, abs=2)


@pytest.mark.quick
def test_each_phase_has_a_colour() -> None:
    assert set(report_page.COLOURS) == set(LedgerPhase)
    assert len(set(report_page.COLOURS.values())) == len(LedgerPhase)


def test_no_name_becomes_markup() -> None:
    hostile = "<script>alert(1)</script>&\"'"
    fails = of_table(FAILS_TWICE)
    named = tuple(replace(cost, node_id=hostile, cause=hostile) for cost in fails.costs)
    evil = tuple(replace(one, node_id=hostile, cause=hostile) for one in fails.intervals)
    page = report_page.ledger(hostile, replace(fails, costs=named, intervals=evil), [], "")
    assert "<script" not in page
    assert _Reader(page).loads == []


# ------------------------------------------------------------------ the command


@pytest.fixture
def job(control: FakeControl, server: str) -> str:
    control.jobs["a"] = control_samples.running()
    control.history = control_samples.history()
    return "a"


def test_one_job(job: str, ctl: Ctl, tmp_path: Path) -> None:
    assert ctl("report", job).out.startswith("a  run")
    document = json.loads(ctl("report", job, "-o", "json").out)
    assert (document["version"], document["rdzv_id"]) == (1, "a")
    ledger = document["ledger"]
    assert sum(ledger["phases"].values()) == ledger["wall_ms"]
    assert list(ledger["phases"]) == [phase.value for phase in LedgerPhase]
    page = tmp_path / "a.html"
    assert (
        f"{page} has the ledger of a; open it in a browser"
        in ctl("report", job, "--html", str(page)).out
    )
    assert re.match("<!doctype html>", page.read_text())
    assert "The last restart" in page.read_text()
    # Whoever is sent the page may live elsewhere.
    assert re.search(rf'text-anchor="end">[^<]+ {time.strftime("%Z")}</text>', page.read_text())
    assert (
        "give another file"
        in ctl("report", job, "--html", str(tmp_path / "no" / "a.html"), code=1).err
    )


async def test_the_time_is_that_of_the_servers_clock() -> None:
    """The client's clock may be wrong by hours; the age of the run comes from the server."""
    story, rdzv_id = STORIES["recovers"]
    of = await told(story, rdzv_id)
    assert servers_now_ms(of.status, of.history, 0) == of.now_ms
    assert servers_now_ms(of.status, of.history[1:], 77) == 77


def test_a_run_that_is_not_kept_is_refused(job: str, ctl: Ctl) -> None:
    assert (
        "run 77 of a is not kept; runs that are: " in ctl("report", job, "--run", "77", code=1).err
    )


@pytest.mark.quick
def test_a_job_without_a_past(job: str, control: FakeControl, ctl: Ctl) -> None:
    control.history = []
    assert "no history of a is kept" in ctl("report", job, code=1).err


def test_all_jobs(job: str, ctl: Ctl, tmp_path: Path) -> None:
    assert ctl("report", "--since", "2w").out.startswith("All jobs in the last 14 d 0 h")
    document = json.loads(ctl("report", "-o", "json").out)
    assert set(document) >= {"version", "phases", "jobs", "causes", "nodes", "goodput"}
    page = tmp_path / "all.html"
    assert run(["report", "--html", str(page)]) == 0
    assert "All jobs" in page.read_text()


def test_advice_is_for_all_jobs_or_one(
    control: FakeControl, server: str, ctl: Ctl, tmp_path: Path
) -> None:
    for name in ("night", "eval"):
        control.jobs[name] = control_samples.running()
        control.jobs[name].rdzv_id = name
    world = a_world(4, failures=9)
    began_ms = round(time.time() * 1000) - world.span_ms
    control.history = [
        write(pb.Event(), an_event(kept, at_ms=began_ms + at_ms))
        for at_ms, kept in lived(world, Policy(0, 500)).past
    ]
    text = ctl("report", "--since", "20d", "--advice").out
    assert text.startswith("Advice for the last 20 d 0 h")
    assert "18 failures, 2 jobs" in text
    assert text.count("(Young/Daly)") == 2
    document = json.loads(ctl("report", "night", "--since", "20d", "--advice", "-o", "json").out)
    assert {change["rdzv_id"] for change in document["advice"]} == {"night", ""}
    assert {change["spares"] for change in document["advice"]} == {1, 2, 3, None}
    page = tmp_path / "a.html"
    assert run(["report", "night", "--since", "20d", "--advice", "--html", str(page)]) == 0
    assert "What changes would have saved" in page.read_text()
    assert "nobody" in ctl("report", "nobody", "--advice", code=1).err


def test_without_a_past_nothing_is_advised(job: str, control: FakeControl, ctl: Ctl) -> None:
    control.history = []
    assert "No job had a run in this time." in ctl("report", "--advice").out


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["a", "--since", "1d"], 2, "give JOB or --since, not both"),
        (["--run", "1"], 2, "--run needs a JOB"),
        (["a", "--run", "1", "--advice"], 2, "--run needs a JOB, and no --advice"),
        (["--since", "soon"], 1, "--since=soon is not a time; give one"),
        (["--since", "30", "--advice"], 1, "--since=30 is not a time; give one"),
    ],
)
def test_the_command_line_says_what_it_needs(
    arguments: list[str], code: int, why: str, job: str, capsys: Capture
) -> None:
    assert run(["report", *arguments]) == code
    assert why in capsys.readouterr().err
