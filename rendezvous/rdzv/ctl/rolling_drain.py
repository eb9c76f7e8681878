"""`rdzvctl drain`: empties one node, or several in turn, and reports what it is waiting for.

The server decides on drains and keeps them; this module only requests them and waits. However this
program ends, a node that it has drained stays drained and leaves by its deadline.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rdzv.client import ControlClient
from rdzv.core.words import duration
from rdzv.ctl.as_text_nodes import natural
from rdzv.ctl.command_line import parse_duration
from rdzv.errors import (
    InvalidRequestError,
    RendezvousConnectionError,
    TooFewNodesError,
    UnknownJobError,
    UnknownNodeError,
)
from rdzv.runtime.log_format import harmless
from rdzv.structs import struct
from rdzv.view.answers import Node

T = TypeVar("T")

LOOK_EVERY_S = 1.0
MAX_DEADLINE_MS = 7 * 86_400_000
NODE_VARIABLE = "RDZV_NODE"
"""The variable that passes the node's name to the command given by --undrain-after."""

EXIT_COMMAND_FAILED = 3


def parse_deadline(text: str) -> int:
    """Parse --deadline, the time that workers have, and return milliseconds.

    >>> parse_deadline("5m"), parse_deadline("90")
    (300000, 90000)
    """
    ms = parse_duration("--deadline", text, least_ms=0, unit="s")
    if ms > MAX_DEADLINE_MS:
        raise InvalidRequestError(f"--deadline={text} is too long; give at most 7 days, 168h")
    return ms


def parse_label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidRequestError(f"--all-of={text} is not LABEL=VALUE; give, for example, rack=a1")
    return name, value


def wait_empty(client: ControlClient, node_id: str, say: Callable[[str], None]) -> Node | None:
    """Wait until a node has no jobs left, and return it; None if it is no longer known.

    Keeps waiting while the server is away. Calls `say` whenever the reason for waiting changes.
    """

    def look() -> Node | str | None:
        found = next(iter(client.nodes(node_id)), None)
        if found is None or (not found.jobs and found.drain):
            return found
        if found.drain is None:
            raise UnknownNodeError(f"{node_id} is no longer drained: its drain was lifted")
        names = ", ".join(job.rdzv_id for job in found.jobs)
        return f"{node_id}: waiting for {names} to leave"

    return _until(look, say)


def _until(look: Callable[[], T | str], say: Callable[[str], None]) -> T:
    """Call `look` until it returns something other than the reason for waiting, a text.

    Keeps waiting while the server is away. Calls `say` whenever the reason changes.
    """
    shown = ""
    while True:
        try:
            found = look()
        except RendezvousConnectionError as error:
            found = f"waiting for the server: {error}"
        if not isinstance(found, str):
            return found
        if found != shown:
            say(harmless(found))
            shown = found
        time.sleep(LOOK_EVERY_S)


@struct(frozen=True)
class Rolling:
    """A rolling drain of all nodes with a given label."""

    label: tuple[str, str]
    deadline_ms: int
    reason: str
    command: str | None = None
    """The command to run for each empty node. If it succeeds, the node's drain is lifted."""


def roll(client: ControlClient, rolling: Rolling, say: Callable[[str], None]) -> int:
    """Drain all nodes with a label, one after another; return the exit code.

    A node is drained only once each of its jobs keeps its min_nodes without it, and the previous
    node's jobs are running again.
    """
    name, value = rolling.label
    node_ids = [node.node_id for node in client.nodes() if _has(node, name, value)]
    if not node_ids:
        raise UnknownNodeError(
            f"no known node has the label {name}={value}; `rdzvctl nodes` shows them"
        )
    node_ids.sort(key=natural)
    say(harmless(f"{len(node_ids)} with {name}={value}: {', '.join(node_ids)}"))
    for number, node_id in enumerate(node_ids, 1):
        before = f"{number} of {len(node_ids)}, {node_id}: "
        jobs = _drain_when_it_may(client, rolling, node_id, lambda text, b=before: say(b + text))  # type: ignore[misc]
        if jobs is None:
            continue
        began_s = time.monotonic()
        wait_empty(client, node_id, say)
        took = duration(round((time.monotonic() - began_s) * 1000))
        say(f"{before}empty after {took}")
        if rolling.command is not None:
            code = _run(rolling.command, node_id)
            if code != 0:
                say(f"{before}the command of --undrain-after exited with {code}; it stays drained")
                return EXIT_COMMAND_FAILED
            found = _until(lambda node_id=node_id: client.undrain(node_id, rolling.reason), say)  # type: ignore[misc]
            still = ", and still cordoned" if found.cordoned else ""
            say(f"{before}undrained{still}")
        _wait_running(client, jobs, say)
    return 0


def _drain_when_it_may(
    client: ControlClient, rolling: Rolling, node_id: str, say: Callable[[str], None]
) -> Sequence[str] | None:
    """Drain a node as soon as its jobs can run without it; return these jobs.

    Return None if the node is skipped: it is not known, or is drained for another reason, which
    the success of `--undrain-after` says nothing about.
    """

    def look() -> Sequence[str] | str | None:
        found = next(iter(client.nodes(node_id)), None)
        if found is None:
            say("it is no longer known; skipping it")
            return None
        reason = found.drain_reason or "no reason was given"
        if found.drained_by_operator and not _is_ours(reason, rolling):
            say(f"it is drained already, and stays so ({harmless(reason)}); skipping it")
            return None
        if found.drained_by_operator:
            say("it is already drained")
        else:
            try:
                found = client.drain(node_id, rolling.deadline_ms, rolling.reason)
            except TooFewNodesError as error:
                return f"waiting: {error}"
            say("draining")
        return [job.rdzv_id for job in found.jobs]

    return _until(look, say)


def _is_ours(reason: str, rolling: Rolling) -> bool:
    """Return whether a drain with this reason may be this command's, run before."""
    # The server appends the name of a caller that is proven.
    return rolling.command is None or f"{reason} [".startswith(f"{rolling.reason} [")


def _wait_running(client: ControlClient, jobs: Sequence[str], say: Callable[[str], None]) -> None:
    for rdzv_id in jobs:

        def look(rdzv_id: str = rdzv_id) -> str | None:
            try:
                status = client.status(rdzv_id)
            except UnknownJobError:
                return None
            if status.state not in ("queued", "joining", "stopping"):
                return None
            return f"waiting for {rdzv_id} to run: {status.reason.headline}"

        _until(look, say)


def _run(command: str, node_id: str) -> int:
    environ = {**os.environ, NODE_VARIABLE: node_id}
    return subprocess.run(command, shell=True, check=False, env=environ).returncode


def _has(node: Node, name: str, value: str) -> bool:
    return node.resources is not None and node.resources.labels.get(name) == value
