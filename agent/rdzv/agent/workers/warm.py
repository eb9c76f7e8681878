"""Warm workers: which modules the zygote preloads, and which workers may be forked from it.

With `--warm`, the zygote is started before the first round; otherwise it is only for restarts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence

from rdzv.agent.launch.launch import Launch
from rdzv.agent.runner.requests import (
    MAX_SPARE_FORKS,
    MAX_ZYGOTE_WAIT_S,
    STANDBY,
    WorkerSpec,
    ZygoteSpec,
)
from rdzv.agent.runner.zygote_process import zygote_environ
from rdzv.agent.runner_link.agent_children import ask_spared
from rdzv.agent.system.accounts import started_as
from rdzv.core.model import Assignment
from rdzv.errors import InvalidRequestError

log = logging.getLogger("rdzv.agent")

ASK_TIMEOUT_S = 60.0

WAIT_VARIABLE = "RDZV_WARM_WAIT"

_WITH = {"torch": ("torch._dynamo",)}
"""Modules to preload along with others: DDP's constructor takes a second to import this one."""

_FOR_RESTARTS = ("torch",)

EACH_WORKERS_OWN = frozenset(
    {
        *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK"),
        *("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "RDZV_ROUND"),
        *("RDZV_SNAPSHOT", "RDZV_SNAPSHOT_ORIGIN"),
        # CUDA reads CUDA_VISIBLE_DEVICES when initialised, which never happens in a zygote.
        *("RDZV_PROGRESS_FILE", "RDZV_NOTICE_FILE", "CUDA_VISIBLE_DEVICES"),
    }
)
"""Variables that differ between workers or rounds. `import torch` reads none of them."""

NO_ROUND = Assignment("", "", STANDBY, 0, 1, 0, 1, 0, 1, "", 0, True, 0, 0)
"""A placeholder for an environment in which a round's variables do not matter, or of standbys."""

_READ_LATE = ("NCCL_", "GLOO_")
"""Variables with these prefixes are read when a process group is created."""


def preloaded(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the modules to preload if `modules` were requested.

    >>> preloaded(["torch", "transformers"])
    ('torch', 'torch._dynamo', 'transformers')
    """
    return tuple(dict.fromkeys(each for name in modules for each in (name, *_WITH.get(name, ()))))


def zygote_spec(
    launch: Launch, environ: Mapping[str, str], cpus: Sequence[tuple[int, ...] | None]
) -> ZygoteSpec:
    """Return the specification of a launch's zygote.

    `environ` is the environment of any of the workers. `cpus` are the CPUs to which each worker is
    bound.
    """
    common = {name: value for name, value in environ.items() if name not in EACH_WORKERS_OWN}
    return ZygoteSpec(
        argv=launch.argv(0),
        env=common,
        cwd=None if launch.chdir is None else str(launch.chdir),
        modules=preloaded(launch.warm or _FOR_RESTARTS),
        after_import=not launch.warm,
        cpus=cpus[0] if len(set(cpus)) == 1 else None,
        wait_s=_wait_s(launch.environ),
        identity=launch.identity,
        # One for each worker, and one for the store host if this node has to serve the store.
        spare_forks=min(launch.job.local_world_size + 1, MAX_SPARE_FORKS),
    )


def why_cold(zygote: ZygoteSpec, worker: WorkerSpec) -> str:
    """Return why a worker cannot be forked from the zygote, or an empty string if it can.

    Modules may read any variable on import, so every difference counts, except in variables that
    are known to be read later.
    """
    names = sorted(zygote.env.keys() | worker.env.keys())
    for name in names:
        if name in EACH_WORKERS_OWN or name.startswith(_READ_LATE):
            continue
        theirs, own = zygote.env.get(name), worker.env.get(name)
        if theirs != own:
            return f"its {name} is {_shown(own)}, but the zygote has {_shown(theirs)}"
    if worker.cpus != zygote.cpus and "OMP_NUM_THREADS" not in worker.env:
        return (
            "its CPUs, which determine OpenMP's number of threads on import, are not the zygote's"
        )
    return ""


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value[:80])


def _wait_s(environ: Mapping[str, str]) -> float:
    text = environ.get(WAIT_VARIABLE, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_ZYGOTE_WAIT_S:
        raise InvalidRequestError(
            f"{WAIT_VARIABLE}={text}: give the seconds that the first round may wait for "
            f"the zygote's imports, at most {MAX_ZYGOTE_WAIT_S:g}"
        )
    return seconds


# ---------------------------------------------------------------------- checks in advance


async def check_warm(launch: Launch) -> str:
    """Check whether workers of this launch can be warm, without importing the modules.

    Returns why they must start cold although the request is valid, or an empty string. Raises
    `InvalidRequestError` if they can never be warm on this node.
    """
    given = f"--warm={','.join(launch.warm)}"
    if launch.no_python:
        raise InvalidRequestError(
            f"{given} and --no-python exclude each other: only an interpreter can be "
            "forked; leave one of them out"
        )
    _wait_s(launch.environ)
    try:
        answer = await _ask(launch)
    except (OSError, TimeoutError) as error:
        return f"{launch.python} does not list its modules: {str(error) or 'no answer in time'}"
    try:
        checked = json.loads(answer.strip().rpartition(b"\n")[2])
        refused, missing = checked.get("refused"), dict(checked.get("missing", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidRequestError(
            f"{given}: {launch.python} runs no sitecustomize from PYTHONPATH (is it a "
            "wrapper that clears the environment, or uses -E, -I or -S?); leave --warm "
            "out"
        ) from error
    if refused:
        raise InvalidRequestError(f"{given}: {launch.python}: {refused}; leave --warm out")
    for name, why in missing.items():
        raise InvalidRequestError(
            f"{given}: {launch.python} has no {name}: {why}; install it there, or leave it out"
        )
    return ""


async def _ask(launch: Launch) -> bytes:
    script = "-m" if launch.module else "-c" if launch.run_path else launch.script
    with started_as(launch.account) as how:
        _, answer, _ = await ask_spared(
            launch.python,
            # If the interpreter ignores the zygote's entry point, this runs instead of the script.
            *("-u", "-c", "print('no')"),
            timeout_s=ASK_TIMEOUT_S,
            env=zygote_environ(launch.environ, {"check": preloaded(launch.warm), "script": script}),
            chdir=launch.chdir,
            **how,
        )
    return answer
