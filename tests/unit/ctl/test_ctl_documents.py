"""rdzvctl docs: the pages that are part of a release, by name."""

from __future__ import annotations

import threading
import time
import urllib.request
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from rdzv.ctl.__main__ import run
from rdzv.ctl.commands import docs
from rdzv.errors import InvalidRequestError


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for name, text in (("hangs", "# Hangs\n\nA worker\n"), ("start/slurm", "# Slurm\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.md").write_text(text)
    (tmp_path / "index.html").write_text("<p>the site")
    return tmp_path


@pytest.mark.parametrize("name", ["hangs", "hangs.md", "docs/hangs.md"])
def test_a_page_is_printed_by_the_name_that_messages_give_it(site: Path, name: str) -> None:
    assert docs.show(site, name, None) == "# Hangs\n\nA worker"


def test_the_folder_may_be_left_out(site: Path) -> None:
    assert docs.show(site, "slurm", None) == "# Slurm"


def test_all_pages_are_listed_with_their_titles(site: Path) -> None:
    first, second, *_ = docs.show(site, None, None).splitlines()
    assert (first.split(), second.split()) == (["hangs", "Hangs"], ["start/slurm", "Slurm"])


@pytest.mark.parametrize(
    ("name", "hint"), [("hngs", "; did you mean `hangs`?"), ("../hangs", ""), ("zebra", "")]
)
def test_another_page_is_refused(site: Path, name: str, hint: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        docs.show(site / "start", name, None) if ".." in name else docs.show(site, name, None)
    assert hint in str(refused.value) and "`rdzvctl docs` lists all" in str(refused.value)


def test_a_checkout_names_its_own_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["docs", "hangs"]) == 1
    assert "docs/; `make docs` builds the site" in capsys.readouterr().err


@pytest.mark.slow
def test_the_site_is_served_until_ctrl_c(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bytes] = []

    def reads(server: ThreadingHTTPServer) -> None:
        client = threading.Thread(
            target=lambda: answers.append(
                urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=60).read()
            )
        )
        client.start()
        server.timeout = 0.1
        deadline_s = time.monotonic() + 20
        while not answers and time.monotonic() < deadline_s:
            server.handle_request()
        client.join(20)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", reads)
    docs.show(site, None, 0)
    assert answers == [b"<p>the site"]
    assert "the documents are at http://127.0.0.1:" in capsys.readouterr().out
