"""Whatever happens to a job, its ledger has every moment of each of its runs exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from rdzv.core import events
from rdzv.view import history
from rdzv.view.answers import Event, event_in
from rdzv.view.history import fields_in, written
from rdzv.view.ledger import Ledger, LedgerPhase, ledgers_of
from rdzv.view.reports import report, spent
from rdzv.view.sentences import sentence
from tests.sim.checkers import SafetyError
from tests.sim.world import World
from tests.support.past_events import a_summary, an_event

SHORT = 20
"""The beginning of longer histories is forgotten."""
LIVE = {
    LedgerPhase.STARTING,
    LedgerPhase.LOADING,
    LedgerPhase.TRAINING,
    LedgerPhase.REDOING,
    LedgerPhase.DETECTING,
}


def check_ledgers(world: World) -> None:
    """Check the ledgers of all jobs of a history: at its end, and at earlier moments.

    Raises:
        SafetyError: a moment is missing, or occurs twice.
    """
    random = Random(f"{world.seed}, ledgers")
    for rdzv_id in world.swarm.jobs:
        past = [event_in(row) for row in world.disk.history(rdzv_id)]
        if not past:
            continue
        for story in (past, past[-SHORT:], with_steps(past, random)):
            upto = random.randint(1, len(story))
            for ledger in ledgers_of(story[:upto], story[upto - 1].unix_ms):
                _check_tiles(rdzv_id, ledger)
            for ledger in ledgers_of(story, past[-1].unix_ms + 777):
                _check_tiles(rdzv_id, ledger)
                if ledger.run_number is not None:
                    _check_live(rdzv_id, ledger, past)
            _check_advice(rdzv_id, story, past[-1].unix_ms + 777)


def _check_tiles(rdzv_id: str, ledger: Ledger) -> None:
    at_ms = ledger.from_unix_ms
    for one in ledger.intervals:
        if one.from_unix_ms != at_ms or one.until_unix_ms <= at_ms or one.node_ms < 0:
            raise SafetyError(f"ledger of {rdzv_id}: {one} does not follow upon {at_ms}")
        at_ms = one.until_unix_ms
    if at_ms != ledger.until_unix_ms or sum(ledger.phases.values()) != ledger.wall_ms:
        raise SafetyError(f"ledger of {rdzv_id}: nothing after {at_ms}: {ledger}")


def _check_advice(rdzv_id: str, past: Sequence[Event], now_ms: int) -> None:
    """Check that advice can be given whatever has happened, and adds up."""
    first = past[0]
    saved = an_event(events.SnapshotsSaved(0, 1, 1_000), first.run, first.unix_ms)
    found = spent(a_summary(rdzv_id), [first, saved, *past[1:]], first.unix_ms, now_ms)
    for change in report([found], past[0].unix_ms, now_ms).advice:
        net_ms = (change.saves_ms or 0) - (change.costs_ms or 0)
        if change.net_ms is not None and abs(change.net_ms - net_ms) > 1:
            raise SafetyError(f"advice of {rdzv_id}: {net_ms} ms, not {change}")


def _check_live(rdzv_id: str, ledger: Ledger, past: Sequence[Event]) -> None:
    spent = sum(ledger.phases[phase] for phase in LIVE)
    live = live_ms(past, ledger.run, ledger.until_unix_ms)
    if spent != live:
        raise SafetyError(f"ledger of {rdzv_id}: {spent} ms of live rounds, not {live}: {ledger}")


def with_steps(past: Sequence[Event], random: Random) -> list[Event]:
    """Add steps that workers may have reported, at times that may be out of order.

    None is added before a run has begun; an event of quarantine may be stored that early.
    """
    found: list[Event] = []
    ahead = {event.run for event in past if event.name == events.RunBegan.__name__}
    for event in past:
        found.append(event)
        if event.name == events.RunBegan.__name__:
            ahead.discard(event.run)
        number = random.randint(0, 4)
        age_ms = random.choice((0, 10, 3_000, 10**7))
        made = random.choice(
            (
                None,
                None,
                events.FirstCollectiveMade(number, "n1", age_ms),
                events.FirstStepMade(number, "n1", 0, random.randint(0, 50), age_ms),
                events.LostStepsRedone(number, random.randint(0, 50), age_ms),
                events.LastStepMade(number, random.randint(0, 50), age_ms),
            )
        )
        if made is not None and event.run not in ahead:
            fields = fields_in(written(made))
            text = sentence(made)
            found.append(Event(event.unix_ms, event.run, type(made).__name__, text, fields))
    return found


def live_ms(past: Sequence[Event], run: str, until_ms: int) -> int:
    """Sum up the times from the completion of rounds to their ends."""
    total, since_ms, latest_ms = 0, None, 0
    for event in past:
        if event.run != run:
            continue
        latest_ms = max(latest_ms, event.unix_ms)
        match history.read(event.name, event.fields):
            case history.RoundCompleted() | history.RoundAdopted():
                total += latest_ms - since_ms if since_ms is not None else 0
                since_ms = latest_ms
            case history.RoundEnded() | history.RunEnded() if since_ms is not None:
                total, since_ms = total + latest_ms - since_ms, None
    return total + (until_ms - since_ms if since_ms is not None else 0)
