"""The tool that plants random changes: what it changes, what it leaves alone, and what it reads."""

from __future__ import annotations

import ast

import pytest

from tests.mutants import __main__ as tool
from tests.mutants.operators import mutations

TESTS = ("not (a)", "True", "False")


def changed(source: str) -> set[str]:
    return {mutation.apply(source) for mutation in mutations("file.py", source)}


@pytest.mark.parametrize(
    ("source", "made"),
    [
        ("x = a < b", ["x = a <= b", "x = a >= b"]),
        (
            "x = 0 <= a < b",
            ["x = 0 < a < b", "x = 0 <= a <= b", "x = 1 <= a < b", "x = (-1) <= a < b"],
        ),
        ("x = a and not b", ["x = (a or not b)", "x = (a)", "x = (not b)", "x = a and b"]),
        ("x = True", ["x = False"]),
        (
            "x = s * 1000",
            ["x = (s)", "x = (s / 1000)", "x = s * 1001", "x = s * (999)"],
        ),
        ("x = min(a, b)", ["x = max(a, b)", "x = min(b, a)"]),
        ("f(a=x.y, b=z)", ["pass", "f(a=z, b=x.y)"]),
        ("self.x = y", ["pass"]),
        ("x = 'ä' if a else b", ["x = 'ä' if not (a) else b"]),
        ("try:\n    a\nexcept E:\n    b\n    c\n", ["try:\n    a\nexcept E:\n    raise\n"]),
        ("if a:\n    raise", [f"if {test}:\n    raise" for test in TESTS] + ["if a:\n    pass"]),
    ],
)
def test_each_change(source: str, made: list[str]) -> None:
    assert changed(source) == set(made)


@pytest.mark.parametrize(
    "source",
    [
        '"""Docstring."""',
        "log.info('text', 1 + 1)",
        "assert a < 1",
        "def f(a: 'x < 1') -> A[1]: ...",
        "x = f'{a + 1}'",
        "x = 'text'",
        "import a",
        "if TYPE_CHECKING:\n    import a",
    ],
)
def test_what_is_left_alone(source: str) -> None:
    assert changed(source) == set()


def test_every_mutation_of_every_target_is_python() -> None:
    for file in tool.targets():
        source = (tool.ROOT / file).read_text()
        for mutation in mutations(file, source)[::100]:
            assert ast.parse(mutation.apply(source)), mutation


def test_a_draw_is_repeated_by_its_seed() -> None:
    assert tool.draw(5, 7) == tool.draw(5, 7) != tool.draw(5, 8)


def test_every_target_and_its_tests_are_there() -> None:
    for pattern, tests in tool.TARGETS.items():
        assert list(tool.ROOT.glob(pattern)), pattern
        assert all((tool.ROOT / test).exists() for test in tests), pattern


def test_every_equivalent_is_of_the_code_as_it_is_and_has_a_reason() -> None:
    for (file, before, after), why in tool.read_equivalents().items():
        source = [line.strip() for line in (tool.ROOT / file).read_text().splitlines()]
        assert set(before.splitlines()) <= set(source), f"{file}: {before}"
        assert after != before
        assert why.endswith(".")
