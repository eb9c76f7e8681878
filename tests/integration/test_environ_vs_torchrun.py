"""Workers get the variables that the real torchrun exports, except for explained differences."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rdzv.agent.core.environ import worker_environ
from rdzv.core.model import Assignment

pytest.importorskip("torch", reason="torch is not installed")

SCRIPT = """
import json, os, pathlib, sys
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
(folder / f"{rank}.json").write_text(json.dumps(dict(os.environ)))
"""

LINE = Assignment(
    "job-7",
    run="r1",
    round=0,
    group_rank=0,
    group_world_size=1,
    rank_first=0,
    world_size=2,
    role_rank_first=0,
    role_world_size=2,
    master_addr="localhost",
    master_port=1,
    use_agent_store=True,
    restarts=0,
    max_restarts=0,
)

ONLY_TORCHRUN = {
    # torchrun's command uses it to tell torchrun's agent which signals to forward; no worker reads
    # it.
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
}
ONLY_HERE = {
    # The restart count does not distinguish two rounds if nodes come and go without cost.
    "RDZV_ROUND",
    # Where a worker may report its progress.
    "RDZV_PROGRESS_FILE",
    # Where a worker finds out that its node is about to leave.
    "RDZV_NOTICE_FILE",
}
DIFFERENT_VALUES = {
    "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",
}


def parent_environ() -> dict[str, str]:
    torchs = ("TORCH", "PET_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "KMP_", "LOGLEVEL")
    return {name: value for name, value in os.environ.items() if not name.startswith(torchs)}


def under_torchrun(folder: Path) -> list[dict[str, str]]:
    """Return the environments of two workers of the real torchrun."""
    script = folder / "print_environ.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    command = [*torchrun, "--standalone", "--nproc-per-node=2", str(script), str(folder)]
    done = subprocess.run(
        command, env=parent_environ(), capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_workers_get_the_variables_that_torchrun_exports(tmp_path: Path) -> None:
    for local_rank, theirs in enumerate(under_torchrun(tmp_path)):
        ours = worker_environ(
            parent_environ(),
            LINE,
            rdzv_id="job-7",
            role="default",
            local_rank=local_rank,
            local_world_size=2,
            error_file="/logs/error.json",
            progress_file="/tmp/progress",
            notice_file="/tmp/notice",
        )
        assert theirs.keys() - ours.keys() == ONLY_TORCHRUN
        assert ours.keys() - theirs.keys() == ONLY_HERE
        differ = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
        assert differ == DIFFERENT_VALUES
