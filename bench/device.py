"""What a machine with a GPU shows of rdzv, section by section.

    python bench/device.py [SECTION...] [--rounds N]

Each section is a process of its own with a deadline, so one that hangs ends by itself; all of them
together take at most 12 minutes. Without a GPU, those that can run on the CPU, and the others say
why they did not. Prints a table, and the same as one line of JSON per section. Exits with 1 if a
section failed.

* inventory: the GPUs that NVML lists, and what rdzv-agent's health check says of them;
* warm: workers forked from a zygote, which use CUDA; and cold ones, for comparison;
* nccl: a group of one rank: all-reduce, reconfigure (torch 2.14), abort and a new group;
* kept: a worker that stays while its peer is killed again and again: is its memory freed?
* snapshot: the copy of a step to the runner's memory, and what it adds to steps;
* hang: a kernel that does not end, and what the job's log names.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from measure import Json, emit, end_on_sigterm, load, say_conditions
from processes import BIN

Row = dict[str, Json]
STEPS = 3
"""Steps that a peer trains before it is killed."""
ENDS_IN_S = 15


class NotRunError(Exception):
    """A section cannot run here; the message gives the reason."""


def device(*, must_be_cuda: bool = False) -> str:
    import torch

    if must_be_cuda and not torch.cuda.is_available():
        raise NotRunError("no CUDA device")
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def seconds(call: Callable[[], object]) -> float:
    import torch

    begun = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def rows_of(script: str, count: int, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Run `script` under rdzvrun; return what its workers `say`, `count` rows, and all output."""
    run = [BIN / "rdzvrun", "--standalone", "--restart-backoff=0", *options]
    # It is in this section's process group, and ends with it.
    command = [*run, __file__, "--script", script, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"row"' in line]
    if len(found) != count:
        raise RuntimeError(f"{len(found)} of {count} rounds were seen: {done.stderr[-400:]}")
    return [json.loads(line)["row"] for line in found], done.stdout + done.stderr


def say(row: dict[str, Any]) -> None:
    print(json.dumps({"row": row}), flush=True)


# ------------------------------------------------------------------------------------ sections


def inventory(_: argparse.Namespace) -> Row:
    from rdzv.agent.inventory.health_checks import look_at_gpus
    from rdzv.agent.inventory.resources import find_gpus

    gpus, (used, unwell) = find_gpus("nvml"), look_at_gpus()
    if not gpus:
        raise NotRunError(f"NVML shows no GPU: {', '.join(unwell) or 'there is none'}")
    return {
        "gpus": [f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB" for gpu in gpus],
        "memory used": [f"{size / 2**30:.1f} GiB" for size in used.values()],
        "unwell": unwell,
    }


def warm(args: argparse.Namespace) -> Row:
    found: Row = {"device": device()}
    for kind, options in (("cold", ()), ("warm", ("--warm=torch",))):
        # The first round's workers may be faster than the zygote.
        rows, _ = rows_of("first_use", 3, "--nproc-per-node=1", "--max-restarts=2", *options)
        found |= {f"{kind}: {name}": f"{took_s:.2f} s" for name, took_s in rows[-1].items()}
    return found


def first_use(rounds: int) -> None:
    """Use the device, and fail in all rounds but the last."""
    begun = time.perf_counter()
    import torch

    imported_s, ones = time.perf_counter() - begun, partial(torch.ones, 9, 9, device=device())
    used_s = seconds(lambda: ones().mm(ones()))
    say({"import of torch": imported_s, "first use of the device": used_s})
    sys.exit(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < rounds - 1)


def nccl(_: argparse.Namespace) -> Row:
    device(must_be_cuda=True)
    import torch
    import torch.distributed as dist

    c10d: Any = dist.distributed_c10d
    reconfigures = hasattr(c10d, "_reconfigure")
    more = {"enable_reconfigure": True} if reconfigures else {}
    uuids, tensor = itertools.count(1), torch.ones(1 << 20, device=device())
    reduce = partial(dist.all_reduce, tensor)

    def begin() -> None:
        backend = "nccl2" if reconfigures else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **more)
        if reconfigures:
            reconfigure()

    def reconfigure() -> None:
        handles = [c10d._get_reconfigure_handle()]
        c10d._reconfigure(uuid=next(uuids), handles=handles, timeout=timedelta(seconds=20)).wait()

    found: Row = {"begin": f"{seconds(begin):.3f} s"}
    found["first all-reduce"] = f"{seconds(reduce):.3f} s"
    if reconfigures:
        times = [(seconds(reconfigure), seconds(reduce))[0] for _ in range(20)]
        found["reconfigure, median of 20"] = f"{statistics.median(times):.4f} s"
    else:
        found["reconfigure"] = f"not run: torch {torch.__version__} has none, 2.14 has"
    group: Any = dist.group.WORLD
    found["abort"] = f"{seconds(group._get_backend(torch.device('cuda')).abort):.3f} s"
    dist.destroy_process_group()
    found["a new group after it"] = f"{seconds(lambda: (begin(), reduce())):.3f} s"
    return found


def kept(args: argparse.Namespace) -> Row:
    options = ("--nproc-per-node=2", f"--max-restarts={args.rounds + 5}", "--warm=torch")
    rows, _ = rows_of("train_kept", args.rounds + 1, *options)
    # The first two rounds allocate what stays.
    first, last, gaps = rows[min(2, args.rounds)], rows[-1], [row["gap_s"] for row in rows[1:]]
    found: Row = {
        "device": device(),
        "kills": args.rounds,
        "kept workers replaced": len({row["pid"] for row in rows}) - 1,
        "from step to step over a kill": f"{statistics.median(gaps):.2f} s (most {max(gaps):.2f})",
    }
    held = first.keys() - {"gap_s", "pid"}
    return found | {name: f"{first[name]} to {last[name]}" for name in first if name in held}


def train_kept(rounds: int) -> None:
    """Train, and kill RANK 1 after each few steps; RANK 0 says what it holds in each round."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from rdzv.worker import Round, State, elastic

    on_gpu, total = device() != "cpu", STEPS * rounds
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(device())
    state = State(model=model, optimizer=torch.optim.AdamW(model.parameters()), step=0)
    last_step_s = [time.monotonic()]

    @elastic(backend="gloo")  # NCCL does not let two ranks share a GPU.
    def train(state: Any, round_: Round) -> None:
        ddp, begun = DistributedDataParallel(state.model, init_sync=False), state.step
        while state.step < total:
            if round_.rank and state.step - begun >= STEPS and state.step <= total - STEPS:
                os.kill(os.getpid(), signal.SIGKILL)
            ddp(torch.ones(32, 1024, device=device())).square().mean().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.step += 1
            state.commit()
            gap_s, last_step_s[0] = time.monotonic() - last_step_s[0], time.monotonic()
            if not round_.rank and state.step == begun + 1:
                free, size = torch.cuda.mem_get_info() if on_gpu else (0, 0)
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                held = {
                    "allocated": torch.cuda.memory_allocated() if on_gpu else 0,
                    "reserved": torch.cuda.memory_reserved() if on_gpu else 0,
                    "in use on the GPU": size - free,
                    "resident": pages * os.sysconf("SC_PAGESIZE"),
                }
                mib = {f"{name}, MiB": round(octets / 2**20) for name, octets in held.items()}
                fd, task = (len([*Path("/proc/self", name).iterdir()]) for name in ("fd", "task"))
                other = {"gap_s": gap_s, "pid": os.getpid(), "descriptors": fd, "threads": task}
                say(mib | other)

    train(state)


def snapshot(_: argparse.Namespace) -> Row:
    import torch
    from torch import nn

    from rdzv.worker.link import Announced, GivenSlots
    from rdzv.worker.rounds import Round
    from rdzv.worker.sealing import Sealing
    from rdzv.worker.snapshots import Snapshots

    fds = [os.memfd_create(str(n)) for n in range(2)]

    def reserve(size: int) -> GivenSlots:
        for fd in fds:
            os.ftruncate(fd, max(size, os.fstat(fd).st_size))
        return GivenSlots(os.fstat(fds[0]).st_size, [os.dup(fd) for fd in fds] if size else [])

    layers, batch = (2, 4) if device() == "cpu" else (40, 256)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(layers))).to(device())
    optimizer = torch.optim.AdamW(model.parameters())
    sealing = Sealing({"model": model, "optimizer": optimizer})
    sealing.begin_round(0, 1, lambda: None)
    link: Any = SimpleNamespace(announced=Announced(), reserve=reserve, saved=lambda *_, **__: None)
    snapshots = Snapshots(sealing, link, None)
    snapshots.begin_round(Round(0, 0, 1, local_rank=0, restarts=0, token=""))

    def step() -> None:
        model(torch.ones(batch, 2048, device=device())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sealing.commit()

    def step_after_save() -> None:
        if sealing.step and not snapshots.save():
            raise RuntimeError("it was not saved; stderr says why")
        step()

    for _ in range(3):
        seconds(step_after_save)  # The slots are mapped, and the pinned buffer is allocated.
        snapshots.finish()
    size = 3 * sum(one.nbytes for one in model.parameters())
    plain = [seconds(step) for _ in range(10)]
    saving, copies = [], []
    for _ in range(10):
        begun = time.perf_counter()
        saving.append(seconds(step_after_save))
        snapshots.finish()
        copies.append(time.perf_counter() - begun)
    step_s, copy_s = statistics.median(plain), statistics.median(copies)
    more_s = statistics.median(saving) - step_s
    return {
        "device": device(),
        "state": f"{size / 1e9:.2f} GB",
        "a step": f"{step_s * 1000:.1f} ms",
        "copied and sealed": f"in {copy_s:.2f} s, {size / 1e9 / copy_s:.2f} GB/s",
        "the next step waits": f"{more_s * 1000:.1f} ms",
        "share, if saved every 10 steps": f"{more_s / step_s / 10:.1%}",
    }


def hang(_: argparse.Namespace) -> Row:
    device(must_be_cuda=True)
    begun = time.monotonic()
    _, said = rows_of(
        "stuck_kernel", 0, "--nproc-per-node=1", "--max-restarts=0", "--hang-timeout=5"
    )
    if (named := re.search(r"hung: .*", said)) is None:
        raise RuntimeError(f"nothing was named: {said[-500:]}")
    return {"named after": f"{time.monotonic() - begun:.1f} s", "as": named[0][:300]}


def stuck_kernel(_: int) -> None:
    import torch

    from rdzv.worker.notice import report_step

    report_step(1)
    for _ in range(1000):
        torch.cuda._sleep(1 << 40)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()


SCRIPTS = {"first_use": first_use, "train_kept": train_kept, "stuck_kernel": stuck_kernel}
"""What workers run under rdzvrun."""

SECTIONS: dict[str, tuple[Callable[[argparse.Namespace], Row], int]] = {
    "inventory": (inventory, 20),
    "warm": (warm, 100),
    "nccl": (nccl, 60),
    "kept": (kept, 240),
    "snapshot": (snapshot, 90),
    "hang": (hang, 80),
}
"""Each with its deadline in seconds: with `ENDS_IN_S` for each, 680 s in the worst case."""


# ------------------------------------------------------------------------------------ the program


def run_section(name: str, options: list[str]) -> Row:
    """Run a section in a process of its own, with all its children, until its deadline."""
    command = [sys.executable, __file__, name, "--alone", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, error = process.communicate(timeout=SECTIONS[name][1])
        found: Row = json.loads(out.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"failed": f"it did not end in {SECTIONS[name][1]} s"}
    except (IndexError, ValueError):
        return {"failed": f"exit code {process.returncode}: {error.strip()[-300:]}"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # On which rdzvrun ends its workers.
            until = time.monotonic() + ENDS_IN_S
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
            os.killpg(process.pid, signal.SIGKILL)
    return found


def alone(name: str, args: argparse.Namespace) -> Row:
    try:
        return SECTIONS[name][0](args)
    except NotRunError as error:
        return {"not run": str(error)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:600]}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--rounds", type=int, default=20, help="kills of a kept worker's peer")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"there is no section {min(unknown)!r}; there are {', '.join(SECTIONS)}")
    if args.alone:
        print(json.dumps(alone(args.sections[0], args)))
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    end_on_sigterm()
    say_conditions("device", Path())
    failed = False
    for name in args.sections or SECTIONS:
        begun = time.monotonic()
        row = run_section(name, [f"--rounds={args.rounds}"])
        took_s, failed = round(time.monotonic() - begun, 1), failed or "failed" in row
        rows = [f"    {key:32}{value}" for key, value in row.items()]
        text = "\n".join([f"{name} ({took_s:.0f} s, load {load():.1f})", *rows])
        emit(text, bench="device", case=name, seconds=took_s, load=load(), **row)
    sys.exit(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--script"]:
        SCRIPTS[sys.argv[2]](int(sys.argv[3]))
    else:
        main()
