"""The kinds of values that flags have: each parses a text, or refuses it and names a remedy.

A kind is called with the name of the flag and its text, like the checks of `rdzv.bounds`, some of
which are kinds as they are.
"""

from __future__ import annotations

import builtins
import math
import re
import signal
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from rdzv import bounds
from rdzv.core.evidence.hang_culprit import HangTimeout
from rdzv.core.model import ScaleUp
from rdzv.errors import InvalidRequestError, short

Kind = Callable[[str, str], Any]

MAX_COUNT = 1_000_000
"""The largest count that a message may carry. It exceeds the limits of any server, each of which
enforces its own."""
DAY_S = 86_400
MAX_TIMEOUT_S = 30 * DAY_S
BACKOFF_MAX_MS = 60_000

COUNTED_BY_NODE = ("auto", "cpu", "gpu", "xpu")
"""The words that --nproc-per-node accepts instead of a number, so that each node counts its own
devices."""

_EXCEPTION = re.compile(r"(?:[^\W\d]\w*\.)*[^\W\d]\w*")
_EXCEPTION_CHARS = 128
_EXCEPTIONS = {
    "torch.cuda.OutOfMemoryError": "torch.OutOfMemoryError",
    **{
        name: kind.__name__
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    },
}
"""The types of well-known exceptions by all their names; tracebacks show only one of these."""


def number(low: float, high: float, unit: str, *, scale: float = 1, also: str = "") -> Kind:
    """Return the kind of a number from `low` to `high`, scaled; `also` completes the remedy."""

    def read(flag: str, text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not low <= found <= high:
            limits = f"{_plain(low)} to {_plain(high)}"
            raise InvalidRequestError(
                f"{flag}={short(text)}: give a number of {unit} from {limits}{also}"
            )
        return found if scale == 1 else round(found * scale)

    return read


def ms(low_s: float, high_s: float, also: str = "") -> Kind:
    """Return the kind of a time that is given in seconds, in milliseconds."""
    return number(low_s, high_s, "seconds", scale=1_000, also=also)


def or_zero(kind: Kind) -> Kind:
    """Return a kind that accepts 0, too; its remedy should say what that means."""

    def read(flag: str, text: str) -> Any:
        return 0 if re.fullmatch(r"0+(\.0*)?", text) else kind(flag, text)

    return read


def whole(low: int, high: int = MAX_COUNT) -> Kind:
    def read(flag: str, text: str) -> int:
        # Python refuses to convert thousands of digits.
        found = int(text) if re.fullmatch(r"[-+]?[0-9]{1,18}", text.strip()) else None
        if found is None or not low <= found <= high:
            raise InvalidRequestError(
                f"{flag}={short(text)}: give a whole number from {low} to {high}"
            )
        return found

    return read


def _plain(number: float) -> str:
    return f"{number:.15g}"


timeout = ms(0, MAX_TIMEOUT_S)
positive_timeout = ms(0.001, MAX_TIMEOUT_S)


def truth(flag: str, text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"{flag}={text} is not true or false")
    return text.lower() in ("true", "1")


def text(_: str, text: str) -> str:
    return text


def path(_: str, text: str) -> Path:
    return Path(text)


def printable_path(flag: str, text: str) -> Path:
    """Parse a path that appears in messages and in the workers' environment."""
    if not text.isprintable():
        raise InvalidRequestError(
            f"{flag}={short(text)!r} has characters that cannot be printed; leave them out"
        )
    return Path(text)


def any_name(flag: str, text: str) -> str:
    return bounds.name(flag, text) if text else ""


def nnodes(flag: str, text: str) -> tuple[int, int]:
    """Parse N or MIN:MAX into the minimum and the maximum.

    >>> nnodes("--nnodes", "2:4"), nnodes("--nnodes", "3")
    ((2, 4), (3, 3))
    """
    low, colon, high = text.partition(":")
    if not re.fullmatch(r"[0-9]+(:[0-9]+)?", text):
        raise InvalidRequestError(
            f"{flag}={text} is not a number of nodes; give N or MIN:MAX, e.g. 2:4"
        )
    count = whole(1)
    least, most = count(flag, low), count(flag, high if colon else low)
    if least > most:
        raise InvalidRequestError(
            f"{flag}={text}: the minimum {least} is above the maximum {most}; swap them?"
        )
    return least, most


def nproc(flag: str, text: str) -> int | str:
    """Parse a number of workers, or return a word that makes each node count its own devices.

    >>> nproc("--nproc-per-node", "8"), nproc("--nproc-per-node", "gpu")
    (8, 'gpu')
    """
    if text in COUNTED_BY_NODE:
        return text
    try:
        found: int = whole(1)(flag, text)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{error}, or {', '.join(COUNTED_BY_NODE)}") from None
    return found


def backoff(flag: str, text: str) -> tuple[int, int]:
    """Parse BASE or BASE:MAX in seconds into milliseconds.

    >>> backoff("", "2"), backoff("", "0.5:10"), backoff("", "90")
    ((2000, 60000), (500, 10000), (90000, 90000))
    """
    base, colon, most = text.partition(":")
    base_ms = timeout(flag, base)
    if not colon:
        return base_ms, max(base_ms, BACKOFF_MAX_MS)
    max_ms = timeout(flag, most)
    if max_ms < base_ms:
        raise InvalidRequestError(f"{flag}={text}: the longest wait is below the first; swap them?")
    return base_ms, max_ms


def scale_up(key: str, text: str) -> tuple[ScaleUp, int]:
    """Parse when new nodes may end a running round, and how long it must have run first, in ms.

    >>> scale_up("", "on-restart"), scale_up("", "after:600")
    ((<ScaleUp.ON_RESTART: 'on-restart'>, 0), (<ScaleUp.AFTER: 'after'>, 600000))
    """
    word, colon, seconds = text.partition(":")
    if word == ScaleUp.AFTER and colon:
        return ScaleUp.AFTER, positive_timeout(f"{key}=after", seconds)
    known = [f"{one}:SECONDS" if one is ScaleUp.AFTER else one.value for one in ScaleUp]
    if text not in known or text == ScaleUp.AFTER:
        raise InvalidRequestError(f"{key}={text} is not one of {', '.join(known)}")
    return ScaleUp(text), 0


_hang_s = ms(1, DAY_S, ", more than the longest pause between two steps; or auto")


def hang_timeout(flag: str, text: str) -> HangTimeout:
    """Parse how long a worker may go without progress; `auto` gives a timeout without a length."""
    return HangTimeout(None if text == "auto" else _hang_s(flag, text))


HANDLED = signal.Signals.__members__.keys() - {"SIGKILL", "SIGSTOP"}
"""The names of the signals that a program may handle."""


def signals(flag: str, text: str) -> tuple[signal.Signals, ...]:
    """Parse a comma-separated list of signal names.

    >>> signals("--signals-to-handle", "SIGTERM,SIGUSR1")
    (<Signals.SIGTERM: 15>, <Signals.SIGUSR1: 10>)
    """
    names = [name for part in text.split(",") if (name := part.strip())]
    for name in names:
        if name not in HANDLED:
            raise InvalidRequestError(
                f"{flag}={text}: {name} is not a signal that can be handled; give "
                "names such as SIGTERM,SIGINT"
            )
    return tuple(signal.Signals[name] for name in names)


def notice_signum(flag: str, text: str) -> int:
    """Parse the signal that notifies workers, or return 0 if only the notice file is written."""
    if text == "none":
        return 0
    if text not in HANDLED:
        raise InvalidRequestError(
            f"{flag}={text} is not a signal that a worker can handle; give one such as "
            "SIGTERM or SIGUSR1, or none"
        )
    return int(signal.Signals[text])


def root_cause(flag: str, text: str) -> bool:
    """Parse whether a failed job's exit code is its root cause's, instead of 1."""
    if text not in ("1", "root-cause"):
        raise InvalidRequestError(f"{flag}={text}: give 1, or root-cause")
    return text == "root-cause"


def modules(flag: str, text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of modules.

    >>> modules("--warm", "torch,transformers"), modules("--warm", "")
    (('torch', 'transformers'), ())
    """
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise InvalidRequestError(
                f"{flag}={text}: {name!r} is not a module name; give names such as "
                f"{flag}=torch,numpy"
            )
    return names


def streams(flag: str, text: str) -> int | dict[int, int]:
    """Parse a number from 0 to 3 for all workers, or LOCAL_RANK:N,..., into numbers by LOCAL_RANK.

    >>> streams("--tee", "3"), streams("--tee", "0:1,11:2")
    (3, {0: 1, 11: 2})
    """
    if text in ("0", "1", "2", "3"):
        return int(text)
    pairs = [pair.partition(":") for pair in text.split(",")]
    for rank, colon, what in pairs:
        if not re.fullmatch("[0-9]{1,9}", rank) or what not in ("0", "1", "2", "3"):
            raise InvalidRequestError(
                f"{flag}={text}: {rank + colon + what!r} is not of the form LOCAL_RANK:N with N "
                "from 0 to 3"
            )
    return {int(rank): int(what) for rank, _, what in pairs}


def worker_ends(flag: str, text: str) -> tuple[str, ...]:
    """Parse a list of how workers may end: exit codes, signals and types of exceptions.

    The result has names as `root_cause.names_of_end` gives them, sorted: 128 + n is signal n.

    >>> worker_ends("--restart-on", "3, SIGKILL,-9,IOError,torch.OutOfMemoryError")
    ('137', '3', 'OSError', 'torch.OutOfMemoryError')
    """
    words = [word for part in text.split(",") if (word := part.strip())]
    return bounds.worker_ends(flag, tuple(_worker_end(flag, word) for word in words))


def _worker_end(flag: str, word: str) -> str:
    if re.fullmatch("-?[0-9]{1,9}", word):
        number = int(word)
        if not (0 < number <= 255 or -64 <= number < 0):
            raise InvalidRequestError(
                f"{flag}: no failed worker ends with {word}; give exit codes from 1 to 255, or "
                "signals by name"
            )
        return str(number if number > 0 else 128 - number)
    if word in signal.Signals.__members__:
        return str(128 + signal.Signals[word])
    if word in _EXCEPTIONS:
        return _EXCEPTIONS[word]
    like = [name for name in (*signal.Signals.__members__, *_EXCEPTIONS) if _is_typo(word, name)]
    # A word in small letters is more likely a mistake than a class, unless its module is given.
    unlikely = "." not in word and (word.islower() or word.startswith("SIG"))
    if like or unlikely or not _EXCEPTION.fullmatch(word) or len(word) > _EXCEPTION_CHARS:
        example = "give 3, SIGKILL, ValueError or torch.OutOfMemoryError, for example"
        remedy = f"did you mean `{like[0]}`?" if like else example
        raise InvalidRequestError(
            f"{flag}: {short(word)!r} is no exit code, signal or exception; {remedy}"
        )
    return word


def _is_typo(word: str, name: str) -> bool:
    """Return whether a word is almost a name; one with a module is taken for what it says."""
    from difflib import SequenceMatcher

    word, name = word.lower(), name.lower()
    if word in (name, name.removeprefix("sig")):
        return True
    near = abs(len(word) - len(name)) < 2 and "." not in word
    return near and SequenceMatcher(None, word, name).ratio() >= 0.9


WORKERS_OWN = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE"),
        *("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
        *("RDZV_ROUND", "RDZV_PROGRESS_FILE", "RDZV_NOTICE_FILE"),
        *("RDZV_SNAPSHOT", "RDZV_SNAPSHOT_ORIGIN", "RDZV_SNAPSHOT_DIR"),
    }
)
"""The variables that the agent sets for every worker in every round."""


def environment(what: str, given: Mapping[str, str], gpus: str) -> tuple[tuple[str, str], ...]:
    """Check the variables of a job's environment; `gpus` says how GPUs are chosen instead."""
    checked = bounds.environment(what, tuple(given.items()))
    for name in given:
        if name in WORKERS_OWN:
            raise InvalidRequestError(
                f"{what}: variable {name}: it is different in every worker and round; leave it out"
            )
        if name == "CUDA_VISIBLE_DEVICES":
            raise InvalidRequestError(
                f"{what}: variable {name}: each node assigns GPUs to the job; {gpus}"
            )
    return checked


def root_cause_exit(
    exit_code: int | None, signum: int | None, own: Collection[int]
) -> tuple[int, str]:
    """Return a failed job's exit code by its root cause's end, and why it is 1 all the same.

    The codes in `own`, and 0, say something else about the job, so they are never passed on.

    >>> root_cause_exit(3, None, ()), root_cause_exit(None, 9, ())
    ((3, ''), (137, ''))
    """
    code = exit_code if signum is None else 128 + signum
    if code is None:
        why = "no exit of a worker is known to have ended the job"
    elif code == 0 or code in own:
        why = f"the root cause's own exit code {code} would mean something else"
    else:
        return code, ""
    return 1, f"--exit-code=root-cause: the exit code is 1, because {why}"
