"""What many tests of real processes start from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, cluster, cluster_without_server
from ready_torchrun import Start, ready_torchrun


@pytest.fixture(name="c")
def _cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A server, and a folder for nodes to start in."""
    with cluster(tmp_path) as made:
        yield made


@pytest.fixture(name="alone")
def _alone(tmp_path: Path) -> Iterator[Cluster]:
    """A folder and an environment without a server."""
    with cluster_without_server(tmp_path) as made:
        yield made


@pytest.fixture(name="own_temporary_folder")
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes without a log directory write into the test's folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture(scope="module", name="ready")
def _ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """A process with torch imported, from which torchruns are forked."""
    with ready_torchrun(tmp_path_factory.mktemp("ready"), os.environ) as start:
        yield start
