"""The job state that a runner keeps, so that the next agent can continue the job.

It is kept by the runner rather than in a file, so it exists exactly as long as the workers and is
never older than the last request to the runner. Newer agents can read the state of older ones: new
fields have defaults, and unknown fields are ignored.
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

PLACEMENT = "placement"
STATE = "state"

_T = TypeVar("_T")


@struct(frozen=True)
class KeptPlacement:
    """The part that does not change while a node holds a job."""

    node_id: str
    instance: str
    """The node's instance, as the server knows it."""
    rdzv_id: str
    run: str
    spec: JobSpec
    gpus: int
    """The number of GPUs that it asked for."""
    granted: tuple[str, ...]
    """The UUIDs of the GPUs that it holds."""
    environ: dict[str, str]
    """The node's environment for all jobs, as it was when this one began."""
    account: Account | None = None
    """The account that it runs as; None for the agent's own."""
    format: int = FORMAT


@struct(frozen=True)
class KeptStop:
    """The stop command to the workers, and its time by the clock of the agent's core."""

    round: int
    grace_ms: int
    signum: int | None
    at_ms: int
    keep_ms: int | None = None
    not_kept: tuple[int, ...] = ()


@struct(frozen=True)
class KeptOutput:
    """The output paths of one worker."""

    stdout: str | None
    stderr: str | None
    error: str


@struct(frozen=True)
class KeptState:
    """The part that changes, as the driver knows it; times are of the monotonic clock."""

    state: AgentState
    offer: Offer
    joined: bool = False
    stop: KeptStop | None = None
    outputs: tuple[KeptOutput, ...] = ()
    """The outputs of the last round, by LOCAL_RANK."""
    progress_folder: str | None = None


@struct(frozen=True)
class Keeping:
    """What a driver needs to let its job outlive the agent."""

    socket: Path
    """The socket on which the runner listens."""
    placement: KeptPlacement


def encode(kept: KeptPlacement | KeptState) -> str:
    """Return the text from which the matching `decode_*` function restores an equal value."""
    # json also accepts file names that are not valid text.
    return json.dumps(msgspec.to_builtins(kept), separators=(",", ":"))


def decode_placement(text: str | None) -> KeptPlacement:
    """Return a kept placement.

    Raises:
        NotAdoptableError: there is none, a newer agent wrote it, or it is damaged.

    """
    raw = _load(PLACEMENT, text)
    found = raw.get("format", 0)
    if isinstance(found, int) and found > FORMAT:
        raise NotAdoptableError(
            f"its state has format {found}, but this agent reads only up to format {FORMAT}"
        )
    return _convert(PLACEMENT, raw, KeptPlacement)


def decode_state(text: str | None) -> KeptState:
    """Return a kept state.

    Raises:
        NotAdoptableError: there is none, or it is damaged.

    """
    return _convert(STATE, _load(STATE, text), KeptState)


def _load(name: str, text: str | None) -> dict[str, Any]:
    if text is None:
        raise NotAdoptableError(f"it keeps no {name}, because its job had not begun")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotAdoptableError(f"cannot read its {name}: {error}") from error
    if not isinstance(raw, dict):
        raise NotAdoptableError(f"cannot read its {name}: {text:.80}")
    return raw


def _convert(name: str, raw: dict[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        # msgspec's error quotes the wrong value, and a lone surrogate in it cannot be encoded.
        raise NotAdoptableError(f"cannot read its {name}: {error}") from error


def keep_output(output: WorkerOutput) -> KeptOutput:
    """Convert a worker's output paths for keeping."""
    return KeptOutput(
        None if output.stdout is None else str(output.stdout),
        None if output.stderr is None else str(output.stderr),
        str(output.error),
    )


def kept_output(output: KeptOutput) -> WorkerOutput:
    """Restore a worker's output paths."""
    return WorkerOutput(
        stdout=None if output.stdout is None else Path(output.stdout),
        stderr=None if output.stderr is None else Path(output.stderr),
        error=Path(output.error),
    )
