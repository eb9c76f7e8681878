"""`rdzvctl drain`: empties one node, or several in turn, and reports what it is waiting for.

The server decides on drains and keeps them; this module only requests them and waits. However this
program ends, a node that it has drained stays drained and leaves by its deadline.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence

from rdzv.client import ControlClient
from rdzv.core.words import duration
from rdzv.ctl.as_text_nodes import natural
from rdzv.errors import (
    InvalidRequestError,
    RendezvousConnectionError,
    TooFewNodesError,
    UnknownJobError,
    UnknownNodeError,
)
from rdzv.runtime.log_format import harmless
from rdzv.structs import struct
from rdzv.view.answers import JobStatus, Node

LOOK_EVERY_S = 1.0
"""How often to check whether a node is empty, or may be drained."""
MAX_DEADLINE_MS = 7 * 86_400_000
_UNITS_MS = {"ms": 1, "s": 1_000, "": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([a-z]*)")

NODE_VARIABLE = "RDZV_NODE"
"""The variable that passes the node's name to the command given by --undrain-after."""

EXIT_COMMAND_FAILED = 3


def parse_deadline(text: str) -> int:
    """Parse --deadline, the time that workers have, and return milliseconds.

    >>> parse_deadline("5m"), parse_deadline("90"), parse_deadline("1.5h")
    (300000, 90000, 5400000)
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None or found[2] not in _UNITS_MS:
        raise InvalidRequestError(
            f"--deadline={text} is not a time; give a number followed by s, m or h, such as 5m"
        )
    ms = round(float(found[1]) * _UNITS_MS[found[2]])
    if ms > MAX_DEADLINE_MS:
        raise InvalidRequestError(f"--deadline={text} is too long; give at most 7 days, 168h")
    return ms


def parse_label(text: str) -> tuple[str, str]:
    """Parse LABEL=VALUE.

    >>> parse_label("rack=a1")
    ('rack', 'a1')
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidRequestError(f"--all-of={text} is not LABEL=VALUE; give, for example, rack=a1")
    return name, value


def wait_empty(client: ControlClient, node_id: str, say: Callable[[str], None]) -> Node | None:
    """Wait until a node has no jobs left, and return it; None if it is no longer known.

    Keeps waiting while the server is away. Calls `say` whenever the reason for waiting changes.

    Raises:
        UnknownNodeError: the drain was lifted in the meantime.
    """
    told = ""
    while True:
        try:
            found = next(iter(client.nodes(node_id)), None)
        except RendezvousConnectionError as error:
            told = _say_once(f"waiting for the server: {error}", told, say)
            time.sleep(LOOK_EVERY_S)
            continue
        if found is None or (not found.jobs and found.drain):
            return found
        if found.drain is None:
            raise UnknownNodeError(f"{node_id} is no longer drained: its drain was lifted")
        names = ", ".join(job.rdzv_id for job in found.jobs)
        told = _say_once(f"{node_id}: waiting for {names} to leave", told, say)
        time.sleep(LOOK_EVERY_S)


def _say_once(text: str, told: str, say: Callable[[str], None]) -> str:
    if text != told:
        say(harmless(text))
    return text


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

    Raises:
        RendezvousError: no node has the label, or the server refuses.
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
            found = _insist(lambda node_id=node_id: client.undrain(node_id, rolling.reason), say)  # type: ignore[misc]
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
    told = ""
    while True:
        try:
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
                found = client.drain(node_id, rolling.deadline_ms, rolling.reason)
                say("draining")
        except TooFewNodesError as error:
            told = _say_once(f"waiting: {error}", told, say)
        except RendezvousConnectionError as error:
            told = _say_once(f"waiting for the server: {error}", told, say)
        else:
            return [job.rdzv_id for job in found.jobs]
        time.sleep(LOOK_EVERY_S)


def _is_ours(reason: str, rolling: Rolling) -> bool:
    """Return whether a drain with this reason may be this command's, run before."""
    # The server appends the name of a caller that is proven.
    return rolling.command is None or f"{reason} [".startswith(f"{rolling.reason} [")


def _insist(ask: Callable[[], Node], say: Callable[[str], None]) -> Node:
    """Repeat a request until the server responds, and return the response."""
    told = ""
    while True:
        try:
            return ask()
        except RendezvousConnectionError as error:
            told = _say_once(f"waiting for the server: {error}", told, say)
            time.sleep(LOOK_EVERY_S)


def _wait_running(client: ControlClient, jobs: Sequence[str], say: Callable[[str], None]) -> None:
    """Wait until each of the jobs, which have lost a node, is running again or has ended."""
    told = ""
    for rdzv_id in jobs:
        while True:
            try:
                status = client.status(rdzv_id)
            except UnknownJobError:
                break
            except RendezvousConnectionError as error:
                told = _say_once(f"waiting for the server: {error}", told, say)
            else:
                if _goes_on(status):
                    break
                told = _say_once(
                    f"waiting for {rdzv_id} to run: {status.reason.headline}", told, say
                )
            time.sleep(LOOK_EVERY_S)


def _goes_on(status: JobStatus) -> bool:
    return status.state not in ("queued", "joining", "stopping")


def _run(command: str, node_id: str) -> int:
    environ = {**os.environ, NODE_VARIABLE: node_id}
    return subprocess.run(command, shell=True, check=False, env=environ).returncode


def _has(node: Node, name: str, value: str) -> bool:
    return node.resources is not None and node.resources.labels.get(name) == value
