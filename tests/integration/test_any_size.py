"""The same training for any number of workers, with real processes and gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from any_size_training import Rows, loss_of, samples_of, steps_of
from cluster import FORK_ALL, QUICK_TORCH
from kept_workers import Worker, World, world
from test_kept_workers import ROOT, SUPPORT, at, finish
from test_resumed_from_memory import RDZVRUN

from tests.support.whole_lines import json_rows

EPOCHS = 6
STEPS = 5
"""In an epoch: 96 samples in global batches of 22."""


def steps(made: World) -> dict[int, Rows]:
    return steps_of(row for one in made.all for row in one.lines("step"))


def launched(folder: Path, workers: int, **how: Any) -> dict[int, Rows]:
    """Train under rdzvrun, with a snapshot of each step."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RDZV_")}
    paths = [str(ROOT / "worker"), os.environ["PYTHONPATH"]]
    environ |= {"PYTHONPATH": os.pathsep.join(paths), **FORK_ALL, **QUICK_TORCH}
    options = ["--standalone", f"--nproc-per-node={workers}", "--warm=torch"]
    script = [str(SUPPORT / "any_size_training.py"), json.dumps({"snapshot_every": 1, **how})]
    done = subprocess.run(
        [RDZVRUN, *options, f"--snapshot-dir={folder}", *script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = steps_of(json_rows(done.stdout, "step"))
    assert found, done.stderr
    return found


def trained(folder: Path, size: int, **how: Any) -> dict[int, Rows]:
    """Train in one round, without faults."""
    folder.mkdir()
    with world(folder, "any_size_training.train", **how) as made:
        made.begin(size)
        finish(made)
        return steps(made)


def test_losses_samples_and_rates_are_those_of_one_worker(tmp_path: Path) -> None:
    """4 workers, one killed in a step, 3, one killed, 2, 4 again; 22 samples in 4 parts."""
    expected = trained(tmp_path / "alone", 1, epochs=EPOCHS)
    faults = [at(3, 4, "forward", "kill", 0), at(2, 13, "forward", "kill", 1)]
    faults.append(at(0, 17, "forward", "sleep", 2, seconds=0.3))
    with world(tmp_path, "any_size_training.train", epochs=EPOCHS, faults=faults) as made:
        kept: list[Worker] = []
        for size in (4, 3, 2):
            made.begin(size, kept)
            lost = made.workers[size - 1 :] if size > 2 else []
            for one in lost:
                assert one.exit_code() == -signal.SIGKILL
            kept = [one for one in made.workers if one not in lost]
            if not lost:
                kept[0].wait_line("fault")
            made.end(kept)
        made.begin(4, kept)
        finish(made)
        found = steps(made)
    assert len(expected) == EPOCHS * STEPS and found.keys() == expected.keys()
    assert {len(rows) for rows in found.values()} == {4, 3, 2}
    for number, rows in expected.items():
        assert samples_of(found[number]) == samples_of(rows)
        assert {row["lr"] for row in found[number]} == {rows[0]["lr"]}
        assert loss_of(found[number]) == pytest.approx(loss_of(rows), rel=1e-11)
    for epoch in range(EPOCHS):
        done = [rows for rows in found.values() if rows[0]["epoch"] == epoch]
        assert Counter(index for rows in done for index in samples_of(rows)) == Counter(range(96))


@pytest.mark.slow
def test_a_snapshot_is_resumed_by_another_number_of_workers(tmp_path: Path) -> None:
    expected = trained(tmp_path / "alone", 1, epochs=EPOCHS)
    faults = [at(0, 17, "forward", "raise")]
    first = launched(tmp_path / "saved", 3, epochs=EPOCHS, faults=faults)
    second = launched(tmp_path / "saved", 2, epochs=EPOCHS)
    assert 1 < min(second) <= 18 == len(first) + 1
    assert {*first, *second} == {*expected}
    for found in (first, second):
        for step, rows in found.items():
            assert samples_of(rows) == samples_of(expected[step])
            assert loss_of(rows) == pytest.approx(loss_of(expected[step]), rel=1e-11)


def test_a_sharded_model_makes_the_same_steps_with_any_number_of_ranks(tmp_path: Path) -> None:
    found = [trained(tmp_path / f"{n}", n, epochs=1, sharded=True) for n in (1, 3)]
    expected = trained(tmp_path / "alone", 1, epochs=1)
    for step, rows in expected.items():
        assert [loss_of(one[step]) for one in found] == pytest.approx(
            [loss_of(rows)] * 2, rel=1e-11
        )


def test_a_sharded_model_that_grows_is_divided_anew_and_redoes_no_step(tmp_path: Path) -> None:
    """All parts are in the memory of kept ranks: of 1, 3, and then 4, which rows do not divide."""
    expected = trained(tmp_path / "alone", 1, epochs=EPOCHS, sharded=True)
    ends = (7, 17)
    faults = [at(0, step, "forward", "sleep", n, seconds=0.3) for n, step in enumerate(ends)]
    how = {"epochs": EPOCHS, "sharded": True, "faults": faults}
    with world(tmp_path, "any_size_training.train", **how) as made:
        kept: list[Worker] = []
        for size, step in zip((1, 3), ends, strict=True):
            made.begin(size, kept)
            kept = made.workers
            kept[0].wait_line("fault", round=made.number)
            assert [one["step"] for one in made.end(kept)] == [step] * size
        made.begin(4, kept, step=ends[-1])
        finish(made)
        found = steps(made)
        committed = Counter(row["step"] for row in made.all[0].lines("step"))
    assert found.keys() == expected.keys() == committed.keys() and set(committed.values()) == {1}
    assert {len(rows) for rows in found.values()} == {1, 3, 4}
    for number, rows in expected.items():
        assert samples_of(found[number]) == samples_of(rows)
        assert loss_of(found[number]) == pytest.approx(loss_of(rows), rel=1e-11)
