"""State that outlives its workers: all are killed at once, and training resumes from memory."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import FORK_ALL, QUICK_TORCH

from tests.support.accounts import needs_root
from tests.support.whole_lines import json_rows

SUPPORT = Path(__file__).parents[1] / "support"
ROOT = Path(__file__).parents[2]
RDZVRUN = Path(sys.executable).parent / "rdzvrun"
PATIENCE_S = 120.0
STEPS, KILLED_IN = 20, 13
WARM = {"train": "--warm=torch", "train_sharded": "--warm=torch,torch.distributed.fsdp"}
"""Workers are forked, which takes a fraction of the time of a cold start."""


class Job:
    """A training under rdzvrun, and its workers' output."""

    def __init__(
        self,
        folder: Path,
        function: str,
        args: dict[str, Any],
        options: tuple[str, ...],
        below: tuple[str, ...],
        warm: bool,
    ) -> None:
        self.script = folder / "train.py"
        self.script.write_text(
            "import json, os, sys, kept_training, numpy\n"
            "numpy.random.seed(int(os.environ['RANK']))\n"
            f"kept_training.{function}(**json.loads(sys.argv[1]))\n"
        )
        env = {name: value for name, value in os.environ.items() if not name.startswith("RDZV_")}
        paths = [str(SUPPORT), str(ROOT / "worker"), os.environ["PYTHONPATH"]]
        env |= {"PYTHONPATH": os.pathsep.join(paths), **FORK_ALL}
        if function == "train":  # Sharding needs the modules of torch's compiler.
            env |= QUICK_TORCH
        launch = [
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=5",
            *([WARM[function]] if warm else []),
            *options,
        ]
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*below, RDZVRUN, *launch, self.script, json.dumps(args)],
                env=env,
                stdout=log,
                stderr=log,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def lines(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the JSON lines of the workers that have these fields."""
        return json_rows(self.text, what, **fields)

    def wait_for(self, what: str, count: int, **fields: Any) -> list[dict[str, Any]]:
        end = time.monotonic() + PATIENCE_S
        while len(found := self.lines(what, **fields)) < count:
            assert self.process.poll() is None and time.monotonic() < end, self.text
            time.sleep(0.02)
        return found

    def kill_all(self, round_: int) -> None:
        """Kill all workers in the middle of a step."""
        for row in self.wait_for("fault", 2, round=round_):
            os.kill(row["pid"], signal.SIGKILL)

    def finish(self) -> None:
        assert self.process.wait(PATIENCE_S) == 0, self.text

    def losses(self) -> dict[tuple[int, int], str]:
        """Return the loss of each step and rank; of a repeated step, the last."""
        return {(row["step"], row["rank"]): row["loss"] for row in self.lines("step")}

    def ends(self) -> list[Any]:
        """Return the final state of the ranks."""
        return sorted(row["weights"] for row in self.lines("done"))


@contextmanager
def job(
    folder: Path,
    function: str = "train",
    options: tuple[str, ...] = (),
    below: tuple[str, ...] = (),
    warm: bool = True,
    **args: Any,
) -> Iterator[Job]:
    """Run a training until the body ends; `below` is a command that runs rdzvrun."""
    folder.mkdir()
    made = Job(folder, function, {"steps": STEPS, **args}, options, below, warm)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.fixture(scope="module", name="undisturbed")
def _undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """Return what runs a training to its end, once for all tests."""

    @functools.cache
    def finished(function: str) -> Job:
        with job(tmp_path_factory.mktemp("undisturbed") / function, function) as made:
            made.finish()
        return made

    return finished


@pytest.mark.parametrize(
    "function", ["train", pytest.param("train_sharded", marks=pytest.mark.campaign)]
)
def test_a_run_that_has_failed_goes_on_from_disk_in_a_new_one(
    tmp_path: Path, undisturbed: Callable[[str], Job], function: str
) -> None:
    """The runner writes it when no worker is left. Any number of workers reads it."""
    disk = (f"--snapshot-dir={tmp_path / 'disk'}", "--max-restarts=0")
    with job(
        tmp_path / "b", function, disk, faults=stopped_in(KILLED_IN), snapshot_every=5
    ) as killed:
        killed.kill_all(0)
        assert killed.process.wait(PATIENCE_S) == 1
    (folder,) = (tmp_path / "disk").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] in (5, 10)
    with job(tmp_path / "c", function, disk) as resumed:
        begun = resumed.wait_for("begin", 2, round=0)
        assert {row["step"] for row in begun} == {manifest["step"]}
        assert f"of step {manifest['step']} in {folder}, not from a checkpoint" in resumed.text
        resumed.finish()
    if function == "train_sharded":
        assert undisturbed(function).ends() == resumed.ends()
        with job(tmp_path / "d", function, (*disk, "--nproc-per-node=1")) as alone:
            assert alone.wait_for("begin", 1)[0]["step"] == manifest["step"]
            alone.finish()
    else:  # The random numbers of LOCAL_RANK 1 are not on disk.
        assert len(resumed.lines("step")) == 2 * (STEPS - manifest["step"])


def stopped_in(step: int, round_: int = 0) -> list[dict[str, Any]]:
    """Let both ranks wait in the middle of a step, to be killed there."""
    place = {"step": step, "at": "forward", "do": "sleep", "seconds": 600, "round": round_}
    return [{"rank": rank, **place} for rank in range(2)]


@pytest.mark.parametrize(
    ("function", "warm"),
    [
        ("train", True),
        ("train_sharded", True),
        pytest.param("train", False, marks=pytest.mark.campaign),
        pytest.param("train_sharded", False, marks=pytest.mark.campaign),
    ],
)
def test_losses_are_those_of_a_run_that_nothing_disturbed(
    tmp_path: Path,
    undisturbed: Callable[[str], Job],
    function: str,
    warm: bool,
) -> None:
    """With dropout, random inputs and a batch norm of each rank's own."""
    faults = [*stopped_in(KILLED_IN), *stopped_in(KILLED_IN + 4, 1)]
    with job(tmp_path / "b", function, warm=warm, faults=faults, snapshot_every=5) as killed:
        killed.kill_all(0)
        begun = killed.wait_for("begin", 2, round=1)
        # Step 10 was saved some steps before; on a busy machine it may be on its way.
        assert {row["step"] for row in begun} in ({5}, {10})
        (said,) = [line for line in killed.text.splitlines() if "resumed from" in line]
        assert f"the snapshot of step {begun[0]['step']} in memory, not from a checkpoint" in said
        killed.kill_all(1)
        assert {row["step"] for row in killed.wait_for("begin", 2, round=2)} in ({10}, {15})
        killed.finish()
    assert killed.losses() == undisturbed(function).losses()
    assert len(killed.ends()) == 2 and killed.ends() == undisturbed(function).ends()


def test_a_script_whose_model_has_changed_starts_again_and_says_why(tmp_path: Path) -> None:
    with job(tmp_path / "a", faults=stopped_in(KILLED_IN), snapshot_every=5) as changed:
        changed.wait_for("fault", 2, round=0)
        text = changed.script.read_text()
        changed.script.write_text(text.replace("argv[1])", "argv[1]), width=16"))
        changed.kill_all(0)
        assert {row["step"] for row in changed.wait_for("begin", 2, round=1)} == {0}
        changed.finish()
    refused = "in memory: its state has other names, sizes or types"
    assert refused in changed.text
    assert len(changed.lines("step", round=1)) == 2 * STEPS


@needs_root
def test_training_goes_on_while_the_disk_for_snapshots_is_full(tmp_path: Path) -> None:
    """It is said each time that a step is not written, and the last one is given up, too."""
    disk = tmp_path / "disk"
    disk.mkdir()
    full = f'mount -t tmpfs -o size=16k tmpfs {disk} && exec "$@"'
    options = (f"--snapshot-dir={disk}", "--snapshot-dir-every=1")
    slowly = [{"at": "forward", "do": "sleep", "seconds": 0.1}]
    with job(
        tmp_path / "a",
        options=options,
        below=("unshare", "--mount", "sh", "-c", full, "sh"),
        faults=slowly,
        snapshot_every=2,
        steps=60,
    ) as training:
        training.finish()
    not_written = training.text.count(f" was not written to {disk}: ")
    assert not_written > 1, training.text
    assert "MB are needed, but only 0 MB are free" in training.text
    assert {row["step"] for row in training.lines("done")} == {60}
    assert f" was written to {disk}" not in training.text
