"""Commands that follow a job: `status --watch` and `wait`.

The server pushes every change. Between changes only ages grow, and these are computed here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import click

from rdzv.client import ControlClient
from rdzv.ctl import as_text, live
from rdzv.ctl.command_line import DENIED, UNREACHABLE, as_yaml, say, warn
from rdzv.ctl.layout import page_for
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.launch_options.job_options import root_cause_exit
from rdzv.structs import struct
from rdzv.view import as_json
from rdzv.view.answers import Event, JobStatus

EXIT_CODES = {"succeeded": 0, "failed": 1, "stopped": 3}
"""The exit codes of `wait` by job state. In any other state, the job has not ended."""
EXIT_GOES_ON = 4
EXIT_NO_PROGRESS = 93
"""The exit code for a job that failed because it made no progress, as in rdzvrun."""

_OWN_CODES = (EXIT_CODES["stopped"], EXIT_GOES_ON, UNREACHABLE, DENIED, EXIT_NO_PROGRESS)

REDRAW_S = 1.0
"""How often ages are updated on a terminal."""

LEAST_REDRAW_S = 0.1

REPEAT_S = 2.0
"""How often a list is requested again, because the server pushes only single jobs."""

HISTORY_EVENTS = 500
"""How many of the newest events, including those of nodes, are requested."""

_HOME, _CLEAR_BELOW, _CLEAR_LINE = "\x1b[H", "\x1b[J", "\x1b[K"
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"


@struct(frozen=True)
class SeenStatus:
    """A job's status, and when it arrived."""

    status: JobStatus
    at_s: float

    def aged(self) -> JobStatus:
        """Return the job with its ages brought up to date."""
        return live.later(self.status, round((time.monotonic() - self.at_s) * 1000))


_News = SimpleQueue[SeenStatus | RendezvousError]


def _tries_again(error: RendezvousError) -> None:
    warn(f"{error}; trying again")


@contextmanager
def watching(
    client: ControlClient, job: str, silent: Callable[[RendezvousError], None] = _tries_again
) -> Iterator[_News]:
    """Yield a queue of the server's updates, which a thread receives.

    `silent` is called in that thread when no server responds any more; by default it prints this on
    stderr.
    """
    news: _News = SimpleQueue()

    def take_in() -> None:
        try:
            for status in client.watch(job, silent):
                news.put(SeenStatus(status, time.monotonic()))
        except RendezvousError as error:
            news.put(error)
        except ValueError:
            # The client was closed, because the caller is no longer watching.
            pass

    threading.Thread(target=take_in, daemon=True).start()
    yield news


def _next(news: _News, within_s: float | None) -> SeenStatus | None:
    """Return the newest update or raise its error; None if nothing arrives within `within_s`."""
    try:
        found = news.get(timeout=within_s)
        while not news.empty():
            found = news.get()
    except Empty:
        return None
    if isinstance(found, RendezvousError):
        raise found
    return found


def _newest(news: _News) -> SeenStatus:
    seen = _next(news, None)
    assert seen is not None, "there is always an update without a deadline"
    return seen


def show(
    client: ControlClient, other: ControlClient, job: str, output: str, *, everything: bool
) -> None:
    """Show a job until it has ended: in place on a terminal, otherwise as a series of statuses.

    `other` is a client of the same server, for requests while `client` is streaming.
    """
    smart = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    terminal = smart and output == "text"
    # A line on stderr would corrupt the screen.
    silent = (lambda _: None) if terminal else _tries_again
    with watching(client, job, silent) as news:
        if terminal:
            last = _live(other, job, news)
            page = page_for(sys.stdout)
            print(as_text.status(last.status, page, everything=everything))  # noqa: T201
            return
        while True:
            seen = _newest(news)
            if output == "text":
                text = as_text.status(seen.status, page_for(sys.stdout), everything=everything)
                print(f"{text}\n", flush=True)  # noqa: T201
            else:
                print(one_of_many(output, as_json.status(seen.status)), flush=True)  # noqa: T201
            if seen.status.state in EXIT_CODES:
                return


def show_again(shown: Callable[[], str], *, as_screen: bool) -> None:
    """Show the result of `shown` now and every `REPEAT_S`, until Ctrl-C.

    On a terminal, with `as_screen`, it is redrawn in place. If the server stops responding, this is
    reported, and the request is repeated.
    """
    smart = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and as_screen
    text = shown()  # A server that was never there is an error.
    with _own_screen() if smart else contextlib.nullcontext():
        while True:
            if smart:
                _draw(_cut(text.splitlines(), shutil.get_terminal_size().lines))
            else:
                print(text, flush=True)  # noqa: T201
            time.sleep(REPEAT_S)
            try:
                text = shown()
            except RendezvousConnectionError as error:
                _tries_again(error)


def _cut(lines: Sequence[str], height: int) -> Sequence[str]:
    """Return as many lines as fit on a terminal; "..." replaces those that do not."""
    return lines if len(lines) <= height else [*lines[: height - 1], "..."]


def one_of_many(output: str, document: str) -> str:
    """Format a JSON document as part of a stream: as a single line, or as YAML after ---."""
    if output == "json":
        return as_json.one_line(document)
    return f"---\n{as_yaml(document)}"


def _live(client: ControlClient, job: str, news: _News) -> SeenStatus:
    """Keep the screen up to date until the job has ended; return its last status."""
    seen = _newest(news)
    whole_ms = live.whole_wait_ms(seen.status, None, None)
    history = _History(client, job)
    with _own_screen():
        while seen.status.state not in EXIT_CODES:
            history.want(seen.status)
            now_s = time.monotonic()
            _draw(
                live.screen(
                    seen.aged(),
                    history.events,
                    whole_ms,
                    page_for(sys.stdout),
                    shutil.get_terminal_size().lines,
                    blocks=_has_blocks(),
                )
            )
            fresh = _next(news, REDRAW_S)
            if fresh is not None:
                whole_ms = live.whole_wait_ms(fresh.status, seen.status, whole_ms)
                seen = fresh
                # Several changes in quick succession are drawn once.
                time.sleep(max(LEAST_REDRAW_S - (time.monotonic() - now_s), 0.0))
    return seen


class _History:
    """A job's events, fetched again whenever the job has changed."""

    def __init__(self, client: ControlClient, job: str) -> None:
        self.events: tuple[Event, ...] = ()
        self._client = client
        self._job = job
        self._turn: object = None
        self._turned: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._keep, daemon=True).start()

    def want(self, status: JobStatus) -> None:
        """Fetch the events again in the background if the job has changed since the last fetch."""
        placed = status.submission.placed if status.submission else ()
        turn = (status.run, status.round, status.state, placed)
        if turn != self._turn:
            self._turn = turn
            self._turned.put(None)

    def _keep(self) -> None:
        while True:
            self._turned.get()
            # While the server does not respond, the screen keeps the last history.
            with contextlib.suppress(RendezvousError, ValueError):
                self.events = self._client.events(self._job, HISTORY_EVENTS)


@contextmanager
def _own_screen() -> Iterator[None]:
    """Use a separate screen without a cursor or line wrapping; restore the terminal afterwards."""
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _draw(lines: Sequence[str]) -> None:
    # Overwrite the current text in one write, because clearing the screen would make it flicker.
    text = "\r\n".join(f"{line}{_CLEAR_LINE}" for line in lines)
    sys.stdout.write(f"{_HOME}{text}{_CLEAR_BELOW}")
    sys.stdout.flush()


def _has_blocks() -> bool:
    try:
        "█░".encode(sys.stdout.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def exit_code(status: JobStatus, *, root_cause: bool) -> int | None:
    """Return the exit code for a program that waits for a job; None while the job continues.

    With `root_cause`, a failed job's code is that of the worker whose failure ended it; if it is 1
    all the same, the reason is shown on stderr.
    """
    code = EXIT_NO_PROGRESS if status.no_progress else EXIT_CODES.get(status.state)
    if not root_cause or code != EXIT_CODES["failed"]:
        return code
    last = status.last_failure if status.ended_by_failure else None
    ended = (last.root_cause.exit_code, last.root_cause.signal) if last else (None, None)
    code, why = root_cause_exit(*ended, _OWN_CODES)
    if why:
        click.echo(f"rdzvctl: {why}", err=True)
    return code


class StateReports:
    """Reports a job's state and the reason on stderr, once per change."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._reported = ("", "")
        """The state and reason last reported, without the changing times in the reason."""

    def report(self, status: JobStatus) -> None:
        """Report a job's state and reason, unless only times in the reason have changed."""
        news = (status.state, str(status.reason.without_times()))
        if news != self._reported:
            reason = str(status.reason).removeprefix(f"{status.state}: ")
            say(f"{self._job} is {status.state}: {reason}")
            self._reported = news


def wait(
    client: ControlClient,
    job: str,
    wait_s: float | None,
    *,
    root_cause: bool,
    until_running: bool,
) -> tuple[str, int]:
    """Wait until a job has ended or runs, or for `wait_s`; return a message and an exit code.

    Until then, report the job's state and reason on stderr, at once and whenever they change.
    """
    reports = StateReports(job)
    deadline_s = None if wait_s is None else time.monotonic() + wait_s
    with watching(client, job) as news:
        last: SeenStatus | None = None
        while True:
            left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
            seen = _next(news, left_s)
            if seen is None:
                state = last.status.state if last else "not known"
                return f"{job} is {state} after {wait_s:g} s", EXIT_GOES_ON
            last = seen
            code = exit_code(seen.status, root_cause=root_cause)
            if code is not None:
                return f"{job} has {seen.status.state}: {seen.status.reason}", code
            reports.report(seen.status)
            if until_running and seen.status.state == "running":
                return f"{job} is running", 0
