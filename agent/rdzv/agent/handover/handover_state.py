"""The job state that a runner keeps so that the next agent can continue the job.

Unknown fields are ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

import msgspec

from rdzv.agent.core.commands import StopWorkers
from rdzv.agent.core.model import AgentState
from rdzv.agent.output.run_files import WorkerOutput
from rdzv.agent.runner.requests import Keep, Serve
from rdzv.agent.runner_link.found_runner import NotAdoptableError
from rdzv.agent.runner_link.runner_link import RunnerLink
from rdzv.agent.system.accounts import Account
from rdzv.core.model import JobSpec, Offer
from rdzv.structs import struct

PLACEMENT = "placement"
STATE = "state"
_T = TypeVar("_T")


@struct(frozen=True)
class KeptPlacement:
    """The part of the state that does not change while a node holds a job."""

    node_id: str
    instance: str
    rdzv_id: str
    run: str
    spec: JobSpec
    gpus: int
    granted: tuple[str, ...]
    environ: dict[str, str]
    """The node's environment for all jobs, as it was when this job began."""
    account: Account | None = None
    """The account under which the job runs, or None for the agent's own."""


@struct(frozen=True)
class KeptStop:
    """The command that told the workers to stop, and when, by the agent core's clock."""

    command: StopWorkers
    at_ms: int


@struct(frozen=True)
class KeptState:
    """The part of the state that changes, as known to the driver, by the monotonic clock."""

    state: AgentState
    offer: Offer
    joined: bool = False
    stop: KeptStop | None = None
    outputs: tuple[WorkerOutput, ...] = ()
    progress_folder: Path | None = None


@struct(frozen=True)
class HandoverPlan:
    """The information a driver needs to let its job outlive the agent."""

    socket: Path
    placement: KeptPlacement


def encode(kept: KeptPlacement | KeptState) -> str:
    # Unlike msgspec, json also accepts file names that are not valid text.
    return json.dumps(msgspec.to_builtins(kept, enc_hook=str), separators=(",", ":"))


def decode_placement(text: str | None) -> KeptPlacement:
    """Raises `NotAdoptableError` if it is missing or damaged."""
    return _decode(PLACEMENT, text, KeptPlacement)


def decode_state(text: str | None) -> KeptState:
    """Raises `NotAdoptableError` if it is missing or damaged."""
    return _decode(STATE, text, KeptState)


def _decode(name: str, text: str | None, kind: type[_T]) -> _T:
    if text is None:
        raise NotAdoptableError(f"it keeps no {name}, because its job had not begun")
    try:
        return msgspec.convert(json.loads(text), kind, dec_hook=lambda path, text: path(text))
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        # msgspec's error quotes the invalid value, which may contain unencodable lone surrogates.
        raise NotAdoptableError(f"cannot read its {name}: {error}") from error


class StateKeeper:
    """Keeps state for the next agent in a job's runner, which outlives the current agent."""

    def __init__(self, keeping: HandoverPlan, runner: RunnerLink, grace_ms: int) -> None:
        """Let `runner` outlive this process. Its workers get `grace_ms` if it is not adopted."""
        self._keeping = keeping
        self._runner = runner
        self._grace_ms = grace_ms
        self._kept: KeptState | None = None
        self._orphan_timeout_ms: int | None = None

    def keep_placement(self) -> None:
        self._runner.ask(Keep(PLACEMENT, encode(self._keeping.placement)))

    def keep(self, kept: KeptState) -> None:
        if kept != self._kept:
            self._kept = kept
            self._runner.ask(Keep(STATE, encode(kept)))

    def outlive(self, within_ms: int) -> None:
        """Make the runner wait `within_ms` for the next agent once this agent is gone."""
        if self._orphan_timeout_ms != within_ms:
            self._orphan_timeout_ms = within_ms
            path = str(self._keeping.socket)
            self._runner.ask(Serve(path, within_ms / 1000, self._grace_ms / 1000))
