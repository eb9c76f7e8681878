"""What the fields of messages may hold: marks that a struct puts on its fields, and their checks.

    @struct(frozen=True)
    class Offer:
        address: Address
        local_world_size: Annotated[int, Within(1, LOCAL_WORLD_SIZE, "--nproc-per-node")] = 1

`transport.wire` applies them where a message is read that comes from outside. A value that is
refused is named with its path, the reason and the remedy. Text for people (such as a reason or a
traceback) is cut if it is too long, because a node's report must not be refused for its length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from rdzv.errors import InvalidRequestError
from rdzv.structs import struct

T = TypeVar("T")

DAY_MS = 86_400_000

LABEL_CHARS = 255
"""The maximum length of role, topology, machine and versions."""
REASON_CHARS = 1_000
"""The maximum length of a sentence for people."""
TRACEBACK_CHARS = 16_384
"""The maximum length of a traceback stored with a job. Longer ones lose their beginning."""
TIMEOUT_MS = 30 * DAY_MS
"""The longest timeout of a job. An ended job is remembered for at least as long, so no node can
still be waiting to learn how it ended."""
NODES_PER_JOB = 1_000_000
"""The largest max_nodes. The largest min_nodes is the setting `limits.nodes`."""
LOCAL_WORLD_SIZE = 4_096
JOBS_PER_NODE = 256
AWAY_MS = 60 * 60_000
"""How long the seats of an agent are kept while it is restarted on purpose."""
GPUS = 1_024
"""The number of GPUs in a node. Machines have 8 or 16."""
RESTARTS = 1_000_000
"""The largest max_restarts, which is more than any job can spend."""
STEPS = 1 << 53
"""The largest step. JSON readers do not read larger integers exactly."""
SHARDS = 1 << 20
LOG_POSITIONS = 65_536
"""The number of files in which a reader can resume after its stream was cut."""
LOG_PIECE_BYTES = 64 * 1024
METRICS_BYTES = 256 * 1024
"""The size of an agent's metrics. They are 12 KiB, or 80 KiB once workers exit in every way."""
LABELS = 64
"""The number of labels that a node has or that a job requires."""

# ------------------------------------------------------------------------------------ the marks


@struct(frozen=True)
class Within:
    """A number from `low` to `high`. A refusal begins with the `flag` that sets it, if any."""

    low: int
    high: int
    flag: str = ""


@struct(frozen=True)
class AtMost:
    """A number that counts as `high` if it is higher."""

    high: int


@struct(frozen=True)
class UpTo:
    """A list of at most `count` items."""

    count: int


@struct(frozen=True)
class First:
    """A list of which only the first `count` items are read."""

    count: int


@struct(frozen=True)
class Check:
    """A value that `call` accepts. It takes the path and the value, and returns the value."""

    call: Callable[[str, Any], Any]
    empty: bool = False
    """Whether the value may be empty, too."""


@struct(frozen=True)
class Cut:
    """A value that `call` makes acceptable."""

    call: Callable[[Any], Any]


@struct(frozen=True)
class Else:
    """What a field reads as that is unset. An enum reads so, too, where it is not checked."""

    value: Any


@struct(frozen=True)
class Coded:
    """A value that is sent as the text that `write` makes of it, and that `read` reads."""

    write: Callable[[Any], str]
    read: Callable[[str], Any]


@struct(frozen=True)
class Age:
    """A time that is sent as an age in the field of this name."""

    field: str


class Flat:
    """A struct whose fields are sent with those of the struct that it is in."""


class Unsent:
    """A field that is not sent: only this end knows it."""


# ------------------------------------------------------------------------------------ the checks


def refusal(what: str, value: object, reason: str, remedy: str) -> InvalidRequestError:
    """Return an error that gives a value, the reason why it is refused, and the remedy."""
    shown = repr(value) if len(str(value)) <= 80 else repr(str(value)[:77] + "...")
    return InvalidRequestError(f"{what} {shown} {reason}; {remedy}")


def spelled(what: str, text: str, alphabet: re.Pattern[str], chars: int, allowed: str) -> str:
    """Check that a text is neither empty nor too long and matches `alphabet`."""
    if len(text) <= chars and alphabet.fullmatch(text):
        return text
    if not text:
        raise refusal(what, text, "is empty", f"give {allowed}")
    if len(text) > chars:
        raise refusal(what, text, f"has {len(text)} characters", f"give at most {chars}")
    raise refusal(what, text, "has characters that are not allowed", f"use {allowed}")


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@-]*")
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_ADDRESS = re.compile(r"[A-Za-z0-9.:%_-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORKER_END = re.compile(r"[0-9]{1,3}|(?:[^\W\d]\w*\.)*[^\W\d]\w*")
_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_NAME_CHARS = 128  # Any pod's name fits.


def name(what: str, text: str) -> str:
    """Check a name chosen by a person, which is used as the name of a directory."""
    allowed = "letters, digits and . _ : @ -, beginning with a letter, a digit or _"
    return spelled(what, text, _NAME, _NAME_CHARS, allowed)


def rdzv_id_of(text: str) -> str:
    return name("rdzv_id", text)


def node_id_of(text: str) -> str:
    return name("node_id", text)


def uid(what: str, text: str) -> str:
    """Check an id generated by a program. A UUID has 36 characters."""
    return spelled(what, text, _UID, 64, "letters, digits, _ and -")


def address(what: str, text: str) -> str:
    """Check a host name or IP address. The longest DNS name has 255 characters."""
    return spelled(what, text, _ADDRESS, 255, "a host name or an IP address")


def label(what: str, text: str) -> str:
    """Check a printable text of bounded length; it may be empty."""
    if len(text) > LABEL_CHARS:
        raise refusal(what, text, f"has {len(text)} characters", f"give at most {LABEL_CHARS}")
    if not text.isprintable():
        raise refusal(what, text, "has characters that cannot be printed", "leave them out")
    return text


def printable(what: str, text: str) -> str:
    """Check a printable text of bounded length that is not empty."""
    if not text:
        raise refusal(what, text, "is empty", "name it")
    return label(what, text)


def sentence(text: str) -> str:
    """Return text for people as one printable line, truncated to a bounded length."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    line = text.strip()
    return line if len(line) <= REASON_CHARS else line[: REASON_CHARS - 3] + "..."


def traceback(text: str) -> str:
    """Return the end of a traceback, which names the cause, truncated to a bounded length."""
    cut = len(text) - TRACEBACK_CHARS
    return text if cut <= 0 else "..." + text[cut + 3 :]


def within(what: str, value: int, low: int, high: int) -> int:
    """Check a number; an error shows milliseconds as seconds, as people write them."""
    if low <= value <= high:
        return value
    if not what.endswith("_ms"):
        raise refusal(what, value, "is out of bounds", f"give {low} to {high}")
    remedy = f"give {low / 1000:.15g} to {high / 1000:.15g} s"
    raise refusal(what.removesuffix("_ms"), f"{value / 1000:.15g} s", "is out of bounds", remedy)


def nnodes(min_nodes: int, max_nodes: int, flag: str = "") -> None:
    if min_nodes > max_nodes:
        reason = f"is above max_nodes {max_nodes}"
        raise refusal(f"{flag}min_nodes", min_nodes, reason, "give MIN:MAX")


def rate(what: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise refusal(what, value, "is no rate", "give one from 0 on")
    return value


def up_to(what: str, values: T, most: int) -> T:
    """Check how many there are of something that has a length."""
    if (given := len(values)) > most:  # type: ignore[arg-type]
        raise refusal(what, given, "are too many", f"give at most {most}")
    return values


def one_of(what: str, value: int, known: Mapping[int, T]) -> T:
    if value not in known:
        allowed = ", ".join(str(number) for number in known)
        raise refusal(what, value, "is not known to this server", f"give one of {allowed}")
    return known[value]


def labels(what: str, pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Check the names and values of labels, and return them sorted by name."""
    checked: dict[str, str] = {}
    for key, value in up_to(what, tuple(pairs), LABELS):
        spelled(what, key, _LABEL_NAME, _NAME_CHARS, "letters, digits and . _ / -")
        if key in checked:
            raise refusal(what, key, "is given twice", "give it once")
        checked[key] = label(f"{what}: {key}", value)
    return tuple(sorted(checked.items()))


def worker_ends(what: str, ends: tuple[str, ...]) -> tuple[str, ...]:
    """Check how workers may end, and return each end once, sorted."""
    allowed = "exit codes, and types of exceptions as in a traceback"
    for end in up_to(what, ends, 32):
        spelled(what, end, _WORKER_END, _NAME_CHARS, allowed)
    return tuple(sorted(set(ends)))


def no_nul(what: str, text: str) -> str:
    if "\0" in text:
        raise refusal(what, text, "has a NUL character", "leave it out")
    return text


def arguments(what: str, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Check a submitted job's arguments, which are stored with it and sent to each node."""
    if not texts:
        raise refusal(what, [], "are empty", "name a script")
    _check_size(what, texts)
    return tuple(no_nul(what, text) for text in texts)


def environment(what: str, pairs: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Check a submitted job's environment. Values are never shown, not even in an error."""
    up_to(what, pairs, 1_000)
    _check_size(what, [text for pair in pairs for text in pair])
    for key, value in pairs:
        allowed = "letters, digits and _, not beginning with a digit"
        spelled(f"{what}: variable", key, _VARIABLE, LABEL_CHARS, allowed)
        if "\0" in value:
            raise refusal(what, key, "has a value with a NUL character", "leave it out")
    return tuple(dict(pairs).items())


def _check_size(what: str, texts: Iterable[str]) -> None:
    """Limit arguments and environments. Linux allows as much in a single variable."""
    most = 128 * 1024
    if (size := sum(len(text.encode()) for text in texts)) > most:
        remedy = f"give at most {most}, and put larger data into a file"
        raise refusal(what, size, "bytes are too many", remedy)


# ------------------------------------------------------------------------------------ the kinds

Name = Annotated[str, Check(name)]
AnyName = Annotated[str, Check(name, empty=True)]
Uid = Annotated[str, Check(uid)]
AnyUid = Annotated[str, Check(uid, empty=True)]
"""An id that may be empty, where it is not known yet."""
Address = Annotated[str, Check(address)]
AnyAddress = Annotated[str, Check(address, empty=True)]
Label = Annotated[str, Check(label, empty=True)]
Printable = Annotated[str, Check(printable)]
Sentence = Annotated[str, Cut(sentence)]
ShortSentence = Annotated[str, Cut(lambda text: sentence(text)[:LABEL_CHARS])]
Traceback = Annotated[str, Cut(traceback)]
Part = Annotated[str, Cut(lambda text: text[:LABEL_CHARS])]
"""A name that a worker's program has chosen; longer ones are cut."""
NoNul = Annotated[str, Check(no_nul)]
Arguments = Annotated[tuple[str, ...], Check(arguments)]
Environment = Annotated[tuple[tuple[str, str], ...], Check(environment)]
WorkerEnds = Annotated[tuple[str, ...], Check(worker_ends)]
Labels = Annotated[tuple[tuple[str, str], ...], Check(labels)]
Rate = Annotated[float, Check(rate)]
Duration = Annotated[int, Within(0, TIMEOUT_MS)]
"""A time span in ms that somebody has set."""
Elapsed = Annotated[int, AtMost(TIMEOUT_MS)]
"""A time span in ms that somebody has measured."""
LocalRank = Annotated[int, Within(0, LOCAL_WORLD_SIZE - 1)]
Step = Annotated[int, Within(0, STEPS)]
Port = Annotated[int, Within(0, 65_535)]
OwnPort = Annotated[int, Within(1, 65_535)]
Count = Annotated[int, Within(0, RESTARTS)]
"""A number of restarts or rounds."""
