"""The checker of `make faults` accepts a good history, and finds the fault in each bad one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from past_events import an_event

from rdzv.core import events as core_events
from rdzv.core.model import Cause, Result
from rdzv.view import history as kept_history
from tests.faults import __main__ as main
from tests.faults import checker, history, sources
from tests.faults.catalogue import CATALOGUE
from tests.faults.history import (
    Announced,
    Exited,
    FaultBegan,
    FaultHealed,
    JobEnded,
    MetStranger,
    NotRecovered,
    Parked,
    Place,
    Promise,
    Record,
    Recovered,
    RunBegan,
    RunEnded,
    Settled,
    Started,
    Stepped,
    Told,
)

R = TypeVar("R", bound=Record)
Records = tuple[Record, ...]


def a_round(number: int, at_s: float, pids: tuple[int, int], restarts: int, step: int) -> Records:
    """Return a round of two nodes: announced, told, started, and two seconds of training."""
    master = f"10.0.0.1:{5000 + number}"
    places = (Place("n1", 0, 0), Place("n2", 1, 1))
    records: list[Record] = [Announced("r", number, places, 2, master)]
    for rank, pid in enumerate(pids):
        host = f"n{rank + 1}"
        records += [
            Told(host, host, number, rank, 2, rank, rank, 2, master, restarts),
            Started(
                at_s, host, pid, number, rank, host, "job", rank, 2, 2, 1, master, restarts
            ),
            Stepped(at_s + 1, host, pid, number, rank, step + 10),
            Stepped(at_s + 2, host, pid, number, rank, step + 20),
        ]  # fmt: skip
    return tuple(records)


def a_good_history() -> Records:
    """Return a job that outlives a stopped server and a killed worker."""
    return (
        RunBegan("r"),
        *a_round(0, 10.0, (101, 102), restarts=0, step=0),
        FaultBegan(11.0, 1, "stop-server", Promise.NOTHING, ("s1",), (), (101, 102), 0, 0),
        FaultHealed(11.5, 1, None),
        Recovered(11.8, 1, 0, 0, (101, 102)),
        FaultBegan(12.0, 2, "kill-worker", Promise.ONE_RESTART, ("n1",), (), (101, 102), 0, 0),
        FaultHealed(12.0, 2, None),
        Settled("r", 0, "worker failure", 1),
        Exited(12.05, "n2", 102, 0, 1, "failed: a peer has closed its connection"),
        *a_round(1, 12.1, (103, 104), restarts=1, step=20),
        Recovered(14.1, 2, 1, 1, (103, 104)),
        RunEnded("r", "succeeded", "all did"),
        JobEnded(15.0, "succeeded", 1, (0, 0)),
    )


def a_cut_history() -> Records:
    """Return a job one node of which is cut off: its worker continues, unseen, in the old round."""
    return (
        RunBegan("r"),
        *a_round(0, 10.0, (101, 102), restarts=0, step=0),
        FaultBegan(12.0, 1, "cut-host", Promise.NO_RESTART, ("n2",), ("n2",), (101, 102), 0, 0),
        Stepped(13.0, "n2", 102, 0, 1, 20),
        FaultHealed(12.9, 1, 40),
        *a_round(1, 12.5, (103, 104), restarts=0, step=20),
        Recovered(14.6, 1, 1, 0, (103, 104)),
        RunEnded("r", "succeeded", "all did"),
        JobEnded(15.0, "succeeded", 0, (0, 0)),
    )


def a_kept_history() -> Records:
    """Return a job that loses one worker and keeps the other."""
    good = tuple(record for record in a_good_history() if not isinstance(record, Exited))
    stays = tuple(
        replace(record, pid=102)
        if isinstance(record, (Started, Stepped)) and record.pid == 104
        else replace(record, pids=(103, 102))
        if isinstance(record, Recovered) and record.number == 2
        else record
        for record in good
    )
    return (*stays, Parked(12.05, "n2", 102, 0, 1))


def changed(records: Records, kind: type[R], place: int, change: Callable[[R], R]) -> Records:
    """Return a history with one changed record."""
    chosen = [record for record in records if isinstance(record, kind)][place]
    return tuple(change(r) if r is chosen else r for r in records)


def rules_broken(records: Records) -> set[str]:
    return {violation.rule for violation in checker.check(records)}


@pytest.mark.parametrize("good", [a_good_history(), a_cut_history(), a_kept_history()])
def test_a_good_history_breaks_no_promise(good: Records) -> None:
    assert checker.check(good) == ()


GOOD = a_good_history()
OTHER_PLACES = (Place("n1", 0, 0), Place("n3", 1, 1))
BAD: dict[str, Records] = {
    "a round completes once": (*GOOD, Announced("r", 1, OTHER_PLACES, 2, "10.0.0.1:5001")),
    "ranks tile": changed(
        GOOD, Announced, 0, lambda a: replace(a, places=(Place("n1", 0, 0), Place("n2", 0, 0)))
    ),
    "agents hear what was announced": changed(
        GOOD, Told, 0, lambda t: replace(t, master="10.0.0.9:1")
    ),
    "agents agree": changed(GOOD, Told, 1, lambda t: replace(t, group_rank=0)),
    "workers find what their agent was told": changed(
        GOOD, Started, 0, lambda s: replace(s, world_size=3)
    ),
    "nobody meets a stranger": (*GOOD, MetStranger(14.0, "n1", 103, 1, 0, "round 0")),
    "round numbers never go back": (
        *GOOD,
        Told("n1", "n1", 0, 0, 2, 0, 0, 2, "10.0.0.1:5000", 0),
    ),
    "no old worker beside a new one": (*GOOD, Stepped(13.0, "n2", 102, 0, 1, 20)),
    "who stays has parked": tuple(r for r in a_kept_history() if not isinstance(r, Parked)),
    "faults are as invisible as promised": changed(
        GOOD, FaultBegan, 1, lambda f: replace(f, promise=Promise.NOTHING)
    ),
    "restarts are neither lost nor invented": changed(
        GOOD, FaultBegan, 1, lambda f: replace(f, promise=Promise.NO_RESTART)
    ),
    "calm": changed(GOOD, Recovered, 0, lambda r: replace(r, pids=(101, 999))),
    "every fault is survived": (*GOOD[:-2], NotRecovered(16.0, -1, "waited 90 s")),
    "every fault does harm": changed(GOOD, FaultHealed, 0, lambda h: replace(h, harmed=0)),
    "training goes forward": changed(GOOD, Stepped, 4, lambda s: replace(s, step=3)),
    "the job is closed once and rightly": changed(
        GOOD, JobEnded, 0, lambda e: replace(e, exit_codes=(0, 1))
    ),
}


def test_every_rule_has_a_history_that_breaks_it() -> None:
    assert {rule.__name__.strip("_").replace("_", " ") for rule in checker.RULES} == set(BAD)


@pytest.mark.parametrize("rule", BAD)
def test_a_rule_finds_the_history_that_breaks_it(rule: str) -> None:
    assert rule in rules_broken(BAD[rule])


def test_an_old_worker_is_excused_only_where_the_server_can_not_see_it() -> None:
    cut = a_cut_history()
    seen = changed(cut, FaultBegan, 0, lambda f: replace(f, unseen=()))
    assert rules_broken(seen) == {"no old worker beside a new one"}
    too_long = (*cut, Stepped(14.9, "n2", 102, 0, 1, 20))
    assert rules_broken(too_long) == {"no old worker beside a new one"}


def test_who_stays_parks_before_the_next_round_begins() -> None:
    late = changed(a_kept_history(), Parked, 0, lambda p: replace(p, at_s=12.4))
    assert rules_broken(late) == {"no old worker beside a new one"}
    moved = changed(a_kept_history(), Started, 3, lambda s: replace(s, host="n3", node_id="n3"))
    assert "who stays has parked" in rules_broken(moved)


@pytest.mark.slow
def test_a_history_is_read_as_it_was_kept(tmp_path: Path) -> None:
    kept = tmp_path / "history.jsonl"
    history.write(kept, GOOD)
    assert history.read(kept) == GOOD


# ------------------------------------------------------------------ where histories come from


def test_the_servers_events_are_understood() -> None:
    places = (kept_history.Place("n1", 0, 2), kept_history.Place("n2", 2, 1))
    cause, worker = Cause.WORKER_FAILURE, kept_history.Worker("n2", 2, 0)
    events = [
        an_event(core_events.RunBegan("u", 1, "the first join"), "u"),
        an_event(kept_history.RoundCompleted(3, 2, 3, places, "h", 1), "u"),
        an_event(core_events.NodeLost("n2", "lease expired"), "u"),
        an_event(kept_history.RoundSettled(3, cause, "rank 2: exit code 1", 1, 5, worker), "u"),
        an_event(kept_history.RunEnded("u", Result.SUCCEEDED, "all workers exited 0"), "u"),
    ]
    assert list(sources.announced(events)) == [
        RunBegan("u"),
        Announced("u", 3, (Place("n1", 0, 1), Place("n2", 2, 2)), 3, "h:1"),
        Settled("u", 3, "worker failure", 1),
        RunEnded("u", "succeeded", "all workers exited 0"),
    ]
    assert sources.lost_nodes(events) == {"n2"}


def test_an_agents_log_is_understood() -> None:
    log = (
        "2026-01-01T00:00:00.000Z rdzvrun: joined job (run u)\n"
        "2026-01-01T00:00:00.001Z rdzvrun: job: round 3: GROUP_RANK 1 of 2, RANK 2..2 of 3, "
        "MASTER h:1, restarts 4 of 5\n"
    )
    assert list(sources.told("n2", "n2-1", log)) == [Told("n2", "n2-1", 3, 1, 2, 2, 2, 3, "h:1", 4)]


def test_a_diary_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "7.jsonl"
    stepped = Stepped(1.0, "n1", 7, 0, 0, 5)
    line = history.encode(stepped)
    path.write_text(line[:20])
    diaries = sources.Diaries(tmp_path)
    diaries.poll()
    assert diaries.records == []
    path.write_text(line + "\n")
    diaries.poll()
    diaries.poll()
    assert diaries.records == [stepped]
    assert diaries.latest == {7: stepped}


def test_the_catalogues_table_names_every_fault() -> None:
    from tests.faults import catalogue

    assert [name for name in CATALOGUE if name not in str(catalogue.__doc__)] == []


# ------------------------------------------------------------------ what is planned


@pytest.mark.parametrize("lanes", [1, 2, 3, 6])
def test_every_fault_is_done_by_one_lane_that_can_do_it(lanes: int) -> None:
    plan = [fault for fault in CATALOGUE.values() for _ in range(2)]
    shares = main.share(plan, lanes, main.WORKERS, random.Random(1))
    assert Counter(fault.name for each in shares for fault in each.faults) == Counter(
        fault.name for fault in plan
    )
    assert all(main.serves(each, fault) for each in shares for fault in each.faults)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--faults=kill-server,eat-server"], "unknown: eat-server; there are: kill-server"),
        (["--times=0"], "'0' is not a number above 0"),
        (["--lanes=two"], "'two' is not a number above 0"),
        (["--workers=kept,heavy"], "'kept,heavy' is not of gloo, kept, light"),
    ],
)
def test_what_can_not_be_done_is_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main.parse(arguments)
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_a_kept_history_is_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    history.write(good, GOOD)
    history.write(bad, BAD["calm"])
    assert main.main([f"--check={good}"]) == 0
    assert "verdict: OK" in capsys.readouterr().out
    assert main.main([f"--check={bad}"]) == 1
    assert "VIOLATION calm: after fault 1" in capsys.readouterr().out
