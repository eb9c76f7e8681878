"""Hooks for an agent's metrics, which do nothing unless overridden by `agent_metrics`.

As a result, an agent without /metrics loads no metrics library.
"""

from __future__ import annotations

from collections.abc import Collection

from rdzv.agent.core import commands
from rdzv.agent.core.events import RunnerEvent


class JobMeter:
    """Receives the events of one job's workers on this node. Never blocks."""

    def runner_started(self) -> None:
        """Record that the job has a runner."""

    def adopted(self, local_ranks: Collection[int], restarts: int | None) -> None:
        """Record that the job has adopted the previous agent's runner and workers.

        `restarts` is the number used up when the workers were started, or None if none were
        started.
        """

    def decided(self, command: commands.Command) -> None:
        """Record a command that is being carried out for the job."""

    def runner_said(self, event: RunnerEvent) -> None:
        """Record an event from the runner."""

    def closed(self) -> None:
        """Record that nothing of the job remains."""


class Meter:
    """Receives this node's events. Never blocks."""

    def job(self, local_world_size: int) -> JobMeter:
        """Return the meter for a new job with `local_world_size` workers on this node."""
        return JobMeter()

    def stream_opened(self) -> None:
        """Record that a server has welcomed this node."""

    def stream_ended(self, *, welcomed: bool, on_purpose: bool) -> None:
        """Record that the stream has ended or could not be opened."""
