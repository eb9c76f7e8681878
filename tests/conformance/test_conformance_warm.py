"""The table of test_conformance.py again, with workers that are forked from a zygote.

CONFORMANCE_WARM=1 runs all of it (`make conformance-warm`), otherwise there is one case of each
kind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace

import pytest
from launchers import Case
from test_conformance import CASES, Result, check, run, running_all

pytest.importorskip("torch", reason="torch is not installed")

ALWAYS = ("a training with torch", "restarts", "another interpreter", "SIGTERM")

COLD = {"logs specs of one's own": "will start cold: its NAMED_BY is "}
"""Cases whose workers cannot be forked, and why: a module may read the plug-in's variables."""

ONLY_WARM = ("RDZV_WARM_WAIT", "TORCHINDUCTOR_CACHE_DIR")
"""Variables that this test sets, and that torch._dynamo sets on import."""

WAIT = "RDZV_WARM_WAIT=100"
"""Otherwise the first round would start cold, and many cases have no other."""


def warmed(case: Case) -> Case:
    """Return the same case with --warm for rdzvrun."""
    line = case.rdzvrun_line or case.line
    variables = re.match(r"(?:[A-Z_]+=(?:'[^']*'|\S)*\s+)*", line)
    assert variables is not None
    rest = line[variables.end() :]
    return replace(case, rdzvrun_line=f"{variables.group()}{WAIT} --warm {rest}")


WARMED = [
    warmed(case)
    for case in CASES
    # A program that is no interpreter cannot be forked.
    if "--no-python" not in case.line
    if os.environ.get("CONFORMANCE_WARM") or case.name in ALWAYS
]


@pytest.fixture(scope="module", name="results")
def _results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Mapping[str, Future[Result]]]:
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = [item.callspec.params["case"] for item in items if item.module is request.module]
    with running_all(asked, run, tmp_path_factory) as results:
        yield results


@pytest.mark.parametrize("case", WARMED, ids=lambda case: case.name.replace(" ", "_"))
def test_a_warm_worker_is_as_under_torchrun(
    case: Case, results: Mapping[str, Future[Result]]
) -> None:
    found = results[case.name].result()
    for variable in ONLY_WARM:
        found.ours.seen.pop(f"env {variable}", None)
    check(case, found)
    said = found.ours.stderr
    if case.name in COLD:
        assert COLD[case.name] in said
        return
    assert re.search("starts? cold", said) is None, said
    if found.ours.seen["workers"] and "LOGLEVEL" not in case.line:
        assert "workers can be warm: the zygote imported torch, torch._dynamo in " in said
