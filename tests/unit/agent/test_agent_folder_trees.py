"""Folders that jobs fill are measured and removed, whatever is in them, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.agent.output.run_folders import RunFolders
from rdzv.agent.system.accounts import Identity
from rdzv.agent.system.folder_trees import measure, remove_tree
from tests.support.accounts import ADA, needs_root, own_folder, passable_folder

pytestmark = pytest.mark.slow

DAY = 86_400.0
NOW = time.time()
PLENTY = 1 << 40


@pytest.fixture(autouse=True)
def nothing_deep_is_left(tmp_path: Path) -> Iterator[None]:
    """Pytest removes the folders of old runs, unless they are too deep for Python."""
    yield
    subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


@pytest.fixture
def shared() -> Iterator[Path]:
    with passable_folder() as folder:
        yield folder


def deep(top: Path, levels: int) -> None:
    """Create nested folders, deeper than a path can spell, with a file in each."""
    folder = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=folder))
        os.mkdir("a-folder-in-a-folder", dir_fd=folder)
        inner = os.open("a-folder-in-a-folder", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)


def owned(identity: Identity, top: Path) -> None:
    for place, folders, files in os.walk(top):
        for name in (".", *folders, *files):
            os.chown(Path(place, name), identity.uid, identity.gid, follow_symlinks=False)


def test_any_depth_is_measured_and_removed_with_a_few_descriptors(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    deep(top, 1_200)
    blocks = top.stat().st_blocks
    assert measure(top, NOW).size_bytes >= 1_200 * blocks * 512
    remove_tree(top)
    assert not top.exists()


def test_a_folder_is_as_old_as_the_last_change_in_it(tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "file").write_text("x")
    (top / "other").symlink_to("/nowhere")
    for place in (top / "a" / "b", top / "a", top):
        os.utime(place, (NOW - 9 * DAY, NOW - 9 * DAY))
    os.utime(top / "other", (NOW - 8 * DAY, NOW - 8 * DAY), follow_symlinks=False)
    os.utime(top / "a" / "b" / "file", (NOW - 5 * DAY, NOW - 5 * DAY))
    assert measure(top, NOW).changed_s == pytest.approx(NOW - 5 * DAY)


def test_a_time_to_come_does_not_keep_a_folder(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    (top / "file").touch()
    os.utime(top / "file", (NOW + 999 * DAY, NOW + 999 * DAY))
    assert measure(top, NOW + DAY).changed_s < NOW + DAY


@pytest.mark.quick
def test_no_link_is_followed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    outside, top = tmp_path / "outside", tmp_path / "top"
    outside.mkdir()
    (outside / "kept").write_bytes(b"x" * 1_000_000)
    top.mkdir()
    (top / "folder").symlink_to(outside)
    (top / "file").symlink_to(outside / "kept")
    assert measure(top, NOW).size_bytes < 1_000_000
    remove_tree(top)
    assert (outside / "kept").exists()
    assert not top.exists()
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(OSError, match="link"):
        remove_tree(tmp_path / "link")
    assert (outside / "kept").exists()


@pytest.mark.quick
def test_what_is_not_there_needs_no_removal(tmp_path: Path) -> None:
    remove_tree(tmp_path / "nothing")
    remove_tree(tmp_path / "nothing" / "below")
    assert measure(tmp_path / "nothing", NOW).size_bytes == 0


def test_what_is_too_much_for_once_is_removed_in_turns(tmp_path: Path) -> None:
    top = tmp_path / "top"
    for folder in range(10):
        (top / str(folder)).mkdir(parents=True)
        for file in range(10):
            (top / str(folder) / str(file)).touch()
    turns = 1
    while True:
        try:
            remove_tree(top, most=30)
            break
        except OSError as error:
            assert "not empty" in str(error)
            turns += 1
    assert 3 <= turns <= 10
    assert not top.exists()


@pytest.mark.quick
def test_a_moved_folder_leads_nobody_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top, outside = tmp_path / "top", tmp_path / "outside"
    (top / "a" / "b").mkdir(parents=True)
    outside.mkdir()
    (outside / "b").mkdir()
    real_open = os.open

    def move(path: str, flags: int, *mode: int, dir_fd: int | None = None) -> int:
        opened = real_open(path, flags, *mode, dir_fd=dir_fd)
        if path == "b":
            (top / "a" / "b").rename(outside / "moved")
        return opened

    monkeypatch.setattr(os, "open", move)
    with pytest.raises(OSError, match="moved in the meantime"):
        remove_tree(top)
    assert sorted(path.name for path in outside.iterdir()) == ["b", "moved"]


# ---------------------------------------------------------------------- as an account


@needs_root
def test_a_folder_that_its_account_has_closed_is_removed_all_the_same(shared: Path) -> None:
    top = own_folder(shared, "top")
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "file").touch()
    owned(ADA, top)
    for place in (top / "a" / "b", top / "a", top):
        place.chmod(0)
    remove_tree(top, ADA)
    assert not top.exists()


@needs_root
def test_nothing_is_removed_that_its_account_may_not_remove(shared: Path) -> None:
    top = own_folder(shared, "top")
    (top / "roots").mkdir()
    (top / "roots" / "kept").touch()
    (top / "own").touch()
    with pytest.raises(OSError, match="Permission denied"):
        remove_tree(top, ADA)
    assert sorted(path.name for path in top.rglob("*")) == ["kept", "roots"]


@needs_root
def test_an_account_need_not_reach_its_folder(shared: Path) -> None:
    """As on a node where jobs once ran as accounts and no longer do."""
    top = own_folder(shared, "top")
    (top / "file").write_bytes(b"x" * 100_000)
    owned(ADA, top)
    shared.chmod(0o700)
    assert measure(top, NOW, ADA).size_bytes >= 100_000
    remove_tree(top, ADA)
    assert not top.exists()


# ---------------------------------------------------------------------- the sweep


def old_run(folders: RunFolders, name: str, identity: Identity | None = None) -> Path:
    folder = folders.open(name, "r1", identity)
    (folder.path / "stdout.log").write_text("x")
    folders.release(folder)
    return folder.path


def age(path: Path, days: float) -> None:
    for found in [*path.rglob("*"), path]:
        os.utime(found, (NOW - days * DAY,) * 2, follow_symlinks=False)


def test_a_folder_of_any_depth_does_not_stop_the_sweep(tmp_path: Path) -> None:
    folders = RunFolders(tmp_path)
    bad, good = old_run(folders, "bad"), old_run(folders, "good")
    deep(bad, 1_200)
    age(good, 20)
    removed = folders.sweep(14 * DAY, PLENTY, NOW + 15 * DAY)
    assert sorted(removed) == [bad, good]
    assert list((tmp_path / "runs").iterdir()) == []


@needs_root
def test_what_can_not_be_removed_is_said(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = RunFolders(shared)
    stuck, good = old_run(folders, "a-stuck", ADA), old_run(folders, "good", ADA)
    (stuck / "roots").mkdir()
    (stuck / "roots" / "kept").touch()
    for path in (stuck, good):
        age(path, 20)
    assert sorted(folders.sweep(14 * DAY, PLENTY, NOW)) == [stuck, good]
    assert not good.exists()
    assert "; will retry later" in caplog.text
    (left,) = (shared / "runs").iterdir()
    (left / "roots" / "kept").unlink()
    folders.sweep(14 * DAY, PLENTY, NOW)
    assert list((shared / "runs").iterdir()) == []


@needs_root
def test_a_folder_root_can_not_list_is_none_of_the_sweeps_business(shared: Path) -> None:
    """Anything mounted in a job's folder is neither examined nor emptied."""
    folders = RunFolders(shared)
    path = old_run(folders, "job", ADA)
    mount = path / "mounted"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", mount], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (mount / "kept").write_bytes(b"x" * 1_000_000)
        assert measure(path, NOW, ADA).size_bytes < 1_000_000
        with pytest.raises(OSError, match=r"busy|denied"):
            remove_tree(path, ADA)
        assert (mount / "kept").exists()
    finally:
        subprocess.run(["umount", mount], check=True)
