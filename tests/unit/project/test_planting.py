"""Planted bugs follow the code: a symbol may move, and its text may be reformatted."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.sim.mutants import ROOT
from tests.sim.planted_bugs import MUTANTS
from tests.sim.planting import StaleError, planted

CODE = """
class Placer:
    def why(self, node):
        if node.away and (
            node.failing  # a comment
            or node.drained,
        ):
            return "away"
        return ""


def why(node):
    return node
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent/rdzv/agent").mkdir(parents=True)
    (tmp_path / "agent/rdzv/agent/placer.py").write_text(CODE)
    return tmp_path


@pytest.mark.slow
def test_each_planted_bug_fits_the_code_and_gives_a_program() -> None:
    for mutant in MUTANTS:
        path, text = planted(ROOT, mutant.where, mutant.old, mutant.new)
        assert text != path.read_text(), mutant.name
        compile(text, path.name, "exec", ast.PyCF_ONLY_AST)


def test_layout_comments_and_trailing_commas_do_not_matter(folder: Path) -> None:
    old = "if node.away and (node.failing or node.drained):\n    return 'away'".replace("'", '"')
    new = "if node.away:\n    pass"
    _, text = planted(folder, "Placer.why", old, new)
    assert (
        'def why(self, node):\n        if node.away:\n            pass\n        return ""' in text
    )


@pytest.mark.parametrize(
    ("where", "old", "said"),
    [
        ("why", "return node", "why is rdzv.agent.placer.Placer.why and rdzv.agent.placer.why"),
        ("Placer.whi", "return", "nothing is called Placer.whi; nearest: rdzv.agent.placer"),
        ("placer.Placer.why", "return", "'return' 2 times"),
        ("Placer.why", 'return "gone"', "0 times; nearest: 'return \"\"'"),
    ],
)
def test_what_does_not_fit_is_named(folder: Path, where: str, old: str, said: str) -> None:
    with pytest.raises(StaleError) as raised:
        planted(folder, where, old, "pass")
    assert said in str(raised.value)
