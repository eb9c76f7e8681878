"""The modules that rdzvrun imports before its workers start: each one delays every start."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rdzv.version import VERSION

NEVER = (
    *("torch", "numpy", "aiohttp", "prometheus_client", "cryptography"),
    *("sqlite3", "http", "email", "importlib.metadata", "multiprocessing", "click"),
    *("rdzv.client", "rdzv.etcd", "rdzv.stores.etcd_client", "rdzv.stores.sqlite", "rdzv.web"),
    *(
        "rdzv.server.http.api",
        "rdzv.server.http.listener",
        "rdzv.server.security.tls",
        "rdzv.server.telemetry.metrics_page",
    ),
    *("rdzv.stores.backup", "grpc_reflection.v1alpha"),
    *(
        "rdzv.agent.node.agent_metrics",
        "rdzv.agent.app.daemon",
        "rdzv.agent.node.placements",
        "rdzv.agent.handover.runner_adoption",
    ),
)
"""Modules that a job with its own server does not need, however it is launched."""

TO_TALK = ("grpc", "google.protobuf", "rdzv.v1", "rdzv.server", "rdzv.agent.job.job_driver")
"""Modules that are not needed to refuse a command line."""


def imported_by(program: str) -> set[str]:
    """Return the modules that a program has imported by its end."""
    asked = f"{program}\nimport sys\nprint(*sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=100, check=True
    )
    return set(told.stdout.split())


def among(modules: set[str], names: tuple[str, ...]) -> set[str]:
    return {m for m in modules if any(m == name or m.startswith(f"{name}.") for name in names)}


@pytest.mark.slow
def test_a_job_with_its_own_server_imports_what_it_needs_and_no_more() -> None:
    modules = imported_by("import rdzv.agent.run, rdzv.agent.node.node")
    assert "rdzv.agent.node.server_hosting" in modules
    assert not among(modules, NEVER)


@pytest.mark.slow
def test_a_command_line_is_read_without_what_talks_to_servers() -> None:
    program = "from rdzv.agent.run import parse_launch\nparse_launch(['--standalone', 'train.py'])"
    modules = imported_by(program)
    assert "rdzv.agent.cli.options" in modules
    assert not among(modules, TO_TALK)


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert project["project"]["version"] == VERSION
