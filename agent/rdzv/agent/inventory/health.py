"""Whether this node is well: checks before it gets work, and before it goes on after a failure.

Each check is looked at in a thread or a process of its own, with a deadline; one that hangs is not
asked again before it has come back. What fails is told to the server at once, which then places
nothing here, and is tried again with growing waits; so is that all is well again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rdzv.core.placement import FailingCheck

log = logging.getLogger("rdzv.agent")

FRESH_S = 5.0
"""How long a result holds for jobs that are to begin here."""
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
"""How soon a check that fails is tried again; the wait doubles from the one to the other."""
END_S = 2.0
"""Time beyond its deadline in which a check may end its processes."""


class Check(Protocol):
    """One thing that is looked at."""

    name: str
    timeout_s: float

    async def look(self, unused_gpus: frozenset[str]) -> str:
        """Return what is wrong, in words that follow the name; nothing if nothing is."""
        ...

    async def lift(self) -> None:
        """Hear that an operator has looked at the node."""
        ...


@dataclass(slots=True)
class _Hung:
    """A check that was asked, and has not come back."""

    task: asyncio.Task[str]
    since_s: float


class Health:
    """The checks of one node, and what they have found."""

    def __init__(
        self,
        checks: Sequence[Check],
        unused_gpus: Callable[[], frozenset[str]] = frozenset,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`unused_gpus` names those that no job has; `on_change` hears when `failing` changes."""
        self.unused_gpus = unused_gpus
        self.is_idle: Callable[[], bool] = lambda: True
        """Says whether no job is on this node. While one is, it is looked only when there is need:
        a check must cost no worker anything."""
        self.idle_interval_s = 0.0
        """How often it is looked while the node is idle; 0: not before there is need."""
        self.on_change = on_change
        self.failing: tuple[FailingCheck, ...] = ()
        """The last result."""
        self._checks = tuple(checks)
        self._began_s: float | None = None
        """When it was looked last."""
        self._looked_at: frozenset[str] = frozenset()
        self._hung: dict[Check, _Hung] = {}
        self._lock = asyncio.Lock()
        self._asked = False
        """Whether somebody wants to have it looked at now."""
        self._lifting = False
        self._woken = asyncio.Event()

    async def look(
        self, mine: frozenset[str] = frozenset(), *, fresh_s: float = FRESH_S
    ) -> tuple[FailingCheck, ...]:
        """Return what is wrong with the node, as it was found not longer ago than `fresh_s`.

        `mine` are the GPUs of the job that asks, whose processes are gone: they are idle.
        """
        if not self._checks:
            return ()
        loop = asyncio.get_running_loop()
        since_s = loop.time() - fresh_s
        async with self._lock:
            unused = self.unused_gpus() | mine
            # A caller that waited here takes the result that another has just found.
            at_s = self._began_s
            if at_s is None or at_s < since_s or not unused <= self._looked_at:
                self._began_s, self._looked_at = loop.time(), unused
                found = await asyncio.gather(*(self._ask(check, unused) for check in self._checks))
                self._note(tuple(one for one in found if one is not None))
            return self.failing

    def look_again(self) -> None:
        """Look soon, for an operator has looked at the node; what was before does not count."""
        self._lifting = self._asked = True
        self._woken.set()

    async def _lift(self) -> None:
        self._lifting = False
        for check in self._checks:
            try:
                async with asyncio.timeout(check.timeout_s):
                    await check.lift()
            except OSError as error:
                # So is a timeout.
                log.error("%s: what was before still counts: %s", check.name, error)

    async def run(self) -> None:
        """Look at once if there is no result, when asked to, and as long as something is wrong.

        And now and then while the node is idle, so that no job is placed on one that became ill.
        """
        if self._began_s is None:
            await self.look()
        retry_s = FIRST_RETRY_S
        while True:
            self._woken.clear()
            if not self._asked:
                wait_s = retry_s if self.failing else self.idle_interval_s or None
                try:
                    async with asyncio.timeout(wait_s):
                        await self._woken.wait()
                except TimeoutError:
                    if not self.failing and not self.is_idle():
                        continue
                    retry_s = min(retry_s * 2, LONGEST_RETRY_S)
                else:
                    # Asked for, or something was found just now, and is tried again in time.
                    retry_s = FIRST_RETRY_S
                    continue
            self._asked = False
            if self._lifting:
                await self._lift()
            await self.look(fresh_s=0.0)

    def close(self) -> None:
        """Wait for no check any more."""
        for hung in self._hung.values():
            hung.task.cancel()

    # ------------------------------------------------------------------ one look

    async def _ask(self, check: Check, unused_gpus: frozenset[str]) -> FailingCheck | None:
        """Ask one check, and wait for it no longer than it may take. Nothing is raised."""
        loop = asyncio.get_running_loop()
        if (hung := self._hung.get(check)) is not None:
            if not hung.task.done():
                return FailingCheck(
                    check.name, f"has not come back for {loop.time() - hung.since_s:.0f} s"
                )
            del self._hung[check]
        task = asyncio.create_task(check.look(unused_gpus), name=f"health {check.name}")
        try:
            done, _ = await asyncio.wait([task], timeout=check.timeout_s + END_S)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            self._hung[check] = _Hung(task, loop.time() - check.timeout_s)
            return FailingCheck(check.name, f"did not come back within {check.timeout_s:g} s")
        if (error := task.exception()) is not None:
            log.error("%s: a bug of this check", check.name, exc_info=error)
            return FailingCheck(check.name, f"could not be checked: {error!r}")
        return FailingCheck(check.name, wrong) if (wrong := task.result()) else None

    def _note(self, failing: tuple[FailingCheck, ...]) -> None:
        if failing == self.failing:
            return
        before, self.failing = self.failing, failing
        if failing:
            log.warning("this node is unhealthy: %s", describe(failing))
        else:
            log.info("this node is healthy again")
        if failing and not before:
            self._woken.set()
        self.on_change()


def describe(failing: Sequence[FailingCheck]) -> str:
    """Say what is wrong, in one line."""
    return "; ".join(map(str, failing))
