"""Stores the quarantined nodes; `core/fleet/quarantine` judges the strikes.

A strike is judged after its step is decided and before the step is stored, under the job's lock.
The job can therefore release a node in the same step that settles its round, and no round forms
with a node that was just quarantined. The verdict is stored first: if storing the step then fails,
the step is retried, and by then the strike is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

import msgspec

from rdzv.core.commands import Bar
from rdzv.core.events import NodeQuarantined
from rdzv.core.fleet.quarantine import (
    Quarantined,
    QuarantineRecord,
    QuarantineRules,
    Strike,
    StrikeOutcome,
    judge,
    lift,
    strikes_in,
)
from rdzv.core.model import State
from rdzv.core.rendezvous import Transition
from rdzv.errors import RendezvousConnectionError, RendezvousError
from rdzv.runtime.clock import Clock, Timer
from rdzv.server.engine.store_access import StoreAccess
from rdzv.server.engine.stored_records import KeyValueRecord
from rdzv.server.telemetry.event_lines import records
from rdzv.stores.base import Record as Row
from rdzv.view.sentences import sentence

log = logging.getLogger("rdzv.quarantine")

QUARANTINE = "quarantine"
"""The name of the key-value record for quarantined nodes and for strikes against other nodes."""


def _read(data: bytes) -> QuarantineRecord:
    return msgspec.json.decode(data, type=QuarantineRecord)


class Quarantine:
    """One server's quarantined nodes, and the strikes against all other nodes."""

    def __init__(
        self,
        store: StoreAccess,
        clock: Clock,
        tuning: QuarantineRules,
        daemons: Callable[[], Collection[str]],
        on_change: Callable[[], None],
    ) -> None:
        """Call `on_change` when a node enters or leaves quarantine.

        `daemons` returns the known nodes that accept submitted jobs.
        """
        self._clock = clock
        self._tuning = tuning
        self._daemons = daemons
        self._on_change = on_change
        self._document = KeyValueRecord(store, QUARANTINE, _read)
        self._lock = asyncio.Lock()
        self._timer = Timer(clock, self._expire)

    async def load(self) -> None:
        """Read the stored quarantine.

        Raises:
            RendezvousConnectionError: the store is unavailable.
            RendezvousStateError: the stored quarantine cannot be read.

        """
        await self._document.load()
        self._changed()

    @property
    def _record(self) -> QuarantineRecord:
        return self._document.value

    def stop(self) -> None:
        self._timer.cancel()

    @property
    def nodes(self) -> Mapping[str, Quarantined]:
        """The nodes that are currently quarantined, by node_id."""
        return self._record.quarantined(self._clock.now_ms())

    @property
    def bar(self) -> Bar:
        """The command that bars quarantined nodes from a submitted job."""
        return Bar(
            tuple((name, f"quarantined: {held.reason}") for name, held in self.nodes.items())
        )

    async def judge(
        self, before: State, transition: Transition
    ) -> tuple[Bar | None, tuple[Row, ...]]:
        """Judge the strikes in a step that has been decided but not yet stored.

        Return the command that must precede the step (None unless the job must release a node) and
        the rows for the job's history.

        Raises:
            RendezvousConnectionError: the verdict could not be stored; retry the step.

        """
        after, now_ms = transition.state.membership, self._clock.now_ms()
        strikes = strikes_in(after.rdzv_id, after.run, transition.events, now_ms)
        if not strikes:
            return None, ()
        rows: list[Row] = []
        for strike in strikes:
            verdict = await self._judge(strike)
            if verdict.event is not None:
                rows += records(strike.rdzv_id, strike.run, (verdict.event,), strike.at_ms)
        concerned = {strike.node_id for strike in strikes} & self.nodes.keys()
        submitted = after.submission is not None and after.ended is None
        bar = self.bar if concerned and submitted else None
        if bar is not None and dict(bar.barred) == before.barred:
            bar = None
        return bar, tuple(rows)

    async def _judge(self, strike: Strike) -> StrikeOutcome:
        async with self._lock:
            now_ms = self._clock.now_ms()
            verdict = judge(self._record, strike, self._tuning, self._daemons(), now_ms)
            if verdict.record is not self._record:
                await self._write(verdict.record)
        if verdict.event is not None:
            extra = {"rdzv_id": strike.rdzv_id, "run": strike.run}
            log.warning("%s", sentence(verdict.event), extra=extra)
        if isinstance(verdict.event, NodeQuarantined):
            self._changed()
        return verdict

    async def lift(self, node_id: str) -> bool:
        """Lift a node's quarantine, and return whether the node was quarantined.

        Raises:
            RendezvousError: the change was not stored; retry.

        """
        async with self._lock:
            held = node_id in self.nodes
            lifted = lift(self._record, node_id)
            if lifted != self._record:
                await self._write(lifted)
        if held:
            log.warning(
                "node %s is no longer quarantined: an operator has lifted the quarantine", node_id
            )
            self._changed()
        return held

    async def _write(self, record: QuarantineRecord) -> None:
        """Store a decision before it takes effect."""
        try:
            await self._document.swap(record, msgspec.json.encode(record))
        except RendezvousConnectionError:
            # The record has been read again and may be different.
            self._changed()
            raise
        except RendezvousError as error:
            # Training must continue, so the verdict counts even if it is not stored.
            log.error("cannot write the record %s: %s", QUARANTINE, error)
            self._document.value = record

    def _changed(self) -> None:
        until = [held.until_ms for held in self.nodes.values()]
        self._timer.arm(min(until, default=None))
        self._on_change()

    def _expire(self, due_ms: int) -> None:
        over = [n for n, held in self._record.nodes.items() if held.until_ms == due_ms]
        for node_id in over:
            log.warning("the quarantine of node %s has expired", node_id)
        self._changed()
