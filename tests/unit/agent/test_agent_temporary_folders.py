"""What a killed rdzvrun leaves in TMPDIR is removed by the next, and nothing that is in use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rdzv.agent.system import temporary_folders
from rdzv.agent.system.temporary_folders import LOGS, PROGRESS, make, sweep


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def left(prefix: str, file: str = "") -> Path:
    """Return a folder whose maker is gone; the kernel has dropped its lock."""
    path, lock = make(prefix)
    os.close(lock)
    (path / "0").mkdir()
    if file:
        (path / "0" / file).write_text("7")
    return path


def test_folders_are_removed_once_their_process_is_gone() -> None:
    used = [make(prefix) for prefix in (PROGRESS, LOGS)]
    gone = [left(PROGRESS, "progress"), left(PROGRESS), left(LOGS)]
    sweep()
    assert [path.exists() for path in gone] == [False] * 3
    assert all(path.exists() for path, _ in used)
    for path, lock in used:
        os.close(lock)
        sweep()
        assert not path.exists()


def test_logs_are_never_removed() -> None:
    logs = left(LOGS, "error.json")
    sweep()
    assert (logs / "0" / "error.json").exists()


def test_others_folders_are_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, target = left(PROGRESS), tmp_path / "target"
    target.mkdir()
    link = tmp_path / f"{own.name}_link"
    link.symlink_to(target)
    daemons = tmp_path / f"{PROGRESS}abcdefgh"  # As an agent on another machine names it, too.
    daemons.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    sweep()
    assert own.exists()
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sweep()
    assert not own.exists()
    assert link.is_symlink()
    assert target.exists()
    assert daemons.exists()


def test_a_sweep_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [left(PROGRESS) for _ in range(3)]
    monkeypatch.setattr(temporary_folders, "MAX_SWEPT", 2)
    for remaining in (1, 0, 0):
        sweep()
        assert sum(path.exists() for path in folders) == remaining


def test_kept_logs_do_not_hide_what_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary_folders, "MAX_SWEPT", 1)
    for name in ("a", "b", "c"):
        progress, _ = left(PROGRESS), [left(LOGS, "error.json") for _ in range(20)]
        sweep()
        assert not progress.exists(), name


def test_a_folder_swept_before_it_is_locked_is_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[Path] = []
    mkdtemp = temporary_folders.tempfile.mkdtemp

    def found_at_once(prefix: str, dir: Path | None = None) -> str:
        path = mkdtemp(prefix=prefix, dir=dir)
        if not swept:
            swept.append(Path(path))
            sweep()
        return path

    monkeypatch.setattr(temporary_folders.tempfile, "mkdtemp", found_at_once)
    path, lock = make(PROGRESS)
    os.close(lock)
    assert path.exists()
    assert path != swept[0]
    assert not swept[0].exists()
