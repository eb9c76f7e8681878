"""A DDP training over gloo that counts its steps: `ddp_steps.py END [fails_on=NODE]`.

The model is one weight; the mean of all ranks' gradients is one, and no rank's own is. So the
weight is the number of trained steps, each once and by all, or the worker fails.

Each step is reported as progress and written to the diary, whose lines begin with round and RANK.
The step is saved when the node of a rank is about to leave, as late as that rank dares, and at the
end, which is when END exists. On the given node, a worker fails instead.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

END = Path(sys.argv[1])
OPTIONS = dict(arg.partition("=")[::2] for arg in sys.argv[2:])
if OPTIONS.get("fails_on") in Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parts:
    os.kill(os.getpid(), signal.SIGSEGV)  # Before torch is imported, which takes seconds.

import no_compiler  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import record  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

SNAPSHOT = END.with_suffix(".pt")
NOTICE = Path(os.environ["RDZV_NOTICE_FILE"])
SAVE_WITHIN_S = 10.0
"""How long saving might take, on the slowest machine seen so far."""
PAUSE_S = 0.02

diary = open(os.environ["RDZV_TEST_DIARY"], "a", buffering=1)  # noqa: PTH123, SIM115


def note(word: str, step: int) -> None:
    about = f"{os.environ['RDZV_ROUND']} {os.environ['RANK']} of {os.getpid()}"
    diary.write(f"{about} {word} {step}\n")


def report_step(step: int) -> None:
    with open(os.environ["RDZV_PROGRESS_FILE"], "r+b", buffering=0) as out:  # noqa: PTH123
        out.write(b"%20d\n" % step)


def agreed(*wishes: bool) -> list[bool]:
    """Share any rank's request with all, at the same step."""
    votes = torch.tensor([float(wish) for wish in wishes])
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [vote > 0 for vote in votes.tolist()]


def deadline() -> float | None:
    """Return when this node leaves, if it does."""
    try:
        return float(json.loads(NOTICE.read_text())["deadline_unix"])
    except FileNotFoundError:
        return None


def save(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        temporary = SNAPSHOT.with_suffix(".tmp")
        torch.save(model.state_dict(), temporary)
        temporary.rename(SNAPSHOT)
    dist.barrier()


@record
def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    if SNAPSHOT.exists():
        model.load_state_dict(torch.load(SNAPSHOT))
    step = int(model.weight.item())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    mine = 1.0 + dist.get_rank() - (dist.get_world_size() - 1) / 2
    note("begins", step)
    noticed = False
    while True:
        leaves_at = deadline()
        if leaves_at is not None and not noticed:
            noticed = True
            note("noticed", step)
        is_time = leaves_at is not None and time.time() > leaves_at - SAVE_WITHIN_S
        ends, leaves = agreed(END.exists(), is_time)
        if ends or leaves:
            save(model)
            note("saved", step)
            report_step(step)
        if ends:
            dist.destroy_process_group()
        if ends or is_time:
            # Without taking torch apart, which on a busy machine takes longer than --hang-timeout.
            # Where only this node leaves, the others notice, and go on with another in its place.
            os._exit(0)
        optimizer.zero_grad()
        ddp(torch.tensor([[-mine]])).sum().backward()
        optimizer.step()
        step += 1
        if model.weight.item() != step:
            raise RuntimeError(f"the weight is {model.weight.item()} after {step} steps")
        note("trained", step)
        report_step(step)
        time.sleep(PAUSE_S)


main()
