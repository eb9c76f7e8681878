"""Every moment of a run belongs to one phase, with its cause and its node."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from past_events import an_event

from rdzv.core import events
from rdzv.core.model import Cause, Result
from rdzv.view import history
from rdzv.view.history import Kept
from rdzv.view.ledger import Comeback, Cost, Interval, Ledger, LedgerPhase, ledgers_of

Story = Sequence[tuple[float, Kept]]
"""Events with their times in seconds."""

BEGAN = events.RunBegan("r", 1, "the first of this job")
SUBMITTED = events.RunBegan("r", 1, "submitted by ada", queued=True, gpus_per_node=8)
SUCCEEDED = history.RunEnded("r", Result.SUCCEEDED, "all workers exited 0")


def joined(node: str) -> Kept:
    return events.NodeJoined(node, 1, "10.0.0.1", 1)


def complete(number: int, *nodes: str, enough_s: float = 0, kept: int = 0) -> Kept:
    places = tuple(history.Place(node, rank, 1) for rank, node in enumerate(nodes))
    return history.RoundCompleted(
        number, len(nodes), len(nodes), places, "h", 1, round(enough_s * 1000), kept
    )


def first(number: int, step: int, ago_s: float = 0) -> Kept:
    return events.FirstStepMade(number, "n1", 0, step, round(ago_s * 1000))


def collective(number: int, ago_s: float = 0) -> Kept:
    return events.FirstCollectiveMade(number, "n1", round(ago_s * 1000))


def last(number: int, step: int, ago_s: float = 0) -> Kept:
    return events.LastStepMade(number, step, round(ago_s * 1000))


def ended(number: int, cause: Cause, node: str = "", dead_s: float = 0) -> Kept:
    return history.RoundEnded(number, cause, "why", True, round(dead_s * 1000), node)


def settled(number: int, cause: Cause, node: str = "", step: int | None = None) -> Kept:
    return history.RoundSettled(number, cause, "why", 0, 3, None, node, step)


def over(
    ended_s: float, settled_s: float, number: int, cause: Cause, node: str = ""
) -> list[tuple[float, Kept]]:
    return [(ended_s, ended(number, cause, node)), (settled_s, settled(number, cause, node))]


def failed(number: int, node: str, ago_s: float = 0) -> Kept:
    age_ms = round(ago_s * 1000)
    return history.WorkerFailed(number, node, 0, 0, 99, 1, None, "boom", age_ms)


def lost(node: str, silent_s: float) -> Kept:
    return events.NodeLost(node, "lease expired", silent_ms=round(silent_s * 1000))


def ledger_of(story: Story, now_s: float, state: str = "") -> Ledger:
    past = [an_event(kept, at_ms=round(at_s * 1000)) for at_s, kept in story]
    (found,) = ledgers_of(past, round(now_s * 1000), state)
    check_tiles(found)
    return found


def check_tiles(ledger: Ledger) -> None:
    """Each interval begins where the previous one ends, from the first moment to the last."""
    at_ms = ledger.from_unix_ms
    for one in ledger.intervals:
        assert one.from_unix_ms == at_ms
        assert one.until_unix_ms > at_ms
        at_ms = one.until_unix_ms
    assert at_ms == ledger.until_unix_ms
    assert sum(ledger.phases.values()) == ledger.wall_ms


def written(one: Interval) -> str:
    owed = " ".join(filter(None, (one.cause and f"({one.cause})", one.node_id)))
    span = f"{one.from_unix_ms / 1000:g}..{one.until_unix_ms / 1000:g}"
    return f"{span} {one.phase} {owed}".rstrip()


GATHERED: Story = [
    (0, BEGAN),
    (0, joined("n1")),
    (4, joined("n2")),
    (4, events.LastCallBegan(2, 2_000)),
    (6, complete(0, "n1", "n2", enough_s=2)),
]
TRAINS: Story = [*GATHERED, (10, first(0, 1))]
FAILS: Story = [
    *TRAINS,
    (31, ended(0, Cause.WORKER_FAILURE, "n2")),
    (31, failed(0, "n2", ago_s=1)),
    (31, last(0, 20, ago_s=1.5)),
    (33, settled(0, Cause.WORKER_FAILURE, "n2", step=20)),
    (34, complete(1, "n1", "n2", enough_s=0.5)),
]
TABLE: dict[str, tuple[Story, float, str]] = {
    "a run that nobody has joined waits": ([(0, BEGAN)], 3, "0..3 waiting"),
    "a last call is no waiting": (GATHERED[:-1], 5, "0..4 waiting, 4..5 forming"),
    "the first step ends the start": (
        [*TRAINS, (20, SUCCEEDED)],
        99,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..20 training",
    ),
    "without a step training counts from the first collective": (
        [*GATHERED, (9.5, collective(0, ago_s=0.5)), (20, SUCCEEDED)],
        99,
        "0..4 waiting, 4..6 forming, 6..9 starting, 9..20 training",
    ),
    "after a failure workers load until their first collective": (
        [
            *GATHERED,
            (9, collective(0)),
            *over(20, 21, 0, Cause.WORKER_FAILURE, "n2"),
            (22, complete(1, "n1", "n2", enough_s=1)),
            (26, collective(1)),
            (30, SUCCEEDED),
        ],
        99,
        "0..4 waiting, 4..6 forming, 6..9 starting, 9..20 training, "
        "20..21 stopping (worker failure) n2, 21..22 forming (worker failure) n2, "
        "22..26 loading (worker failure) n2, 26..30 training",
    ),
    "a round of one worker, which needs no collectives, trains from its start": (
        [
            *GATHERED,
            (9, collective(0)),
            *over(20, 20, 0, Cause.NODE_LOST, "n2"),
            (20, complete(1, "n1")),
            (30, SUCCEEDED),
        ],
        99,
        "0..4 waiting, 4..6 forming, 6..9 starting, 9..20 training, 20..30 training",
    ),
    "what one worker has trained stays so when others join it": (
        [
            *((0, BEGAN), (0, joined("n1")), (0, complete(0, "n1")), (4, joined("n2"))),
            *over(5, 5, 0, Cause.NODES_JOINED),
            (5, complete(1, "n1", "n2")),
            (8, collective(1)),
            (20, SUCCEEDED),
        ],
        99,
        "0..4 training, 4..5 training, 5..8 loading (nodes joined), 8..20 training",
    ),
    "steps count, and collectives before them do not": (
        [*GATHERED, (7, collective(0)), (10, first(0, 1)), (20, SUCCEEDED)],
        99,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..20 training",
    ),
    "a round that ended before its first collective has not trained": (
        [
            *GATHERED,
            *over(8, 9, 0, Cause.WORKER_FAILURE, "n2"),
            (10, complete(1, "n1", "n2", enough_s=1)),
            (13, collective(1)),
            (20, SUCCEEDED),
        ],
        99,
        "0..4 waiting, 4..6 forming, 6..8 starting, 8..9 stopping (worker failure) n2, "
        "9..10 forming (worker failure) n2, 10..13 starting (worker failure) n2, "
        "13..20 training",
    ),
    "without any of both training counts from the start of the workers": (
        [*GATHERED, (20, SUCCEEDED)],
        99,
        "0..4 waiting, 4..6 forming, 6..20 training",
    ),
    "a failure is detected after it has happened, and its steps are redone": (
        [*FAILS, (40, first(1, 11)), (49, events.LostStepsRedone(1, 20, 1_000)), (60, SUCCEEDED)],
        99,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..30 training, "
        "30..31 detecting (worker failure) n2, 31..33 stopping (worker failure) n2, "
        "33..33.5 waiting (worker failure) n2, 33.5..34 forming (worker failure) n2, "
        "34..40 loading (worker failure) n2, 40..48 redoing (worker failure) n2, "
        "48..60 training",
    ),
    "where nothing was lost nothing is redone": (
        [*FAILS, (40, first(1, 21)), (60, SUCCEEDED)],
        99,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..30 training, "
        "30..31 detecting (worker failure) n2, 31..33 stopping (worker failure) n2, "
        "33..33.5 waiting (worker failure) n2, 33.5..34 forming (worker failure) n2, "
        "34..40 loading (worker failure) n2, 40..60 training",
    ),
    "a round that fails before it has redone all owes that to the failure before": (
        [
            *FAILS,
            (40, first(1, 11)),
            (45, ended(1, Cause.STORE_HOST, "n1")),
            (45, last(1, 15)),
            (46, settled(1, Cause.STORE_HOST, "n1", step=15)),
            (46, complete(2, "n1", "n2")),
            (50, first(2, 11)),
            (60, events.LostStepsRedone(2, 20, 0)),
        ],
        61,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..30 training, "
        "30..31 detecting (worker failure) n2, 31..33 stopping (worker failure) n2, "
        "33..33.5 waiting (worker failure) n2, 33.5..34 forming (worker failure) n2, "
        "34..40 loading (worker failure) n2, 40..45 redoing (worker failure) n2, "
        "45..46 stopping (store host) n1, 46..50 loading (store host) n1, "
        "50..60 redoing (store host) n1, 60..61 training",
    ),
    "a failure before the first step is no training once any step is made": (
        [
            *GATHERED,
            (9, ended(0, Cause.WORKER_FAILURE, "n1")),
            (9, failed(0, "n1", ago_s=0.5)),
            (10, settled(0, Cause.WORKER_FAILURE, "n1")),
            (10, complete(1, "n1", "n2")),
            (15, first(1, 1)),
        ],
        16,
        "0..4 waiting, 4..6 forming, 6..8.5 starting, 8.5..9 detecting (worker failure) n1, "
        "9..10 stopping (worker failure) n1, 10..15 starting (worker failure) n1, "
        "15..16 training",
    ),
    "a lost node is detected from its last word": (
        [
            *TRAINS,
            (40, ended(0, Cause.NODE_LOST, "n2")),
            (40, lost("n2", silent_s=15)),
            (41, settled(0, Cause.NODE_LOST, "n2")),
        ],
        50,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..25 training, "
        "25..40 detecting (node lost) n2, 40..41 stopping (node lost) n2, "
        "41..50 waiting (node lost) n2",
    ),
    "steps that are made after a node's last word are training": (
        [
            *TRAINS,
            (40, ended(0, Cause.NODE_LOST, "n2")),
            (40, lost("n2", silent_s=15)),
            (40, settled(0, Cause.NODE_LOST, "n2")),
            (40, last(0, 300, ago_s=2)),
        ],
        41,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..38 training, "
        "38..40 detecting (node lost) n2, 40..41 waiting (node lost) n2",
    ),
    "the loss that explains the failures of others is charged": (
        [
            *TRAINS,
            (40, ended(0, Cause.WORKER_FAILURE, "n1")),
            (40, failed(0, "n1", ago_s=1)),
            (42, lost("n2", silent_s=4)),
            (42, settled(0, Cause.NODE_LOST, "n2")),
        ],
        43,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..38 training, "
        "38..40 detecting (node lost) n2, 40..42 stopping (node lost) n2, "
        "42..43 waiting (node lost) n2",
    ),
    "a hang is detected from the silence on, also while it lasts": (
        [*TRAINS, (70, events.WorkersHang(0, "n2", "no progress", 30_000))],
        75,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..40 training, "
        "40..75 detecting (worker failure)",
    ),
    "a hang that is over was training": (
        [
            *TRAINS,
            (70, events.WorkersHang(0, "n2", "no progress", 30_000)),
            (80, events.HangOver(0)),
        ],
        90,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..90 training",
    ),
    "workers that a fence has killed were not training": (
        [*TRAINS, (40, ended(0, Cause.NODE_LEFT, "n2", dead_s=10))],
        42,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..30 training, "
        "30..40 detecting (node left) n2, 40..42 stopping (node left) n2",
    ),
    "a drain costs the stop and the next start, and nothing to detect": (
        [
            *TRAINS,
            (30, events.NodeDrained("n2", "new kernel", 60_000)),
            (35, ended(0, Cause.NODE_LEFT, "n2")),
            (35, events.NodeLeaving("n2", "drained")),
            (36, events.NodeLeft("n2", "drained")),
            (36, settled(0, Cause.NODE_LEFT, "n2", step=25)),
            (36, joined("n3")),
            (38, complete(1, "n1", "n3", enough_s=2)),
            (40, first(1, 26)),
        ],
        45,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..35 training, "
        "35..36 stopping (node left) n2, 36..38 forming (node left) n2, "
        "38..40 loading (node left) n2, 40..45 training",
    ),
    "a submitted job is queued until it is placed": (
        [
            (0, SUBMITTED),
            (10, history.NodesPlaced(2, ("n1", "n2"), was_queued=True)),
            (11, joined("n1")),
            (14, joined("n2")),
            (15, complete(0, "n1", "n2", enough_s=1)),
        ],
        16,
        "0..10 queued, 10..14 waiting, 14..15 forming, 15..16 training",
    ),
    "nodes that are there without a name are there": (
        [
            (0, events.RunBegan("r", 1, "the server had no memory of it")),
            (2, history.RoundAdopted(4, 2)),
            (10, history.NodesPlaced(1, ("n3",))),
        ],
        12,
        "0..2 waiting, 2..12 training",
    ),
    "a node that declines costs the wait for it, and the queue after it": (
        [
            (0, SUBMITTED),
            (10, history.NodesPlaced(1, ("n1",), was_queued=True)),
            (12, events.NodeDeclined("n1", "no such folder")),
            (20, history.NodesPlaced(1, ("n2",), was_queued=True)),
            (21, joined("n2")),
            (21, complete(0, "n2")),
        ],
        22,
        "0..10 queued, 10..12 waiting (node declined) n1, 12..20 queued (node declined) n1, "
        "20..21 waiting (node declined) n1, 21..22 training",
    ),
    "where the last round has not stopped yet, the queue begins at the decline": (
        [
            *TRAINS,
            (20, ended(0, Cause.NODE_LOST, "n2")),
            (20, lost("n2", 0)),
            (21, history.NodesPlaced(1, ("n3",), was_queued=False)),
            (25, events.NodeDeclined("n3", "no such folder")),
            (30, history.NodesPlaced(1, ("n4",), was_queued=True)),
            (31, joined("n4")),
            (31, complete(1, "n1", "n4")),
        ],
        32,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..20 training, "
        "20..25 stopping (node lost) n2, 25..30 queued (node lost) n2, "
        "30..31 waiting (node lost) n2, 31..32 loading (node lost) n2",
    ),
    "a job that goes back to the queue has waited before": (
        [
            (0, SUBMITTED),
            (5, history.NodesPlaced(2, ("n1", "n2"), was_queued=True)),
            (6, joined("n1")),
            (60, events.JobQueued("join timeout")),
            (60, events.NodeLeft("n1", "the job is queued again")),
            (60, history.NodesWithdrawn(2, ("n1", "n2"), "the job is queued again")),
        ],
        70,
        "0..5 queued, 5..60 waiting, 60..70 queued",
    ),
    "a join timeout was all waiting": (
        [
            (0, BEGAN),
            (0, joined("n1")),
            (60, history.RunEnded("r", Result.FAILED, "join timeout")),
        ],
        99,
        "0..60 waiting",
    ),
    "a server without memory counts from where it knows the run": (
        [
            (0, events.RunBegan("r", 1, "the server had no memory of it")),
            (2, history.RoundAdopted(4, 2)),
            (3, first(4, 500)),
            (10, ended(4, Cause.OPERATOR)),
            (11, settled(4, Cause.OPERATOR, step=510)),
            (11, complete(5, "n1", "n2")),
        ],
        12,
        "0..2 waiting, 2..10 training, 10..11 stopping (operator), 11..12 loading (operator)",
    ),
    "a server that is restarted notes the first step again, and it counts once": (
        [*TRAINS, (15, first(0, 6)), (20, SUCCEEDED)],
        99,
        "0..4 waiting, 4..6 forming, 6..10 starting, 10..20 training",
    ),
    "a clock that is set back costs no time and makes none": (
        [*TRAINS, (8, ended(0, Cause.OPERATOR)), (9, settled(0, Cause.OPERATOR))],
        9,
        "0..4 waiting, 4..6 forming, 6..10 starting",
    ),
    "of a history whose beginning is forgotten the rest is counted": (
        [(50, settled(3, Cause.WORKER_FAILURE, "n2")), (52, complete(4, "n1", enough_s=2))],
        53,
        "50..52 forming (worker failure) n2, 52..53 training",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_every_moment_is_in_one_phase(name: str) -> None:
    story, now_s, intervals = TABLE[name]
    assert ", ".join(map(written, ledger_of(story, now_s).intervals)) == intervals


def test_the_table_has_every_phase() -> None:
    shown = {text.split()[1] for _, _, found in TABLE.values() for text in found.split(", ")}
    assert shown == {phase.value for phase in LedgerPhase}


@pytest.mark.parametrize("name", TABLE)
def test_at_every_moment_the_ledger_adds_up(name: str) -> None:
    """The view before late facts have arrived is provisional, but complete."""
    story, now_s, _ = TABLE[name]
    for upto in range(1, len(story) + 1):
        at_s = max(time_s for time_s, _ in story[:upto])
        ledger_of(story[:upto], at_s)
        ledger_of(story[:upto], at_s + 0.4)
    ledger_of(story, now_s + 1_000)


def test_a_queued_job_is_told_from_one_that_waits_by_its_state() -> None:
    story: Story = [(0, events.RunBegan("r", 1, "submitted"))]
    assert [written(one) for one in ledger_of(story, 5, "queued").intervals] == ["0..5 queued"]


def test_goodput_is_trainings_share() -> None:
    ledger = ledger_of([*TRAINS, (20, SUCCEEDED)], 99)
    assert (ledger.goodput, ledger.result, ledger.steps_reported) == (0.5, "succeeded", True)
    assert not ledger_of(GATHERED, 10).steps_reported
    assert ledger_of([(0, BEGAN)], 0).goodput is None


def test_steps_that_were_lost_are_counted() -> None:
    story, now_s, _ = TABLE["a failure is detected after it has happened, and its steps are redone"]
    assert ledger_of(story, now_s).steps_redone == 10


def test_what_each_cause_and_node_has_cost() -> None:
    story, now_s, _ = TABLE[
        "a round that fails before it has redone all owes that to the failure before"
    ]
    second_cost, first_cost, start = ledger_of(story, now_s).costs
    # 2 nodes are held from second 4 on, and one before.
    assert first_cost == Cost("worker failure", "n2", 1, 15_000, 30_000, 30_000, None)
    assert second_cost == Cost("store host", "n1", 1, 15_000, 30_000, 30_000, None)
    assert start == Cost("", "", 1, 10_000, 16_000, 20_000, None)


def test_how_long_it_took_to_train_again_is_told_by_how_the_workers_came() -> None:
    """A round that never trains counts until one trains again; the first start does not count.

    The quickest way comes first.
    """
    story = list(GATHERED)
    for number, kept, trains in ((1, 1, True), (2, 0, False), (3, 2, True), (4, 1, True)):
        at_s = 10 * number
        story += [
            *over(at_s, at_s + 1, number - 1, Cause.WORKER_FAILURE, "n2"),
            (at_s + 2, complete(number, "n1", "n2", kept=kept)),
            *([(at_s + 3, first(number, 100 * number))] if trains else []),
        ]
    story[len(GATHERED) : len(GATHERED)] = [(7, first(0, 1))]
    assert ledger_of(story, 45).comebacks == (
        Comeback("some kept", 2, 6_000, 12_000),
        Comeback("all kept", 1, 13_000, 26_000),
    )


@pytest.mark.parametrize(
    ("kept", "warm", "cold", "way"),
    [
        (2, 0, 0, "all kept"),
        (1, 1, 0, "some kept, others warm"),
        (1, 0, 1, "some kept, others cold"),
        (0, 2, 0, "all warm"),
        (0, 1, 1, "cold"),
    ],
)
def test_a_comeback_is_told_by_how_its_nodes_say_that_workers_came(
    kept: int, warm: int, cold: int, way: str
) -> None:
    """The server's decision counts only until the nodes have reported what was done."""
    story: Story = [
        *TRAINS,
        *over(20, 21, 0, Cause.WORKER_FAILURE, "n2"),
        (22, complete(1, "n1", "n2", kept=1)),
        (23, events.WorkersStarted(1, kept, warm, cold)),
        (24, first(1, 20)),
    ]
    assert [one.way for one in ledger_of(story, 30).comebacks] == [way]


def test_each_end_of_a_round_is_one_time() -> None:
    """Also in a crash loop, where one failure follows another."""
    story = list(GATHERED)
    for number in range(3):
        at_s = 10 + number * 5
        story += [
            (at_s, ended(number, Cause.WORKER_FAILURE, "n2")),
            (at_s, failed(number, "n2", ago_s=1)),
            (at_s + 1, settled(number, Cause.WORKER_FAILURE, "n2")),
            (at_s + 2, complete(number + 1, "n1", "n2", enough_s=1)),
        ]
    story.append((40, first(3, 1)))
    (cost, _) = ledger_of(story, 41).costs
    assert (cost.cause, cost.node_id, cost.times) == ("worker failure", "n2", 3)


def test_the_nodes_time_is_counted_while_they_are_held() -> None:
    """Also for nodes that the history does not name: it names eight of a round."""
    story: Story = [
        (0, events.RunBegan("r", 1, "the server had no memory of it")),
        (0, history.RoundAdopted(0, 3)),
        (0, events.NodeAdopted("n1", 0, 0)),
        (10, ended(0, Cause.NODE_LOST, "n3")),
        (10, lost("n3", 0)),
        (10, settled(0, Cause.NODE_LOST, "n3")),
    ]
    ledger = ledger_of(story, 20)
    assert [one.node_ms for one in ledger.intervals] == [30_000, 20_000]
    assert ledger.costs == (Cost("node lost", "n3", 1, 10_000, 20_000, 30_000, None),)


def test_each_change_of_the_nodes_begins_an_interval_once_there_was_a_round() -> None:
    """Before, thousands may come one by one, so one interval has their mean."""
    story: Story = [(0, BEGAN), *((number / 10, joined(f"n{number}")) for number in range(1_000))]
    story += [(100, complete(0, "n0", "n1")), (110, joined("late"))]
    story += over(120, 120, 0, Cause.NODE_LOST, "n1")
    story += [(120, lost("n1", 0)), (121, joined("m1")), (123, complete(1, "n0", "m1"))]
    found = [(written(one), one.nodes, one.seats) for one in ledger_of(story, 130).intervals]
    assert found == [
        ("0..100 waiting", pytest.approx(500.5), 2),
        ("100..110 training", 1_000, 2),
        ("110..120 training", 1_001, 2),
        ("120..121 waiting (node lost) n1", 1_000, 2),
        ("121..123 waiting (node lost) n1", 1_001, 2),
        ("123..130 training", 1_001, 2),
    ]


def test_runs_are_apart() -> None:
    past = [
        an_event(BEGAN, "r1", 0),
        an_event(history.RunEnded("r1", Result.FAILED, "why"), "r1", 1_000),
        an_event(events.RunBegan("r2", 2, "again"), "r2", 5_000),
    ]
    one, two = ledgers_of(past, 9_000)
    assert (one.run, one.wall_ms, one.result) == ("r1", 1_000, "failed")
    assert (two.run, two.wall_ms, two.run_number) == ("r2", 4_000, 2)
