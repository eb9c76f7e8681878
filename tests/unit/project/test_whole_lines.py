"""What tests read of a file that a program is still writing."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

from tests.support import whole_lines
from tests.support.whole_lines import json_rows, lines_of


def test_a_line_that_has_only_begun_is_not_read(tmp_path: Path) -> None:
    assert doctest.testmod(whole_lines).failed == 0
    file = tmp_path / "diary"
    assert lines_of(file) == []
    for text, lines in (("", []), ("0 beg", []), ("0 begins\n", ["0 begins"])):
        file.write_text(text)
        assert lines_of(file) == lines


def test_rows_are_found_by_their_fields_behind_the_name_of_a_worker() -> None:
    rows = [{"what": "step", "step": 3}, {"what": "step", "step": 4}, {"what": "done", "step": 4}]
    text = "Traceback\n" + "".join(f"[default0]:{json.dumps(row)}\n" for row in rows)
    assert json_rows(text, "step", step=4) == [{"what": "step", "step": 4}]
    for end in range(1, len(text.splitlines()[-1]) + 1):
        assert json_rows(text[:-end], "done") == []
