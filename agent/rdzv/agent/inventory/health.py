"""This node's health: checks before it gets work, and before it continues after a failure.

A check that hangs is not run again until it returns. A failure is reported at once to the server,
which then places nothing here, and the checks are repeated at growing intervals.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rdzv.agent.inventory.health_checks import NodeCheck
from rdzv.core.fleet.node_resources import FailingCheck

log = logging.getLogger("rdzv.agent")

FRESH_S = 5.0
"""How old a result may be when a job is about to begin here."""
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
"""The maximum wait before a failed check is repeated; the wait doubles each time."""
END_S = 2.0
"""How long a check may take to end its processes after its deadline."""


class NodeHealth:
    """One node's checks, and their results."""

    def __init__(
        self,
        checks: Sequence[NodeCheck],
        unused_gpus: Callable[[], frozenset[str]] = frozenset,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.unused_gpus = unused_gpus
        self.is_idle: Callable[[], bool] = lambda: True
        self.idle_interval_s = 0.0
        """The interval between checks while the node is idle; 0 if they run only when needed."""
        self.on_change = on_change
        self.failing: tuple[FailingCheck, ...] = ()
        self._checks = tuple(checks)
        self._began_s: float | None = None
        self._looked_at: frozenset[str] = frozenset()
        self._hung: dict[NodeCheck, tuple[asyncio.Task[str], float]] = {}
        """The checks that have not returned by their deadline, and when they began."""
        self._lock = asyncio.Lock()
        self._asked = False
        self._lifting = False
        self._woken = asyncio.Event()

    async def look(
        self, mine: frozenset[str] = frozenset(), *, fresh_s: float = FRESH_S
    ) -> tuple[FailingCheck, ...]:
        """Return what fails, found no longer than `fresh_s` ago. `mine`: the caller's idle GPUs."""
        if not self._checks:
            return ()
        loop = asyncio.get_running_loop()
        since_s = loop.time() - fresh_s
        async with self._lock:
            unused = self.unused_gpus() | mine
            # A caller that waited here uses the result of the caller before it.
            at_s = self._began_s
            if at_s is None or at_s < since_s or not unused <= self._looked_at:
                self._began_s, self._looked_at = loop.time(), unused
                found = await asyncio.gather(*(self._ask(check, unused) for check in self._checks))
                self._note(tuple(one for one in found if one is not None))
            return self.failing

    def look_again(self) -> None:
        self._lifting = self._asked = True
        self._woken.set()

    async def _lift(self) -> None:
        self._lifting = False
        for check in self._checks:
            try:
                async with asyncio.timeout(check.timeout_s):
                    await check.lift()
            except OSError as error:
                # A timeout is also an OSError.
                log.error("%s: cannot dismiss earlier errors: %s", check.name, error)

    async def run(self) -> None:
        """Run the checks first, on request, and repeatedly while one fails or the node is idle."""
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
                    # A check was requested, or a failure was just found and is due for a retry.
                    retry_s = FIRST_RETRY_S
                    continue
            self._asked = False
            if self._lifting:
                await self._lift()
            await self.look(fresh_s=0.0)

    def close(self) -> None:
        for task, _ in self._hung.values():
            task.cancel()

    # ------------------------------------------------------------------ one check

    async def _ask(self, check: NodeCheck, unused_gpus: frozenset[str]) -> FailingCheck | None:
        loop = asyncio.get_running_loop()
        if check in self._hung:
            task, since_s = self._hung[check]
            if not task.done():
                return FailingCheck(
                    check.name, f"has not returned for {loop.time() - since_s:.0f} s"
                )
            del self._hung[check]
        task = asyncio.create_task(check.look(unused_gpus), name=f"health {check.name}")
        try:
            done, _ = await asyncio.wait([task], timeout=check.timeout_s + END_S)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            self._hung[check] = task, loop.time() - check.timeout_s
            return FailingCheck(check.name, f"did not return within {check.timeout_s:g} s")
        if (error := task.exception()) is not None:
            log.error("the health check %s raised an exception", check.name, exc_info=error)
            return FailingCheck(check.name, f"failed because of a bug: {error!r}")
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
    return "; ".join(map(str, failing))
