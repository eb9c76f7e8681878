"""torchelastic's events for one job on this node, sent to torch's event handlers.

Events are recorded at the same points as under torchrun, with the same names and fields, and
`torch_side` passes them to the handler. If a handler is slow or dies, only events are lost.

Source: `_construct_event`, `record_duration` and `_record_worker_events` in
`torch/distributed/elastic/agent/server/api.py`, and `torch/distributed/launcher/api.py` of torch
2.13.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rdzv.agent.launch.launch import NO_HANDLER, Launch
from rdzv.agent.system.side_process import SideProcess
from rdzv.agent.workers.fates import NodeOutcome, WorkerFate
from rdzv.core.model import Assignment

log = logging.getLogger("rdzv.agent")

CLOSE_TIMEOUT_S = 5.0
"""How long the handler may take to process the last events."""

START_TIMEOUT_S = 30.0
"""The additional time allowed if the job ends before the handler's process has imported torch."""

AT_HAND = ("console",)
"""Handlers that every torch has, so a job need not wait for the process to confirm the name."""


class EventLog:
    """Records a job's events. Does nothing unless a handler was requested."""

    def __init__(
        self,
        launch: Launch,
        now_ms: int,
        error_file: Callable[[int], Path],
        handler: SideProcess | None = None,
    ) -> None:
        """Record the events of a launch; a `handler` that is given is running already."""
        self._launch = launch
        self._error_file = error_file
        self._began_ms = now_ms
        self._joining_since_ms = now_ms
        self._last: Assignment | None = None
        self._side = handler
        self.missed = 0

    async def open(self) -> None:
        """Start the handler. Raises `InvalidRequestError` if torch has no such handler."""
        name = self._launch.event_log.destination
        if name == NO_HANDLER:
            return
        launch = self._launch
        options = {"role": "events", "name": name, "logs_specs": launch.output.logs_specs}
        self._side = await SideProcess.start(
            launch.python,
            options,
            self._note_end,
            environ=launch.environ,
            chdir=launch.chdir,
            account=launch.account,
        )
        if name not in AT_HAND:
            await self._side.ready(f"--event-log-handler={name}")

    async def close(self) -> None:
        if self._side is None:
            return
        side, self._side = self._side, None
        timeout_s = CLOSE_TIMEOUT_S + (0.0 if side.has_answered else START_TIMEOUT_S)
        refused = bool(side.refusal)
        if not await side.close(timeout_s) and not refused:
            log.warning("the event handler had to be killed; it may have missed events")
        if self.missed:
            log.warning("the event handler has missed %d events", self.missed)

    # ------------------------------------------------------------------ events

    def joining(self, now_ms: int) -> None:
        self._joining_since_ms = now_ms

    def round_complete(self, assignment: Assignment, now_ms: int) -> None:
        waited_ms = now_ms - self._joining_since_ms
        # As under torchrun, these still describe the previous round, except for the restarts.
        for state, duration_ms in (("RENDEZVOUS", waited_ms), ("ASSIGN_WORKER_RANKS", 0)):
            self._record(
                state, self._last, restarts=assignment.restarts, duration_ms=float(duration_ms)
            )
        self._last = assignment

    def worker_started(self, fate: WorkerFate) -> None:
        self._record("START", self._last, fate)

    def ended(self, outcome: NodeOutcome, now_ms: int) -> None:
        """Record the outcome of each worker of the last round, and of the agent.

        As under torchrun, the agent counts as succeeded if its workers' outcome is known, even if
        they failed.
        """
        ran_s = (now_ms - self._began_ms) // 1000
        known = outcome.exit_code == 0 or (bool(outcome.workers) and outcome.result is not None)
        if known:
            for fate in outcome.workers:
                self._record(_state(fate), self._last, fate, ran_s=ran_s, final=True)
        state, raw_error = ("SUCCEEDED", None) if known else ("FAILED", outcome.text)
        self._record(state, self._last, ran_s=ran_s, raw_error=raw_error)

    # ------------------------------------------------------------------ the record

    def _record(
        self,
        state: str,
        assignment: Assignment | None,
        fate: WorkerFate | None = None,
        *,
        restarts: int | None = None,
        duration_ms: float | None = None,
        ran_s: int = 0,
        raw_error: str | None = None,
        final: bool = False,
    ) -> None:
        if self._side is None:
            return
        more: dict[str, Any] = {
            "group_world_size": assignment.group_world_size if assignment else None,
            "entry_point": self._entry_point(),
        }
        error_file, exit_code = None, None
        if fate is not None and assignment is not None:
            if final and fate.failed:
                exit_code = fate.exit_code if fate.signal is None else -fate.signal
                error_file = os.fspath(self._error_file(fate.local_rank))
            # Lists with one element, as in torchrun.
            more |= {
                "local_rank": [fate.local_rank],
                "role_rank": [fate.role_rank],
                "role_world_size": [assignment.role_world_size],
                "exit_code": [exit_code],
                "worker_pid": [fate.pid if exit_code is not None else None],
            }
        if restarts is None:
            restarts = assignment.restarts if assignment else 0
        metadata = {
            "run_id": self._launch.job.rdzv_id,
            "global_rank": fate.rank if fate else None,
            "group_rank": assignment.group_rank if assignment else None,
            "worker_id": str(fate.pid) if fate else None,
            "role": self._launch.role,
            "hostname": "",
            "state": state,
            "total_run_time": ran_s,
            "rdzv_backend": self._launch.event_log.backend,
            "raw_error": raw_error,
            "metadata": json.dumps(more),
            "agent_restarts": restarts,
            "duration_ms": duration_ms,
        }
        event = {
            "name": f"torchelastic.worker.status.{state}",
            "source": "AGENT" if fate is None else "WORKER",
            "metadata": metadata,
            "error_file": error_file,
            "exit_code": exit_code,
        }
        if not self._side.send(event):
            self.missed += 1

    def _entry_point(self) -> str:
        launch = self._launch
        if launch.run_path:
            return "run_script_path"
        return Path(launch.script if launch.no_python else launch.python).name

    def _note_end(self) -> None:
        if self._side is not None:
            reason = self._side.refusal or "its process has ended"
            log.warning("the event handler no longer receives events: %s", reason)


def _state(fate: WorkerFate) -> str:
    if fate.failed:
        return "FAILED"
    return "SUCCEEDED" if fate.exit_code == 0 and fate.stopped is None else "TERMINATED"
