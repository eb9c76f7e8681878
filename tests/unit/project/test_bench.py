"""What the programs of bench/ conclude from what they have measured."""

import doctest
from importlib import import_module
from typing import Any

import bench_path  # noqa: F401
import dashboard
import draw
import launch
import profiling
import pytest
import recovery_job
import sections
from goodput import Step, trained
from measure import Spread
from recovery import Point, rows, table
from recovery_job import CONTENDERS, PHASES, Outcome, Said, Stage, new_world, phases


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["draw", "goodput", "launch", "measure", "recovery", "recovery_job", "sections"]
)
def test_the_examples_hold(module: str) -> None:
    assert doctest.testmod(import_module(module)).failed == 0


def test_only_new_steps_of_one_process_are_goodput() -> None:
    """Time between two processes is no training, nor are steps made before."""
    first = [Step(float(at), 7, at) for at in range(1, 11)]
    again = [Step(20.0 + at, 8, 5 + at) for at in range(1, 11)]
    spent_s, new, redone = trained([*first, *again])
    assert (spent_s, new, redone) == (9.0 + 5.0, 15, 5)
    assert trained([]) == (0.0, 0, 0)


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["python3", "-I", "-S", "-X", "utf8", "/a/runner/__main__.py", "15"], "runner"),
        (["python3", "/a/store_host.py", "--fd", "6"], "store host"),
        (["rdzv zygote: torch, torch._dynamo"], "zygote"),
        (["python3", "-u", str(launch.WORKER)], "worker"),
        (["python3", "-c", "pass"], "other"),
        ([""], "other"),
    ],
)
def test_processes_are_told_apart_by_their_command_line(command: list[str], role: str) -> None:
    assert launch.role_of(command, leader=False) == role


BY_NAME = {contender.name: contender for contender in CONTENDERS}


def stages(node: str, pid: int, world_size: int, upto: str, at_s: float = 0.0) -> list[Stage]:
    """Return the output of one worker, one second per stage."""
    reached = ["started", "imported", "grouped", "reduced", "stepped", "steady"]
    return [
        Stage(stage, at_s + number, pid, node, world_size)
        for number, stage in enumerate(reached[: reached.index(upto) + 1])
    ]


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


def test_of_several_attempts_the_last_counts() -> None:
    said = stages("n0", 3, 1, "grouped", 10.0) + stages("n0", 5, 1, "steady", 20.0)
    world = new_world(said, frozenset(), ["n0"])
    assert world is not None
    assert world["started"] == 20.0


def test_a_node_that_was_steady_and_began_again_has_not_recovered() -> None:
    said = stages("n0", 3, 1, "steady", 10.0) + stages("n0", 5, 1, "started", 20.0)
    assert new_world(said, frozenset(), ["n0"]) is None


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


def test_what_was_said_before_or_after_is_no_phase() -> None:
    """The first formation, and everything after the recovery."""
    said = [Said("noticed", 1090.0), Said("round", 1091.0), Said("round", 1104.5)]
    found = phases(100.0, WORLD, {}, said, 1000.0)
    assert "noticed" not in found
    assert "round" not in found


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


def test_a_profile_counts_by_part_package_and_function() -> None:
    listed = "  7f00 (/usr/lib/libpython3.11.so)\n  ff00 ([kernel.kallsyms])\n  00 (/x/odd.so)\n"
    stacks = (
        "<module> (/v/bin/rdzvd:8);write (/r/rdzv/server/wire/out.py:9);g (/lib/enum.py:3) 3\n"
        "<module> (/v/bin/rdzvd:8);_run (/lib/python3.11/asyncio/events.py:80) 1\n"
        "main (/elsewhere.py:1) 1\n"
    )
    counted = profiling.functions(stacks)
    assert counted == {
        "rdzv/server/wire/out.py write": 3,
        "asyncio/events.py _run": 1,
        "other": 1,
    }
    shown = str(profiling.Profile(profiling.parts(listed), counted))
    assert " 33.3 %  Python's interpreter\n" in shown
    assert " 33.3 %  kernel\n" in shown
    assert " 33.3 %  odd.so\n" in shown
    assert " 60.0 %  rdzv/server/wire\n" in shown


def spread(*samples: float) -> dict[str, Any]:
    return dict(Spread.of(samples).as_json())


def recovered(contender: str, *reduced: float, lost: int = 0) -> dict[str, Any]:
    medians = {p: spread(*reduced) if reduced else None for p in PHASES if p != "noticed"}
    return {
        "bench": "recovery",
        "case": "tree",
        "nodes": 3,
        "nproc": 1,
        "contender": contender,
        "runs": len(reduced) + lost,
        "recovered": len(reduced),
        "deadline_s": 30.0,
        "phases_s": {"noticed": None, **medians},
        "to_torchrun": 0.5 if reduced else None,
        "to_best": None,
        "failed": ["does not train within 30 s"] * lost,
    }


def test_medians_spread_and_ratio_are_in_the_section() -> None:
    section = sections.recovery_section([recovered("rdzvrun", 2.0, 4.0, 3.0)])
    assert "| 3 of 3 | 3 | - | 3 | 3 |" in section
    head, rule, row = (line for line in section.splitlines() if line.startswith("|"))
    assert head.count("|") == rule.count("|") == row.count("|")
    assert "| 2 / 4 / 4 | x0.5 | - |" in section


def test_only_what_is_between_the_marks_is_renewed() -> None:
    text = "before\n<!-- scale begins -->\nold\n<!-- scale ends -->\nafter\n"
    assert sections.renewed(text, "scale", "new") == text.replace("old", "new")


@pytest.mark.parametrize("text", ["", "<!-- a begins -->", "<!-- a ends --><!-- a begins -->"])
def test_a_document_without_marks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="needs the marks"):
        sections.renewed(text, "a", "new")


def test_a_recovery_is_read_from_what_sum_and_count_grew_by() -> None:
    sums = {
        "stop": [(0.0, 0.0), (1.0, 2.5), (2.0, 4.0)],
        "form": [(0.0, 0.0), (1.0, 0.0), (2.0, 0.5)],
    }
    counts = {
        "stop": [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0)],
        "form": [(0.0, 0.0), (1.0, 0.0), (2.0, 1.0)],
    }
    assert dashboard.recoveries(sums, counts) == [
        draw.Pile(2.0, (("stop", 2.5), ("form", 0.5))),
        draw.Pile(2.0, (("stop", 1.5),)),
    ]
    assert dashboard.ends({"lost": counts["form"], "failure": counts["stop"]}) == [
        draw.Pile(1.0, (("failure", 1.0),)),
        draw.Pile(2.0, (("failure", 1.0), ("lost", 1.0))),
    ]
