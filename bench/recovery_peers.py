"""The two peers whose processes stay as well: how each of their workers is launched.

torchft and NVIDIA's in-process wrapper are in a separate environment, `build/peers`, which `make
build/peers/.ready` creates. Each worker is launched by itself: torchft by a separate torchrun (a
replica group of one rank) beside one lighthouse, the wrapper as a plain process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from measure import ROOT

PEERS = ROOT / "build" / "peers" / "bin"
NAMES = ("torchft", "nvidia")
SCRIPTS = {name: Path(__file__).with_name(f"recovery_{name}_worker.py") for name in NAMES}


def are_installed() -> bool:
    """Whether their environment exists."""
    return (PEERS / "torchft_lighthouse").exists()


def lighthouse(endpoint: str) -> list[str]:
    """Return the command of torchft's server: its defaults, but it never waits for more."""
    return [
        str(PEERS / "torchft_lighthouse"),
        f"--bind={endpoint}",
        "--min_replicas=1",
        "--join_timeout_ms=1000",
    ]


def command(program: str) -> list[str]:
    """Return the command of one worker."""
    by_itself = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=100"]
    return [
        str(PEERS / "python"),
        *("-W", "ignore"),
        *(by_itself if program == "torchft" else []),
        str(SCRIPTS[program]),
    ]


def environ(program: str, name: str, endpoint: str, workers: int) -> dict[str, str]:
    """Return the variables of one worker besides the bench's own."""
    if program == "torchft":
        return {"TORCHFT_LIGHTHOUSE": f"http://{endpoint}", "REPLICA_GROUP_ID": name}
    host, _, port = endpoint.partition(":")
    rank = name.removeprefix("n")
    return {
        **{"RANK": rank, "WORLD_SIZE": str(workers + 1), "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": host, "MASTER_PORT": port, "RDZV_BENCH_ACTIVE": str(workers)},
    }


def spares(program: str, workers: int) -> Sequence[str]:
    """Return the number of workers besides the training ones: the wrapper starts no new process."""
    return [f"n{workers}"] if program == "nvidia" else []
