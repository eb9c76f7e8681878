"""Parses the options that concern the job, or refuses them and names a remedy.

Nothing here depends on the machine, because the machine that parses a command line may not be the
node that launches the job. `rdzvctl submit` and rdzvrun therefore refuse the same words in the same
way.
"""

from __future__ import annotations

import argparse
import builtins
import math
import re
import signal
from collections.abc import Collection, Iterable, Mapping

from rdzv.core.evidence.hang_culprit import HangTimeout
from rdzv.core.model import ScaleUp, Settings
from rdzv.errors import InvalidRequestError, did_you_mean, short
from rdzv.launch_options.declared_flags import CONF_ALIASES, CONF_KEYS, TORCH_CONF_KEYS

MAX_COUNT = 1_000_000
"""The largest count that a message may carry. It exceeds the limits of any server, each of which
enforces its own."""
MAX_CONF_S = 30 * 86_400
MAX_SHUTDOWN_S = 86_400
BACKOFF_MS, BACKOFF_MAX_MS = 1_000, 60_000
"""The default first wait and longest wait between consecutive restarts."""
MAX_FENCE_S = 3_600
"""The longest fence accepted here, which exceeds any lease. The server refuses values above its own
lease."""

MIN_SNAPSHOT_S = 1
MAX_SNAPSHOT_GB = 1_000_000
MAX_SNAPSHOT_MB_S = 100_000
MIN_HANG_S = 1
MAX_HANG_S = 86_400

COUNTED_BY_NODE = ("auto", "cpu", "gpu", "xpu")
"""The words that --nproc-per-node accepts instead of a number, so that each node counts its own
devices."""

NAME_CHARS = 128
"""The maximum length of a job or node name; the server has the same limit."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
LABEL_CHARS = 255
"""The patterns of variable and label names, and the maximum length of a label value, as in the
server's defaults."""

MAX_WORKER_ENDS = 32
"""The maximum length of --restart-on and of --no-restart-on, as on the server."""
_EXCEPTION = re.compile(r"(?:[^\W\d]\w*\.)*[^\W\d]\w*")
_EXCEPTIONS = {
    "torch.cuda.OutOfMemoryError": "torch.OutOfMemoryError",
    **{
        name: kind.__name__
        for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    },
}
"""The types of well-known exceptions by all their names; tracebacks show only one of these."""
_GIVE_ENDS = "give 3, SIGKILL, ValueError or torch.OutOfMemoryError, for example"

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

_NAMES = ("rdzv_id", "node_id", "role", "topology", "local_addr", "master_addr")


def check_words(args: argparse.Namespace) -> None:
    """Refuse flags that exclude each other, and names that cannot be sent."""
    if args.rdzv_id == "":
        # A shell variable is probably unset, so a random name would be wrong.
        raise InvalidRequestError("--rdzv-id is empty; give the job's name, or leave it out")
    for option in _NAMES:
        check_printable(f"--{option.replace('_', '-')}", getattr(args, option) or "")
    for option in ("rdzv_id", "node_id"):
        _check_length(f"--{option.replace('_', '-')}", getattr(args, option) or "")
    if args.snapshot is not None:
        check_printable("--snapshot", str(args.snapshot))
        if not args.no_progress_restarts:
            raise InvalidRequestError(
                f"--snapshot={args.snapshot} has no effect without --no-progress-restarts; give a "
                "number of restarts, or leave it out"
            )
    if args.restart_on and not args.max_restarts:
        raise InvalidRequestError(
            f"--restart-on={short(args.restart_on)} has no effect without --max-restarts; give a "
            "number of restarts, or leave it out"
        )
    wants_root_cause(args.exit_code)
    if args.snapshot_dir is not None:
        check_printable("--snapshot-dir", str(args.snapshot_dir))
    _check_snapshot_dir(args.snapshot_dir_every, args.snapshot_dir_keep)
    snapshot_memory(args.snapshot_memory)
    snapshot_copy_rate(args.snapshot_copy_rate)
    if args.module and args.no_python:
        raise InvalidRequestError("-m and --no-python exclude each other; leave one of them out")
    if args.module and args.run_path:
        raise InvalidRequestError("-m and --run-path exclude each other; leave one of them out")
    # torch.distributed.launch always refuses this.
    if args.no_python and not getattr(args, "use_env", True):
        raise InvalidRequestError(
            "--no-python passes no --local-rank to the program; add --use-env, and read LOCAL_RANK"
        )


def _check_length(option: str, name: str) -> None:
    """Refuse a name that is too long for any server, before it appears in every log line."""
    if len(name) > NAME_CHARS:
        raise InvalidRequestError(
            f"{option}={short(name)} has {len(name)} characters; give at most {NAME_CHARS}"
        )


def check_printable(option: str, value: str) -> None:
    """Refuse characters that cannot be sent or printed, such as terminal control codes."""
    if not value.isprintable():
        raise InvalidRequestError(
            f"{option}={short(value)!r} has characters that cannot be printed; leave them out"
        )


def read_settings(args: argparse.Namespace, conf: Mapping[str, str]) -> Settings:
    """Parse the settings on which all nodes of a job must agree.

    Raises:
        InvalidRequestError: a value is not valid; the message names it, the reason, and a remedy.

    """
    min_nodes, max_nodes = parse_nnodes(args.nnodes)
    scale_up, scale_up_after_ms = parse_scale_up(conf.get("scale_up", ScaleUp.EAGER.value))
    backoff_ms, backoff_max_ms = _restart_backoff_ms(args, conf)
    return Settings(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=at_least("--max-restarts", args.max_restarts, 0),
        join_timeout_ms=conf_ms(conf, "join_timeout", 600, least_ms=1),
        last_call_timeout_ms=conf_ms(conf, "last_call_timeout", 30),
        scale_up=scale_up,
        restart_window_ms=_restart_window_ms(args, conf),
        scale_up_after_ms=scale_up_after_ms,
        restart_backoff_ms=backoff_ms,
        restart_backoff_max_ms=backoff_max_ms,
        max_preemptions=_budget("--max-preemptions", args.max_preemptions),
        max_store_failures=_budget("--max-store-failures", args.max_store_failures),
        no_progress_restarts=at_least("--no-progress-restarts", args.no_progress_restarts, 0),
        restart_on=parse_worker_ends("--restart-on", args.restart_on),
        no_restart_on=parse_worker_ends("--no-restart-on", args.no_restart_on),
    )


def _restart_window_ms(args: argparse.Namespace, conf: Mapping[str, str]) -> int:
    given, text = _flag_or_key("restart_window", args.restart_window, conf)
    return 0 if text is None else _seconds_ms(given, text, least_ms=0)


def _restart_backoff_ms(args: argparse.Namespace, conf: Mapping[str, str]) -> tuple[int, int]:
    given, text = _flag_or_key("restart_backoff", args.restart_backoff, conf)
    return parse_backoff(given, text) if text is not None else (BACKOFF_MS, BACKOFF_MAX_MS)


def _flag_or_key(key: str, flag: str | None, conf: Mapping[str, str]) -> tuple[str, str | None]:
    name = f"--{key.replace('_', '-')}"
    if flag is None:
        return f"--rdzv-conf: {key}={conf.get(key)}", conf.get(key)
    if key in conf and conf[key] != flag:
        raise InvalidRequestError(
            f"{name}={flag} and --rdzv-conf={key}={conf[key]} differ; leave one of them out"
        )
    return f"{name}={flag}", flag


def parse_backoff(given: str, text: str) -> tuple[int, int]:
    """Parse BASE or BASE:MAX in seconds into milliseconds; `given` names the option in errors.

    >>> parse_backoff("", "2"), parse_backoff("", "0.5:10"), parse_backoff("", "90")
    ((2000, 60000), (500, 10000), (90000, 90000))
    """
    base, colon, most = text.partition(":")
    base_ms = _seconds_ms(given, base, least_ms=0)
    if not colon:
        return base_ms, max(base_ms, BACKOFF_MAX_MS)
    max_ms = _seconds_ms(given, most, least_ms=0)
    if max_ms < base_ms:
        raise InvalidRequestError(f"{given}: the longest wait is below the first; swap them?")
    return base_ms, max_ms


def _budget(option: str, value: int | None) -> int | None:
    return None if value is None else at_least(option, value, 0)


def parse_nnodes(text: str) -> tuple[int, int]:
    """Parse N or MIN:MAX into the minimum and the maximum.

    >>> parse_nnodes("2:4"), parse_nnodes("3")
    ((2, 4), (3, 3))
    """
    parts = text.split(":")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts):
        raise InvalidRequestError(
            f"--nnodes={text} is not a number of nodes; give N or MIN:MAX, e.g. 2:4"
        )
    low, high = (_count(f"--nnodes={text}", part) for part in (parts[0], parts[-1]))
    if low < 1:
        raise InvalidRequestError(
            f"--nnodes={text}: a job needs at least 1 node; raise the minimum"
        )
    if low > high:
        raise InvalidRequestError(
            f"--nnodes={text}: the minimum {low} is above the maximum {high}; swap them?"
        )
    return low, high


def parse_nproc(text: str) -> int:
    """Parse a number of workers, or return 0 for a word that makes each node count its own devices.

    >>> parse_nproc("8"), parse_nproc("gpu")
    (8, 0)
    """
    if text in COUNTED_BY_NODE:
        return 0
    if not text.isdecimal():
        raise InvalidRequestError(
            f"--nproc-per-node={text} is not a number of workers; give one from 1 on, or "
            f"{', '.join(COUNTED_BY_NODE)}"
        )
    count = _count(f"--nproc-per-node={text:.20}", text)
    return at_least("--nproc-per-node", count, 1)


def parse_conf(text: str) -> dict[str, str]:
    """Parse K=V,K=V, where any key is accepted.

    >>> parse_conf("join_timeout = 5, reuse=false,")
    {'join_timeout': '5', 'reuse': 'false'}
    """
    conf: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key or not value:
            raise InvalidRequestError(f"--rdzv-conf: {pair!r} is not of the form key=value")
        conf[key] = value
    return conf


def unknown_key_warnings(conf: Iterable[str]) -> list[str]:
    """Return a warning for each key that is unknown to both rdzvrun and torchrun's backends."""
    known = {*CONF_KEYS, *CONF_ALIASES, *TORCH_CONF_KEYS}
    return [unknown_key_warning(key, CONF_KEYS) for key in conf if key not in known]


def unknown_key_warning(key: str, known: Iterable[str]) -> str:
    remedy = did_you_mean(key, known, f"known keys: {', '.join(known)}")
    return f"--rdzv-conf: ignoring unknown key {key}; {remedy}"


def conf_ms(conf: Mapping[str, str], key: str, default_s: float, least_ms: int = 0) -> int:
    text = conf.get(key, str(default_s))
    return _seconds_ms(f"--rdzv-conf: {key}={text}", text, least_ms)


def _seconds_ms(given: str, text: str, least_ms: int) -> int:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise InvalidRequestError(f"{given} is not a number of seconds; give one from 0 on")
    if seconds > MAX_CONF_S:
        raise InvalidRequestError(
            f"{given} is too long; give at most {MAX_CONF_S} seconds (30 days)"
        )
    ms = round(seconds * 1000)
    if ms < least_ms:
        raise InvalidRequestError(
            f"{given} is too short; give at least {least_ms / 1000:g} seconds"
        )
    return ms


def conf_bool(conf: Mapping[str, str], key: str, *, default: bool) -> bool:
    text = conf.get(key, str(default)).lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"--rdzv-conf: {key}={text} is not true or false")
    return text in ("true", "1")


def parse_scale_up(text: str) -> tuple[ScaleUp, int]:
    """Parse when new nodes may end a running round, and how long it must have run first, in ms.

    >>> parse_scale_up("on-restart"), parse_scale_up("after:600")
    ((<ScaleUp.ON_RESTART: 'on-restart'>, 0), (<ScaleUp.AFTER: 'after'>, 600000))
    """
    given = f"--rdzv-conf: scale_up={text}"
    word, colon, seconds = text.partition(":")
    if word == ScaleUp.AFTER and colon:
        return ScaleUp.AFTER, _seconds_ms(given, seconds, least_ms=1)
    known = [f"{one}:SECONDS" if one is ScaleUp.AFTER else one.value for one in ScaleUp]
    if text not in known or text == ScaleUp.AFTER:
        raise InvalidRequestError(f"{given} is not one of {', '.join(known)}")
    return ScaleUp(text), 0


def at_least(option: str, value: int, least: int) -> int:
    """Return a number, or refuse it if it is too small or is too large for any server."""
    if value < least:
        raise InvalidRequestError(f"{option}={value} is too small; give at least {least}")
    if value > MAX_COUNT:
        raise InvalidRequestError(f"{option}={value} is too large; give at most {MAX_COUNT}")
    return value


def _count(given: str, digits: str) -> int:
    """Parse decimal digits of any length, refusing numbers above MAX_COUNT."""
    too_long = len(digits.lstrip("0")) > len(str(MAX_COUNT))
    if too_long or int(digits) > MAX_COUNT:
        raise InvalidRequestError(f"{given} is too large; give at most {MAX_COUNT}")
    return int(digits)


def _within(
    given: str, number: float | str, low: float, high: float, unit: str, also: str = ""
) -> float:
    """Return a number from `low` to `high`; `also` completes the remedy for any other."""
    try:
        number = float(number)
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        raise InvalidRequestError(f"{given}: give a number of {unit} from {low} to {high}{also}")
    return number


def shutdown_timeout_ms(given: str, text: str) -> int:
    """Parse how long workers may take to stop; `given` names the option in errors."""
    return round(_within(given, text, 0, MAX_SHUTDOWN_S, "seconds") * 1000)


def keep_timeouts_ms(keep_s: float, park_s: float) -> tuple[int, int]:
    """Convert how long workers may take to park (0 keeps none) and how long they stay parked.

    >>> keep_timeouts_ms(10, 600)
    (10000, 600000)
    """
    return (
        shutdown_timeout_ms(f"--keep-timeout={keep_s:g}", str(keep_s)),
        shutdown_timeout_ms(f"--park-timeout={park_s:g}", str(park_s)),
    )


def snapshot_memory(gb: float | None) -> int | None:
    """Convert the memory limit for snapshots to bytes, or return None if it is not given.

    >>> snapshot_memory(1.5), snapshot_memory(None)
    (1500000000, None)
    """
    if gb is None:
        return None
    return round(_within(f"--snapshot-memory={gb:g}", gb, 0, MAX_SNAPSHOT_GB, "gigabytes") * 1e9)


def snapshot_copy_rate(mb: float) -> int:
    """Convert `--snapshot-copy-rate` from megabytes to bytes per second; 0 disables copying.

    >>> snapshot_copy_rate(200), snapshot_copy_rate(0)
    (200000000, 0)
    """
    if mb:
        given, also = f"--snapshot-copy-rate={mb:g}", ", or 0 to have no copies on other nodes"
        _within(given, mb, 1, MAX_SNAPSHOT_MB_S, "megabytes a second", also)
    return round(mb * 1e6)


def _check_snapshot_dir(every_s: float, keep: int) -> None:
    if every_s:
        given, also = f"--snapshot-dir-every={every_s:g}", ", or 0 to write only at the end"
        _within(given, every_s, MIN_SNAPSHOT_S, MAX_CONF_S, "seconds", also)
    _within(f"--snapshot-dir-keep={keep}", keep, 1, MAX_COUNT, "steps")


def fence_after_ms(seconds: float | None) -> int:
    """Convert the time that workers continue without proof of contact; 0 means no limit."""
    if seconds is None:
        return 0
    also = ", and at least 1 s below the server's lease"
    return round(
        _within(f"--fence-after={seconds:g}", seconds, 1, MAX_FENCE_S, "seconds", also) * 1000
    )


def hang_timeout(text: str | None) -> HangTimeout | None:
    """Parse --hang-timeout: how long a worker may go without progress before it counts as hung.

    `auto` yields a timeout without a length; None means that hangs are not detected.

    >>> hang_timeout("600"), hang_timeout("auto"), hang_timeout(None)
    (HangTimeout(ms=600000), HangTimeout(ms=None), None)
    """
    if text is None:
        return None
    if text == "auto":
        return HangTimeout(None)
    given, also = (
        f"--hang-timeout={text}",
        ", more than the longest pause between two steps; or auto",
    )
    return HangTimeout(round(_within(given, text, MIN_HANG_S, MAX_HANG_S, "seconds", also) * 1000))


HANDLED = signal.Signals.__members__.keys() - {"SIGKILL", "SIGSTOP"}
"""The names of the signals that a program may handle."""


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Parse a comma-separated list of signal names.

    >>> parse_signals("SIGTERM,SIGUSR1")
    (<Signals.SIGTERM: 15>, <Signals.SIGUSR1: 10>)
    """
    signals = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name not in HANDLED:
            raise InvalidRequestError(
                f"--signals-to-handle={text}: {name} is not a signal that can be handled; give "
                "names such as SIGTERM,SIGINT"
            )
        signals.append(signal.Signals[name])
    return tuple(signals)


def parse_notice_signal(text: str) -> signal.Signals | None:
    """Parse the signal that notifies workers, or return None if only the notice file is written.

    >>> parse_notice_signal("SIGUSR1"), parse_notice_signal("none")
    (<Signals.SIGUSR1: 10>, None)
    """
    if text == "none":
        return None
    if text not in HANDLED:
        raise InvalidRequestError(
            f"--notice-signal={text} is not a signal that a worker can handle; give one such as "
            "SIGTERM or SIGUSR1, or none"
        )
    return signal.Signals[text]


def parse_worker_ends(option: str, text: str | None) -> tuple[str, ...]:
    """Parse a list of how workers may end: exit codes, signals and types of exceptions.

    The result has names as `root_cause.names_of_end` gives them, sorted: 128 + n is signal n.

    >>> parse_worker_ends("--restart-on", "3, SIGKILL,-9,IOError,torch.OutOfMemoryError")
    ('137', '3', 'OSError', 'torch.OutOfMemoryError')
    """
    words = [word for part in (text or "").split(",") if (word := part.strip())]
    if len(words) > MAX_WORKER_ENDS:
        raise InvalidRequestError(
            f"{option} lists {len(words)} ends of workers; give at most {MAX_WORKER_ENDS}"
        )
    return tuple(sorted({_worker_end(option, word) for word in words}))


def _worker_end(option: str, word: str) -> str:
    if re.fullmatch("-?[0-9]{1,9}", word):
        number = int(word)
        if not (0 < number <= 255 or -64 <= number < 0):
            raise InvalidRequestError(
                f"{option}: no failed worker ends with {word}; give exit codes from 1 to 255, or "
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
    if like or unlikely or not _EXCEPTION.fullmatch(word) or len(word) > NAME_CHARS:
        remedy = f"did you mean `{like[0]}`?" if like else _GIVE_ENDS
        raise InvalidRequestError(
            f"{option}: {short(word)!r} is no exit code, signal or exception; {remedy}"
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


def wants_root_cause(text: str) -> bool:
    """Parse --exit-code: whether a failed job's exit code is its root cause's, instead of 1.

    >>> wants_root_cause("1"), wants_root_cause("root-cause")
    (False, True)
    """
    if text not in ("1", "root-cause"):
        raise InvalidRequestError(f"--exit-code={text}: give 1, or root-cause")
    return text == "root-cause"


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


def parse_streams(option: str, text: str, local_world_size: int) -> dict[int, int]:
    """Parse a number from 0 to 3, or LOCAL_RANK:N,..., into numbers by LOCAL_RANK.

    >>> parse_streams("--tee", "3", 2), parse_streams("--tee", "0:1,11:2", 12)
    ({0: 3, 1: 3}, {0: 1, 11: 2})
    """
    if text in ("0", "1", "2", "3"):
        return dict.fromkeys(range(local_world_size), int(text))
    streams = {}
    for pair in text.split(","):
        rank, _, what = pair.partition(":")
        if not rank.isdecimal() or what not in ("0", "1", "2", "3"):
            raise InvalidRequestError(
                f"{option}={text}: {pair!r} is not of the form LOCAL_RANK:N with N from 0 to 3"
            )
        streams[_count(f"{option}={text}", rank)] = int(what)
    return streams
