"""Hooks for an agent's metrics: these count nothing, those of `agent_metrics` do.

So an agent without /metrics loads no library for metrics.
"""

from __future__ import annotations

from collections.abc import Collection

from rdzv.agent.core import commands
from rdzv.agent.runner_link import RunnerEvent


class JobMeter:
    """Is told what becomes of one job's workers on this node. Waits for nothing."""

    def runner_started(self) -> None:
        """Note that the job has a runner."""

    def adopted(self, local_ranks: Collection[int], restarts: int | None) -> None:
        """Note that it goes on with the runner and the workers of the agent before this one.

        `restarts`: how many the job had spent when they were started; None if none ever were.
        """

    def decided(self, command: commands.Command) -> None:
        """Note what is done for the job."""

    def runner_said(self, event: RunnerEvent) -> None:
        """Note what the runner says."""

    def closed(self) -> None:
        """Note that nothing is left of the job."""


class Meter:
    """Is told what happens on this node. Waits for nothing."""

    def job(self, local_world_size: int) -> JobMeter:
        """Return what is to be told of a job that begins, with so many workers here."""
        return JobMeter()

    def stream_opened(self) -> None:
        """Note that a server has welcomed this node."""

    def stream_ended(self, *, welcomed: bool, on_purpose: bool) -> None:
        """Note that there is no stream any more, or that none came to be."""
