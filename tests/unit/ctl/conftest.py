"""What most tests of rdzvctl begin with: a fake server, which RDZV_SERVER names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_control import FakeControl, serving


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def server(control: FakeControl, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(control) as endpoint:
        monkeypatch.setenv("RDZV_SERVER", endpoint)
        yield endpoint
