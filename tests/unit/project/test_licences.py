"""docs/licences.md names all dependencies of rdzv; declared licences are read as they are."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("licences", ROOT / "deploy/licences.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_package_that_is_asked_for_is_in_the_document() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["oidc"]]
    rows = re.findall(r"^\| ([\w.-]+) \| .+ \|$", (ROOT / "docs/licences.md").read_text(), re.M)
    named = {row.lower().replace("_", "-") for row in rows}
    missing = [one for one in asked if re.split(r"[<>=\[]", one)[0].lower() not in named]
    assert not missing, "run: make sbom"


@pytest.mark.parametrize(
    ("declared", "shown"),
    [
        ([{"expression": "Apache-2.0 OR BSD-3-Clause"}], "Apache-2.0 OR BSD-3-Clause"),
        ([{"license": {"id": "MIT"}}], "MIT"),
        (
            [
                {"license": {"id": "MPL-2.0"}},
                {"license": {"name": "License :: OSI Approved :: Mozilla Public License 2.0"}},
            ],
            "MPL-2.0",
        ),
        ([{"license": {"name": "License :: OSI Approved :: BSD License"}}], "BSD License"),
        ([], "see the package"),
    ],
)
def test_what_is_declared_is_shown(declared: list[dict[str, object]], shown: str) -> None:
    assert load().licence({"licenses": declared}) == shown
