"""The scripts of the workers in `kept_workers`: a small training, with faults at chosen places."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rdzv.worker import (
    ElasticBatchSampler,
    Round,
    State,
    elastic,
    exit_if_leaving,
    groups,
    healing,
    should_stop,
)

SAMPLES = 96


def say(what: str, **fields: Any) -> None:
    os.write(1, (json.dumps({"what": what, "pid": os.getpid(), **fields}) + "\n").encode())


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True).tanh())


def make_state(rank: int, width: int = 32, **more: Any) -> State:
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    torch.manual_seed(100 + rank)
    return State(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=ElasticBatchSampler(SAMPLES, 4, seed=3),
        step=0,
        history=[],
        **more,
    )


def weights(state: State) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in state.model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def fault(
    faults: list[dict[str, Any]], round_: Round, step: int, at: str, saving: State | None = None
) -> None:
    """Carry out the fault planned for this place, if any, once `saving` has saved its last step.

    Otherwise one rank's part of a step may be there and the other's not; that rank is healed, with
    random numbers and buffers that are not its own.
    """
    for one in faults:
        here = {"rank": round_.rank, "step": step, "at": at, "round": round_.number}
        if all(one.get(key, value) == value for key, value in here.items()):
            if saving is not None:
                saving._running("fault").snapshots.finish()
            say("fault", **here)
            if one["do"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif one["do"] == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif one["do"] == "raise":
                raise ValueError("the script's own mistake")
            elif one["do"] == "sleep":
                time.sleep(one["seconds"])
            elif one["do"] == "time out":
                group = dist.new_group()
                # This does not cover its creation, which may take longer on a busy machine.
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
                if round_.rank == 0:
                    dist.all_reduce(torch.ones(1), group=group)
                time.sleep(600)


def stop_at(rank: int, operation: int, round_: int = 0) -> None:
    """Make a rank stop itself before one operation on the store of its first round."""
    made = groups.recording_store
    left = operation

    def recording_store(inner: Any, published: Any, refuse: Any) -> Any:
        def counting() -> None:
            nonlocal left
            refuse()
            left -= 1
            place = (os.environ["RANK"], os.environ["RDZV_ROUND"])
            if left == -1 and place == (str(rank), str(round_)):
                say("stops")
                os.kill(os.getpid(), signal.SIGSTOP)

        return made(inner, published, counting)

    groups.recording_store = recording_store


def die_while_healing(faults: list[dict[str, Any]]) -> None:
    """Send a few tensors at a time, and let the source die before one of these sends."""
    healing.BUCKET_BYTES = 600
    divided = healing.buckets_of

    def buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        for number, bucket in enumerate(divided(tensors)):
            for one in faults:
                place = (int(os.environ["RANK"]), int(os.environ["RDZV_ROUND"]), number)
                # The first send has only the head.
                if (one["rank"], one["round"], one["bucket"]) == place and len(tensors) > 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            yield bucket

    healing.buckets_of = buckets


def train(
    steps: int,
    faults: list[dict[str, Any]] | None = None,
    workers: int = 0,
    stops_at: tuple[int, ...] | None = None,
    settles: bool = False,
    **options: Any,
) -> None:
    """Train a model with dropout and batch norm for a number of steps.

    With `settles`, let DDP divide the gradients before the first step as it does after it.
    """
    faults = faults or []
    if stops_at is not None:
        stop_at(*stops_at)
    if any("bucket" in one for one in faults):
        die_while_healing([one for one in faults if "bucket" in one])
        faults = [one for one in faults if "bucket" not in one]
    data = make_data()
    state = make_state(int(os.environ["RANK"]), **options)

    @elastic
    def run(state: State, round_: Round) -> None:
        fault(faults, round_, state.step, "begin")
        model = DistributedDataParallel(state.model, init_sync=False)
        model.register_comm_hook(None, _faulty_hook(faults, state, round_))
        if settles:
            model.eval()
            model(torch.zeros(1, 8)).sum().backward()
            model.train()
            state.optimizer.zero_grad()
        say("begin", round=round_.number, step=state.step, rank=round_.rank, weights=weights(state))
        while state.step < steps:
            # As scripts do; by default a child of a fork server does not, and each imports torch.
            context = "fork" if workers else None
            loader = DataLoader(
                data,
                batch_sampler=state.sampler,
                num_workers=workers,
                multiprocessing_context=context,
            )
            for indices, x, y in loader:
                one_step(model, indices, x, y, round_)
                if state.step >= steps:
                    break

    def one_step(
        model: nn.Module, indices: torch.Tensor, x: torch.Tensor, y: torch.Tensor, round_: Round
    ) -> None:
        noise = torch.from_numpy(np.random.rand(len(x), 8).astype("float32")) * 0.01
        loss = nn.functional.mse_loss(model(x + noise), y)
        fault(faults, round_, state.step, "forward", state)
        state.optimizer.zero_grad()
        loss.backward()
        fault(faults, round_, state.step, "backward")
        state.optimizer.step()
        fault(faults, round_, state.step, "step")
        state.scheduler.step()
        state.step += 1
        state.history.append(round_.number)
        redo = state.is_redo
        fault(faults, round_, state.step, "commit")
        said = {
            "step": state.step,
            "rank": round_.rank,
            "round": round_.number,
            "world": round_.world_size,
            "loss": loss.detach().double().item().hex(),
            "samples": indices.tolist(),
            "redo": redo,
        }
        try:
            state.commit()
        finally:
            say("step", **said)

    run(state)
    say("done", step=state.step, weights=weights(state), history=len(state.history))


def _faulty_hook(faults: list[dict[str, Any]], state: State, round_: Round) -> Any:
    """Return DDP's default hook, with a fault before the collective."""

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # Torch reads annotations, as types.
        fault(faults, round_, state.step, "collective")
        tensor = bucket.buffer().div_(dist.get_world_size())
        future = dist.all_reduce(tensor, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    return hook


class Layers(nn.Sequential):
    """A model with a forward pass of the script's own, which is what torch compiles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def compiled() -> None:
    """Train a model whose wrapper is compiled in each round; count what that compiles."""
    net = Layers(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    state = State(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), step=0)
    times = 0

    def counting(graph: Any, _: Any) -> Any:
        nonlocal times
        times += 1
        return graph.forward

    @elastic
    def run(state: State, round_: Round) -> None:
        wrapper = DistributedDataParallel(state.net, init_sync=False)
        model = torch.compile(wrapper, backend=counting)
        while True:
            state.optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            state.optimizer.step()
            state.step += 1
            state.commit()
            if state.step % 4 == 0:
                say("compiled", round=round_.number, times=times)

    run(state)


def with_socket(steps: int, port: int) -> None:
    """Train beside the script's own TCP connection, and use it at the end."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"a")
    train(steps)
    connection.sendall(b"b")


def busy() -> None:
    """Do nothing but small collectives."""

    @elastic
    def run(state: State, round_: Round) -> None:
        while True:
            dist.all_reduce(torch.ones(100))

    run(State(step=0))


def until_told() -> None:
    """Run small collectives until this node is told to leave, then save and return."""

    @elastic
    def run(state: State, round_: Round) -> None:
        while not round_.leaving:
            dist.all_reduce(torch.ones(1))
            state.check()
        say("saved", rank=round_.rank)

    run(State(step=0))
    say("returned")


def differing(entry: str) -> None:
    """Build another model, or another sampler, on each rank."""
    rank = int(os.environ["RANK"])
    entries = {
        "model": nn.Linear(4, 2 + rank),
        "sampler": ElasticBatchSampler(9, global_batch=4, micro_batch=1 + rank),
    }
    elastic(lambda state, round_: None)(State(**{entry: entries[entry]}))


def with_old_wrapper() -> None:
    """Hold on to a wrapper of the first round in a global variable."""
    state = make_state(int(os.environ["RANK"]))

    @elastic
    def run(state: State, round_: Round) -> None:
        kept_for_long["wrapper"] = DistributedDataParallel(state.model)
        say("begin", round=round_.number)
        while True:
            dist.all_reduce(torch.ones(1))
            state.check()

    run(state)


kept_for_long: dict[str, Any] = {}


class Trainer:
    """The object in which some scripts keep everything."""

    group: Any = None


trainer = Trainer()


def parking(seconds: float) -> None:
    """Have a callback of some length before each park, and check how the loop is left."""
    state = State(step=0)

    @state.on_park
    def note(round_: Round) -> None:
        time.sleep(seconds)
        say("on_park", round=round_.number, token=round_.token)

    @elastic
    def run(state: State, round_: Round) -> None:
        say("begin", round=round_.number)
        while round_.number == 0:
            try:
                state.step += 1
                state.commit()
                time.sleep(0.01)
            except Exception as error:
                say("swallowed", error=repr(error))

    run(state)
    say("done", step=state.step, env=os.environ["RDZV_ROUND"])


def in_two_groups(steps: int, faults: list[dict[str, Any]]) -> None:
    """Reduce in a group of half of the ranks, then in the default one, in each step."""
    state = make_state(int(os.environ["RANK"]))

    @elastic
    def run(state: State, round_: Round) -> None:
        halves = [dist.new_group(list(range(half, round_.world_size, 2))) for half in (0, 1)]
        mine = halves[round_.rank % 2]
        while state.step < steps:
            one, all_ = torch.ones(1), torch.ones(1)
            fault(faults, round_, state.step, "half")
            dist.all_reduce(one, group=mine)
            fault(faults, round_, state.step, "all")
            dist.all_reduce(all_)
            state.step += 1
            say("sums", round=round_.number, half=int(one), all=int(all_))
            state.commit()

    run(state)
    say("done", step=state.step)


def swallowing(
    steps: int, faults: list[dict[str, Any]], steps_on: bool = False, timeout_s: float = 60.0
) -> None:
    """Train two models and catch every exception; their weights count the optimizers' steps.

    With `steps_on`, an optimizer also steps after a failed backward pass.
    """
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for model in models:
        nn.init.zeros_(model.weight)
    first, second = (torch.optim.SGD(model.parameters(), lr=1.0) for model in models)
    state = State(a=models[0], b=models[1], first=first, second=second, step=0)

    def one_step(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        try:
            ddp(torch.ones(1, 1)).sum().backward()
        except Exception:
            if not steps_on:
                raise
            say("swallowed", step=state.step)
        optimizer.step()

    @elastic
    def run(state: State, round_: Round) -> None:
        one, other = (DistributedDataParallel(model) for model in models)
        # This does not cover the start of the round, which may take longer on a busy machine.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)
        while state.step < steps:
            fault(faults, round_, state.step, "forward")
            try:
                one_step(one, first)
                fault(faults, round_, state.step, "between")
                one_step(other, second)
                fault(faults, round_, state.step, "after")
                dist.all_reduce(torch.ones(1))
            except Exception as error:
                say("swallowed", step=state.step, error=repr(error))
            state.step += 1
            state.commit()

    run(state)
    say("done", step=state.step, applied=[-int(model.weight) for model in models])


def with_old_mesh() -> None:
    """Hold on to a device mesh of the first round in a global variable."""

    @elastic
    def run(state: State, round_: Round) -> None:
        trainer.group = dist.device_mesh.init_device_mesh("cpu", (round_.world_size,))
        say("begin", round=round_.number)
        while True:
            dist.all_reduce(torch.ones(1))
            state.check()

    run(State(step=0))


def with_old_group() -> None:
    """Hold on to a second group of the first round in a global variable."""

    @elastic
    def run(state: State, round_: Round) -> None:
        trainer.group = dist.new_group([0])
        say("begin", round=round_.number)
        while True:
            dist.all_reduce(torch.ones(1))
            state.check()

    run(State(step=0))


def script(text: str) -> None:
    """Run the text of a script, whose `mark(step)` prints a line."""
    torch.set_num_threads(1)
    exec(text, {"mark": lambda step: say("mark", step=step)})


def with_default_group() -> None:
    """Hold on to the default group of the first round, and use it in all."""

    @elastic
    def run(state: State, round_: Round) -> None:
        is_same = trainer.group is dist.group.WORLD
        trainer.group = dist.group.WORLD
        ranks = torch.full((1,), dist.get_rank())
        dist.all_reduce(ranks, group=trainer.group)
        last = torch.full((1,), round_.rank)
        dist.broadcast(last, src=round_.world_size - 1)
        half = torch.ones(1)
        halves = min(2, round_.world_size)
        mine = [dist.new_group(list(range(of, round_.world_size, 2))) for of in range(halves)]
        dist.all_reduce(half, group=mine[round_.rank % 2])
        members = dist.get_process_group_ranks(dist.group.WORLD)
        found = {"ranks": int(ranks), "last": int(last), "half": int(half), "members": members}
        say("group", round=round_.number, is_same=is_same, **found)
        while True:
            dist.all_reduce(torch.ones(1))
            state.step += 1
            state.commit()

    run(State(step=0))


def twice() -> None:
    """Call two functions under @elastic, one after the other."""
    elastic(lambda state, round_: say("first"))(State(step=0))
    elastic(lambda state, round_: say("second"))(State(step=0))


def unsendable() -> None:
    """Have a value in the state that can be copied, but not pickled."""
    elastic(lambda state, round_: say("begin"))(State(score=lambda x: x))


def in_thread(seconds: float) -> None:
    """Two groups, one used by another thread, and a blocked collective in it."""
    state = make_state(int(os.environ["RANK"]))

    @elastic
    def run(state: State, round_: Round) -> None:
        group = dist.new_group(list(range(round_.world_size)))
        if round_.rank == 0 and round_.number == 0:
            thread = threading.Thread(target=_reduce, args=(group,))
            thread.start()
            dist.all_reduce(torch.ones(2))
            thread.join()
        elif round_.number == 0:
            time.sleep(seconds)
        dist.all_reduce(torch.ones(2), group=group)
        state.step += 1
        state.commit()

    run(state)
    say("done", step=state.step)


def _reduce(group: Any) -> None:
    try:
        dist.all_reduce(torch.ones(2), group=group)
    except RuntimeError as error:
        say("thread", error=str(error)[:100])


def train_sharded(
    steps: int,
    faults: list[dict[str, Any]] | None = None,
    replicas: int = 1,
    hold_last: bool = True,
    forgets_in: int | None = None,
    leaves: bool = False,
    **options: Any,
) -> None:
    """Train a model that is sharded anew in each round, with a scheduler and a scaler.

    With `leaves`, look in each step whether a node leaves, and save then.
    """
    # These take half as long as torch itself; the other functions do without.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    faults = faults or []
    data = make_data()
    torch.set_num_threads(1)
    torch.manual_seed(100 + int(os.environ["RANK"]))
    state = State(
        sampler=ElasticBatchSampler(SAMPLES, 4, seed=3),
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3),
        step=0,
        **options,
    )

    def build(world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        with torch.random.fork_rng():
            torch.manual_seed(11)
            model = nn.Sequential(
                nn.Linear(8, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Dropout(0.3), nn.Linear(33, 1)
            )
        shape = (replicas, world_size // replicas) if replicas > 1 else (world_size,)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    @elastic
    def run(state: State, round_: Round) -> None:
        model, optimizer = build(round_.world_size)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        if round_.number != forgets_in:
            state.add(model=model, optimizer=optimizer, scheduler=scheduler, hold_last=hold_last)
        say("begin", round=round_.number, step=state.step, rank=round_.rank)
        while state.step < steps:
            for _, x, y in DataLoader(data, batch_sampler=state.sampler):
                fault(faults, round_, state.step, "begin")
                loss = nn.functional.mse_loss(model(x), y)
                fault(faults, round_, state.step, "forward", state)
                optimizer.zero_grad()
                state.scaler.scale(loss).backward()
                state.scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                fault(faults, round_, state.step, "backward")
                state.scaler.step(optimizer)
                fault(faults, round_, state.step, "step")
                state.scaler.update()
                scheduler.step()
                state.step += 1
                redo = state.is_redo
                try:
                    state.commit()
                finally:
                    say(
                        "step",
                        step=state.step,
                        rank=round_.rank,
                        round=round_.number,
                        loss=loss.detach().double().item().hex(),
                        redo=redo,
                    )
                if leaves:
                    leave_if_told(state)
                if state.step >= steps:
                    break
        say("done", step=state.step, weights=parts_of(model), lr=optimizer.param_groups[0]["lr"])

    run(state)


def leave_if_told(state: State) -> None:
    if should_stop():
        say("leaves", step=state.step)
        state.save()
        exit_if_leaving()


def parts_of(model: nn.Module) -> str:
    """Return a digest of this rank's part of a sharded model's parameters."""
    found = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        found.update(parameter.detach().to_local().numpy().tobytes())
    return found.hexdigest()
