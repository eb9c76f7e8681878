"""Every scenario beside this file gives exactly the answer that is written in it."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import pytest

from tests.scenarios.interpreter import answer

SCENARIOS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path, pytestconfig: pytest.Config) -> None:
    written = path.read_text(encoding="utf-8")
    answered = answer(written)
    if pytestconfig.getoption("--rewrite"):
        path.write_text(answered, encoding="utf-8")
        return
    diff = unified_diff(
        written.splitlines(), answered.splitlines(), "written", "answered", lineterm=""
    )
    assert answered == written, "\n".join(["", *diff, "", "pytest --rewrite writes the answers"])


def test_every_scenario_opens_with_its_story() -> None:
    assert not [p.name for p in SCENARIOS if not p.read_text(encoding="utf-8").startswith("# ")]
