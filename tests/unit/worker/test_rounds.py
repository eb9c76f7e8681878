"""What a round passes to the script's function."""

from __future__ import annotations

from pathlib import Path

from rdzv.worker.rounds import round_of


def test_a_node_leaves_once_its_notice_is_there(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    told, untold = round_of({"RDZV_NOTICE_FILE": str(notice)}), round_of({})
    assert not told.leaving
    assert not untold.leaving
    notice.touch()
    assert told.leaving
    assert not untold.leaving
