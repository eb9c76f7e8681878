"""Sharded models (FSDP2) in workers that stay, with real processes and gloo."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from kept_workers import Worker, World, world
from test_kept_workers import ROOT, at, finish, losses, run_script


def history(folder: Path, rounds: int, faults: list[dict[str, Any]], steps: int) -> World:
    """Train in rounds that end with a fault; no worker is lost."""
    folder.mkdir()
    with world(folder, "train_sharded", faults=faults, steps=steps) as made:
        kept: list[Worker] = []
        for number in range(rounds):
            made.begin(2, kept)
            kept = made.workers
            if number < rounds - 1:
                (one,) = [one for one in faults if one["round"] == number]
                kept[one["rank"]].wait_line("fault", round=number)
                parked = made.end()
                assert not any(one["torn"] for one in parked)
                assert [(one["shard"], one["shards"]) for one in parked] == [(0, 2), (1, 2)]
        finish(made)
        return made


def test_losses_are_those_of_a_run_that_nothing_disturbed(tmp_path: Path) -> None:
    """Rounds end everywhere in a step. If one rank has sealed it already, it goes back."""
    places = ["begin", "forward", "backward", "step"]
    faults = [
        at(number % 2, 3 + 3 * number, where, "sleep", number, seconds=0.3)
        for number, where in enumerate(places)
    ]
    undisturbed = history(tmp_path / "a", 1, [], 16)
    disturbed = history(tmp_path / "b", 5, faults, 16)
    assert losses(disturbed.all) == losses(undisturbed.all)
    ends = [
        [(row["weights"], row["lr"]) for one in made.all for row in one.lines("done")]
        for made in (undisturbed, disturbed)
    ]
    assert len(ends[0]) == 2 and ends[0] == ends[1]


def lose_the_last(made: World, size: int) -> list[dict[str, Any]]:
    """Begin a round whose last rank dies in its sixth step; return what the others have parked."""
    made.begin(size)
    assert made.workers[-1].exit_code() == -signal.SIGKILL
    return made.end(made.workers[:-1])


def test_a_part_that_is_lost_is_missed_on_all_ranks(tmp_path: Path) -> None:
    """The server then starts new processes; otherwise ranks would mix states, or hang."""
    faults = [at(1, 5, "forward", "kill")]
    with world(tmp_path, "train_sharded", steps=9, faults=faults) as made:
        (parked,) = lose_the_last(made, 2)
        assert (parked["step"], parked["shard"], parked["shards"]) == (5, 0, 2)
        made.begin(2, made.workers[:1], step=5)
        for worker in made.workers:
            assert worker.exit_code() == 1
            assert (
                "no rank holds [17:33, 0:8] of model.0.weight, which rank 1 needs: the job must"
                in (worker.text())
            )


def test_a_part_is_received_from_its_replica(tmp_path: Path) -> None:
    faults = [at(3, 5, "forward", "kill")]
    with world(tmp_path, "train_sharded", steps=9, faults=faults, replicas=2) as made:
        parked = lose_the_last(made, 4)
        assert [(one["shard"], one["shards"]) for one in parked] == [(0, 2), (1, 2), (0, 2)]
        made.begin(4, made.workers[:3], step=5)
        done = finish(made)
        assert done[0]["weights"] == done[2]["weights"] != done[1]["weights"]
        assert done[1]["weights"] == done[3]["weights"]


def test_a_lost_replica_is_not_replaced_and_the_state_is_divided_anew(tmp_path: Path) -> None:
    """Of two replicas of two parts, two replicas of one part are made."""
    faults = [at(3, 5, "forward", "kill")]
    with world(tmp_path, "train_sharded", steps=9, faults=faults, replicas=2) as made:
        parked = lose_the_last(made, 4)
        assert [one["step"] for one in parked] == [5] * 3
        made.begin(2, made.workers[:2], step=5)
        done = finish(made)
        assert done[0]["weights"] == done[1]["weights"]
        assert [one["pid"] for one in done] == [one.pid for one in made.workers]


def test_a_model_that_is_not_added_again_is_refused(tmp_path: Path) -> None:
    faults = [at(0, 5, "forward", "sleep", seconds=0.3)]
    with world(tmp_path, "train_sharded", steps=9, faults=faults, forgets_in=1) as made:
        (only,) = made.begin(1)
        only.wait_line("fault")
        made.end()
        made.begin(1, [only], step=5)
        assert only.exit_code() == 1
        assert "state.commit() was called before state.add()" in only.text()


TELLS_THREADS = """
import atexit, pathlib, sys
def tell():
    tasks = pathlib.Path("/proc/self/task").glob("*/comm")
    print("left at exit:", [name for task in tasks if "gloo" in (name := task.read_text())])
atexit.register(tell)
sys.path.insert(0, sys.argv[1])
del sys.argv[0]
exec(pathlib.Path(sys.argv[0], "train_kept_fsdp.py").read_text())
"""


def test_the_example_writes_checkpoints(tmp_path: Path) -> None:
    """And leaves no thread of gloo: one that frees a tensor at the end aborts the process."""
    options = ["--samples=64", "--epochs=1", f"--checkpoints={tmp_path}"]
    command = [sys.executable, "-c", TELLS_THREADS, str(ROOT / "examples"), *options]
    # Sharded tensors need torch's compiler.
    out = run_script(command, {})
    assert "starting at step 0 | world_size 1" in out and "training finished" in out
    assert out.endswith("left at exit: []\n")
    assert [file.parent.name for file in tmp_path.glob("*/.metadata")] == ["00000002-job.round0"]
