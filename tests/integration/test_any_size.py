"""The same training for any number of workers, with real processes and gloo."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kept_workers import Worker, World, world
from test_kept_workers import at, finish

EPOCHS = 3
STEPS = 10
"""In an epoch: 96 samples in global batches of 10."""


def steps_of(workers: list[Worker]) -> dict[int, list[dict[str, Any]]]:
    """Return what the ranks did in each step; of a repeated step, the last round's."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in (row for one in workers for row in one.lines("step")):
        known = rows.setdefault(row["step"], [])
        if not known or row["round"] == known[0]["round"]:
            known.append(row)
        elif row["round"] > known[0]["round"]:
            rows[row["step"]] = [row]
    return rows


def loss_of(step: list[dict[str, Any]]) -> float:
    total: float = sum(weight * loss for row in step for _, weight, loss in row["parts"])
    return total / len(step)


def samples_of(step: list[dict[str, Any]]) -> list[int]:
    parts = [indices for row in step for indices, weight, _ in row["parts"] if weight]
    return sorted(index for indices in parts for index in indices)


def undisturbed(folder: Path) -> World:
    folder.mkdir()
    with world(folder, "train_any_size", epochs=EPOCHS) as made:
        made.begin(1)
        finish(made)
        return made


def test_losses_samples_and_rates_are_those_of_one_worker(tmp_path: Path) -> None:
    """4 workers, one killed in a step, 3, one killed, 2, 4 again; 10 samples, 3 to 4 parts."""
    expected = steps_of(undisturbed(tmp_path / "one").all)
    faults = [at(3, 4, "forward", "kill", 0), at(2, 13, "forward", "kill", 1)]
    faults.append(at(0, 17, "forward", "sleep", 2, seconds=0.3))
    with world(tmp_path, "train_any_size", epochs=EPOCHS, faults=faults) as made:
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
        found = steps_of(made.all)
    assert len(expected) == EPOCHS * STEPS and found.keys() == expected.keys()
    assert Counter(len(rows) for rows in found.values()).keys() == {4, 3, 2}
    for number, rows in expected.items():
        assert samples_of(found[number]) == samples_of(rows)
        assert {row["lr"] for row in found[number]} == {rows[0]["lr"]}
        assert loss_of(found[number]) == pytest.approx(loss_of(rows), rel=1e-9)
    for epoch in range(EPOCHS):
        done = [rows for rows in found.values() if rows[0]["epoch"] == epoch]
        assert Counter(index for rows in done for index in samples_of(rows)) == Counter(range(96))
