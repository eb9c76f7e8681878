"""Snapshots on disk: written from memory, read by torch alone, and gone on from."""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from test_resuming import (
    Runner,
    bits,
    resume,
    round_of,
    save_part,
    sealing_of,
    sharded,
    step_of,
    train,
)
from torch._C._distributed_c10d import HashStore
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rdzv.worker import MismatchError, WorkerError, snapshot_files, write_snapshots
from rdzv.worker.shards import add_parts
from rdzv.worker.slot_format import Header, SnapshotError
from rdzv.worker.snapshot_files import StepWriter, whole_steps
from rdzv.worker.snapshot_slot import Slot

pytestmark = pytest.mark.slow


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "snapshots"
    monkeypatch.setenv("RDZV_SNAPSHOT_DIR", str(path))
    return path


def mark(runner: Runner, step: int) -> tuple[int, int, str]:
    (series,) = {what["mark"]["series"] for _, what in runner.said if step_of(what) == step}
    return (0, step, series)


def write(runner: Runner, folder: Path, step: int, keep: int = 2, run: str = "run-1") -> bool:
    """Write a step as the program does that runners start."""
    return write_snapshots.write(folder, run, keep, mark(runner, step), runner.fds)[1]


def new_processes(count: int) -> tuple[list[Any], list[bool]]:
    """Start a new run, with nothing in memory."""
    runners = [Runner() for _ in range(count)]
    return resume(runners, number=0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_new_run_goes_on_from_disk_with_any_number_of_workers(
    runner: Runner, folder: Path, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    last = train(runner, 3)
    assert write(runner, folder, 3)
    new, found = new_processes(ranks)
    assert found == [True] * ranks
    assert [one.step for one in new] == [3] * ranks
    assert [bits(one) for one in new] == [bits(last)] * ranks
    assert new[0].contents.values["step"] == 3
    said = capsys.readouterr().err
    assert f"rank 0: resumed from the snapshot of step 3 in {folder}/step-000000003.run-1.0" in said


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_it_without_us(runner: Runner, folder: Path) -> None:
    last = train(runner, 3)
    write(runner, folder, 3)
    (step,) = folder.iterdir()
    other = sealing_of()
    model, optimizer = other.contents.modules["model"], other.contents.optimizers["optimizer"]
    states = get_state_dict(model, optimizer)
    saved = {"model": states[0], "optimizer": states[1], "step": 0}
    checkpoint.load(saved, checkpoint_id=step, no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    assert bits(other) == bits(last)
    assert saved["step"] == 3
    manifest = json.loads((step / "manifest.json").read_text())
    assert manifest["step"] == 3 and set(manifest["files"]) == {".metadata", "__0_0.distcp"}


def test_memory_goes_before_disk(runner: Runner, folder: Path) -> None:
    train(runner, 3)
    write(runner, folder, 2)
    assert [one.step for one in resume([runner])[0]] == [3]


def test_the_newest_are_kept_and_what_is_no_step_is_left_alone(
    runner: Runner, folder: Path
) -> None:
    train(runner, 2)
    (folder / "notes").mkdir(parents=True)
    for step in (1, 2):
        assert write(runner, folder, step)
    train(runner, 3)
    assert write(runner, folder, 3)
    assert [one.header.step for one in whole_steps(folder)] == [2, 3]
    assert sorted(one.name for one in folder.iterdir())[0] == "notes"


def test_steps_of_other_runs_are_removed_only_if_this_one_has_gone_on_from_them(
    folder: Path,
) -> None:
    made: list[Runner] = []

    def run_on(name: str, nonce: str, begins_with: list[Runner] | None = None) -> list[str]:
        """Begin a run with what is on disk, or with what these runners hold, then write a step."""
        if begins_with is not None:
            resume(begins_with, nonce=nonce)
        made.append(Runner())
        train(made[-1], 3, nonce=nonce)
        assert write(made[-1], folder, 3, keep=1, run=name)
        return [one.run for one in whole_steps(folder)]

    try:
        assert run_on("a", "n0") == ["a"]
        # The model was changed by mistake: it has loaded nothing.
        assert run_on("b", "n1") == ["a", "b"]
        assert run_on("c", "n2", [Runner()]) == ["a", "c"]  # It has loaded what "b" wrote.
        # Before "d" writes, all its workers are lost, and others go on from memory.
        resume([Runner()], nonce="n3")
        made.append(Runner())
        train(made[-1], 3, nonce="n3")
        assert run_on("d", "n4", [made[-1]]) == ["a", "d"]
        (left,) = (one for one in whole_steps(folder) if one.run == "a")
        assert left.is_sound(left.header)
    finally:
        for runner in made:
            runner.close()


def test_what_a_run_has_gone_on_from_goes_with_what_that_had_gone_on_from(
    runner: Runner, folder: Path
) -> None:
    train(runner, 2)
    for run, step in (("a", 1), ("b", 2)):
        write(runner, folder, step, run=run)
    first, second = whole_steps(folder)
    first.mark_loaded("b")
    second.mark_loaded("c")
    assert write(runner, folder, 2, keep=1, run="c")
    assert [one.run for one in whole_steps(folder)] == ["c"]


def test_a_damaged_file_is_found_wherever_the_bit_is_and_the_step_before_is_used(
    runner: Runner, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(runner, 3)
    write(runner, folder, 2)
    write(runner, folder, 3)
    old, new = whole_steps(folder)
    for name, (size, _) in new.files.items():
        file = new.folder / name
        whole = file.read_bytes()
        for place in range(0, size, 97):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            assert not new.is_sound(new.header)
        sealings, _ = new_processes(1)
        assert [one.step for one in sealings] == [2]
        assert f"step 3 in {new.folder} is damaged, so it is ignored" in capsys.readouterr().err
        file.write_bytes(whole[: size - 1])
        assert not new.is_sound(new.header)
        file.unlink()
        assert not new.is_sound(new.header)
        file.write_bytes(whole)
        assert new.is_sound(new.header)
    assert old.is_sound(old.header)


def test_a_damaged_manifest_is_said_and_the_step_before_is_used(
    runner: Runner, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(runner, 3)
    write(runner, folder, 2)
    write(runner, folder, 3)
    manifest = whole_steps(folder)[-1].folder / "manifest.json"
    text = manifest.read_text()
    for wrong in (text[:40], "", "[]", text.replace('"format": 2', '"format": 3')):
        manifest.write_text(wrong)
        assert [one.step for one in new_processes(2)[0]] == [2, 2]
        said = capsys.readouterr().err
        assert said.count(f"rank 0: warning: cannot read {manifest}, so it is ignored: ") == 1
    manifest.unlink()  # As if it had never become whole.
    assert [one.step for one in new_processes(2)[0]] == [2, 2]
    assert "cannot read" not in capsys.readouterr().err


def test_a_step_without_manifest_is_none(runner: Runner, folder: Path) -> None:
    train(runner, 3)
    write(runner, folder, 3)
    (step,) = whole_steps(folder)
    (step.folder / "manifest.json").unlink()
    assert whole_steps(folder) == []
    assert [one.step for one in new_processes(1)[0]] == [None]


def test_a_step_of_which_a_part_is_missing_is_none(runner: Runner, folder: Path) -> None:
    train(runner, 3)
    write(runner, folder, 3)
    (older,) = whole_steps(folder)
    nodes = [Runner(), Runner()]
    try:
        for rank, node in enumerate(nodes):
            save_part(node, rank, 4)
        assert not write(nodes[0], folder, 4, keep=1)
        assert [one.folder for one in whole_steps(folder)] == [older.folder]
        assert write(nodes[1], folder, 4, keep=1)
        (newer,) = whole_steps(folder)
        assert newer.header.shards == 2 and not older.folder.exists()
    finally:
        for node in nodes:
            node.close()


def test_an_incomplete_step_is_removed_once_nobody_writes_to_it_any_more(
    runner: Runner, folder: Path
) -> None:
    train(runner, 3)
    write(runner, folder, 2)
    (left,) = whole_steps(folder)
    (left.folder / "manifest.json").unlink()
    write(runner, folder, 3)
    assert left.folder.exists(), "another node may be writing its part"
    for part in left.folder.iterdir():
        os.utime(part, (0, 0))
    write(runner, folder, 3)
    assert not left.folder.exists()
    assert [one.header.step for one in whole_steps(folder)] == [3]


@pytest.mark.parametrize("copies", [False, True])
def test_a_slot_may_be_overwritten_once_it_is_copied(
    runner: Runner, folder: Path, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    last = train(runner, 3)
    reads, copied = os.pipe()
    save = torch.save

    def overwrite(*args: Any) -> None:
        """Do what a worker does as soon as it may."""
        if copies:
            assert os.read(reads, 1) == b""
        for fd in runner.fds:
            os.pwrite(fd, bytes(runner.size), 0)
        save(*args)

    monkeypatch.setattr(torch, "save", overwrite)
    of = mark(runner, 3)
    if copies:
        assert write_snapshots.write(folder, "run-1", 2, of, runner.fds, copied)[1]
        assert bits(new_processes(1)[0][0]) == bits(last)
    else:
        with pytest.raises(SnapshotError, match="it was overwritten in the meantime"):
            write_snapshots.write(folder, "run-1", 2, of, runner.fds)
        assert not whole_steps(folder)
        os.close(copied)
    os.close(reads)


def test_a_slot_is_copied_without_torch(runner: Runner) -> None:
    """To import it takes seconds, in which workers could not save."""
    train(runner, 3)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from rdzv.worker import write_snapshots\n"
        "for fd in map(int, sys.argv[1:]):\n"
        "    slot, header = write_snapshots._opened(fd)\n"
        "    copy = write_snapshots._copy(slot, header)\n"
        "    assert copy.header() == header and copy.size == header.bytes\n"
    )
    command = [sys.executable, "-c", program, *map(str, runner.fds)]
    subprocess.run(command, check=True, pass_fds=runner.fds, timeout=60)


def test_a_full_disk_leaves_what_is_there(
    runner: Runner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(runner, 3)
    write(runner, folder, 2, keep=1)
    monkeypatch.setattr(
        snapshot_files.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})
    )
    with pytest.raises(SnapshotError, match="0 MB are needed, but only 0 MB are free"):
        write(runner, folder, 3, keep=1)
    monkeypatch.undo()

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="No space"):
        write(runner, folder, 3, keep=1)
    assert [one.header.step for one in whole_steps(folder)] == [2]
    assert not list(folder.glob("*/*.tmp"))


def test_what_another_node_has_written_is_not_written_again(runner: Runner, folder: Path) -> None:
    train(runner, 3)
    write(runner, folder, 3)
    (step,) = whole_steps(folder)
    part = step.folder / "__0_0.distcp"
    before = part.stat()
    assert write(runner, folder, 3)
    assert part.stat() == before and whole_steps(folder) == [step]


@pytest.mark.parametrize("has_links", [True, False])
def test_two_nodes_may_write_a_part_at_the_same_time(
    folder: Path, has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a run. Their random numbers differ, and so do their files."""
    if not has_links:

        def link(*_: Path) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", link)
    nodes = [Runner(), Runner()]
    for rank, node in enumerate(nodes):
        train(node, 3, rank)

    def meanwhile() -> None:
        monkeypatch.setattr(os, "getpid", lambda: 1)
        for path in folder.rglob("*"):
            os.utime(path, (0, 0))  # It does not wait for the other one.
        assert write(nodes[1], folder, 3)

    opened = [Slot(memoryview(mmap.mmap(fd, nodes[0].size))) for fd in nodes[0].fds]
    slot, header = max(((one, one.header()) for one in opened), key=lambda one: one[1].step)
    writer = StepWriter(folder, "run-1", header)
    writer.write(header, slot.read(header, in_place=True), slot.head_bytes(header), meanwhile)
    assert writer.finish(keep=2)
    (step,) = whole_steps(folder)
    assert step.is_sound(step.header)
    assert not list(folder.rglob("*.tmp"))
    for node in nodes:
        node.close()


def test_a_step_that_another_round_repeats_is_written_to_a_folder_of_its_own(
    tmp_path: Path,
) -> None:
    """A node may have written its part of the first time before that round ended."""
    header = Header(3, 0, 0, 2, rank=0, world_size=2, state="s", part="p")
    writers = [StepWriter(tmp_path, "run-1", replace(header, round=number)) for number in (0, 1)]
    assert writers[0].folder != writers[1].folder


def test_a_writer_names_its_reason(
    runner: Runner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "nice", lambda _: 0)
    train(runner, 3)
    words = [str(folder), "--run", "run-1", "--keep", "2", "--mark", "0:9:f00d"]
    with pytest.raises(SystemExit) as ended:
        write_snapshots.main([*words, *map(str, runner.fds)])
    assert str(ended.value) == (f"rdzv: cannot write step 9 to {folder}: no slot holds it any more")


def test_numpys_generator_is_on_disk_if_numpy_is_used(runner: Runner, folder: Path) -> None:
    numpy.random.seed(5)
    train(runner, 1)
    state: Any = numpy.random.get_state()
    assert write(runner, folder, 1)
    (step,) = whole_steps(folder)
    content = step.read(step.header)
    _, keys, *_ = content.own["rng"]["numpy"]
    assert keys == state[1].tolist()


def test_parts_on_disk_are_loaded_when_the_script_adds_its_objects(folder: Path) -> None:
    """These parts differ, as local experts do: another number of ranks cannot share them."""
    nodes = [Runner(), Runner()]
    for rank, node in enumerate(nodes):
        save_part(node, rank, 3)
        write(node, folder, 3)
        node.close()
    assert new_processes(3)[1] == [False] * 3
    sealings, found = new_processes(2)
    assert found == [True, True] and [one.step for one in sealings] == [3, 3]
    for sealing in sealings:
        with pytest.raises(WorkerError, match=r"called before state\.add\(\) in this round"):
            sealing.commit()

    def add(entry: str) -> list[Any]:
        store, parts = HashStore(), [sharded(rank, entry)[1] for rank in range(2)]

        def of_rank(rank: int) -> Any:
            with suppress(MismatchError):
                add_parts(sealings[rank], parts[rank], round_of(0, rank), store, holds_last=False)
                return parts[rank].modules[entry].weight.unique().tolist()

        with ThreadPoolExecutor() as pool:
            return list(pool.map(of_rank, range(2)))

    assert add("another") == [None, None]
    assert add("part") == [[3.0], [13.0]]
    assert [one.shards.on_disk for one in sealings] == [None, None]
