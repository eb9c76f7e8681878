"""The agent's own directories: no other user may have created them or be able to replace them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.agent.app.agent_config import check_own
from rdzv.agent.app.daemon import locked
from rdzv.errors import InvalidRequestError
from tests.support.accounts import ADA, needs_root, own_folder, passable_folder

pytestmark = pytest.mark.slow


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: every user may write there, and remove their own files."""
    with passable_folder() as folder:
        folder.chmod(0o1777)
        yield folder


def refusal(path: Path, *, strictly: bool = False) -> str:
    try:
        check_own("runtime_dir", path, strictly=strictly)
    except InvalidRequestError as error:
        return str(error)
    return ""


def test_a_directory_of_ones_own_is_taken(shared: Path) -> None:
    own = shared / "rdzv-1000" / "rdzv-agent"
    own.mkdir(parents=True, mode=0o700)
    assert refusal(own, strictly=True) == ""
    (shared / "link").symlink_to(own)
    assert refusal(shared / "link", strictly=True) == ""


@needs_root
def test_a_directory_that_somebody_else_has_made_is_refused(shared: Path) -> None:
    planted = own_folder(shared, "rdzv-1000")
    (planted / "rdzv-agent").mkdir()
    for path in (planted, planted / "rdzv-agent"):
        assert refusal(path) == (
            f"`runtime_dir` = {str(path)!r} is not safe: {planted} belongs to {ADA.uid}, who could "
            "put anything in its place; remove it, or give another directory"
        )


@needs_root
def test_a_folder_of_another_account_is_taken_where_root_has_put_it(shared: Path) -> None:
    """Like home directories in a folder of their group; refused if jobs have accounts."""
    shared.chmod(0o755)
    group = own_folder(shared, "group")
    own = group / "own"
    own.mkdir()
    assert refusal(own) == ""
    assert f"{group} belongs to {ADA.uid}" in refusal(own, strictly=True)


@needs_root
def test_a_link_that_somebody_else_has_made_is_refused(shared: Path) -> None:
    (shared / "own").mkdir()
    link = shared / "link"
    link.symlink_to("own")
    os.chown(link, ADA.uid, ADA.gid, follow_symlinks=False)
    assert f"{link} belongs to {ADA.uid}" in refusal(link)
    (shared / "mine").symlink_to("link/below")
    (shared / "own" / "below").mkdir()
    os.chown(shared / "own", ADA.uid, ADA.gid)
    assert f"{shared / 'own'} belongs to {ADA.uid}" in refusal(shared / "mine")


def test_a_directory_that_everybody_may_write_to_is_refused_where_jobs_have_accounts(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_ = shared / "open"
    open_.mkdir()
    open_.chmod(0o777)
    (open_ / "below").mkdir()
    for path in (open_, open_ / "below", shared):
        place = shared if path == shared else open_
        with caplog.at_level(logging.WARNING):
            assert refusal(path) == ""
        assert f"everyone may write to {place}" in caplog.text
        assert f"everyone may write to {place}; chmod o-w" in refusal(path, strictly=True)
        caplog.clear()


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_leads_elsewhere_changes_nothing_there(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("kept")
    lock = tmp_path / "lock"
    if kind == "link":
        lock.symlink_to(secret)
    else:
        os.mkfifo(lock)
    refused = pytest.raises(InvalidRequestError, match=f"cannot write {lock}")
    with refused, locked("runtime_dir", tmp_path):
        pass
    assert secret.read_text() == "kept"


@pytest.mark.quick
def test_a_directory_has_one_agent_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(InvalidRequestError, match=f"in use by rdzv-agent pid {os.getpid()}")
    with locked("runtime_dir", tmp_path), refused, locked("runtime_dir", tmp_path):
        pass
    with locked("runtime_dir", tmp_path):
        pass
