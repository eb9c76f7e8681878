"""When a worker hangs: it has said how far it is, and then says nothing, for too long.

Pure: what is seen of a worker, look by look, becomes a `Vigil`, which says whether it hangs. Only
time in which somebody watched counts, so neither a pause of the agent nor one of the machine makes
a worker silent.
"""

from __future__ import annotations

from rdzv.core.hangs import HangTimeout
from rdzv.structs import replace, struct

AUTO_LEAST_MS = 60_000
"""What is learned is never less: a worker may well pause for a moment that it has not shown yet."""
AUTO_INTERVALS = 50
"""How many of a worker's latest intervals it is learned from, ..."""
AUTO_FACTOR = 20
"""... and how many times the longest of them a silence may last; ..."""
AUTO_LONGEST_FACTOR = 2
"""... or so many times the longest pause ever seen on this node, in whatever round, ..."""
AUTO_LONGEST_MS = 30 * 60_000
"""... which counts for no more than this: one silence must not blind it to the next for ever."""

UNINTERRUPTIBLE, TRACED = "D", "t"


@struct(frozen=True)
class Look:
    """What is seen of a worker at one moment."""

    word: tuple[int, ...] | None
    """Stands for the last time that it wrote its step, be it the same; None: it never has."""
    state: str
    """Of its process, as in /proc."""
    switches: int | None = None
    """How often it has been switched away from so far: one that sleeps on does not change it."""


@struct(frozen=True)
class Vigil:
    """What is known of one worker in one round."""

    word: tuple[int, ...] | None = None
    silent_ms: int = 0
    """Since its last word, or its start."""
    intervals_ms: tuple[int, ...] = ()
    """Between its latest words, oldest first; from its start to the first word, too."""
    blocked_ms: int = 0
    """For how long it was seen in one and the same uninterruptible sleep."""
    switches: int | None = None

    def after(self, look: Look, passed_ms: int) -> Vigil:
        """Take note of a look, so long after the one before."""
        blocked = look.state == UNINTERRUPTIBLE and look.switches == self.switches is not None
        seen = replace(
            self,
            word=look.word if look.word is not None else self.word,
            silent_ms=self.silent_ms + passed_ms,
            blocked_ms=self.blocked_ms + passed_ms if blocked else 0,
            switches=look.switches if look.state == UNINTERRUPTIBLE else None,
        )
        if seen.word != self.word:
            intervals = (*self.intervals_ms, seen.silent_ms)[-AUTO_INTERVALS:]
            return replace(seen, silent_ms=0, intervals_ms=intervals)
        # Whoever holds it with a debugger knows that it does not run.
        return replace(seen, silent_ms=self.silent_ms) if look.state == TRACED else seen

    def why_hung(self, timeout_ms: int) -> str:
        """Say in words why it hangs; empty if it does not.

        >>> Vigil(word=(1,), silent_ms=61_500).why_hung(60_000)
        'no word of its progress for 62 s, limit 60 s'
        """
        if self.blocked_ms >= timeout_ms:
            return f"in D state for {self.blocked_ms / 1000:.0f} s without a break"
        if self.word is None or self.silent_ms < timeout_ms:
            return ""
        silent_s, limit_s = self.silent_ms / 1000, timeout_ms / 1000
        return f"no word of its progress for {silent_s:.0f} s, limit {limit_s:g} s"


def timeout_ms(timeout: HangTimeout, vigil: Vigil, longest_ms: int) -> int:
    """Return how long this worker may say nothing.

    `longest_ms` is the longest pause between two words ever seen on this node, the silences that
    were taken for hangs among them: what was no hang is then not taken for one again so soon.
    """
    if timeout.ms is not None:
        return timeout.ms
    return max(
        AUTO_LEAST_MS,
        AUTO_FACTOR * max(vigil.intervals_ms, default=0),
        min(AUTO_LONGEST_FACTOR * longest_ms, AUTO_LONGEST_MS),
    )
