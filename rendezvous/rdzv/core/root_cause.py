"""Finds the failure that caused the other failures in a round."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rdzv.core.model import Cause, Failure, Round, Settings
from rdzv.core.words import duration, listed, ranks_text
from rdzv.structs import replace

MAX_FAILURES = 64
"""The maximum number of failures kept per round; the earliest are kept."""

_OF_COLLECTIVE = re.compile(
    r"\bgloo/[\w./-]+:\d+\]"
    r"|^(?:[\w.]+\.)?Dist(?:Backend|Network|Store)?Error\b"
    r"|^nccl(?:Remote|System)Error\b",
    re.MULTILINE,
)
"""Matches an exception of torch's collectives or stores in a message or traceback: its type at the
start of a line or, as gloo's have none of their own, the place in gloo that raised it.
"""
_OF_ITSELF = re.compile(
    # A port that is taken, an address that is another's, a port that needs rights.
    r"\bname: E(?:ADDRINUSE|ADDRNOTAVAIL|ACCES)\b|\(errno: (?:98|99|13) - "
    r"|^nccl(?:UnhandledCuda|InvalidUsage|InvalidArgument)",
    re.MULTILINE,
)
"""Matches what these exceptions contain if their own end of the connection is at fault."""
_LOST_PEER = re.compile(r"(?:Connection(?:Reset|Refused|Aborted)Error|BrokenPipeError)\b")
"""Python's own exceptions for a connection that its other end has broken."""

_RAISED = re.compile(
    r"(?:^Traceback \(most recent call last\):|\A.*)\n(?:[ \t].*\n)*((?:\w+\.)*\w+)", re.MULTILINE
)
"""Matches a traceback, which may lack its beginning, up to the type of its exception."""
_TYPE = re.compile(r"(?:\w+\.)*([^\W\d]\w*)(?::|$)", re.MULTILINE)
"""Matches the type with which the message about an exception begins."""


def is_connection_error(failure: Failure) -> bool:
    """Return whether a worker seems to have failed only because another worker was gone.

    Only exceptions count, by their types: what their texts say may be about anything.
    """
    if failure.suspect:
        return True
    text = f"{failure.message}\n{failure.traceback}"
    if _OF_COLLECTIVE.search(text):
        return not _OF_ITSELF.search(text)
    return _LOST_PEER.match(failure.message) is not None


WINDOW_MS = 500
"""Failures within this time of the earliest one may have one cause, and are shown together."""


def root_cause(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return the failures within `WINDOW_MS` of the earliest, with the root cause first.

    Failures with a traceback other than a connection error come first, then those without
    information (killed by a signal, or no error file), and finally connection errors, which are a
    consequence of another failure. Within each class, the earliest comes first. Suspects count only
    if there is no other failure.

    If there are only connection errors, and a worker had exited with 0 before them, that worker is
    the root cause: the others still needed it.
    """
    by_time = sorted(failures, key=lambda f: (f.at_ms, f.node_id, f.local_rank))
    finished = [failure for failure in by_time if failure.finished]
    by_time = [failure for failure in by_time if not failure.finished]
    by_time = [failure for failure in by_time if not failure.suspect] or by_time
    if not by_time:
        return tuple(finished[:1])
    earliest_ms = by_time[0].at_ms
    together = [f for f in by_time if f.at_ms - earliest_ms <= WINDOW_MS]
    found = tuple(sorted(together, key=lambda f: (_tier(f), f.at_ms)))
    if finished and finished[0].at_ms <= earliest_ms and is_connection_error(found[0]):
        return (_exited_early(finished[0], found), *found)
    return found


def _exited_early(finished: Failure, found: tuple[Failure, ...]) -> Failure:
    if finished.message:
        return finished
    before = duration(min(failure.at_ms for failure in found) - finished.at_ms)
    ranks = ranks_text(failure.rank for failure in found)
    message = (
        f"exited with 0, {before} before; then collectives or connections of RANK {ranks} failed"
    )
    return replace(finished, message=message)


def _tier(failure: Failure) -> int:
    if is_connection_error(failure):
        return 2
    return 0 if failure.traceback else 1


def charged_failures(round_: Round) -> tuple[Failure, ...]:
    """Return the failures to which the end of a round is charged, with the root cause first.

    The result is empty if the end is charged to something else. Neither a suspect nor a worker that
    exited with 0 is charged if a participant was given up before its workers had finished, for
    instance because they survive SIGKILL.
    """
    end = round_.end
    if end is None or end.cause is not Cause.WORKER_FAILURE:
        return ()
    failures = root_cause(end.failures)
    given_up = frozenset(round_.gone).difference(round_.succeeded)
    consequences = bool(failures) and (failures[0].suspect or failures[0].finished)
    return () if given_up and consequences else failures


def names_of_end(failure: Failure) -> tuple[str, ...]:
    """Return the names of how a worker ended: its exit code, and the type of its exception.

    After signal n the exit code is 128 + n, as in a shell. The type is named with its module, if it
    has one, and without. Without a traceback, a message is no exception's, and may be any text.
    """
    code = failure.exit_code if failure.signal is None else 128 + failure.signal
    names = () if code is None else (str(code),)
    found = _TYPE.match(failure.message)
    if found is None or not failure.traceback or not (code or failure.suspect):
        return names
    raised = [n for n in _RAISED.findall(failure.traceback) if n.rpartition(".")[2] == found[1]]
    return tuple(dict.fromkeys((*names, *raised[-1:], found[1])))


def is_odd_replica(failure: Failure) -> bool:
    """Return whether a worker ended because its state differs from that of most other ranks."""
    return "OddReplicaError" in names_of_end(failure)


def why_not_restarted(settings: Settings, root_cause: Failure | None) -> str:
    """Explain why a job ends with this failure, however many restarts are left; or return ""."""
    if not settings.restart_on and not settings.no_restart_on:
        return ""
    names = names_of_end(root_cause) if root_cause is not None else ()
    shown = [f"exit code {name}" if name.isdecimal() else name for name in names]
    if root_cause is not None and root_cause.signal is not None:
        shown[0] = f"signal {root_cause.signal}"
    for name, text in zip(names, shown, strict=True):
        if name in settings.no_restart_on:
            return f"{text} is listed in --no-restart-on"
    if not settings.restart_on or not set(names).isdisjoint(settings.restart_on):
        return ""
    if not shown:
        return "how it ended is not known, so --restart-on does not list it"
    return f"--restart-on does not list {listed(shown[:2])}"


def earliest_failures(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return as many failures as a node reports.

    Those that exited with 0 are dropped first, then suspects, then the latest.
    """
    ordered = sorted(failures, key=lambda one: (one.finished, one.suspect, one.at_ms))
    return tuple(ordered[:MAX_FAILURES])


def only_suspects(failures: Iterable[Failure]) -> bool:
    """Return whether all these workers are suspects, or have exited with 0."""
    return all(failure.suspect or failure.finished for failure in failures)


def keep_earliest(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return one failure per worker, at most the earliest `MAX_FAILURES`, with suspects last.

    A worker's own failure replaces the failure for which it was a suspect. Of the workers that
    exited with 0, only the first to do so is kept, after all others.
    """
    by_worker: dict[tuple[str, int], Failure] = {}
    for failure in sorted(failures, key=lambda f: f.suspect):
        by_worker.setdefault((failure.node_id, failure.local_rank), failure)
    by_time = sorted(by_worker.values(), key=lambda f: (f.suspect, f.at_ms))
    failed = [failure for failure in by_time if not failure.finished][:MAX_FAILURES]
    # One that was charged by evidence of a hang has a message.
    finished = sorted((f for f in by_time if f.finished), key=lambda f: (not f.message, f.at_ms))
    return (*failed, *finished[:1])


def describe_failure(failure: Failure) -> str:
    how = f": exit code {failure.exit_code}"
    if failure.suspect:
        how = ": a collective failed"
    elif failure.signal is not None:
        how = f": signal {failure.signal}"
    elif failure.finished and failure.message:
        how = ""
    elif failure.exit_code is None:
        # The worker hung, or its end was not observed; the message contains all that is known.
        how = "" if failure.message else ": how it ended is not known"
    text = f"rank {failure.rank} (local_rank {failure.local_rank}) on {failure.node_id}{how}"
    return f"{text}: {failure.message}" if failure.message else text


def referring(text: str, failure: Failure) -> str:
    """Only name the worker where a text describes this failure, which is told elsewhere."""
    return text.replace(describe_failure(failure), f"RANK {failure.rank} on {failure.node_id}")
