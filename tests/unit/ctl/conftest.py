"""What most tests of rdzvctl begin with: a fake server, which RDZV_SERVER names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.capture import CaptureResult
from fake_control import Capture, Ctl, FakeControl, serving

from rdzv.ctl.__main__ import run


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def ctl(capsys: Capture) -> Ctl:
    def ran(*words: str, code: int = 0) -> CaptureResult[str]:
        found = run(words)
        captured = capsys.readouterr()
        assert found == code, captured.err
        return captured

    return ran


@pytest.fixture
def server(control: FakeControl, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(control) as endpoint:
        monkeypatch.setenv("RDZV_SERVER", endpoint)
        yield endpoint
