"""What other spares, another snapshot interval or another node would have saved, from the ledger.

It is a replay: the recorded failures happen at the same times, and only the answer to them changes.
The work of an interval is its time in training multiplied by the nodes that train. docs/ledger.md
has the model, its assumptions and what it leaves out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import exp, expm1, sqrt

from rdzv.core.model import Cause
from rdzv.core.words import counted
from rdzv.structs import replace, struct
from rdzv.view.answers import JobSummary
from rdzv.view.ledger import Cost, Interval, LedgerPhase, gaps

FAILURES = {Cause.WORKER_FAILURE, Cause.NODE_LOST, Cause.STORE_HOST, Cause.START_FAILED}
"""The causes that nobody has asked for, such as a drain."""
ENOUGH = 5
"""The number of failures below which a verdict is withheld."""
SPARES = (0, 1, 2, 3)

_SIGMAS = 2 * sqrt(2)
_CHANCE = 0.05
"""The probability below which it is no chance that one node has failed so often."""

_EVERY = 500
"""The longest interval between snapshots, in times between failures, that is calculated with."""
_RECOVERY = (LedgerPhase.FORMING, LedgerPhase.LOADING, LedgerPhase.REDOING)

Runs = Sequence[Sequence[Interval]]
"""The intervals of each run of a job."""


@struct(frozen=True)
class Change:
    """What one change would have saved and cost in the period of a report, in node time."""

    rdzv_id: str
    """The job, or empty for all jobs."""
    change: str
    """The change in words; `now` is what it was."""
    now: str
    spares: int | None = None
    """With `steps` and `node_id`, what is changed: the number of spares, the number of steps
    between snapshots, or a node that another one replaces."""
    steps: int | None = None
    node_id: str | None = None
    times: int = 0
    """The number of failures that would have cost more or less."""
    saves_ms: int | None = None
    """The node time saved, like `costs_ms` None if unknown."""
    costs_ms: int | None = None
    net_ms: int | None = None
    """The difference of both."""
    spread_ms: int | None = None
    """By how much the net of another such period may differ, by chance (95 %)."""
    snapshot_ms: int | None = None
    """The time of one snapshot at which a change of their interval neither saves nor costs."""
    verdict: str = ""


def of_job(job: JobSummary, runs: Runs, snapshot_ms: float | None) -> list[Change]:
    """Return what may be changed about one job.

    `snapshot_ms` is the time for which a snapshot has stopped training, or None if none has.
    """
    return [*_spares(job, runs), *_snapshots(job.rdzv_id, runs, snapshot_ms)]


def best_first(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Sort changes by what they save; those of unknown value come between gains and losses."""
    return tuple(sorted(changes, key=lambda one: (-(one.net_ms or 0), one.rdzv_id)))


def _valued(change: Change, gains: Sequence[float], costs_ms: float | None) -> Change:
    """Add the work that a change gains at each failure, and what it costs, if that is known."""
    few, gain_ms = len(gains) < ENOUGH, sum(gains)
    change = replace(change, times=len(gains))
    if few:
        change = replace(change, verdict=f"too few cases: {len(gains)}")
    if costs_ms is None:
        gain = round(gain_ms)
        return replace(change, saves_ms=gain) if gain > 0 else replace(change, costs_ms=-gain)
    spread_ms = _SIGMAS * sqrt(sum(gain * gain for gain in gains))
    net_ms, saves_ms = gain_ms - costs_ms, max(gain_ms, 0) - min(costs_ms, 0)
    verdict = "worth it" if net_ms > 0 else "not worth it"
    return replace(
        change,
        saves_ms=round(saves_ms),
        costs_ms=round(saves_ms - net_ms),
        net_ms=round(net_ms),
        spread_ms=None if few else round(spread_ms),
        verdict=change.verdict or (verdict if abs(net_ms) > spread_ms else "may be worth it"),
    )


def _goodput(intervals: Sequence[Interval]) -> float:
    """Return training's share of the time with nodes.

    Whoever trains for longer fails more often: time that is gained is spent like the rest.
    """
    held_ms = sum(one.ms for one in intervals if one.nodes)
    trained_ms = sum(one.ms for one in intervals if one.phase == LedgerPhase.TRAINING)
    return trained_ms / held_ms if held_ms else 1.0


# ------------------------------------------------------------------ spares


def _spares(job: JobSummary, runs: Runs) -> Iterable[Change]:
    training, free = _in_training(runs), Counter[int]()
    for one in training:
        free[max(round(one.nodes) - one.seats, 0)] += one.ms
    if not training:
        return
    most = job.max_nodes or max(one.seats for one in training)
    least = job.min_nodes or min(one.seats for one in training)
    ((now, _),) = free.most_common(1)
    for spares in SPARES:
        if (more := spares - now) == 0:
            continue
        gains = [gain for run in runs for gain in _gains(run, more, least, most)]
        held = [one for run in runs for one in run if one.nodes]
        costs_ms = sum(one.ms * max(more, -one.nodes) for one in held)
        name = counted(spares, "spare") if spares else "no spare"
        yield _valued(Change(job.rdzv_id, name, str(now), spares=spares), gains, costs_ms)


def _in_training(runs: Runs) -> list[Interval]:
    return [one for run in runs for one in run if one.phase == LedgerPhase.TRAINING and one.seats]


def _gains(run: Sequence[Interval], more: int, least: int, most: int) -> list[float]:
    """Return the work that `more` nodes would have added to a run after each failure, if any."""
    gains, failures, short, trained = dict[int, float](), 0, False, True
    good = _goodput([one for one in run if one.phase != LedgerPhase.WAITING])
    for one in run:
        if one.phase == LedgerPhase.TRAINING:
            short = one.nodes + more < one.seats
        elif trained and not short:
            failures += 1
        trained = one.phase == LedgerPhase.TRAINING
        gained = one.ms * _more_seats(one, more, least, most, short, good)
        gains[failures] = gains.get(failures, 0) + gained
    return [gain for gain in gains.values() if gain]


def _more_seats(one: Interval, more: int, least: int, most: int, short: bool, good: float) -> float:
    """Return how many more nodes would have trained in an interval.

    `short` says whether there would have been too few nodes before the last failure.
    """
    needed = min(least, one.seats)
    if one.phase == LedgerPhase.TRAINING:
        most = max(most, one.seats) if more > 0 else one.seats
        seats = min((one.seats if more > 0 else one.nodes) + more, most)
        return (seats if seats >= needed else 0) - one.seats
    if more < 0:
        # What nodes did to train again, they do once more or, if they were too few, after the wait.
        again = one.phase in _RECOVERY and one.cause and not short
        return -one.seats if again and one.nodes + more < one.seats <= one.nodes else 0
    if one.cause == Cause.NODES_JOINED:
        return min(one.seats + more, most) * good if one.nodes - 1 + more >= most else 0
    missing = one.phase == LedgerPhase.WAITING and one.cause and one.nodes < needed
    return one.seats * good if missing and one.nodes + more >= needed else 0


# ------------------------------------------------------------------ snapshots


def _snapshots(rdzv_id: str, runs: Runs, snapshot_ms: float | None) -> Iterable[Change]:
    """Yield what half and twice the interval between snapshots, and the best one, would have saved.

    The interval as seen is the one at which as much would be lost on average.
    """
    redone = [[one for one in gap if _is_redone(one)] for run in runs for gap in gaps(run)]
    lost = [again for again in redone if again]
    stepped = [one for one in _in_training(runs) if one.steps]
    if not lost or not stepped:
        why = "no redone steps are reported"
        yield Change(rdzv_id, "other snapshot interval", "", times=len(lost), verdict=why)
        return
    step_ms = sum(one.ms for one in stepped) / sum(one.steps for one in stepped)
    live = [*_in_training(runs), *(one for again in lost for one in again)]
    between_ms = sum(one.ms for one in live) / len(lost)
    mean_ms = step_ms * max(sum(one.steps for again in lost for one in again) / len(lost), 0.5)
    mean_ms = min(mean_ms, between_ms / 2)
    seen_ms = 2 * mean_ms
    for _ in range(20):
        seen_ms *= mean_ms / loss_ms(seen_ms, between_ms)
    losses = [sum(one.ms * one.seats for one in again) for again in lost]
    # Each snapshot counts as often as there are nodes that wait for it.
    taken = sum(one.ms * one.seats for one in live) / seen_ms
    wanted = [(seen_ms / 2, ""), (seen_ms * 2, "")]
    if snapshot_ms is not None:
        wanted.append((max(sqrt(2 * snapshot_ms * between_ms), step_ms), " (Young/Daly)"))
    for every_ms, name in wanted:
        steps = max(round(every_ms / step_ms), 1)
        gain = 1 - loss_ms(every_ms, between_ms) / mean_ms
        more = taken * (seen_ms / every_ms - 1)
        even_ms = sum(losses) * gain / more if more else 0
        change = Change(
            rdzv_id=rdzv_id,
            change=f"snapshots every {counted(steps, 'step')}{name}",
            now=f"{seen_ms / step_ms:.0f}",
            steps=steps,
            snapshot_ms=round(even_ms),
            verdict=""
            if snapshot_ms is not None
            else f"if one takes {'less' if more > 0 else 'more'} than {even_ms / 1000:.3g} s",
        )
        costs_ms = None if snapshot_ms is None else snapshot_ms * more
        yield _valued(change, [loss * gain for loss in losses], costs_ms)


def loss_ms(every_ms: float, between_ms: float) -> float:
    """Return the mean loss of a failure, of which one comes in `between_ms` on average.

    It is half the interval between snapshots, and less where failures are nearly as frequent
    (Daly, "A higher order estimate of the optimum checkpoint interval", 2006).

    >>> round(loss_ms(100, 10_000)), round(loss_ms(10_000, 10_000))
    (50, 4180)
    """
    often = min(every_ms / between_ms, _EVERY)
    if often < 1 / _EVERY:
        return every_ms / 2 * (1 - often / 6)  # The same, without its loss of precision.
    return between_ms * (1 - often / expm1(often))


def _is_redone(one: Interval) -> bool:
    """Return whether steps are redone from a snapshot; kept workers go on from their own memory."""
    return one.phase == LedgerPhase.REDOING and "kept" not in one.way


# ------------------------------------------------------------------ nodes


def without_worst_node(found: Sequence[Cost], nodes: int, good: float) -> list[Change]:
    """Return what another node in place of the worst of `nodes` would have saved, at most.

    `found` is what each gap in training has cost, and `good` the goodput of the time gained.
    """
    lost = [cost for cost in found if cost.node_id and cost.cause in FAILURES]
    by_node = Counter[str]()
    for cost in lost:
        by_node[cost.node_id] += cost.work_ms
    if not lost:
        return []
    ((worst, _),) = by_node.most_common(1)
    gains = [cost.work_ms * good for cost in lost if cost.node_id == worst]
    nodes = max(nodes, len(by_node))
    stands_out = nodes * _chance(len(gains), len(lost) / nodes) < _CHANCE
    verdict = "" if stands_out else f"no node stands out: {len(gains)} of {len(lost)}"
    change = Change("", f"another node in place of {worst}", "", node_id=worst, verdict=verdict)
    return [_valued(change, gains, 0)]


def _chance(times: int, mean: float) -> float:
    """Return the probability of so many rare events, or more, where `mean` are expected.

    >>> round(_chance(1, 1), 3), _chance(0, 5), round(_chance(8, 2), 4)
    (0.632, 1.0, 0.0011)
    """
    fewer, term = 0.0, exp(-mean)
    for number in range(times):
        fewer += term
        term *= mean / (number + 1)
    return 1 - fewer
