"""How bench/recovery.py makes phases from workers' output, and a table from phases."""

import doctest

import bench_path  # noqa: F401
import measure
import pytest
import recovery
import recovery_job
from recovery import Point, points, rows, table
from recovery_job import CONTENDERS, Outcome, Said, Stage, new_world, phases, said_by_torchrun

BY_NAME = {contender.name: contender for contender in CONTENDERS}


def stages(node: str, pid: int, world_size: int, upto: str, at_s: float = 0.0) -> list[Stage]:
    """Return the output of one worker, one second per stage."""
    reached = ["started", "imported", "grouped", "reduced", "stepped", "steady"]
    return [
        Stage(stage, at_s + number, pid, node, world_size)
        for number, stage in enumerate(reached[: reached.index(upto) + 1])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("module", [measure, recovery_job, recovery])
def test_the_examples_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


# ------------------------------------------------------------------ the new world


def test_the_old_world_is_no_recovery() -> None:
    old = stages("n0", 1, 2, "steady") + stages("n1", 2, 2, "steady")
    assert new_world(old, frozenset({(1, 0), (2, 0)}), ["n0", "n1"]) is None


def test_a_process_that_stays_is_of_the_new_world_in_its_next_round() -> None:
    old = stages("n0", 1, 1, "steady")
    kept = [Stage(s.stage, s.at_s + 10, s.pid, s.seat, s.world_size, round=1) for s in old[2:]]
    parked = Stage("parked", 6.5, 1, "n0", 1)
    world = new_world([*old, parked, *kept], frozenset({(1, 0)}), ["n0"])
    assert world == {
        "parked": 6.5,
        "grouped": 12.0,
        "reduced": 13.0,
        "stepped": 14.0,
        "steady": 15.0,
    }


def test_a_world_of_which_one_node_is_not_steady_has_not_recovered() -> None:
    said = stages("n0", 3, 2, "steady") + stages("n1", 4, 2, "stepped")
    assert new_world(said, frozenset(), ["n0", "n1"]) is None


def test_a_world_of_another_size_has_not_recovered() -> None:
    """Each by itself: this is how a group looks that has split in two."""
    said = stages("n0", 3, 1, "steady") + stages("n1", 4, 1, "steady")
    assert new_world(said, frozenset(), ["n0", "n1"]) is None


def test_the_last_worker_of_the_new_world_counts() -> None:
    said = stages("n0", 3, 2, "steady", 10.0) + stages("n1", 4, 2, "steady", 11.5)
    world = new_world(said, frozenset(), ["n0", "n1"])
    assert world is not None
    assert (world["started"], world["reduced"]) == (11.5, 14.5)


def test_of_several_attempts_the_last_counts() -> None:
    said = stages("n0", 3, 1, "grouped", 10.0) + stages("n0", 5, 1, "steady", 20.0)
    world = new_world(said, frozenset(), ["n0"])
    assert world is not None
    assert world["started"] == 20.0


def test_a_node_that_was_steady_and_began_again_has_not_recovered() -> None:
    said = stages("n0", 3, 1, "steady", 10.0) + stages("n0", 5, 1, "started", 20.0)
    assert new_world(said, frozenset(), ["n0"]) is None


# ------------------------------------------------------------------ phases


WORLD = {
    "parked": 100.7,
    "started": 103.0,
    "imported": 104.0,
    "grouped": 104.1,
    "reduced": 104.2,
    "stepped": 105.0,
    "steady": 105.5,
}


def test_phases_are_counted_from_what_befell_the_job() -> None:
    said = [Said("noticed", 1100.5), Said("round", 1102.0), Said("spawned", 1102.5)]
    found = phases(100.0, WORLD, {7: 101.0, 8: 101.5}, said, 1000.0)
    assert {name: round(at_s, 3) for name, at_s in found.items()} == {
        "died": 1.0,
        "noticed": 0.5,
        "parked": 0.7,
        "stopped": 1.5,
        "round": 2.0,
        "spawned": 2.5,
        "started": 3.0,
        "imported": 4.0,
        "grouped": 4.1,
        "reduced": 4.2,
        "stepped": 5.0,
    }
    assert list(found) == list(recovery_job.PHASES)


def test_the_first_notice_and_the_last_round_count() -> None:
    said = [Said("noticed", 1101.0), Said("noticed", 1100.5)]
    said += [Said("round", 1101.0), Said("round", 1102.5)]
    found = phases(100.0, WORLD, {}, said, 1000.0)
    assert (found["noticed"], found["round"]) == (0.5, 2.5)


def test_what_was_said_before_or_after_is_no_phase() -> None:
    """The first formation, and everything after the recovery."""
    said = [Said("noticed", 1090.0), Said("round", 1091.0), Said("round", 1104.5)]
    found = phases(100.0, WORLD, {}, said, 1000.0)
    assert "noticed" not in found
    assert "round" not in found


def test_what_a_spare_rank_has_done_before_is_no_phase() -> None:
    assert "started" not in phases(103.5, WORLD, {}, [], 1000.0)


def test_a_log_that_is_cut_to_milliseconds_is_not_before_its_cause() -> None:
    found = phases(100.0004, WORLD, {}, [Said("noticed", 1100.0)], 1000.0)
    assert found["noticed"] == 0.0


def test_not_all_stopped_is_no_phase() -> None:
    found = phases(100.0, WORLD, {7: 101.0, 8: None}, [], 1000.0)
    assert found["died"] == 1.0
    assert "stopped" not in found


def test_peers_whose_workers_are_launched_alone_are_measured_in_one_case() -> None:
    alone = [str(point) for point in points([3], [], [BY_NAME["torchft"], BY_NAME["nvidia"]], 2)]
    assert alone == ["worker nodes=3x2 torchft", "worker nodes=3x2 nvidia"]


def test_what_is_no_line_of_a_log_is_passed_over() -> None:
    text = "Traceback (most recent call last):\nE1121 nonsense\n\n"
    assert list(said_by_torchrun(text, 2026)) == []


# ------------------------------------------------------------------ the table


def outcome(reduced: float) -> Outcome:
    return Outcome({"reduced": reduced, "stepped": reduced + 1})


def test_a_run_that_did_not_recover_is_counted_and_in_no_median() -> None:
    point = Point("worker", 3, BY_NAME["torchrun"])
    (row,) = rows({point: [outcome(4.0), Outcome({}, "does not train within 30 s"), outcome(6.0)]})
    assert (row["runs"], row["recovered"]) == (3, 2)
    assert row["failed"] == ["does not train within 30 s"]
    assert row["phases_s"]["reduced"]["median"] == 5.0  # type: ignore[index,call-overload]
    assert row["phases_s"]["noticed"] is None  # type: ignore[index,call-overload]
    assert "2 of 3" in table([row])


def test_ratios_are_to_torchrun_in_the_same_case() -> None:
    found = rows(
        {
            Point("worker", 3, BY_NAME["torchrun"]): [outcome(8.0)],
            Point("worker", 3, BY_NAME["torchrun-best"]): [outcome(4.0)],
            Point("worker", 3, BY_NAME["rdzvrun"]): [outcome(2.0)],
            Point("tree", 3, BY_NAME["rdzvrun"]): [outcome(2.0)],
        }
    )
    assert [(row["to_torchrun"], row["to_best"]) for row in found] == [
        (1.0, 2.0),
        (0.5, 1.0),
        (0.25, 0.5),
        (None, None),
    ]


def test_where_nothing_recovered_the_table_says_the_deadline() -> None:
    point = Point("late", 3, BY_NAME["torchrun"])
    found = rows({point: [Outcome({}, "does not train within 60 s")]})
    assert "0 of 1" in table(found)
    assert f"> {point.deadline_s:g} s" in table(found)


def test_every_contender_of_a_case_is_measured_before_the_next_case() -> None:
    wanted = list(points([2, 3], [], CONTENDERS))
    assert [str(point) for point in wanted[: len(CONTENDERS)]] == [
        f"worker nodes=2x1 {contender.name}" for contender in CONTENDERS
    ]
    alone = sum(contender.alone for contender in CONTENDERS)
    assert len(wanted) == len(CONTENDERS) * 5 - alone * 3


def test_only_torchrun_with_its_own_timeouts_is_patient() -> None:
    patient = [c.name for c in CONTENDERS if Point("tree", 3, c).patient]
    assert patient == ["torchrun", "torchrun-unshared"]
    assert not any(Point("worker", 3, c).patient for c in CONTENDERS)
