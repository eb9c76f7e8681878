"""Quarantines nodes at fault; `core/fleet/quarantine` judges the strikes.

A strike is judged after its step is decided and before the step is stored, under the job's lock, so
no round forms with a node that was just quarantined. The verdict is stored first: if storing the
step then fails, the step is retried, and by then the strike is known.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rdzv.core.commands import Bar
from rdzv.core.fleet.quarantine import Quarantined, Strike, StrikeOutcome, judge, lift, strikes_in
from rdzv.core.model import State
from rdzv.core.rendezvous import Transition
from rdzv.runtime.clock import Timer
from rdzv.server.engine.history import records
from rdzv.server.scheduling.fleet import Restrictions
from rdzv.stores.base import Record
from rdzv.structs import replace
from rdzv.view.sentences import sentence

if TYPE_CHECKING:
    from rdzv.server.driver import Driver

log = logging.getLogger("rdzv.quarantine")


class Quarantine:
    """One server's quarantined nodes, and the strikes against all other nodes."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._clock = driver.clock
        self._timer = Timer(driver.clock, self._expire)

    def stop(self) -> None:
        self._timer.cancel()

    @property
    def nodes(self) -> Mapping[str, Quarantined]:
        return self._driver.fleet.restrictions.quarantine.quarantined(self._clock.now_ms())

    @property
    def bar(self) -> Bar:
        return Bar(
            tuple((name, f"quarantined: {held.reason}") for name, held in self.nodes.items())
        )

    async def judge(
        self, before: State, transition: Transition
    ) -> tuple[Bar | None, tuple[Record, ...]]:
        """Judge the strikes in a step that has been decided but not yet stored.

        Return the command that must precede the step (None unless the job must release a node) and
        the rows for the job's history.
        """
        after, now_ms = transition.state.membership, self._clock.now_ms()
        strikes = strikes_in(after.rdzv_id, after.run, transition.events, now_ms)
        if not strikes:
            return None, ()
        rows: list[Record] = []
        for strike in strikes:
            if (event := (await self._judge(strike)).event) is not None:
                extra = {"rdzv_id": strike.rdzv_id, "run": strike.run}
                log.warning("%s", sentence(event), extra=extra)
                rows += records(strike.rdzv_id, strike.run, (event,), strike.at_ms)
        concerned = {strike.node_id for strike in strikes} & self.nodes.keys()
        submitted = after.submission is not None and after.ended is None
        bar = self.bar if concerned and submitted else None
        if bar is not None and dict(bar.barred) == before.barred:
            bar = None
        return bar, tuple(rows)

    async def _judge(self, strike: Strike) -> StrikeOutcome:
        outcomes: list[StrikeOutcome] = []

        def struck(now: Restrictions) -> Restrictions:
            reported, rules = self._driver.fleet.reported, self._driver.config.quarantine
            daemons = [n for n, report in reported.items() if report.resources is not None]
            outcome = judge(now.quarantine, strike, rules, daemons, self._clock.now_ms())
            outcomes.append(outcome)
            known = outcome.record is now.quarantine
            return now if known else replace(now, quarantine=outcome.record)

        # Training must continue, so the verdict counts even if the store refuses it.
        await self._driver.fleet.change(struck, anyhow=True)
        return outcomes[-1]

    async def lift(self, node_id: str) -> bool:
        held = node_id in self.nodes

        def lifted(now: Restrictions) -> Restrictions:
            record = lift(now.quarantine, node_id)
            return now if record == now.quarantine else replace(now, quarantine=record)

        await self._driver.fleet.change(lifted, anyhow=True)
        if held:
            log.warning(
                "node %s is no longer quarantined: an operator has lifted the quarantine", node_id
            )
        return held

    def note_change(self) -> None:
        """Wake all that depends on which nodes are restricted, and wait for the next expiry."""
        self._timer.arm(min((held.until_ms for held in self.nodes.values()), default=None))
        self._driver.watchers.nodes_changed()
        self._driver.placer.wake()

    def _expire(self, due_ms: int) -> None:
        for node_id, held in self._driver.fleet.restrictions.quarantine.nodes.items():
            if held.until_ms == due_ms:
                log.warning("the quarantine of node %s has expired", node_id)
        self.note_change()
