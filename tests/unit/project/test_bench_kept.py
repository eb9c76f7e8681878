"""How bench/kept.py reads the output of workers, and its conclusions."""

import json
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401
from kept import Found, row
from kept_job import Diary


def written(path: Path, *lines: dict[str, Any]) -> Diary:
    path.write_text("".join(json.dumps({"pid": 7, "at_s": 1.0, **line}) + "\n" for line in lines))
    return Diary(path).read()


def test_a_step_that_was_done_twice_has_the_loss_of_the_second_time(tmp_path: Path) -> None:
    step = {"what": "step", "round": 1, "rank": 2, "step": 9}
    diary = written(
        tmp_path / "diary",
        {**step, "first": True, "loss": "0x1"},
        {**step, "first": False, "loss": "0x2", "at_s": 2.0},
    )
    assert diary.losses == {(9, 2): "0x2"}
    assert diary.stepped_s == {1: {2: 1.0}}


def test_a_line_that_is_cut_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "diary"
    diary = written(path, {"what": "dies"}, {"what": "blocks", "pid": 8})
    assert (diary.died, diary.blocked) == ([7], {8: 1.0})
    line = json.dumps({"what": "parked", "pid": 9, "round": 3, "at_s": 4.0}) + "\n"
    with path.open("a") as file:
        file.write(line[:10])
    assert diary.read().parked_s == {}
    with path.open("a") as file:
        file.write(line[10:])
    assert diary.read().parked_s == {3: {9: 4.0}}


def test_a_row_has_median_p99_and_most_of_each_phase_and_what_was_broken() -> None:
    found = Found("lost", 3, held=2, seconds={"stepped": [0.3, 0.1, 0.2]}, broken="pids are gone")
    assert row(found) == ("| lost | 2 of 3 | stepped 0.2 / 0.3 / 0.3 | **broken**: pids are gone |")
