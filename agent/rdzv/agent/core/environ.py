"""The environment of each worker, with the same variables as under torchrun.

Source: `torch/distributed/elastic/agent/server/local_elastic_agent.py` (`_start_workers`) and
`torch/distributed/run.py` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping

from rdzv.core.model import Assignment

_SNAPSHOT, _ORIGIN = "RDZV_SNAPSHOT", "RDZV_SNAPSHOT_ORIGIN"


def worker_environ(
    base: Mapping[str, str],
    assignment: Assignment,
    *,
    rdzv_id: str,
    role: str,
    local_rank: int,
    local_world_size: int,
    error_file: str,
    progress_file: str,
    notice_file: str,
    virtual_local_rank: bool = False,
) -> dict[str, str]:
    """Return the complete environment of one worker.

    `base` is the agent's own environment; a snapshot that it names is not this job's, but that of
    the worker that has started the agent. With `virtual_local_rank`, every worker is LOCAL_RANK 0
    and sees only the GPU that it would have picked. In addition to torchrun's variables, a worker
    gets RDZV_ROUND, which increases with every round of a job (TORCHELASTIC_RESTART_COUNT counts
    only failures); RDZV_PROGRESS_FILE, where it may report progress; and RDZV_NOTICE_FILE, which
    exists once the node is about to leave. Both paths are empty if there is no folder for the
    files. For the worker library, RDZV_SNAPSHOT names the snapshots that new workers load from
    memory, and RDZV_SNAPSHOT_ORIGIN names the oldest lineage that is not outdated.
    """
    environ = {name: base[name] for name in base if name not in (_SNAPSHOT, _ORIGIN)}
    environ.update(
        LOCAL_RANK=str(local_rank),
        RANK=str(assignment.rank_first + local_rank),
        GROUP_RANK=str(assignment.group_rank),
        ROLE_RANK=str(assignment.role_rank_first + local_rank),
        ROLE_NAME=role,
        LOCAL_WORLD_SIZE=str(local_world_size),
        WORLD_SIZE=str(assignment.world_size),
        GROUP_WORLD_SIZE=str(assignment.group_world_size),
        ROLE_WORLD_SIZE=str(assignment.role_world_size),
        MASTER_ADDR=assignment.master_addr,
        MASTER_PORT=str(assignment.master_port),
        TORCHELASTIC_RESTART_COUNT=str(assignment.restarts),
        TORCHELASTIC_MAX_RESTARTS=str(assignment.max_restarts or 0),
        TORCHELASTIC_RUN_ID=rdzv_id,
        TORCHELASTIC_USE_AGENT_STORE=str(assignment.use_agent_store),
        TORCHELASTIC_ERROR_FILE=error_file,
        RDZV_ROUND=str(assignment.round),
        RDZV_PROGRESS_FILE=progress_file,
        RDZV_NOTICE_FILE=notice_file,
    )
    if (snapshot := _snapshot(assignment)) is not None:
        environ[_SNAPSHOT] = snapshot
        environ[_ORIGIN] = str(assignment.origin)
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if local_world_size > 1:
        environ.setdefault("OMP_NUM_THREADS", "1")
    if virtual_local_rank:
        environ["LOCAL_RANK"] = "0"
        environ["CUDA_VISIBLE_DEVICES"] = _only_gpu(base, local_rank)
    return environ


_OF_A_ROUND = (
    *("RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    "RDZV_ROUND",
)


def without_round(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker without a round.

    Its ranks are a word: a script that reads one before its function under @elastic fails, instead
    of training alone or with a wrong rank.
    """
    return {**environ, **dict.fromkeys(_OF_A_ROUND, "standby")}


def _snapshot(assignment: Assignment) -> str | None:
    """Return LINEAGE:STEP:SERIES to load, "" for none, or None where the server does not say."""
    mark = assignment.snapshot
    if mark is not None and assignment.snapshot_loads:
        return f"{mark.lineage}:{mark.step}:{mark.series}"
    begins_anew = assignment.round and assignment.origin == assignment.round
    return "" if begins_anew or assignment.source is not None else None


def _only_gpu(base: Mapping[str, str], local_rank: int) -> str:
    visible = [gpu for gpu in base.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return visible[local_rank] if local_rank < len(visible) else str(local_rank)


def substitute_local_rank(args: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """Replace `${local_rank}` in a worker's arguments.

    >>> substitute_local_rank(("--device=${local_rank}",), 3)
    ('--device=3',)
    """
    return tuple(arg.replace("${local_rank}", str(local_rank)) for arg in args)
