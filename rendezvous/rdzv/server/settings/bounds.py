"""Checks external names, numbers and texts against bounds, independently of protobuf.

A check returns the value, or refuses it with an error that gives the value, the reason and the
remedy. Text for people (such as a reason or a traceback) is truncated if it is too long, because a
node's report must not be refused for its length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from rdzv.errors import InvalidRequestError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@-]*")
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_ADDRESS = re.compile(r"[A-Za-z0-9.:%_-]+")
T = TypeVar("T")

# What a caller may send.

NAME_CHARS = 128
"""The maximum length of rdzv_id and node_id, which become directory names. Any pod's name fits."""
UID_CHARS = 64
"""The maximum length of instance and run, which are random ids. A UUID has 36 characters."""
ADDRESS_CHARS = 255
"""The length of the longest DNS name."""
LABEL_CHARS = 255
"""The maximum length of role, topology, machine and versions."""
SECRET_CHARS_LEAST = 16
"""The minimum length of a job's secret, whose stored hash would reveal a shorter one."""
REASON_CHARS = 1_000
"""The maximum length of a sentence for people. Longer ones are truncated."""
TRACEBACK_CHARS = 16_384
"""The maximum length of a traceback stored with a job. Longer ones lose their beginning."""
WORKER_ENDS = 32
"""The number of ends in each of restart_on and no_restart_on, each of at most `NAME_CHARS`."""
TIMEOUT_MS = 30 * 86_400_000
"""The longest timeout of a job. An ended job is remembered for at least as long, so no node can
still be waiting to learn how it ended."""
AWAY_MS = 60 * 60_000
"""How long the seats of an agent are kept while it is restarted on purpose."""
NODES_PER_JOB = 1_000_000
"""The largest max_nodes. The setting `limits.nodes` bounds how many nodes there are."""
LOCAL_WORLD_SIZE = 4_096
"""The number of workers of one node in a job."""
JOBS_PER_NODE = 256
"""The number of jobs that one node may be in."""
ARGS_BYTES = 128 * 1024
"""The size of a submitted job's arguments, which are stored with it and sent to each node."""
ENV_BYTES = 128 * 1024
"""The size of a submitted job's environment, which is stored and sent in the same way. Linux
allows as much in a single variable."""
ENV_VARIABLES = 1_000
"""The number of variables in a submitted job's environment."""
LABELS = 64
"""The number of labels that a node has or that a job requires."""
GPUS = 1_024
"""The number of GPUs in a node. Machines have 8 or 16."""
CAPACITY = 1_024
"""The number of jobs that a node accepts at once."""
PRIORITY = 1_000_000
"""The largest priority. The smallest is its negative."""
FAILING_CHECKS = 16
"""The number of failing checks in a node's report. One is enough to keep jobs off the node."""
FAILURES = 64
"""The number of failed workers in a report. The earliest are kept, as in the core."""
PIDS = 64
"""The number of stuck processes in a report. The rest are dropped, because one is reason enough."""
RESTARTS = 1_000_000
"""The largest max_restarts, which is more than any job can spend."""
STEPS = 1 << 53
"""The number of steps that a parked worker has sealed. JSON readers do not read larger integers
exactly."""
SHARDS = 1 << 20
"""The number of parts in a sharded state."""
SNAPSHOTS_PER_WORKER = 8
"""The number of snapshots that a node holds for each of its workers: two of the worker's own, and
copies for three others."""
LOG_POSITIONS = 65_536
"""The number of files in which a reader can resume after its stream was cut."""
LOG_PIECE_BYTES = 64 * 1024
"""The size of one piece of a log."""
STACK_THREADS = 64
"""The number of threads kept for each worker. Others are omitted."""
STACK_FRAMES = 128
"""The number of frames kept for each thread. Others are omitted."""
STACK_WORKERS = 256
"""The number of workers in one message from a node, which sends them one at a time."""
ARRIVALS = 1 << 17
"""The number of collective entry times in one report from a node."""
RECORD_GROUPS = 64
"""The number of process groups per worker whose collectives are kept. Others are omitted."""
RECORD_ENTRIES = 64
"""The number of collectives kept for each process group. Others are omitted."""
RECORD_MEMBERS = 4_096
"""The number of RANKs kept for each process group. Others are omitted."""
HISTORY_DEFAULT = 200
"""The number of rows that ListEvents returns if the caller does not specify one."""


def refusal(what: str, value: object, reason: str, remedy: str) -> InvalidRequestError:
    """Return an error that gives a value, the reason why it is refused, and the remedy."""
    shown = repr(value) if len(str(value)) <= 80 else repr(str(value)[:77] + "...")
    return InvalidRequestError(f"{what} {shown} {reason}; {remedy}")


def spelled(what: str, text: str, alphabet: re.Pattern[str], chars: int, allowed: str) -> str:
    """Check that a text is neither empty nor too long and matches `alphabet`."""
    if not text:
        raise refusal(what, text, "is empty", f"give {allowed}")
    if len(text) > chars:
        raise refusal(what, text, f"has {len(text)} characters", f"give at most {chars}")
    if not alphabet.fullmatch(text):
        raise refusal(what, text, "has characters that are not allowed", f"use {allowed}")
    return text


def name(what: str, text: str) -> str:
    """Check a name chosen by a person, which is used as the name of a directory."""
    allowed = "letters, digits and . _ : @ -, beginning with a letter, a digit or _"
    return spelled(what, text, _NAME, NAME_CHARS, allowed)


def rdzv_id_of(text: str) -> str:
    return name("rdzv_id", text)


def node_id_of(text: str) -> str:
    return name("node_id", text)


def uid(what: str, text: str, *, needed: bool = True) -> str:
    """Check an id generated by a program; it may be empty unless it is `needed`."""
    if not text and not needed:
        return ""
    return spelled(what, text, _UID, UID_CHARS, "letters, digits, _ and -")


def address(what: str, text: str, *, needed: bool = True) -> str:
    """Check a host name or IP address; it may be empty unless it is `needed`."""
    if not text and not needed:
        return ""
    return spelled(what, text, _ADDRESS, ADDRESS_CHARS, "a host name or an IP address")


def label(what: str, text: str) -> str:
    """Check a printable text of bounded length; it may be empty."""
    if len(text) > LABEL_CHARS:
        raise refusal(what, text, f"has {len(text)} characters", f"give at most {LABEL_CHARS}")
    if not text.isprintable():
        raise refusal(what, text, "has characters that cannot be printed", "leave them out")
    return text


def within(what: str, value: int, lowest: int, highest: int) -> int:
    """Check a number; an error shows milliseconds as seconds, as people write them."""
    if lowest <= value <= highest:
        return value
    if not what.endswith("_ms"):
        raise refusal(what, value, "is out of bounds", f"give {lowest} to {highest}")
    remedy = f"give {lowest / 1000:.15g} to {highest / 1000:.15g} s"
    raise refusal(what.removesuffix("_ms"), f"{value / 1000:.15g} s", "is out of bounds", remedy)


def one_of(what: str, value: int, known: Mapping[int, T]) -> T:
    if value not in known:
        allowed = ", ".join(str(number) for number in known)
        raise refusal(what, value, "is not known to this server", f"give one of {allowed}")
    return known[value]


def sentence(text: str) -> str:
    """Return text for people as one printable line, truncated to a bounded length."""
    line = "".join(char if char.isprintable() else " " for char in text).strip()
    return line if len(line) <= REASON_CHARS else line[: REASON_CHARS - 3] + "..."


def traceback(text: str) -> str:
    """Return the end of a traceback, which names the cause, truncated to a bounded length."""
    cut = len(text) - TRACEBACK_CHARS
    return text if cut <= 0 else "..." + text[cut + 3 :]
