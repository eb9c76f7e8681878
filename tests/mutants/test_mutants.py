"""The mutation tool: which changes it makes, which it does not, and the files it reads."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import __main__ as tool
from tests.mutants.operators import mutations
from tests.mutants.record import Record, make_programs_write

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
        ("x = min(a, b)", ["x = max(a, b)"]),
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


def test_every_target_and_every_judge_is_there() -> None:
    for pattern in tool.TARGETS:
        assert list(tool.ROOT.glob(pattern)), pattern
    for judge in tool.JUDGES:
        assert (tool.ROOT / judge).exists(), judge


@pytest.mark.parametrize(
    ("line", "tests"),
    [
        (1, ["t.py::slow", "t.py::one", "u.py::two"]),  # Runs as the module is loaded.
        (3, ["t.py::slow", "t.py::one", "u.py::two"]),
        (4, ["t.py::slow", "t.py::one"]),
        (5, ["t.py::slow", "t.py::one"]),  # Of a statement, the line that is recorded.
        (6, ["u.py::two"]),
        (7, []),
    ],
)
def test_who_judges_a_line(line: int, tests: list[str]) -> None:
    source = """\
A = 1
def f(x):
    if x:
        g(
            1)
    else: h()
    k()
"""
    lines = {"f.py": {"3": [0, 1, 2], "4": [0, 1], "6": [2]}}
    record = Record({"t.py::slow": 50.0, "t.py::one": 0.1, "u.py::two": 0.1}, lines)
    assert record.tests("f.py", source, line) == tests


def test_the_quick_tests_of_the_nearest_files_judge_first_and_slow_ones_last() -> None:
    quick = [f"{file}.py::{n}" for n, file in enumerate("abcabcabcd")]
    seconds = dict.fromkeys(quick, 0.1) | {"a.py::30": 30.0, "d.py::29": 29.0, "d.py::31": 31.0}
    record = Record(seconds, {})
    assert record.portions(list(seconds)) == [quick[:-1], quick[-1:], ["d.py::29", "a.py::30"]]
    assert record.portions([]) == []


def test_a_program_writes_which_lines_it_runs(tmp_path: Path) -> None:
    module = tmp_path / "agent/rdzv/module.py"
    (tmp_path / "tests/mutants").mkdir(parents=True)
    module.parent.mkdir(parents=True)
    source = (
        "from __future__ import annotations\nimport os\ndef f():\n    os.kill(os.getpid(), 9)\n"
    )
    module.write_text(source)
    shutil.copy(Path(tool.__file__).parent / "tracer.py", tmp_path / "tests/mutants")
    make_programs_write(tmp_path, ["agent/rdzv/module.py"])
    code = f"import sys; sys.path[:0] = [{str(module.parent)!r}]; import module; module.f()"
    for test in ("a.py::test", ""):
        env = {**os.environ, "PYTEST_CURRENT_TEST": test and f"{test} (call)"}
        done = subprocess.run([sys.executable, "-I", "-S", "-c", code], env=env, check=False)
        assert done.returncode == -9
    (tmp_path / "lines.1").write_text('{"seconds": {"a.py::test": 1}, "failed": [], "ran": []}')
    record = Record.collected(tmp_path)
    assert record.lines == {"agent/rdzv/module.py": {"4": [0]}}
    assert record.tests("agent/rdzv/module.py", source, 4) == ["a.py::test"]


def test_every_equivalent_is_of_the_code_as_it_is_and_has_a_reason() -> None:
    for (file, before, after), why in tool.read_equivalents().items():
        source = [line.strip() for line in (tool.ROOT / file).read_text().splitlines()]
        assert set(before.splitlines()) <= set(source), f"{file}: {before}"
        assert after != before
        assert why.endswith(".")
