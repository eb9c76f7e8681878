"""What goes on while it is looked at: `status --watch`, and `wait`.

The server pushes every change. Between two of them only ages grow, which this side counts itself.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from rdzv.client import ControlClient, JobStatus
from rdzv.ctl import as_json, as_text
from rdzv.ctl.layout import page_for
from rdzv.errors import RendezvousError

EXIT_CODES = {"succeeded": 0, "failed": 1, "stopped": 3}
"""What `wait` exits with; a state that is none of these is no end."""
EXIT_GOES_ON = 4

REDRAW_S = 1.0
"""How often ages are counted on a terminal."""

_HOME, _CLEAR_BELOW, _CLEAR_LINE = "\x1b[H", "\x1b[J", "\x1b[K"


@dataclass(frozen=True, slots=True)
class _Seen:
    status: JobStatus
    at_s: float

    def aged(self) -> JobStatus:
        """Return the job with the ages that it has by now."""
        more_ms = round((time.monotonic() - self.at_s) * 1000)
        status = self.status
        nodes = tuple(replace(n, state_age_ms=n.state_age_ms + more_ms) for n in status.nodes)
        progress = tuple(replace(p, age_ms=p.age_ms + more_ms) for p in status.progress)
        return replace(
            status,
            nodes=nodes,
            progress=progress,
            state_age_ms=status.state_age_ms + more_ms,
            run_age_ms=status.run_age_ms + more_ms,
        )


_News = SimpleQueue[_Seen | RendezvousError]


@contextmanager
def _watching(client: ControlClient, job: str) -> Iterator[_News]:
    """Take in what the server pushes in a thread, so that the screen need not wait for it."""
    news: _News = SimpleQueue()

    def take_in() -> None:
        try:
            for status in client.watch(job):
                news.put(_Seen(status, time.monotonic()))
        except RendezvousError as error:
            news.put(error)
        except ValueError:
            # The channel was closed by the end of the block below.
            pass

    threading.Thread(target=take_in, daemon=True).start()
    yield news


def _next(news: _News, within_s: float | None) -> _Seen | None:
    """Return what is newest; None if nothing came in time."""
    try:
        found = news.get(timeout=within_s)
        while not news.empty():
            found = news.get()
    except Empty:
        return None
    if isinstance(found, RendezvousError):
        raise found
    return found


def show(client: ControlClient, job: str, *, as_documents: bool, everything: bool) -> None:
    """Show a job until it has ended: on a terminal in place, else one after the other."""
    terminal = sys.stdout.isatty() and not as_documents
    with _watching(client, job) as news:
        seen = _next(news, None)
        while seen is not None:
            if as_documents:
                print(as_json.one_line(as_json.status(seen.status)), flush=True)  # noqa: T201
            elif terminal:
                _redraw(as_text.status(seen.aged(), page_for(sys.stdout), everything=everything))
            else:
                text = as_text.status(seen.status, page_for(sys.stdout), everything=everything)
                print(f"{text}\n", flush=True)  # noqa: T201
            if seen.status.state in EXIT_CODES:
                return
            seen = _next(news, REDRAW_S if terminal else None) or seen


def _redraw(text: str) -> None:
    lines = "".join(f"{line}{_CLEAR_LINE}\n" for line in text.splitlines())
    sys.stdout.write(f"{_HOME}{lines}{_CLEAR_BELOW}")
    sys.stdout.flush()


def wait(client: ControlClient, job: str, wait_s: float | None) -> tuple[str, int]:
    """Wait until a job has ended, or for so long; return what to say and to exit with."""
    deadline_s = None if wait_s is None else time.monotonic() + wait_s
    with _watching(client, job) as news:
        last: _Seen | None = None
        while True:
            left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
            seen = _next(news, left_s)
            if seen is None:
                state = last.status.state if last else "not known"
                return f"{job} is {state} after {wait_s:g} s", EXIT_GOES_ON
            last = seen
            code = EXIT_CODES.get(seen.status.state)
            if code is not None:
                return f"{job} has {seen.status.state}: {seen.status.reason}", code
