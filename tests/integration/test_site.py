"""The documents as a stranger reads them: the site in a real Chromium, with its own search."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="playwright is not installed; run: make setup")

from playwright.sync_api import Page, expect, sync_playwright

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
DEADLINE_MS = 60_000
RESULTS_READ = 3
"""A reader in a hurry looks at this many search results."""

QUESTIONS = [
    ("start on slurm", "sbatch --nodes="),
    ("why does my job wait", "rdzvctl status JOB"),
    ("exit code 75", "no server, or too few nodes"),
    ("upgrade", "Server first, then the nodes"),
    ("what survives", "train on; the next agent takes them over"),
    ("who is slow", "names the rank that the others wait for"),
]
"""The words typed into the search, and the text of the answer."""

FROM_HOME = [
    ("Slurm", "sbatch --nodes=5"),
    ("Why does my job wait", "rdzvctl nodes shows the nodes"),
    ("What does exit code 75 mean", "no server, too few nodes in time"),
    ("Upgrading", "If you only use rdzvrun"),
    ("What survives what", "train on; the next agent takes them over"),
    ("Who is slow", "A straggler is a rank that slows all others down"),
]
"""A link of the first page, and the text of its target."""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; run: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def page(site: str) -> Iterator[Page]:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed (Debian's package chromium has it)")
    expect.set_options(timeout=DEADLINE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.set_default_timeout(DEADLINE_MS)
        yield opened
        browser.close()


@pytest.mark.parametrize(("asked", "answer"), QUESTIONS)
def test_the_search_answers_a_strangers_question(
    site: str, page: Page, asked: str, answer: str
) -> None:
    page.goto(site)
    search = page.get_by_role("textbox", name="Search")
    search.click()
    # Words that are typed earlier are lost.
    expect(page.locator(".md-search-result__meta")).to_have_text("Type to start searching")
    search.press_sequentially(asked)
    links = page.locator(".md-search-result__item > a, .md-search-result__item details a")
    expect(links.first).to_be_visible()
    tops = page.locator(".md-search-result__item").all()[:RESULTS_READ]
    found = [top.locator("a").first.get_attribute("href") for top in tops]
    assert any(answer in text_of(page, str(link)) for link in found), found


@pytest.mark.parametrize(("link", "answer"), FROM_HOME)
def test_the_first_page_leads_to_the_answer(site: str, page: Page, link: str, answer: str) -> None:
    page.goto(site)
    page.get_by_role("article").get_by_role("link", name=link, exact=True).first.click()
    expect(page.get_by_role("article")).to_contain_text(answer)


def text_of(page: Page, url: str) -> str:
    """Return the text of the page at a URL."""
    page.goto(url)
    return " ".join(page.get_by_role("article").inner_text().split())
