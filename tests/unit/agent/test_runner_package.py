"""The runner's package as it is started: by path, without the rest of rdzv, loaded at once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rdzv.agent import runner

pytestmark = pytest.mark.slow

FOLDER = Path(runner.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "__main__.py"])
def test_files_of_the_runner_import_each_other_by_relative_imports_alone(path: Path) -> None:
    absolute = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom) and "rdzv" in ast.unparse(node)
    ]
    assert not absolute


def test_the_runner_imports_all_its_files_as_it_starts() -> None:
    """An upgrade may replace the files while it runs."""
    code = f"import sys; sys.path.append({str(FOLDER.parent)!r}); import runner.runner; "
    code += "print(*[m.__file__ for n, m in sys.modules.items() if n.startswith('runner')])"
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert sorted(loaded) == [str(path) for path in FILES if path.name != "__main__.py"]
