"""A sharded snapshot at other sizes: `sharded_checkpoints.py FOLDER SAVERS,REPLICAS,LOCAL N...`.

SAVERS ranks train a few steps and save to memory, as under rdzvrun; the program that runners start
writes it to disk. With LOCAL 1, each also has a tensor that is not sharded. Then N ranks load it
with torch alone, as a new run under @elastic, and as new processes that find the memory of all
savers; and compare what they have with what was saved, bit by bit.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rdzv.worker import Round, State, elastic, session, write_snapshots
from rdzv.worker.link import Announced, GivenSlots
from rdzv.worker.slot_format import SealedMemory
from rdzv.worker.snapshot_files import whole_steps
from rdzv.worker.snapshots import HeldSlots, Snapshots

STEPS = 3
MOST_S = 120


class Slots:
    """A rank's end of its runner, whose slots are files; some hold copies of other ranks' parts."""

    def __init__(self, folder: Path, rank: int, copied: Sequence[int] = ()) -> None:
        self.announced = Announced()
        self.paths = [folder / f"slot-{rank}-{n}" for n in range(2)]
        self._copies = [path for one in copied for path in Slots(folder, one).paths]

    def reserve(self, size: int, *, copies: bool = False) -> GivenSlots:
        given = [os.open(path, os.O_RDWR) for path in self._copies] if copies else []
        if not size and not self.paths[0].exists():
            return GivenSlots(0, [], "no snapshot is held", given)
        if not size:
            return GivenSlots(self.paths[0].stat().st_size, self.open(), copies=given)
        fds = self.open()
        for fd in fds:
            os.ftruncate(fd, size)
        return GivenSlots(size, fds)

    def open(self) -> list[int]:
        return [os.open(path, os.O_RDWR | os.O_CREAT) for path in self.paths]

    def saved(self, slot: int, **_: Any) -> None:
        pass


def built(seed: int, replicas: int, local: bool) -> dict[str, Any]:
    """Build what a script adds: 33 rows and 3 do not divide evenly, some ranks have none."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, 33), nn.BatchNorm1d(33), nn.Dropout(0.3), nn.Linear(33, 3), nn.Linear(3, 2)
    )
    model[4].requires_grad_(False)
    kept_whole = {model[0].bias} if local else set()
    size = dist.get_world_size()
    shape = (replicas, size // replicas) if replicas > 1 else (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    fully_shard(model, mesh=mesh, ignored_params=kept_whole)
    rows = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.3}]
    optimizer = torch.optim.AdamW([*rows, {"params": model[1].parameters()}], lr=0.1)
    # Its milestones have numbers as keys, which DCP makes strings.
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 9])
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def one_step(entries: Any) -> None:
    model, optimizer = entries["model"], entries["optimizer"]
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    entries["scheduler"].step()


def whole(entries: dict[str, Any]) -> dict[str, Any]:
    """Gather all that should be equal, however many ranks there are."""
    model, optimizer = entries["model"], entries["optimizer"]
    tensors = dict(model.named_parameters())
    for path, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{path}/{key}"] = value
    full = {
        path: one.full_tensor() if hasattr(one, "full_tensor") else one
        for path, one in tensors.items()
    }
    rates = [group["lr"] for group in optimizer.param_groups]
    return {**full, "rates": rates, "scheduler": entries["scheduler"].state_dict()}


def own(entries: dict[str, Any]) -> dict[str, Any]:
    """Return what belongs to one rank: its random numbers, buffers and unsharded tensors."""
    model = entries["model"]
    local = {path: one for path, one in model.named_parameters() if not hasattr(one, "to_local")}
    return {**dict(model.named_buffers()), **local, "next": torch.rand(3)}


def save(rank: int, folder: Path, replicas: int, local: bool) -> None:
    @elastic
    def train(state: State, round_: Round) -> None:
        snapshots = Snapshots(state._sealing, Slots(folder, rank), 1)  # type: ignore[arg-type]
        snapshots.begin_round(round_)
        entries = built(1, replicas, local)
        state.add(**entries)
        torch.manual_seed(100 + rank)
        for step in range(STEPS):
            one_step(entries)
            if local:
                entries["model"][0].bias.data.add_(rank)
            state.step = step + 1
            state.commit()
            snapshots.committed()
        snapshots.finish()
        found = whole(entries)
        if rank == 0:
            torch.save(found, folder / "whole")
        torch.save(own(entries), folder / f"own-{rank}")

    train(State(step=0, note="of all ranks"))


def write(folder: Path, savers: int) -> None:
    for rank in range(savers):
        fds = Slots(folder, rank).open()
        headers = [SealedMemory(bytearray(os.pread(fd, 1 << 24, 0))).header() for fd in fds]
        newest = max(header.mark for header in headers if header is not None)
        write_snapshots.write(folder / "disk", "run", 2, newest[:3], fds)


def load(rank: int, folder: Path) -> None:
    """Load it as a script without rdzv."""
    dist.init_process_group("gloo")
    entries = built(2 + rank, 1, local=False)
    model, optimizer = entries["model"], entries["optimizer"]
    saved: dict[str, Any] = {"scheduler": entries["scheduler"], "step": 0, "note": ""}
    saved["model"], saved["optimizer"] = get_state_dict(model, optimizer)
    (step,) = whole_steps(folder / "disk")
    checkpoint.load(saved, checkpoint_id=step.folder)
    states = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
    set_state_dict(model, optimizer, **states)
    assert (saved["step"], saved["note"]) == (STEPS, "of all ranks")
    found, before = whole(entries), torch.load(folder / "whole", weights_only=False)
    # DCP makes strings of its milestones, which are numbers.
    assert before["scheduler"].pop("milestones") != found["scheduler"].pop("milestones")
    expect_equal(found, before)
    dist.destroy_process_group()


def resume_from_memory(
    folder: Path, how: Callable[[int], object], savers: int, size: int, rank: int
) -> None:
    """Resume as this rank with the snapshots that are its own, or copied to its node."""
    del os.environ["RDZV_SNAPSHOT_DIR"]
    slots = Slots(folder, rank, range(rank + size, savers, size))

    def made(sealing: Any, link: None, every: None) -> Snapshots:
        snapshots = Snapshots(sealing, link, every)
        snapshots.held = HeldSlots(slots)  # type: ignore[arg-type]
        return snapshots

    session.Snapshots = made  # type: ignore[assignment,misc]
    how(rank)


def resume(folder: Path, replicas: int, local: bool, savers: int, rank: int) -> None:
    @elastic
    def train(state: State, round_: Round) -> None:
        assert (state.committed, state.step, state.note) == (STEPS, STEPS, "of all ranks")
        entries = built(2 + rank, replicas, local)
        state.add(**entries)
        if not local:
            expect_equal(whole(entries), torch.load(folder / "whole", weights_only=False))
        if round_.world_size == savers and replicas == 1:
            expect_equal(own(entries), torch.load(folder / f"own-{rank}", weights_only=False))
        one_step(entries)
        state.commit()

    train(State(step=0, note=""))


def expect_equal(found: dict[str, Any], saved: dict[str, Any]) -> None:
    for name, one in found.items():
        same = torch.equal(one, saved[name]) if torch.is_tensor(one) else one == saved[name]
        assert same, f"{name} is {one}, but {saved[name]} was saved"


def forked(call: Callable[[], object]) -> int:
    if pid := os.fork():
        return pid
    code = 1
    signal.alarm(MOST_S)
    try:
        call()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve_store(to: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(to, str(store.port).encode())
    signal.pause()


def run_ranks(count: int, call: Callable[[int], object]) -> list[int]:
    """Call it in as many processes, each with its RANK; return their exit codes."""
    reads, writes = os.pipe()
    # In a process of its own, because one with its threads could not be forked.
    store = forked(lambda: serve_store(writes))
    os.environ |= {"WORLD_SIZE": str(count), "MASTER_PORT": os.read(reads, 9).decode()}

    def as_rank(rank: int) -> None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        call(rank)

    ranks = [forked(partial(as_rank, rank)) for rank in range(count)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    return codes


def main() -> None:
    folder, (how, *counts) = Path(sys.argv[1]), sys.argv[2:]
    savers, replicas, local = (int(one) for one in how.split(","))
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert not any(run_ranks(savers, lambda rank: save(rank, folder, replicas, bool(local))))
    write(folder, savers)
    os.environ["RDZV_SNAPSHOT_DIR"] = str(folder / "disk")
    for count in map(int, counts):
        if not local:
            codes = run_ranks(count, lambda rank: load(rank, folder))
            print(f"torch alone, {count} ranks: {codes}", flush=True)
        made = replicas if count == savers else 1
        how = partial(resume, folder, made, bool(local), savers)
        codes = run_ranks(count, how)
        print(f"under @elastic, {count} ranks: {codes}", flush=True)
        codes = run_ranks(count, partial(resume_from_memory, folder, how, savers, count))
        print(f"from memory, {count} ranks: {codes}", flush=True)


if __name__ == "__main__":
    main()
