"""Hooks for an agent's metrics. These do nothing; `agent_metrics` overrides them.

An agent without /metrics therefore loads no metrics library.
"""

from __future__ import annotations

from collections.abc import Collection

from rdzv.agent.core import commands
from rdzv.agent.runner_link import RunnerEvent


class JobMeter:
    """Receives the events of one job's workers on this node. Never blocks."""

    def runner_started(self) -> None:
        """Note that the job has a runner."""

    def adopted(self, local_ranks: Collection[int], restarts: int | None) -> None:
        """Note that the job has adopted the runner and the workers of the previous agent.

        `restarts` are those spent when the workers were started; None if none were started.
        """

    def decided(self, command: commands.Command) -> None:
        """Note a command that is being carried out for the job."""

    def runner_said(self, event: RunnerEvent) -> None:
        """Note an event from the runner."""

    def closed(self) -> None:
        """Note that nothing of the job is left."""


class Meter:
    """Receives the events of this node. Never blocks."""

    def job(self, local_world_size: int) -> JobMeter:
        """Return the meter of a new job with `local_world_size` workers on this node."""
        return JobMeter()

    def stream_opened(self) -> None:
        """Note that a server has welcomed this node."""

    def stream_ended(self, *, welcomed: bool, on_purpose: bool) -> None:
        """Note that the stream has ended, or could not be opened."""
