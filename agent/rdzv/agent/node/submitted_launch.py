"""The launch of a submitted job that was placed on this node.

It inherits nothing: its environment comes from the node's settings and the submission, its GPUs
from the node's ledger. Of the agent's own variables it gets only those that the settings name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rdzv.agent.cli.options import parse_launch
from rdzv.agent.core.model import JobTerms
from rdzv.agent.launch.launch import Launch, Output, ask_count_devices, count_cpus
from rdzv.agent.system.accounts import Account
from rdzv.errors import InvalidRequestError
from rdzv.launch_options import flags
from rdzv.messages import Placed
from rdzv.structs import replace, struct
from rdzv.transport.endpoints import Endpoint

log = logging.getLogger("rdzv.agent")

SERVER_TIMEOUT_MS = 30 * 86_400_000
"""As good as for ever: only the server can place another job, and a job that succeeded here would
be placed here again."""


@struct(frozen=True)
class Surroundings:
    """The part of a launch that this node provides for every submitted job."""

    node_id: str
    endpoints: tuple[Endpoint, ...]
    environ: Mapping[str, str]
    address: str = ""
    """Where other nodes reach this one; empty: where it reaches the server from."""
    topology: str = ""
    progress_dir: Path | None = None
    snapshot_memory: int | None = None
    """The most bytes for each job's snapshots; None: no limit."""


@struct(frozen=True)
class Share:
    """The part of this node that one submitted job gets."""

    gpus: Sequence[str] | None
    """The UUIDs of its GPUs, or None on a node that has no GPUs."""
    run_dir: Path
    account: Account | None = None
    """The account under which it runs, or None for the agent's own."""


def passed_on(environ: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    """Pick variables by name; a pattern may end with a star.

    >>> passed_on({"LC_ALL": "C", "SECRET": "x", "HOME": "/root"}, ["HOME", "LC_*"])
    {'LC_ALL': 'C', 'HOME': '/root'}
    """
    names = tuple(pattern for pattern in patterns if not pattern.endswith("*"))
    starts = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
    return {
        name: value for name, value in environ.items() if name in names or name.startswith(starts)
    }


def working_directory(placed: Placed, around: Surroundings, account: Account | None = None) -> Path:
    if placed.spec.chdir:
        return Path(placed.spec.chdir)
    return Path(around.environ.get("HOME") or "/" if account is None else account.home)


def job_environ(placed: Placed, around: Surroundings, share: Share) -> dict[str, str]:
    # Variables passed on from this agent may name its account, which is not the job's.
    own = {} if share.account is None else share.account.environ
    environ = {**around.environ, **own, **dict(placed.spec.env)}
    if share.gpus is not None:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
    return environ


async def make_launch(
    placed: Placed, around: Surroundings, share: Share, counted: int = 0
) -> Launch:
    """Parse the submitted rdzvrun arguments, within this node's limits.

    The workers' output goes only to files, because a daemon has no console. `counted` is the number
    of workers if the arguments ask for one per device, or 0 if it is not known yet.
    """
    environ = job_environ(placed, around, share)
    chdir = working_directory(placed, around, share.account)
    args = [
        "--rdzv-backend=rdzv",
        f"--rdzv-endpoint={','.join(map(str, around.endpoints))}",
        f"--rdzv-id={placed.rdzv_id}",
        f"--node-id={around.node_id}",
        *([f"--local-addr={around.address}"] if around.address else []),
        *([f"--topology={around.topology}"] if around.topology else []),
        *placed.spec.args,
    ]
    flags.refuse_answers(placed.spec.args)
    kind = flags.parse(args, environ).nproc_per_node
    launch, meeting = parse_launch(args, environ=environ, chdir=chdir, counted=counted or 1)
    if isinstance(kind, str) and not counted:
        size = count_cpus()
        if kind != "cpu":
            size = await ask_count_devices(kind, launch.python, environ, share.account)
        launch, meeting = parse_launch(args, environ=environ, chdir=chdir, counted=size)
    job = launch.job
    if (job.rdzv_id, job.node_id) != (placed.rdzv_id, around.node_id) or (
        meeting.endpoints != around.endpoints
    ):
        raise InvalidRequestError(
            f"the arguments {list(placed.spec.args)} name their own job, node or server; "
            "leave --rdzv-id, --node-id, --rdzv-endpoint, --rdzv-backend and "
            "--standalone out"
        )
    limits = [one for one in (launch.snapshot_memory, around.snapshot_memory) if one is not None]
    return replace(
        launch,
        job=replace(job, server_timeout_ms=SERVER_TIMEOUT_MS),
        output=_to_files(launch.output, job.local_world_size, share.run_dir),
        progress_dir=around.progress_dir,
        snapshot_memory=min(limits, default=None),
        account=share.account,
    )


def bare_launch(placed: Placed, around: Surroundings, share: Share, job: JobTerms) -> Launch:
    """Return a launch that is sufficient to supervise running workers, but not to start others."""
    return Launch(
        job,
        script="",
        environ=job_environ(placed, around, share),
        account=share.account,
        progress_dir=around.progress_dir,
        output=Output(run_dir=share.run_dir),
    )


def _to_files(output: Output, local_world_size: int, run_dir: Path) -> Output:
    if output.stdout_filters or output.stderr_filters:
        log.warning(
            "--duplicate-stdout-filters and related options have no effect for submitted jobs"
        )
    everything = dict.fromkeys(range(local_world_size), 3)
    if output.log_dir is None and not output.logs_specs:
        output = replace(output, run_dir=run_dir)
    return replace(
        output,
        redirects=everything,
        tee={},
        stdout_filters=(),
        stderr_filters=(),
        # Logs specs may still name files to be teed; nothing here reads them.
        console=False,
    )
