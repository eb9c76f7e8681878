"""Stores the state that the next agent needs to continue a job in the job's runner."""

from __future__ import annotations

from rdzv.agent.handover.handover_state import PLACEMENT, STATE, Keeping, KeptState, encode
from rdzv.agent.runner_link import RunnerLink


class StateKeeper:
    """Keeps state for the next agent in a job's runner, which outlives the current agent."""

    def __init__(self, keeping: Keeping, runner: RunnerLink, grace_ms: int) -> None:
        """Let `runner` outlive this process. Its workers get `grace_ms` if it is not adopted."""
        self._keeping = keeping
        self._runner = runner
        self._grace_ms = grace_ms
        self._kept: KeptState | None = None
        self._orphan_timeout_ms: int | None = None

    def keep_placement(self) -> None:
        """Store the part of the state that does not change while this node holds the job."""
        self._runner.keep(PLACEMENT, encode(self._keeping.placement))

    def keep(self, kept: KeptState) -> None:
        """Store this state if it differs from the last one."""
        if kept != self._kept:
            self._kept = kept
            self._runner.keep(STATE, encode(kept))

    def outlive(self, within_ms: int) -> None:
        """Make the runner wait `within_ms` for the next agent once this agent is gone."""
        if self._orphan_timeout_ms != within_ms:
            self._orphan_timeout_ms = within_ms
            self._runner.serve(self._keeping.socket, within_ms / 1000, self._grace_ms / 1000)
