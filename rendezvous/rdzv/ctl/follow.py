"""`submit --follow`: the output of a run's workers, what the run waits for, and how it ended."""

from __future__ import annotations

import threading

import click

from rdzv.client import ControlClient
from rdzv.core.timed_text import without_times
from rdzv.ctl.as_text_logs import show
from rdzv.ctl.watch import EXIT_CODES, exit_code, watching
from rdzv.errors import InvalidRequestError, RendezvousClosedError, RendezvousError
from rdzv.view.answers import JobStatus
from rdzv.view.log_lines import harmless


def follow(logs: ControlClient, watcher: ControlClient, rdzv_id: str, run: str) -> int:
    """Show the output of a run's workers until it has ended; return the exit code of `wait`.

    What the run waits for, and its events, are reported on stderr.

    Raises:
        RendezvousError: the server can no longer report on the run.

    """
    story = _Story(watcher, rdzv_id, run)
    told = threading.Thread(target=story.tell, daemon=True)
    told.start()
    try:
        written = logs.logs(rdzv_id, follow=True, run=run)
        # The story reports what the job as a whole waits for.
        written = (piece for piece in written if piece.node_id)
        show(written, one_rank=False, one_stream=False)
    except (InvalidRequestError, RendezvousClosedError):
        # It ended without output, or another run has begun: the story reports which.
        pass
    except RendezvousError as error:
        _say(f"no more of what it writes can be shown: {error}")
    # Its watch of the server gives up by itself if no server answers.
    told.join()
    return story.end()


class _Story:
    """The state changes of one run, as pushed by the server."""

    def __init__(self, client: ControlClient, rdzv_id: str, run: str) -> None:
        self._client = client
        self._rdzv_id = rdzv_id
        self._run = run
        self._told = ("", "")
        """The state and reason last reported, without the times that change in the reason."""
        self._end: JobStatus | RendezvousError | None = None

    def tell(self) -> None:
        """Report every change on stderr until the run has ended."""
        with watching(self._client, self._rdzv_id) as news:
            while self._end is None:
                found = news.get()
                if isinstance(found, RendezvousError):
                    self._end = found
                elif found.status.run != self._run:
                    self._end = RendezvousClosedError(
                        f"another run of {self._rdzv_id} has begun; `rdzvctl events "
                        f"{self._rdzv_id}` tells how this one ended"
                    )
                else:
                    self._tell(found.status)

    def _tell(self, status: JobStatus) -> None:
        if status.state in EXIT_CODES:
            self._end = status
            return
        reason = (status.reason or "").removeprefix(f"{status.state}: ")
        news = (status.state, without_times(status.reason or "", status.reason_times))
        if news != self._told:
            _say(f"{self._rdzv_id} is {status.state}: {reason}")
            self._told = news

    def end(self) -> int:
        """Report how the run ended; return its exit code."""
        if isinstance(self._end, RendezvousError):
            raise self._end
        assert self._end is not None, "it has told all"
        _say(f"{self._rdzv_id} has {self._end.state}: {self._end.reason or ''}")
        code = exit_code(self._end)
        assert code is not None, "it has ended"
        return code


def _say(text: str) -> None:
    click.echo(harmless(f"rdzvctl: {text}"), err=True)
