"""The training example under a real launcher: killed, scaled, stopped, without harm."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cluster import FORK_ALL, QUICK_TORCH

torch = pytest.importorskip("torch", reason="torch is not installed")

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "examples" / "train_ddp.py"
BIN = Path(sys.executable).parent

# One line for each launcher that has to keep the example's guarantees.
LAUNCHERS = {
    "rdzvrun": [str(BIN / "rdzvrun"), "--standalone"],
}

EPOCH_LINE = re.compile(
    r"^epoch (\d+) \| step (\d+) \| loss ([\d.]+) \| world_size (\d+) \| round (\d+)$",
    re.MULTILINE,
)
# 128 samples, batches of 8, two workers: 8 steps an epoch.
TRAINING = ["--epochs=6", "--samples=128", "--batch-size=8", "--seed=3"]
STEPS_PER_EPOCH = 8


@dataclass
class Job:
    """A running launcher, and its output so far."""

    process: subprocess.Popen[bytes]
    log: Path
    mark: str = field(repr=False)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for_step(self, step: int) -> None:
        """Wait until rank 0 has reported a step: both workers then sleep for `--step-seconds`."""
        environ = Path(f"/proc/{self.worker(0)}/environ").read_bytes().split(b"\0")
        told = dict(pair.split(b"=", 1) for pair in environ if b"=" in pair)
        file = Path(os.fsdecode(told[b"RDZV_PROGRESS_FILE"]))
        deadline = time.monotonic() + 100
        while int(file.read_text() or -1) < step:
            assert time.monotonic() < deadline, f"no step {step}:\n{self.output}"
            time.sleep(0.005)

    def wait_for(self, text: str, timeout_s: float = 100) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, f"it ended before {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in {timeout_s} s:\n{self.output}"
            time.sleep(0.02)

    def finish(self, timeout_s: float = 200) -> str:
        assert self.process.wait(timeout_s) == 0, self.output
        return self.output

    def worker(self, rank: int) -> int:
        """Return the pid of a worker, however deep below the launcher."""
        wanted = {f"EXAMPLE_MARK={self.mark}".encode(), f"RANK={rank}".encode()}
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environ = set((process / "environ").read_bytes().split(b"\0"))
            except OSError:
                continue
            if wanted <= environ:
                found.append(int(process.name))
        assert len(found) == 1, found
        return found[0]


class Launcher:
    """Starts jobs in its own folder, and ends those left over by a failed test."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.jobs: list[Job] = []

    def __call__(
        self, *arguments: str, nproc: int = 2, max_restarts: int = 3, flag: str = "--warm=torch"
    ) -> Job:
        mark = uuid.uuid4().hex
        # torchrun's restarts are reliable only if each has its own store.
        environ = os.environ | {"EXAMPLE_MARK": mark, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environ |= QUICK_TORCH | FORK_ALL
        command = [
            *LAUNCHERS[self.name],
            f"--nproc-per-node={nproc}",
            f"--max-restarts={max_restarts}",
            flag,
            str(SCRIPT),
            *TRAINING,
            *arguments,
        ]
        log = self.folder / f"{len(self.jobs)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
        self.jobs.append(Job(process, log, mark))
        return self.jobs[-1]

    def close(self) -> None:
        for job in self.jobs:
            if job.process.poll() is None:
                job.process.terminate()
                try:
                    job.process.wait(60)
                except subprocess.TimeoutExpired:
                    job.process.kill()
                    job.process.wait()


@pytest.fixture(scope="module", params=LAUNCHERS)
def launcher_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def launch(launcher_name: str, tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(launcher_name, tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def undisturbed(
    launcher_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """Return the training's output and final weights if nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    launcher = Launcher(launcher_name, folder)
    yield launcher(f"--final-weights={folder / 'final.pt'}").finish(), folder / "final.pt"
    launcher.close()


@dataclass(frozen=True)
class Line:
    epoch: int
    step: int
    loss: float
    world_size: int
    round: int


def lines(output: str) -> list[Line]:
    return [
        Line(int(epoch), int(step), float(loss), int(world_size), int(round_))
        for epoch, step, loss, world_size, round_ in EPOCH_LINE.findall(output)
    ]


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-5, atol=1e-6, msg=name)


def test_killed_workers_change_nothing_in_the_result(
    launch: Launcher, undisturbed: tuple[str, Path], tmp_path: Path
) -> None:
    job = launch(
        f"--snapshot={tmp_path / 'snapshot.pt'}",
        f"--final-weights={tmp_path / 'disturbed.pt'}",
        "--step-seconds=0.1",
        flag="--warm",
    )
    for epoch, victim in (2, 1), (4, 0):
        job.wait_for(f"\nepoch {epoch} | step {epoch * STEPS_PER_EPOCH} | ")
        job.wait_for_step(epoch * STEPS_PER_EPOCH + 2)
        os.kill(job.worker(victim), signal.SIGKILL)
    output = job.finish()

    assert output.count("rank 0 of 2: starting afresh") == 1
    assert output.count("rank 0 of 2: resuming from epoch") == 2
    told = lines(output)
    assert told[0].round < told[-1].round
    assert told[-1].loss < told[0].loss
    # An epoch repeated because the kill came before its snapshot prints the same again.
    assert list(dict.fromkeys((line.epoch, line.step, line.loss) for line in told)) == [
        (line.epoch, line.step, line.loss) for line in lines(undisturbed[0])
    ]
    assert_same_weights(undisturbed[1], tmp_path / "disturbed.pt")


def test_training_goes_on_with_another_number_of_workers(launch: Launcher, tmp_path: Path) -> None:
    snapshot = f"--snapshot={tmp_path / 'snapshot.pt'}"
    before = lines(launch(snapshot, "--epochs=3", nproc=1).finish())
    output = launch(snapshot, nproc=2).finish()
    assert "rank 0 of 2: resuming from epoch 3 | step 48 | " in output
    after = lines(output)
    assert [line.step for line in after] == [56, 64, 72]
    assert {line.world_size for line in after} == {2}
    assert after[-1].loss < before[-1].loss
    first, last = re.findall(r"training finished: .* loss first ([\d.]+) -> last ([\d.]+)", output)[
        0
    ]
    assert float(first) > before[0].loss > float(last) == after[-1].loss


def test_sigterm_saves_the_step_it_interrupts(
    launch: Launcher, undisturbed: tuple[str, Path], tmp_path: Path
) -> None:
    """The launcher passes the signal on to all workers; no finished step is repeated."""
    arguments = (
        f"--snapshot={tmp_path / 'snapshot.pt'}",
        f"--final-weights={tmp_path / 'disturbed.pt'}",
        "--save-every=100",
    )
    job = launch(*arguments, "--step-seconds=0.5")
    job.wait_for("epoch 1 | step 8 | ")
    # While both sleep: a worker that gets it one step earlier leaves the other in a broken step.
    job.wait_for_step(10)
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(100) != 0
    stopped = re.search(r"rank 0 of 2: stopping on SIGTERM at step (\d+)", job.output)
    assert stopped, job.output
    assert 8 < int(stopped[1]) < 16

    output = launch(*arguments).finish()
    assert f"rank 0 of 2: resuming from epoch 1 | step {stopped[1]} | " in output
    assert [line.step for line in lines(output)] == [16, 24, 32, 40, 48]
    assert_same_weights(undisturbed[1], tmp_path / "disturbed.pt")
