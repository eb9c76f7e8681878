"""Shows a job line by line: the output of its workers, and what is new.

`submit --follow` shows the output of a run's workers, what the run is waiting for, and how it
ended; `events --follow` shows its events.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence

from rdzv.client import ControlClient
from rdzv.ctl import as_text
from rdzv.ctl.command_line import say
from rdzv.ctl.layout import page_for
from rdzv.ctl.watch import HISTORY_EVENTS, StateReports, exit_code, one_of_many, tries_again
from rdzv.errors import InvalidRequestError, RendezvousClosedError, RendezvousError
from rdzv.view import as_json
from rdzv.view.answers import ENDED, Event, JobStatus, LogLines
from rdzv.view.log_lines import Printer, note_of


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

    Raises:
        RendezvousError: the server can no longer report on the run.
    """
    story = _Story(watcher, rdzv_id, run)
    story.start()
    try:
        written = logs.logs(rdzv_id, follow=True, run=run)
        # Notes about the whole job are omitted, because the story reports them.
        written = (piece for piece in written if piece.node_id)
        show_logs(written, one_rank=False, one_stream=False)
    except (InvalidRequestError, RendezvousClosedError):
        # The run ended without output, or another run has begun. The story reports which.
        pass
    except RendezvousError as error:
        say(f"no more of its output can be shown: {error}")
    # This ends, because the watch gives up by itself if no server responds.
    story.join()
    return story.end(root_cause=root_cause)


class _Story(threading.Thread):
    """Reports one run's state changes on stderr, as the server pushes them, until it has ended."""

    def __init__(self, client: ControlClient, rdzv_id: str, run: str) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._rdzv_id = rdzv_id
        self._run_uid = run
        self._end: JobStatus | RendezvousError | None = None

    def run(self) -> None:
        """Report every change."""
        reports = StateReports(self._rdzv_id)
        try:
            for status in self._client.watch(self._rdzv_id, tries_again):
                if status.run != self._run_uid:
                    raise RendezvousClosedError(
                        f"another run of {self._rdzv_id} has begun; `rdzvctl events "
                        f"{self._rdzv_id}` shows how this one ended"
                    )
                if status.state in ENDED:
                    self._end = status
                    return
                reports.report(status)
        except RendezvousError as error:
            self._end = error
        except ValueError:
            pass  # The client was closed, because of Ctrl-C.

    def end(self, *, root_cause: bool) -> int:
        """Report how the run ended and return the exit code; raise if that is unknown."""
        if isinstance(self._end, RendezvousError):
            raise self._end
        assert self._end is not None, "the watcher has seen the end"
        say(f"{self._rdzv_id} has {self._end.state}: {self._end.reason}")
        code = exit_code(self._end, root_cause=root_cause)
        assert code is not None, "it has ended"
        return code


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
    """Return the `newest` events that come after the `known` ones."""
    for count, event in enumerate(reversed(newest)):
        if known and event == known[-1]:
            return newest[len(newest) - count :]
    return newest


def _show_events(rdzv_id: str, some: Sequence[Event], output: str) -> None:
    if not some:
        return
    if output == "text":
        text = as_text.event_lines(some, page_for(sys.stdout))
    else:
        text = one_of_many(output, as_json.events(rdzv_id, some))
    print(text, flush=True)  # noqa: T201
