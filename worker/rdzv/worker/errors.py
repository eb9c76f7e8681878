"""The library's exceptions, with their meanings and remedies."""

from __future__ import annotations


class RoundOver(BaseException):
    """The round has ended. The function must exit, and is called again in the next round.

    This is not an `Exception`, so a loop's `except Exception` cannot swallow it. A script may catch
    it to clean up, but must re-raise it.
    """

    def __init__(self, reason: str = "the round is over", *, leaving: bool = False) -> None:
        super().__init__(reason)
        self.leaving = leaving
        """Whether this worker's node is leaving, in which case there is no next round here."""


class WorkerError(RuntimeError):
    """The script uses the library in a way that cannot work; the message gives the remedy."""


class NoRoundError(WorkerError):
    """A call that needs a round was made outside of any round."""


class MismatchError(WorkerError):
    """Ranks differ in the names, shapes or types of their state."""


class CannotBroadcastError(WorkerError):
    """An entry of the state cannot be copied or sent to another rank."""


class StaleGroupError(WorkerError):
    """A process group, or a wrapper around one, was created outside the round that would use it."""


class UnsupportedError(WorkerError):
    """This version of torch, or this form of parallelism, is not supported."""


class NoSourceError(WorkerError):
    """No rank holds the step from which the round should continue."""
