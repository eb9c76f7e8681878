"""The snapshots of the examples: complete, durable, and never replaced by an older one."""

import fcntl
import os
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def snapshot() -> Iterator[ModuleType]:
    spec = spec_from_file_location("examples_snapshot", EXAMPLES / "snapshot.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their own module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.pt"


def state(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3,), value)}, "epoch": int(value)}


def value_of(file: Any) -> float:
    found = file.load()
    assert found is not None
    return float(found[1]["model"]["weight"][0])


def other_files(path: Path) -> set[str]:
    return {file.name for file in path.parent.iterdir()} - {path.name, f".{path.name}.lock"}


def test_without_a_file_training_starts_afresh(snapshot: ModuleType, path: Path) -> None:
    assert snapshot.SnapshotFile(path, "job", 0).load() is None


def test_a_snapshot_comes_back_with_its_header(snapshot: ModuleType, path: Path) -> None:
    assert snapshot.SnapshotFile(path, "job", 2).save(state(7), step=70)
    header, content = snapshot.SnapshotFile(path, "job", 3).load()
    assert header == snapshot.Header("job", round=2, step=70)
    assert content["epoch"] == 7
    assert torch.equal(content["model"]["weight"], torch.full((3,), 7.0))
    assert other_files(path) == set()


def test_a_folder_that_is_missing_is_made(snapshot: ModuleType, path: Path) -> None:
    deep = path.parent / "a" / "b" / "snapshot.pt"
    assert snapshot.SnapshotFile(deep, "job", 0).save(state(1), step=1)
    assert deep.exists()


def test_an_older_round_never_replaces_a_newer_one(snapshot: ModuleType, path: Path) -> None:
    """Rank 0 of round 1 was paused; it wakes up further than round 2 is, and wants to save."""
    straggler = snapshot.SnapshotFile(path, "job", 1)
    straggler.save(state(1), step=10)
    survivor = snapshot.SnapshotFile(path, "job", 2)
    survivor.load()
    survivor.save(state(2), step=11)
    with pytest.raises(snapshot.StaleWriterError, match=r"round 2 .* is of round 1"):
        straggler.save(state(1), step=99)
    assert value_of(survivor) == 2
    assert other_files(path) == set()


def test_a_worker_of_an_older_round_does_not_even_begin(snapshot: ModuleType, path: Path) -> None:
    snapshot.SnapshotFile(path, "job", 5).save(state(1), step=10)
    with pytest.raises(snapshot.StaleWriterError, match="another --rdzv-id"):
        snapshot.SnapshotFile(path, "job", 4).load()


def test_a_newer_round_replaces_an_older_one_that_was_further(
    snapshot: ModuleType, path: Path
) -> None:
    """The straggler saved after the newer round had started from the previous snapshot."""
    snapshot.SnapshotFile(path, "job", 1).save(state(1), step=100)
    assert snapshot.SnapshotFile(path, "job", 2).save(state(2), step=95)
    assert value_of(snapshot.SnapshotFile(path, "job", 2)) == 2


@pytest.mark.parametrize(("step", "accepted"), [(9, False), (10, False), (11, True)])
def test_within_a_round_only_a_further_step_is_saved(
    snapshot: ModuleType, path: Path, step: int, accepted: bool
) -> None:
    file = snapshot.SnapshotFile(path, "job", 1)
    file.save(state(1), step=10)
    assert file.save(state(2), step=step) is accepted
    assert value_of(file) == (2 if accepted else 1)
    assert other_files(path) == set()


def test_a_new_run_goes_on_from_the_snapshot_of_a_former_one(
    snapshot: ModuleType, path: Path
) -> None:
    """Its rounds start from 0 again, so they are not compared; the previous run is outdated."""
    former = snapshot.SnapshotFile(path, "former", 7)
    former.save(state(1), step=10)
    new = snapshot.SnapshotFile(path, "new", 0)
    new.load()
    former.save(state(2), step=20)  # a straggler, before the new run has saved anything
    assert new.save(state(3), step=11)
    with pytest.raises(snapshot.StaleWriterError, match="another job"):
        former.save(state(4), step=30)
    assert new.save(state(5), step=12)
    assert value_of(new) == 5


def test_two_jobs_with_one_file_are_told(snapshot: ModuleType, path: Path) -> None:
    one, two = (snapshot.SnapshotFile(path, run_id, 0) for run_id in ("one", "two"))
    assert one.load() is None
    assert two.load() is None
    one.save(state(1), step=1)
    with pytest.raises(snapshot.StaleWriterError, match="Give each job a snapshot of its own"):
        two.save(state(2), step=2)
    assert value_of(one) == 1


def test_rdzvrun_says_the_round(snapshot: ModuleType, path: Path) -> None:
    file = snapshot.SnapshotFile.from_environ(
        path,
        {"TORCHELASTIC_RUN_ID": "job", "RDZV_ROUND": "4", "TORCHELASTIC_RESTART_COUNT": "1"},
    )
    assert (file.run_id, file.round) == ("job", 4)
    file.save(state(1), step=1)
    with pytest.raises(snapshot.StaleWriterError):
        snapshot.SnapshotFile.from_environ(
            path, {"TORCHELASTIC_RUN_ID": "job", "RDZV_ROUND": "3"}
        ).load()


def test_under_torchrun_rank_0_may_move_to_a_node_with_fewer_restarts(
    snapshot: ModuleType, path: Path
) -> None:
    def launched(restarts: int) -> Any:
        return snapshot.SnapshotFile.from_environ(
            path, {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        )

    straggler = launched(0)
    launched(3).save(state(1), step=10)
    survivor = launched(1)
    survivor.load()
    assert survivor.save(state(2), step=11)
    with pytest.raises(snapshot.StaleWriterError):
        straggler.save(state(3), step=12)


@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "flipped", "foreign"])
def test_a_corrupt_snapshot_is_named_and_left_alone(
    snapshot: ModuleType, path: Path, damage: str
) -> None:
    file = snapshot.SnapshotFile(path, "job", 0)
    file.save({"model": {"weight": torch.ones(1000)}}, step=1)
    whole = path.read_bytes()
    middle = len(whole) // 2
    if damage == "foreign":
        torch.save({"weight": torch.ones(3)}, path)
    else:
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        path.write_bytes(
            {"empty": b"", "cut": whole[:middle], "noise": bytes(range(256)), "flipped": flipped}[
                damage
            ]
        )
    damaged = path.read_bytes()
    with pytest.raises(snapshot.CorruptSnapshotError, match=r"snapshot\.pt .* remove the file"):
        file.load()
    if damage != "flipped":  # a save reads the header alone
        with pytest.raises(snapshot.CorruptSnapshotError):
            file.save(state(2), step=2)
        assert path.read_bytes() == damaged
    assert other_files(path) == set()


def test_a_snapshot_is_data_and_runs_no_code(snapshot: ModuleType, path: Path) -> None:
    torch.save({"header": {}, "state": os.getcwd}, path)
    with pytest.raises(snapshot.CorruptSnapshotError):
        snapshot.SnapshotFile(path, "job", 0).load()


def test_a_crash_while_writing_leaves_the_former_snapshot(
    snapshot: ModuleType, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = snapshot.SnapshotFile(path, "job", 0)
    file.save(state(1), step=1)

    def full(content: Any, target: Any) -> None:
        target.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        file.save(state(2), step=2)
    assert value_of(file) == 1
    assert other_files(path) == set()


def test_content_and_name_are_on_the_disk_before_save_returns(
    snapshot: ModuleType, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(descriptor: int) -> None:
        done.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().suffix}")
        fsync(descriptor)

    def note_replace(self: Path, target: Path) -> Path:
        done.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    snapshot.SnapshotFile(path, "job", 0).save(state(1), step=1)
    assert done == ["fsync .tmp", "replace", "fsync "]


def test_the_comparison_holds_the_lock(
    snapshot: ModuleType, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused process that holds it cannot keep the others waiting forever."""
    monkeypatch.setattr(snapshot, "LOCK_TIMEOUT_S", 0.0)
    lock = path.with_name(".snapshot.pt.lock")
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(snapshot.SnapshotError, match=r"\.snapshot\.pt\.lock has been held"):
            snapshot.SnapshotFile(path, "job", 0).save(state(1), step=1)
    assert not path.exists()
    assert snapshot.SnapshotFile(path, "job", 0).save(state(1), step=1)


def test_leftovers_of_killed_writers_are_removed_and_live_ones_kept(
    snapshot: ModuleType, path: Path
) -> None:
    dead, live = (path.with_name(f".snapshot.pt.{name}.tmp") for name in ("dead", "live"))
    dead.write_bytes(b"half")
    with live.open("xb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        snapshot.SnapshotFile(path, "job", 0).load()
        assert other_files(path) == {live.name}
