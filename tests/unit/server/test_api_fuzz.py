"""Schemathesis tests the HTTP API against its own OpenAPI document, with generated input.

Each answer has a documented status and shape, invalid input is refused, and no request makes the
server fail. The stream has no end, and is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from served import served

from rdzv.core.evidence.stacks import CollectedStacks
from rdzv.server.http.openapi import document
from rdzv.server.operations.table import OPERATIONS, PREFIX

if TYPE_CHECKING:
    from schemathesis import GenerationMode

pytestmark = pytest.mark.slow
# Collecting these tests does not import schemathesis, which takes half a second.

NAMES = [one.http.path for one in OPERATIONS if one.http and one.http.path != "/stream"]
KNOWN = {"rdzv_id": "job-7", "node_id": "n1"}
SETTINGS = settings(
    max_examples=10,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as s:
        s.join("job-7", "n1", "n2")
        s.fail("job-7", "n1", "no", "Traceback")
        run = s.do(s.driver.operations.status("job-7")).run
        s.do(s.driver.stack_archive.keep(CollectedStacks("job-7", run, 0, 0, "it hung")))
        yield f"{s.url}{PREFIX}"


@pytest.mark.parametrize("path", NAMES)
def test_the_api_keeps_to_its_document(path: str, url: str) -> None:
    import schemathesis
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(document())
    operation = schema[path]["GET"]
    # Any text may be a name, so that only the rest of the request can be wrong.
    modes = list(GenerationMode) if [*operation.query] else [GenerationMode.POSITIVE]
    seen: set[int] = set()
    for mode in modes:
        for known in (True, False):
            seen |= _try(operation, mode, url, known=known)
    assert 200 in seen
    assert not operation.path_parameters or seen & {400, 404}


def _try(operation: Any, mode: GenerationMode, url: str, *, known: bool) -> set[int]:
    """Try an operation, also with known names; return the statuses that came."""
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    named = known and mode is GenerationMode.POSITIVE
    # A name that no job can have is refused, and so is a round or RANK that never existed.
    of_rounds = operation.path.endswith(("/logs", "/stacks"))
    excluded = [] if named and not of_rounds else [positive_data_acceptance]
    seen = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @SETTINGS
    def try_it(case: Any) -> None:
        if named:
            case.path_parameters.update({name: KNOWN[name] for name in case.path_parameters})
        if str((case.query or {}).get("follow")).lower() == "true":
            # That ends only with the job.
            del case.query["follow"]
        seen.add(case.call_and_validate(base_url=url, excluded_checks=excluded).status_code)

    try_it()
    return seen
