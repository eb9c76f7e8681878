"""The live page in a real Chromium: an operator's view, without ever reloading it.

Most of it uses a server whose nodes the test controls; one test uses real ones. No page may log
anything to the browser's console, or load anything from elsewhere.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from cluster import cluster
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright
from ports import free_port
from replicas import Replicas
from served import Served, served

from rdzv.core.life.runs import vacant
from rdzv.core.model import JobState, Tuning
from rdzv.core.reason import Reason, ReasonItem
from rdzv.ctl import live
from rdzv.structs import as_dict, replace
from rdzv.view.job_status import view

DEADLINE_MS = 90_000
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
BLANK = "about:blank"
LOST = "Failed to load resource"
"""Chromium's own message when a server does not answer."""
INTERRUPTED = "net::ERR_NETWORK_CHANGED"
"""Chromium ends all requests when the machine gets or loses an address, as beside tests that make
network namespaces."""
TRACEBACK = "Traceback (most recent call last):\n  loss.backward()\nMemoryError: none is left\n"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed (Debian's package chromium has it)")
    expect.set_options(timeout=DEADLINE_MS)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield started
        started.close()


class Tab:
    """A page in a context of its own, used by one test after the other: a new one takes a second.

    Each test gets it as if it were new: empty, and without anything stored.
    """

    def __init__(self, browser: Browser) -> None:
        self.page = browser.new_context().new_page()
        self.page.set_default_timeout(DEADLINE_MS)
        self.heard: Callable[[str, str], None]
        self.homes: tuple[str, ...] = ()
        self.page.on("console", lambda said: self.heard(said.type, said.text))
        self.page.on("pageerror", lambda error: self.heard("error", str(error)))
        self.page.on("request", lambda asked: self._asks(asked.url))
        self.page.on("dialog", lambda dialog: self.heard("dialog", dialog.message))

    def _asks(self, url: str) -> None:
        if not url.startswith((*self.homes, BLANK)):
            self.heard("asks elsewhere", url)

    def clear(self) -> None:
        """Forget the page and all that it has stored."""
        self.page.evaluate("localStorage.clear(); sessionStorage.clear()")
        self.page.context.clear_cookies()
        self.page.goto(BLANK)


class Open:
    """Opens pages, and collects all their errors."""

    def __init__(self, browser: Browser, free: list[Tab]) -> None:
        self._browser = browser
        self._free = free
        self._used: list[Tab] = []
        self.complaints: list[str] = []

    def __call__(
        self,
        url: str,
        allowed: str = "",
        size: tuple[int, int] = (1280, 900),
        color_scheme: Literal["light", "dark"] = "light",
    ) -> Page:
        """Open a page, whose errors may be of the allowed kinds."""
        interrupted: list[str] = []

        def heard(kind: str, text: str) -> None:
            if INTERRUPTED in text:
                interrupted.append(text)
            elif not (allowed and allowed in text):
                self.complaints.append(f"{kind}: {text}")

        tab = self._free.pop() if self._free else Tab(self._browser)
        self._used.append(tab)
        tab.homes, tab.heard = (f"{url.partition('/#')[0]}/",), heard
        page = tab.page
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=color_scheme)
        try:
            page.goto(url)
        except Error as error:
            if INTERRUPTED not in error.message:
                raise
            page.goto(url)
        if interrupted:
            page.reload()
        # Everything checked here has come over the stream, and the page was loaded once.
        page.evaluate("window.loadedOnce = true")
        return page

    def add_home(self, page: Page, url: str) -> None:
        """Let a page go to another server, too: until it is there it asks the first one again."""
        (tab,) = (tab for tab in self._used if tab.page is page)
        tab.homes += (f"{url}/",)

    def close(self) -> None:
        """Close all pages."""
        while self._used:
            tab = self._used.pop()
            tab.clear()
            self._free.append(tab)


@pytest.fixture(scope="module")
def free_tabs() -> list[Tab]:
    return []


@pytest.fixture
def open_page(browser: Browser, free_tabs: list[Tab]) -> Iterator[Open]:
    """Open pages; in the end, none has logged an error or contacted another server."""
    opened = Open(browser, free_tabs)
    yield opened
    opened.close()
    assert not opened.complaints


@contextmanager
def to_the_end(open_page: Open, server: AbstractContextManager[Served]) -> Iterator[Served]:
    """Serve until the pages are closed: a page reports an error if its server goes first."""
    with server as s:
        yield s
        open_page.close()


@contextmanager
def fleet(open_page: Open) -> Iterator[Served]:
    """A job of three nodes that runs, and one that waits for a second."""
    with to_the_end(open_page, served()) as s:
        s.join("night", "n1", "n2", "n3", nodes=(2, 3))
        s.join("waits", "n4", nodes=(2, 4))
        yield s


def go(page: Page, where: str) -> None:
    page.evaluate("where => { location.hash = where }", where)


def job_row(page: Page, name: str) -> Any:
    return page.locator("tbody tr").filter(has=page.get_by_role("link", name=name, exact=True))


def once(page: Page) -> None:
    assert page.evaluate("window.loadedOnce") is True, "the page was loaded anew"


# ------------------------------------------------------------------ what is shown


@pytest.mark.parametrize("grafana", [None, 'https://grafana.example.org/"sub"/'])
def test_a_job_links_to_its_dashboard_if_there_is_a_grafana(
    grafana: str | None, open_page: Open
) -> None:
    with to_the_end(open_page, served(grafana=grafana)) as s:
        s.join("night", "n1")
        page = open_page(f"{s.url}/#/job/night")
        expect(page.get_by_role("heading", name="night")).to_be_visible()
        link = page.get_by_role("link", name="Grafana")
        if grafana is None:
            expect(link).to_have_count(0)
        else:
            url = 'https://grafana.example.org/"sub"/d/rdzv-job?var-rdzv_id=night'
            expect(link).to_have_attribute("href", url)


def test_a_server_that_is_open_to_everyone_is_warned_of(open_page: Open) -> None:
    with to_the_end(open_page, served()) as s:
        expect(open_page(s.url).locator("#insecure")).to_be_hidden()
        s.expose("nothing here is encrypted or authenticated")
        expect(open_page(s.url).locator("#insecure")).to_have_text(
            "Insecure: nothing here is encrypted or authenticated; anyone who can reach "
            "10.0.0.5:29400 can run and end jobs."
        )


def test_a_failure_is_seen_without_reloading(open_page: Open) -> None:
    with fleet(open_page) as s:
        page = open_page(s.url)
        expect(page.locator("#link-text")).to_have_text("live")
        expect(job_row(page, "night")).to_contain_text("running")
        expect(job_row(page, "waits")).to_contain_text("waiting for 1 more node (have 1 of 2:4)")
        # What needs attention comes first.
        expect(page.locator("tbody tr").first).to_contain_text("waits")
        s.fail("night", "n2", "MemoryError: none is left", TRACEBACK)
        expect(job_row(page, "night")).to_contain_text("stopping")
        expect(page.locator("#said")).to_contain_text("job night is stopping")

        page.get_by_role("link", name="night", exact=True).click()
        expect(page).to_have_title("night: stopping · rdzv")
        expect(page.locator(".tile")).to_have_count(3)
        expect(page.locator(".tile").first).to_have_attribute(
            "title", "GROUP_RANK 0, n1, stopping, RANK 0–1"
        )
        s.rejoin("night")
        expect(page.locator(".head .chip")).to_have_text("running")
        expect(page.locator(".failure")).to_contain_text("MemoryError: none is left")
        expect(page.get_by_label("Traceback")).to_have_text(TRACEBACK)
        rounds = page.locator(".rounds tbody tr")
        expect(rounds).to_have_count(2)
        expect(rounds.nth(1)).to_contain_text("worker failure")
        expect(rounds.nth(1)).to_contain_text("1 of 3")
        # The picture of the restart says who failed, in words, too.
        told = page.locator(".restarts desc")
        expect(told).to_contain_text("Round 0 ended (worker failure); rank 2 (local_rank 0) on n2")
        expect(page.locator(".restarts title", has_text="RANK 2 on n2: new")).to_have_count(1)
        s.progress("night", "n1", (0, 1200, 2.5), (1, 1204, 2.5))
        expect(page.locator(".progress")).to_contain_text("step 1,200–1,204, 2.50 steps/s")
        expect(page.locator(".progress")).to_contain_text("slowest: RANK 0, 4 steps behind")
        expect(page.locator(".lag title").first).to_have_text("RANK 0: step 1,200, 4 steps behind")
        once(page)


def test_a_straggler_is_named(open_page: Open) -> None:
    with to_the_end(open_page, served(straggler_after_ms=1)) as s:
        s.join("night", "n1", "n2", "n3", nodes=(2, 3))
        page = open_page(f"{s.url}/#/job/night")
        facts = page.locator(".job > .facts")
        expect(facts).to_contain_text("Restarts")
        expect(facts).not_to_contain_text("Straggling")
        for step in (10, 20):
            for rank, node, rate in ((0, "n1", 2.5), (2, "n2", 2.5), (4, "n3", 0.5)):
                s.progress("night", node, (rank, step, rate))
            page.wait_for_timeout(500)  # Rates are compared now and then.
        s.progress("night", "n3", (4, 30, 0.5))
        expect(facts).to_contain_text("RANK 4 (2.00 s a step, the median 0.400 s)")


def test_what_a_failure_would_cost_is_told_of_workers_and_of_a_node(open_page: Open) -> None:
    with to_the_end(open_page, served()) as s:
        s.join("night", "n1", "n2", nodes=(2, 2))
        page = open_page(f"{s.url}/#/job/night")
        facts = page.locator(".job > .facts")
        s.progress("night", "n1", (0, 52, 2.5))
        s.saved("night", "n1", (40, 0), (40, 1), (50, 0))
        s.saved("night", "n2", (40, 1), (40, 0), (50, 1))
        expect(facts).to_contain_text("2 steps if all workers fail; at most 12 steps if all")
        alone = "all nodes are on one machine, and of one topology"
        expect(facts).to_contain_text(
            "step 40, if any one node is lost; "
            f"step 50 is whole only with n1 ({alone}), n2 ({alone})"
        )
        s.saved("night", "n1", (50, 0))
        s.saved("night", "n2", (50, 1), (50, 0))
        expect(facts).to_contain_text(
            "perhaps no step, if one node is lost; step 50 is whole only with n2"
        )


def test_where_the_time_went_is_told_and_drawn(open_page: Open) -> None:
    with fleet(open_page) as s:
        page = open_page(f"{s.url}/#/job/night")
        card = page.locator("section[aria-labelledby=ledger]")
        expect(card).to_contain_text("No progress is reported")
        expect(card.locator("tbody tr", has_text="training")).to_have_count(1)
        s.progress("night", "n1", (0, 100, 2.5))
        expect(card.locator("tbody tr", has_text="starting")).to_have_count(1)
        expect(card).not_to_contain_text("No progress is reported")
        s.fail("night", "n2", "MemoryError: none is left", TRACEBACK)
        s.rejoin("night")
        expect(card.locator("tbody tr", has_text="loading")).to_have_count(1)
        cost = page.locator("section[aria-labelledby=cost]")
        expect(cost).to_contain_text("worker failure on n2once")
        expect(cost.locator("li", has_text="the start")).to_have_count(1)
        expect(card.locator(".band rect[data-phase=loading] title")).to_contain_text(
            "round 1: worker failure on n2"
        )
        # One run: there is none to choose.
        expect(card.get_by_label("Run")).to_be_hidden()
        s.progress("night", "n1", (0, 101, 2.5))
        expect(card.locator(".band rect").last).to_have_attribute("data-phase", "training")
        expect(card).to_contain_text("with workers all new (once)")
        page.get_by_role("link", name="Lost time").click()
        causes = page.get_by_label("Which causes cost most")
        expect(causes.locator("tr", has_text="worker failure")).to_have_count(1)
        advice = page.get_by_label("What changes would have saved, in node-hours")
        expect(advice.locator("tr", has_text="another node in place of n2")).to_contain_text(
            "too few cases: 1"
        )
        # The one that has lost more comes first, which depends on how long this test takes.
        jobs = page.get_by_label("Jobs").get_by_role("link")
        expect(jobs).to_have_count(2)
        assert {*jobs.all_inner_texts()} == {"night", "waits"}
        page.get_by_label("Which nodes cost most").get_by_role("link", name="n2").click()
        expect(page.locator("h1")).to_have_text("n2")
        once(page)


def test_kept_warm_and_cold_workers_are_told_apart_and_each_recovery_by_phase(
    open_page: Open,
) -> None:
    with to_the_end(open_page, served()) as s:
        s.join("night", "n1", "n2", nodes=(2, 2))
        page = open_page(f"{s.url}/#/job/night")
        rounds = page.locator(".rounds tbody tr")
        facts, tiles = page.locator(".job > .facts"), page.locator(".tile")
        for node_id in ("n1", "n2"):
            s.started("night", node_id, "cold", "cold")
        expect(rounds.locator("[data-of=workers]")).to_have_text(["4 cold"])
        expect(rounds.locator('[data-of="came after"]')).to_have_text([""])
        s.progress("night", "n1", (0, 100, 2.5))
        expect(page.locator(".progress")).to_contain_text("step 100")

        s.fail("night", "n2", "MemoryError: none is left", TRACEBACK)
        s.rejoin("night", kept_on=["n1"])
        s.started("night", "n1", "kept", "kept")
        s.started("night", "n2", "warm", "cold", why="it did not park in time")
        expect(rounds.locator("[data-of=workers]")).to_have_text(
            ["2 kept, 1 warm, 1 cold", "4 cold"]
        )
        expect(facts).to_contain_text("2 kept, 1 warm, 1 cold")
        expect(tiles.nth(0)).to_contain_text("2 kept")
        expect(tiles.nth(1)).to_have_attribute("title", re.compile("workers: 1 warm, 1 cold$"))
        came = rounds.nth(0).locator('[data-of="came after"]')
        expect(came).to_have_text(re.compile(r"^stop \d+\.\d s, form \d+\.\d s$"))
        s.progress("night", "n1", (0, 101, 2.5))
        expect(came).to_have_text(re.compile(r"form \d+\.\d s, first step \d+\.\d s$"))
        expect(page.locator("section[aria-labelledby=history]")).to_contain_text(
            "is warm (it did not park in time)"
        )
        ledger = page.locator("section[aria-labelledby=ledger]")
        expect(ledger).to_contain_text("with workers some kept, others cold (once)")
        expect(ledger.locator("tbody tr", has_text="loading")).to_have_count(1)
        once(page)


RECOVERY = (
    (1_000, "RoundCompleted", {"round": 0, "world_size": 2}),
    (1_500, "FirstStepMade", {"round": 0, "age_ms": 100}),
    (9_000, "RoundEnded", {"round": 0, "cause": "worker failure", "reason": "rank 1"}),
    (9_200, "RoundSettled", {"round": 0, "cause": "worker failure", "reason": "", "restarts": 1}),
    (9_300, "RoundCompleted", {"round": 1, "world_size": 2}),
    (9_350, "WorkersStarted", {"round": 1, "kept": 1, "warm": 1, "cold": 0}),
    (10_800, "FirstStepMade", {"round": 1, "age_ms": 500}),
    (13_300, "LostStepsRedone", {"round": 1, "age_ms": 0}),
)


def test_a_recovery_has_its_phases_from_the_history(open_page: Open) -> None:
    events = [{"unix_ms": at, "run": "r", "name": n, "fields": f} for at, n, f in RECOVERY]
    with fleet(open_page) as s:
        first, second = open_page(s.url).evaluate(
            """async events => {
              const { roundsOf } = await import("/web/rounds.js");
              return roundsOf(events, "r").map((round) => [round.workers, round.steps]);
            }""",
            events,
        )
    assert first == ["", []]
    took = [["stop", 200], ["form", 100], ["first step", 1_000], ["redo", 3_000]]
    assert second == ["1 kept, 1 warm", took]


def test_a_hang_is_told_and_what_all_workers_did_can_be_read(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdzv.server.diagnosis.reported_hangs.GATHER_MS", 100)
    monkeypatch.setattr("rdzv.server.diagnosis.stack_collection.ANSWER_MS", 600_000)
    with to_the_end(open_page, served()) as s:
        s.join("night", "n1", "n2", nodes=(2, 2))
        s.lines[2] = 7
        page = open_page(f"{s.url}/#/job/night")
        card = page.locator("section[aria-labelledby=stacks]")
        expect(page.locator(".head .chip")).to_have_text("running")
        s.hang("night", "n1", 0, 1)
        hanging = page.locator(".job > .hanging")
        expect(hanging.locator(".chip")).to_have_text("hangs")
        expect(hanging).to_contain_text("n1: workers hang in round 0: RANK 0")
        expect(page.locator("#said")).to_contain_text("Job night hangs: n1: workers hang")
        expect(card.get_by_role("button", name="Show")).to_be_hidden()
        s.let_look()
        summary = "RANK 0-1,3 in step at train.py:41; RANK 2 in step at train.py:7"
        expect(card).to_contain_text(summary)
        expect(hanging).to_be_hidden()
        s.rejoin("night")
        expect(page.locator(".failure")).to_contain_text("hung: RANK 0-1,3 in step")
        # The hang is reported further, and can be read while the next round runs.
        card.locator("summary").first.click()
        card.get_by_role("button", name="Show the stacks of round 0").click()
        groups = card.locator(".groups details")
        expect(groups).to_have_count(2)
        expect(groups.locator("summary").first).to_have_text("RANK 0-1,3 in step at train.py:41")
        expect(card.get_by_label("Stack of RANK 2")).to_have_text(
            "step (/home/ada/train.py:7)\n<module> (/home/ada/train.py:90)"
        )
        once(page)
        # Present stacks can be requested at any time.
        card.get_by_role("button", name="Take stacks and collectives now").click()
        expect(card.locator("[role=status]")).to_have_text("Of round 1.")
        expect(card.get_by_label("Stack of RANK 2")).to_be_visible()


def test_a_job_that_hangs_stands_out_of_the_fleet(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdzv.server.diagnosis.reported_hangs.GATHER_MS", 100)
    monkeypatch.setattr("rdzv.server.diagnosis.stack_collection.ANSWER_MS", 600_000)
    with to_the_end(open_page, served()) as s:
        s.join("night", "n1", "n2", nodes=(2, 2))
        s.join("day", "n3", nodes=(1, 1))
        page = open_page(f"{s.url}/#/")
        row = job_row(page, "night")
        expect(row.locator(".chip")).to_have_text("running")
        s.hang("night", "n1", 0, 1)
        expect(row.locator(".chip")).to_have_text("hangs")
        expect(row.locator(".why")).to_have_text("hangs: RANK 0-1: no step")
        # The time for which it has been running says nothing of that.
        expect(row.locator("[data-of=for]")).to_have_text("")
        expect(page.locator("#said")).to_contain_text("job night hangs")
        expect(job_row(page, "day").locator(".chip")).to_have_text("running")
        only = page.locator(".tally").filter(has_text="hangs")
        only.click()
        expect(page.locator("tbody tr")).to_have_count(1)
        only.click()
        expect(page.locator("tbody tr")).to_have_count(2)
        s.let_look()
        expect(row.locator(".chip")).to_have_text("stopping")
        once(page)


ITEM = ReasonItem("its stream ended", "n3", "away", "its seat is kept for", 12_000)
REASONS = (
    Reason("waiting for 1 more node (have 1 of 2)", "gives up in", 588_000, (ITEM,)),
    Reason("\U0001f642 quoted", "gives up in 12 s, said a worker"),
    Reason("no nodes", items=(ReasonItem("why"), ReasonItem("why", state="round 3 ended"))),
)


def test_a_reason_ages_as_it_does_in_rdzvctl(open_page: Open) -> None:
    with fleet(open_page) as s:
        page = open_page(s.url)
        aged = page.evaluate(
            """async reasons => {
              const words = await import("/web/words.js");
              return reasons.map((reason) => [
                words.reasonLine(reason.headline, reason, 2000),
                ...reason.items.map((item) => words.itemLine(item, 2000))]);
            }""",
            [as_dict(one) for one in REASONS],
        )
    later = [live.later(one, 2_000) for one in REASONS]
    assert aged == [[one.line, *map(str, one.items)] for one in later]


NODE = {"state": "connected", "state_age_ms": 9_000, "cordoned": False}
MARKS = (
    (NODE, ["connected", 9_000], []),
    (
        NODE | {"drain": "draining", "drain_age_ms": 4_000, "drain_left_ms": 61_000},
        ["draining", 4_000],
        ["draining: no reason was given, 50 s left"],
    ),
    (
        NODE | {"cordoned": True, "cordon_reason": "a fan", "cordon_age_ms": 3_000},
        ["cordoned", 3_000],
        ["cordoned: a fan"],
    ),
    (
        NODE
        | {"unhealthy": "no disk", "unhealthy_age_ms": 2_000}
        | {"quarantine": "5 faults", "quarantine_age_ms": 1_000, "quarantine_left_ms": 10_000},
        ["unhealthy", 2_000],
        ["unhealthy: no disk", "quarantined: 5 faults, 0 s left"],
    ),
    (
        NODE | {"state": "away", "cordoned": True},
        ["away", 9_000],
        ["cordoned: no reason was given"],
    ),
)


def test_a_node_has_the_age_of_the_state_that_is_shown(open_page: Open) -> None:
    """And the time that is left goes on, here ten seconds after it was received."""
    with to_the_end(open_page, served()) as s:
        shown = open_page(s.url).evaluate(
            """async nodes => {
              const { nodeMark, nodeNotes } = await import("/web/words.js");
              const at = Date.now() - 10_500;
              return nodes.map((node) => [nodeMark(node), nodeNotes({ ...node, at })]);
            }""",
            [node for node, _, _ in MARKS],
        )
    assert shown == [[mark, notes] for _, mark, notes in MARKS]


def test_a_node_and_its_jobs(open_page: Open) -> None:
    with fleet(open_page) as s:
        page = open_page(f"{s.url}/#/node/n1")
        page_jobs = page.locator(".joblist a")
        expect(page_jobs).to_contain_text("night")
        s.join("other", "n1")
        expect(page_jobs).to_have_count(2)
        s.fail("night", "n1", "MemoryError: none is left")
        page.get_by_role("button", name="Read what is kept").click()
        past = page.locator("section[aria-labelledby=past] tbody tr")
        expect(past.filter(has_text="NodeJoined")).to_have_count(2)
        page.get_by_label("only what went wrong").check()
        expect(past.filter(has_text="NodeJoined")).to_have_count(0)
        expect(past.filter(has_text="MemoryError: none is left").first).to_contain_text("night")
        go(page, "#/nodes")
        expect(page.locator("tbody tr")).to_have_count(4)
        s.lose("n4")
        expect(page.locator("tbody tr").first).to_contain_text("away")
        go(page, "#/node/nobody")
        expect(page.locator(".empty")).to_contain_text("No node nobody is known here")
        once(page)


def test_logs_are_read_and_followed(open_page: Open) -> None:
    with fleet(open_page) as s:
        s.logs["n1"] = b"epoch 1\nepoch 2\n"
        s.logs["n2"] = b"of another rank\n"
        page = open_page(f"{s.url}/#/job/night")
        log = page.get_by_label("What the workers have written")
        page.locator(".logs summary").click()
        expect(log).to_have_text("epoch 1\nepoch 2\n")
        page.get_by_label("with", exact=True).fill("EPOCH 2")
        page.keyboard.press("Enter")
        expect(log).to_have_text("epoch 2\n")
        page.get_by_label("with", exact=True).fill("")
        page.get_by_label("RANK", exact=True).fill("2")
        page.keyboard.press("Enter")
        expect(log).to_have_text("of another rank\n")
        page.get_by_label("follow").check()
        expect(page.locator(".logs [role=status]")).to_have_text("Following.")
        page.get_by_label("follow").uncheck()
        page.get_by_label("RANK", exact=True).fill("99")
        page.get_by_label("RANK", exact=True).press("Tab")
        expect(log).to_have_text("of another rank\n")


# ------------------------------------------------------------------ when the server goes


def test_the_page_says_when_it_is_stale_and_comes_back_by_itself(open_page: Open) -> None:
    with fleet(open_page) as s:
        page = open_page(s.url, LOST)
        expect(job_row(page, "night")).to_contain_text("running")
        s.stop_http()
        expect(page.locator("#link-text")).to_have_text("reconnecting")
        expect(page.locator("#banner")).to_contain_text("Not live: ")
        expect(page.locator("#banner")).to_contain_text("old. Connecting again.")
        # The last known data is still shown.
        expect(job_row(page, "night")).to_contain_text("running")
        s.fail("night", "n2", "MemoryError")
        s.start_http()
        expect(page.locator("#link-text")).to_have_text("live")
        expect(job_row(page, "night")).to_contain_text("stopping")
        expect(page.locator("#banner")).to_be_hidden()
        once(page)


def test_the_page_of_a_server_that_stands_by_links_the_one_that_leads(open_page: Open) -> None:
    """Not its own, which is what all servers are to a browser behind a tunnel."""
    with fleet(open_page) as s:
        page = open_page(s.url, LOST)
        expect(job_row(page, "night")).to_contain_text("running")
        refused = {"code": "NotLeaderError", "message": "it stands by", "leader": "n2:29400"}
        one = {"address": "n2:29400", "leads": True, "page": "http://n2:29480", "insecure": None}
        page.route("**/api/v1/nodes", lambda route: route.fulfill(status=503, json=refused))
        page.route("**/api/v1/servers", lambda route: route.fulfill(json={"servers": [one]}))
        s.stop_http()
        link = page.get_by_role("link", name="Open the page of the server that leads")
        expect(link).to_have_attribute("href", "http://n2:29480/")
        expect(page.locator("#banner")).to_contain_text("Not live: it stands by.")
        go(page, "#/nodes")
        expect(link).to_have_attribute("href", "http://n2:29480/#/nodes")
        one["page"], refused["leader"] = s.url, "n3:29400"
        expect(link).to_be_hidden()
        page.unroute_all()


def test_a_page_leads_from_each_server_to_the_one_that_leads(
    open_page: Open, tmp_path: Path
) -> None:
    with Replicas.running(tmp_path, 1) as c:
        leader = c.wait_for_leader()
        other = next(address for address in c.addresses if address != leader.address)
        page = open_page(f"{c.http[other]}/#/nodes", LOST)
        expect(page.locator("#banner")).to_contain_text(f"the one at {leader.address} leads")
        open_page.add_home(page, c.http[leader.address])
        page.get_by_role("link", name="Open the page of the server that leads").click()
        expect(page.locator("#link-text")).to_have_text("live")
        assert page.url == f"{c.http[leader.address]}/#/nodes"
        c.kill_replica(leader.address)
        link = page.get_by_role("link", name="Open the page of another server")
        assert link.get_attribute("href") in {f"{c.http[a]}/#/nodes" for a in c.rdzvds}
        open_page.close()


def test_a_node_with_a_long_past_is_readable_on_a_phone(open_page: Open) -> None:
    """Its events wrap, and only the first are drawn; of its jobs, the table of nodes has a few."""
    message = "torch.distributed.DistBackendError: NCCL error in: /opt/pytorch/torch/csrc/x.cpp"
    with to_the_end(open_page, served()) as s:
        for number in range(10):
            s.join(f"sweep-{number:03}", "gpu-01")
            s.fail(f"sweep-{number:03}", "gpu-01", message)
        page = open_page(f"{s.url}/#/node/gpu-01", size=(400, 800))
        past = page.locator("section[aria-labelledby=past] tbody tr")
        expect(past).to_have_count(25)
        assert page.evaluate("document.documentElement.scrollHeight") < 5_000
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        more = page.get_by_role("button", name=re.compile("Show [0-9]+ more of"))
        more.click()
        expect(more).to_be_hidden()
        assert past.count() > 25
        go(page, "#/nodes")
        expect(page.locator(".joblist a")).to_have_count(6)
        expect(page.locator("td.jobs small").last).to_have_text("and 4 more")
        # There are no GPUs, and so there is no column.
        expect(page.get_by_text("GPUs free")).to_be_hidden()


def test_a_job_that_is_not_known_is_told_so(open_page: Open) -> None:
    with fleet(open_page) as s:
        page = open_page(f"{s.url}/#/job/nobody", LOST)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        expect(page.locator("#main .empty")).to_have_text(
            "no job nobody is known here; rdzvctl list shows those that are."
        )
        expect(page.locator("#main .empty code")).to_have_text("rdzvctl list")
        expect(page.locator("#banner")).to_be_hidden()
        # It was requested without a pause: a stream and a request, at first twice a second.
        page.wait_for_timeout(4_000)
        assert len(asked) <= 2, asked
        # It is followed from the moment it exists.
        s.join("nobody", "n9")
        expect(page.locator(".head .chip")).to_have_text("running")


# ------------------------------------------------------------------ for everyone


@pytest.mark.parametrize("where", ["#/", "#/nodes", "#/job/night", "#/node/n1"])
def test_a_phone_shows_one_column(open_page: Open, where: str) -> None:
    with fleet(open_page) as s:
        s.fail("night", "n2", "M" * 300, TRACEBACK)
        page = open_page(f"{s.url}/{where}", size=(360, 740))
        expect(page.locator("#link-text")).to_have_text("live")
        expect(page.locator("#main .chip:visible").first).to_be_visible()
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 360, f"{where} is {wide} wide"


SIZES = ((1280, 900), (400, 800))
PAGES = (
    *("#/", "#/nodes", "#/report", "#/job/night", "#/job/done", "#/job/waits", "#/job/nobody"),
    *("#/node/n1", "#/node/n3", "#/node/nobody", "web/runbook.html"),
)
# Only colors differ in the dark.
AXE = """async (rules) => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  const { violations } = await axe.run(rules ? { runOnly: rules } : {});
  return violations.map((one) => [one.id, one.nodes[0].html]);
}"""


def test_axe_finds_nothing_on_any_page(browser: Browser) -> None:
    """At two widths, in both themes, with all that can be opened open; none scrolls sideways."""
    if (spec := importlib.util.find_spec("axe_playwright_python")) is None or not spec.origin:
        pytest.skip("axe-core is missing: it comes with `make setup`")
    with served() as s, browser.new_context(bypass_csp=True) as context:
        context.add_init_script(path=Path(spec.origin).parent / "axe.min.js")
        s.join("night", "n1", "n2", "n3", "n4", nodes=(2, 4))
        s.progress("night", "n1", (0, 1200, 2.5), (1, 1204, 2.5))
        s.fail("night", "n2", "M" * 300, TRACEBACK)
        s.rejoin("night", kept_on=["n1", "n3", "n4"])
        s.lose("n3")
        s.join("done", "n4")
        s.succeed("done")
        s.join("waits", "n5", nodes=(2, 4))
        page, found = context.new_page(), []
        page.set_default_timeout(DEADLINE_MS)
        for where in PAGES:
            page.goto(f"{s.url}/{where}")
            expect(page.locator("h1")).to_be_visible()
            if where == "#/job/night":
                expect(page.locator(".restarts svg")).to_be_visible()
            for (width, height), scheme in itertools.product(SIZES, ("light", "dark")):
                page.set_viewport_size({"width": width, "height": height})
                page.emulate_media(color_scheme=cast("Any", scheme))
                rules = ["color-contrast"] if scheme == "dark" else None
                found += [(where, width, scheme, *one) for one in page.evaluate(AXE, rules)]
                wide = page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, f"{where} is {wide} wide"
        assert found == []


def test_light_and_dark_follow_the_system_or_the_button(open_page: Open) -> None:
    def background(page: Page) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    with fleet(open_page) as s:
        light = open_page(s.url, color_scheme="light")
        dark = open_page(s.url, color_scheme="dark")
        assert background(light) != background(dark)
        button = light.get_by_role("button", name="Theme: auto")
        for name, like in (("light", light), ("dark", dark)):
            button.click()
            button = light.get_by_role("button", name=f"Theme: {name}")
            expect(button).to_be_visible()
            if name == "dark":
                assert background(light) == background(like)
        light.reload()
        expect(light.get_by_role("button", name="Theme: dark")).to_be_visible()
        assert background(light) == background(dark)


def test_everything_is_reached_by_keyboard(open_page: Open) -> None:
    with fleet(open_page) as s:
        page = open_page(s.url)
        expect(page.locator("tbody tr")).to_have_count(2)
        focused = page.locator(":focus")
        page.keyboard.press("Tab")
        expect(focused).to_have_text("Skip to the content")
        expect(focused).to_be_in_viewport()
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_be_focused()
        names = []
        for _ in range(14):
            page.keyboard.press("Tab")
            names.append(focused.evaluate("one => one.textContent || one.id"))
            outline = focused.evaluate("one => getComputedStyle(one).outlineStyle")
            assert outline != "none", f"nothing shows that {names[-1]} has the focus"
            if names[-1] == "Job":
                page.keyboard.press("Enter")
                head = page.locator("th[aria-sort=ascending]")
                expect(head).to_have_text("Job")
            if names[-1] == "night":
                break
        assert names[-1] == "night", names
        page.keyboard.press("Enter")
        expect(page.locator("#main")).to_be_focused()
        # All tiles are one tab stop; arrow keys go from one to the next.
        expect(page.locator(".tile")).to_have_count(3)
        while focused.get_attribute("class") != "tile":
            if focused.inner_text().startswith("Nodes"):
                page.keyboard.press("Enter")
            page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        expect(focused).to_contain_text("n2")
        page.keyboard.press("End")
        expect(focused).to_contain_text("n3")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("n3")
        # The landmarks that a screen reader uses.
        for role in ("banner", "navigation", "main", "contentinfo"):
            expect(page.get_by_role(role)).to_have_count(1)
        expect(page.get_by_role("heading", level=1)).to_have_count(1)


# ------------------------------------------------------------------ what strangers have written

ATTACK = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"


class Watching:
    """Jobs that are only watched: their names are a stranger's choice."""

    def view(self, rdzv_id: str) -> Any:
        if rdzv_id != ATTACK:
            return None
        shown = view(vacant(rdzv_id, Tuning()), 0)
        return replace(
            shown, run="c10d", backend="c10d", state=JobState.RUNNING, reason=Reason(ATTACK)
        )

    def views(self) -> tuple[Any, ...]:
        return (self.view(ATTACK),)


def test_what_strangers_have_written_stays_text(open_page: Open) -> None:
    with to_the_end(open_page, served(Watching())) as s:
        s.logs["n1"] = f"{ATTACK}\n</pre>{ATTACK}\x1b[31m\n".encode()
        s.join("night", "n1")
        s.fail("night", "n1", ATTACK, f"Traceback {ATTACK}\n")
        s.rejoin("night")
        page = open_page(s.url)
        expect(job_row(page, ATTACK)).to_contain_text(ATTACK)
        page.get_by_role("link", name=ATTACK, exact=True).click()
        expect(page.locator("h1")).to_have_text(ATTACK)
        expect(page.locator(".head .chip")).to_have_text("running")
        expect(page).to_have_title(f"{ATTACK}: running · rdzv")
        go(page, "#/job/night")
        expect(page.locator(".message")).to_have_text(ATTACK)
        page.locator(".logs summary").click()
        expect(page.get_by_label("What the workers have written")).to_contain_text(ATTACK)
        page.locator("details summary").last.click()
        expect(page.locator("section[aria-labelledby=history]")).to_contain_text("onerror")
        for where in ("#/job/%", f"#/node/{ATTACK}", "#/node/%3Cimg%20src=x%20onerror=alert(1)%3E"):
            go(page, where)
            expect(page.locator("h1")).to_be_visible()
        assert page.evaluate("window.pwned") is None
        assert page.locator("#main img, #main script").count() == 0
        # If text could become HTML, the browser would still refuse it.
        page = open_page(s.url, "requires 'TrustedHTML'")
        refused = page.evaluate(
            "() => { try { document.body.innerHTML = '<b>' } catch (e) { return e.name } }"
        )
        assert refused == "TypeError"


# ------------------------------------------------------------------ a large fleet


def test_500_nodes_and_2000_jobs(open_page: Open) -> None:
    with to_the_end(open_page, served()) as s:
        nodes = [f"n{number:03d}" for number in range(500)]
        s.join_each({f"job-{number:04d}": nodes[number % 500] for number in range(2000)})
        s.join("huge", *nodes)
        page = open_page(s.url)
        expect(page.locator(".count")).to_have_text("2,001 jobs")
        assert page.locator("tbody tr").count() <= 400, "not all that is known is drawn"
        page.get_by_role("searchbox").fill("job-1999")
        expect(page.locator("tbody tr")).to_have_count(1)
        page.get_by_role("searchbox").fill("")
        # A change of one job updates its own row, and no other.
        expect(job_row(page, "job-0001")).to_be_visible()
        page.evaluate(
            """() => {
              window.touched = new Set();
              new MutationObserver((all) => {
                for (const one of all) {
                  const node = one.target.nodeType === 1 ? one.target : one.target.parentElement;
                  if (node.closest("time, .why")) continue;
                  window.touched.add(node.closest("tr")?.job.rdzv_id);
                }
              }).observe(document.querySelector("tbody"),
                {subtree: true, characterData: true, attributes: true, childList: true});
            }"""
        )
        page.get_by_role("columnheader", name="Job").get_by_role("button").click()
        page.evaluate("window.touched.clear()")
        s.fail("job-0001", "n001", "no")
        expect(job_row(page, "job-0001")).to_contain_text("stopping")
        assert page.evaluate("[...window.touched]") == ["job-0001"]

        go(page, "#/job/huge")
        expect(page.locator(".tile")).to_have_count(500)
        s.fail("huge", "n007", "no")
        expect(page.locator(".tile[data-state=stopping]")).to_have_count(500)
        go(page, "#/nodes")
        expect(page.locator(".count")).to_have_text("500 nodes")
        once(page)


# ------------------------------------------------------------------ the real thing


def test_three_real_nodes(open_page: Open, tmp_path: Path) -> None:
    port = free_port()
    with cluster(tmp_path) as c:
        c.kill_server()
        c.start_server("--http", f"127.0.0.1:{port}")
        page = open_page(f"http://127.0.0.1:{port}", LOST)
        expect(page.locator(".empty")).to_have_text("No job is known here yet.")
        more = ("--redirects=3", f"--log-dir={tmp_path / 'logs'}")
        names = ("n1", "n2", "n3")
        nodes = [c.start_node(n, *more, nnodes="2:3", args=("say=hello there",)) for n in names]
        c.wait_for_round(0, workers=3)
        expect(job_row(page, "job")).to_contain_text("running")
        page.get_by_role("link", name="job", exact=True).click()
        expect(page.locator(".tile[data-state=seated]")).to_have_count(3)
        page.locator(".logs summary").click()
        expect(page.get_by_label("What the workers have written")).to_contain_text("hello there")
        nodes[2].kill_tree()
        expect(page.locator(".tile")).to_have_count(2)
        expect(page.locator(".rounds tbody tr")).to_have_count(2)
        expect(page.locator(".rounds tbody tr").nth(1)).to_contain_text("node lost")
        c.kill_server()
        expect(page.locator("#banner")).to_contain_text("Not live: ")
        c.start_server("--http", f"127.0.0.1:{port}")
        expect(page.locator("#link-text")).to_have_text("live")
        c.finish()
        expect(page.locator(".head .chip")).to_have_text("succeeded")
        once(page)


def test_the_page_shows_nothing_without_a_token(open_page: Open, tmp_path: Path) -> None:
    file = tmp_path / "admin-token"
    listen = f"127.0.0.1:{free_port()}"
    with cluster(
        tmp_path, f"--http={listen}", "--auth=required", f"--init-admin-token={file}"
    ) as running:
        page = open_page(f"http://{listen}", allowed=LOST)
        expect(page.locator("#banner")).to_contain_text("this server requires authentication")
        field = page.get_by_label("Your token")
        field.fill("rdzv_00000000_nonsense")
        page.get_by_role("button", name="Look").click()
        expect(page.locator("#banner")).to_contain_text("not known here, or was revoked")
        field.fill(file.read_text())
        page.get_by_role("button", name="Look").click()
        expect(page.locator("#link-text")).to_have_text("live")
        expect(field).to_be_hidden()
        # It lasts as long as the tab, and is not readable anywhere.
        page.reload()
        expect(page.locator("#link-text")).to_have_text("live")
        assert file.read_text().strip() not in page.content()
        assert running.server is not None
        assert running.server.poll() is None
        open_page.close()
