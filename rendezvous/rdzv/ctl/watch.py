"""Commands that follow a job: `status --watch`, `wait`, `logs`, `submit --follow` and so on.

The server pushes every change. Between changes only ages grow, and these are computed here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

import click

from rdzv.client import ControlClient
from rdzv.ctl import as_text, as_text_lists, live
from rdzv.ctl.command_line import DENIED, UNREACHABLE, as_yaml, say, warn
from rdzv.ctl.layout import page_for
from rdzv.errors import (
    InvalidRequestError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
)
from rdzv.launch_options.kinds import root_cause_exit
from rdzv.view import as_json
from rdzv.view.answers import ENDED, Event, JobStatus, LogLines
from rdzv.view.log_lines import Printer, note_of

EXIT_CODES = {"succeeded": 0, "failed": 1, "stopped": 3}
"""The exit codes of `wait` by job state. In any other state, the job has not ended."""
EXIT_GOES_ON = 4
EXIT_NO_PROGRESS = 93
"""The exit code for a job that failed because it made no progress, as in rdzvrun."""

_OWN_CODES = (EXIT_CODES["stopped"], EXIT_GOES_ON, UNREACHABLE, DENIED, EXIT_NO_PROGRESS)

REDRAW_S = 1.0

LEAST_REDRAW_S = 0.1

REPEAT_S = 2.0
"""How often a list is requested again, because the server pushes only single jobs."""

HISTORY_EVENTS = 500
"""How many of the newest events, including those of nodes, are requested."""

_HOME, _CLEAR_BELOW, _CLEAR_LINE = "\x1b[H", "\x1b[J", "\x1b[K"
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"


_News = SimpleQueue[JobStatus | RendezvousError]


def tries_again(error: RendezvousError) -> None:
    warn(f"{error}; trying again")


def _watching(
    client: ControlClient, job: str, silent: Callable[[RendezvousError], None] = tries_again
) -> _News:
    """Return a queue of the server's updates, which a thread receives.

    `silent` is called in that thread when no server responds any more.
    """
    news: _News = SimpleQueue()

    def take_in() -> None:
        try:
            for status in client.watch(job, silent):
                news.put(status)
        except RendezvousError as error:
            news.put(error)
        except ValueError:
            pass  # The client was closed, because the caller is no longer watching.

    threading.Thread(target=take_in, daemon=True).start()
    return news


def _next(news: _News, within_s: float | None = None) -> JobStatus:
    """Return the newest update or raise its error; raise Empty if none arrives in time."""
    found = news.get(timeout=within_s)
    while not news.empty():
        found = news.get()
    if isinstance(found, RendezvousError):
        raise found
    return found


def show(
    client: ControlClient, other: ControlClient, job: str, output: str, *, everything: bool
) -> None:
    """Show a job until it has ended: in place on a terminal, otherwise as a series of statuses.

    `other` is a client of the same server, for requests while `client` is streaming.
    """
    if output == "text" and _is_smart():
        status = _live(other, job, _watching(client, job, lambda _: None))
        print(as_text.status(status, page_for(sys.stdout), everything=everything))  # noqa: T201
        return
    for status in client.watch(job, tries_again):
        if output == "text":
            shown = as_text.status(status, page_for(sys.stdout), everything=everything) + "\n"
        else:
            shown = one_of_many(output, status)
        print(shown, flush=True)  # noqa: T201
        if status.state in ENDED:
            return


def _is_smart() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def show_again(shown: Callable[[], str], *, as_screen: bool) -> None:
    """Show the result of `shown` now and every `REPEAT_S`, until Ctrl-C.

    On a terminal, with `as_screen`, it is redrawn in place. If the server stops responding, this is
    reported, and the request is repeated.
    """
    smart = as_screen and _is_smart()
    text = shown()  # A server that was never there is an error.
    with _own_screen() if smart else contextlib.nullcontext():
        while True:
            if smart:
                lines, height = text.splitlines(), shutil.get_terminal_size().lines
                _draw(lines if len(lines) <= height else [*lines[: height - 1], "..."])
            else:
                print(text, flush=True)  # noqa: T201
            time.sleep(REPEAT_S)
            try:
                text = shown()
            except RendezvousConnectionError as error:
                tries_again(error)


def one_of_many(output: str, found: Any) -> str:
    if output == "json":
        return as_json.document(found, indent=None)
    return f"---\n{as_yaml(as_json.document(found))}"


def _live(client: ControlClient, job: str, news: _News) -> JobStatus:
    """Keep the screen up to date until the job has ended; return its last status."""
    status, seen_s = _next(news), time.monotonic()
    whole_ms = live.whole_wait_ms(status, None, None)
    history: Sequence[Event] = ()
    turn: object = None
    with _own_screen():
        while status.state not in ENDED:
            placed = status.submission.placed if status.submission else ()
            before, turn = turn, (status.run, status.round, status.state, placed)
            if turn != before:
                # While the server does not respond, the screen keeps the last history.
                with contextlib.suppress(RendezvousError):
                    history = client.events(job, HISTORY_EVENTS)
            drawn_s = time.monotonic()
            aged = live.later(status, round((drawn_s - seen_s) * 1000))
            page, height = page_for(sys.stdout), shutil.get_terminal_size().lines
            _draw(live.screen(aged, history, whole_ms, page, height, blocks=_has_blocks()))
            with contextlib.suppress(Empty):
                fresh = _next(news, REDRAW_S)
                whole_ms = live.whole_wait_ms(fresh, status, whole_ms)
                status, seen_s = fresh, time.monotonic()
                # Several changes in quick succession are drawn once.
                time.sleep(max(LEAST_REDRAW_S - (seen_s - drawn_s), 0.0))
    return status


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
    until_s = None if wait_s is None else time.monotonic() + wait_s
    news, state = _watching(client, job), "not known"
    while True:
        left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
        try:
            status = _next(news, left_s)
        except Empty:
            return f"{job} is {state} after {wait_s:g} s", EXIT_GOES_ON
        state = status.state
        code = exit_code(status, root_cause=root_cause)
        if code is not None:
            return f"{job} has {state}: {status.reason}", code
        reports.report(status)
        if until_running and state == "running":
            return f"{job} is running", 0


# ------------------------------------------------------------------------------------ line by line


def show_logs(pieces: Iterable[LogLines], *, one_rank: bool, one_stream: bool) -> bool:
    """Print all pieces, with notes on stderr; return whether the output is complete."""
    terminal = sys.stdout.isatty()
    printer = Printer(
        sys.stdout.buffer,
        prefixed=not one_rank,
        escaped=terminal,
        as_it_comes=one_rank and one_stream and not terminal,
    )
    whole, absent = True, False
    try:
        for piece in pieces:
            if piece.note is None:
                printer.take(piece)
                absent = False
                continue
            say(note_of(piece))
            # Output may still follow a note that concerns the whole job.
            absent = absent or not piece.node_id
            whole = whole and not piece.node_id
    finally:
        printer.end()
    return whole and not absent


def follow(
    logs: ControlClient, watcher: ControlClient, rdzv_id: str, run: str, *, root_cause: bool
) -> int:
    """Show the output of a run's workers until the run has ended; return the exit code of `wait`.

    The run's state and reason are reported on stderr.
    """
    output = threading.Thread(target=_show_output, args=(logs, rdzv_id, run), daemon=True)
    output.start()
    news, reports = _watching(watcher, rdzv_id), StateReports(rdzv_id)
    while isinstance(status := news.get(), JobStatus) and status.run == run:
        if status.state in ENDED:
            break
        reports.report(status)
    output.join()
    if isinstance(status, RendezvousError):
        raise status
    if status.run != run:
        raise RendezvousClosedError(
            f"another run of {rdzv_id} has begun; `rdzvctl events {rdzv_id}` shows how this "
            "one ended"
        )
    say(f"{rdzv_id} has {status.state}: {status.reason}")
    code = exit_code(status, root_cause=root_cause)
    assert code is not None, "it has ended"
    return code


def _show_output(client: ControlClient, rdzv_id: str, run: str) -> None:
    try:
        pieces = client.logs(rdzv_id, follow=True, run=run)
        # Notes about the whole job are omitted, because its state is reported.
        pieces = (piece for piece in pieces if piece.node_id)
        show_logs(pieces, one_rank=False, one_stream=False)
    except (InvalidRequestError, RendezvousClosedError):
        pass  # The run ended without output, or another run has begun.
    except RendezvousError as error:
        say(f"no more of its output can be shown: {error}")
    except ValueError:
        pass  # The client was closed, because of Ctrl-C.


def follow_events(
    client: ControlClient, watcher: ControlClient, rdzv_id: str, known: Sequence[Event], output: str
) -> None:
    """Show a job's `known` events, then new ones until the job has ended.

    The server announces each change to the job; the new events are then fetched.
    """
    _show_events(rdzv_id, known, output)
    for status in watcher.watch(rdzv_id, tries_again):
        newest = client.events(rdzv_id, HISTORY_EVENTS)
        _show_events(rdzv_id, _after(known, newest), output)
        known = newest
        if status.state in ENDED:
            return


def _after(known: Sequence[Event], newest: Sequence[Event]) -> Sequence[Event]:
    for count, event in enumerate(reversed(newest)):
        if known and event == known[-1]:
            return newest[len(newest) - count :]
    return newest


def _show_events(rdzv_id: str, some: Sequence[Event], output: str) -> None:
    if not some:
        return
    if output == "text":
        text = as_text_lists.event_lines(some, page_for(sys.stdout))
    else:
        text = one_of_many(output, {"rdzv_id": rdzv_id, "events": some})
    print(text, flush=True)  # noqa: T201
