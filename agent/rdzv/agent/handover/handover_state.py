"""The state of a job that its runner keeps, so that the next agent can go on with it.

It is kept by the runner and not in a file: it is there exactly as long as the workers are, is gone
with them, and is never older than what the runner was asked to do last. A newer agent reads what an
older one had kept: what is new has a default, and what is not known any more is passed over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rdzv.agent.core.model import AgentState
from rdzv.agent.output.run_files import WorkerOutput
from rdzv.agent.runner_link import NotAdoptableError
from rdzv.agent.system.accounts import Account
from rdzv.core.model import JobSpec, Offer
from rdzv.structs import struct

FORMAT = 2
"""Raised whenever an older agent would misread what this one has kept."""

WITH_ACCOUNT = 2
"""The first whose agents know of accounts; one before would start the next round as itself."""

PLACEMENT = "placement"
STATE = "state"

_T = TypeVar("_T")


@struct(frozen=True)
class KeptPlacement:
    """The part that does not change while a node holds a job."""

    node_id: str
    instance: str
    """The instance of the node that the server knows it by."""
    rdzv_id: str
    run: str
    spec: JobSpec
    gpus: int
    """How many it was to get."""
    granted: tuple[str, ...]
    """Those that it has, by UUID."""
    environ: dict[str, str]
    """The environment that its node gives to every job, as it was when this one began."""
    account: Account | None = None
    """The account that it runs as; None: the agent's."""
    format: int = 1
    """The first whose agents do with it what is meant."""


@struct(frozen=True)
class KeptStop:
    """How the workers were told to end, and when, by the clock of the agent's core."""

    round: int
    grace_ms: int
    signum: int | None
    at_ms: int


@struct(frozen=True)
class KeptOutput:
    """Where a worker writes."""

    stdout: str | None
    stderr: str | None
    error: str


@struct(frozen=True)
class KeptState:
    """The part that changes, as the driver knows it; times by this machine's monotonic clock."""

    state: AgentState
    offer: Offer
    joined: bool = False
    stop: KeptStop | None = None
    outputs: tuple[KeptOutput, ...] = ()
    """Those of the last round, by LOCAL_RANK."""
    progress_folder: str | None = None


@struct(frozen=True)
class Keeping:
    """A driver's means to let its job outlive the agent."""

    socket: Path
    """Where the runner listens."""
    placement: KeptPlacement


def format_for(account: Account | None) -> int:
    """Return the format of a placement, which older agents may read as long as they can."""
    return 1 if account is None else WITH_ACCOUNT


def encode(kept: KeptPlacement | KeptState) -> str:
    """Return the text from which `decode` gives an equal value."""
    # By way of json, which also takes names of files that are no characters.
    return json.dumps(msgspec.to_builtins(kept), separators=(",", ":"))


def decode_placement(text: str | None) -> KeptPlacement:
    """Return a placement that was kept.

    Raises:
        NotAdoptableError: there is none, or it is of a newer agent, or damaged.

    """
    raw = _load(PLACEMENT, text)
    found = raw.get("format", 0)
    if isinstance(found, int) and found > FORMAT:
        raise NotAdoptableError(
            f"what it keeps has format {found}, and this agent reads format {FORMAT}"
        )
    return _convert(PLACEMENT, raw, KeptPlacement)


def decode_state(text: str | None) -> KeptState:
    """Return a state that was kept.

    Raises:
        NotAdoptableError: there is none, or it is damaged.

    """
    return _convert(STATE, _load(STATE, text), KeptState)


def _load(name: str, text: str | None) -> dict[str, Any]:
    if text is None:
        raise NotAdoptableError(f"it was about to begin, and keeps no {name}")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotAdoptableError(f"its {name} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise NotAdoptableError(f"its {name} cannot be read: {text:.80}")
    return raw


def _convert(name: str, raw: dict[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        # msgspec quotes a wrong value in its error, which half a surrogate is no text for.
        raise NotAdoptableError(f"its {name} cannot be read: {error}") from error


def keep_output(output: WorkerOutput) -> KeptOutput:
    """Keep where a worker writes."""
    return KeptOutput(
        None if output.stdout is None else str(output.stdout),
        None if output.stderr is None else str(output.stderr),
        str(output.error),
    )


def kept_output(output: KeptOutput) -> WorkerOutput:
    """Return where a worker writes."""
    return WorkerOutput(
        stdout=None if output.stdout is None else Path(output.stdout),
        stderr=None if output.stderr is None else Path(output.stderr),
        error=Path(output.error),
    )
