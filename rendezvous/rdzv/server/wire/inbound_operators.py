"""Converts operators' requests to bounded and validated values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rdzv.core.commands import Restart, Scale, Stop, Submit
from rdzv.core.model import JobSpec
from rdzv.server.messages import LogPosition, LogsWanted
from rdzv.server.settings import bounds
from rdzv.server.settings.config import DAY_MS
from rdzv.server.wire.inbound_settings import labels_of, nnodes_of, settings_of
from rdzv.stores.base import HISTORY_ROWS
from rdzv.v1 import rdzv_pb2 as pb

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def stacks_wanted_of(message: pb.TakeStacksRequest) -> tuple[str, int | None]:
    """Read the run and round whose stacks are requested; a round of None means the last."""
    run = bounds.uid("run", message.run, needed=False)
    return run, message.round if message.HasField("round") else None


def logs_wanted_of(message: pb.ReadLogsRequest) -> LogsWanted:
    """Read which logs are requested; if neither stream is named, both are."""
    if len(message.positions) > bounds.LOG_POSITIONS:
        raise bounds.refusal(
            "positions",
            len(message.positions),
            "are too many",
            f"give at most {bounds.LOG_POSITIONS}",
        )
    both = not message.stdout and not message.stderr
    return LogsWanted(
        rank=message.rank if message.HasField("rank") else None,
        round=message.round if message.HasField("round") else None,
        stdout=message.stdout or both,
        stderr=message.stderr or both,
        follow=message.follow,
        tail_bytes=message.tail_bytes,
        tail_lines=message.tail_lines,
        run=bounds.uid("run", message.run, needed=False),
        positions=tuple(
            LogPosition(
                bounds.name("node_id", at.node_id),
                at.round,
                at.local_rank,
                at.stderr,
                at.offset,
            )
            for at in message.positions
        ),
    )


def submit_of(message: pb.SubmitJobRequest) -> Submit:
    settings = settings_of(message.settings)
    if settings.max_restarts is None:
        raise bounds.refusal(
            "max_restarts", None, "is not set", "give a number of restarts, from 0 on"
        )
    return Submit(
        run=bounds.uid("run", message.run),
        settings=settings,
        spec=_spec(message.spec),
        submitted_by=bounds.sentence(bounds.label("submitted_by", message.submitted_by))
        or "somebody",
    )


def _spec(message: pb.JobSpec) -> JobSpec:
    if not message.args:
        raise bounds.refusal("args", [], "are empty", "name a script")
    _sized("args", message.args, bounds.ARGS_BYTES)
    if "\0" in message.chdir or any("\0" in arg for arg in message.args):
        raise bounds.refusal("args", list(message.args), "have a NUL character", "leave it out")
    gpus = message.gpus_per_node if message.HasField("gpus_per_node") else None
    return JobSpec(
        args=tuple(message.args),
        env=_env(message.env),
        chdir=message.chdir,
        labels=labels_of(message.labels),
        priority=bounds.within("priority", message.priority, -bounds.PRIORITY, bounds.PRIORITY),
        gpus_per_node=None
        if gpus is None
        else bounds.within("--gpus-per-node: gpus_per_node", gpus, 0, bounds.GPUS),
        local_world_size=bounds.within(
            "--nproc-per-node: local_world_size",
            message.local_world_size,
            0,
            bounds.LOCAL_WORLD_SIZE,
        ),
        needs_gpu=message.needs_gpu,
        account=bounds.label("--user: account", message.account),
    )


def _env(messages: Sequence[pb.EnvironmentVariable]) -> tuple[tuple[str, str], ...]:
    """Read an environment. Values are never shown, not even in an error."""
    if len(messages) > bounds.ENV_VARIABLES:
        most = f"give at most {bounds.ENV_VARIABLES}"
        raise bounds.refusal("env", len(messages), "are too many variables", most)
    _sized("env", [text for one in messages for text in (one.name, one.value)], bounds.ENV_BYTES)
    allowed = "letters, digits and _, not beginning with a digit"
    env = {}
    for variable in messages:
        name = bounds.spelled("variable", variable.name, _VARIABLE, bounds.LABEL_CHARS, allowed)
        if "\0" in variable.value:
            raise bounds.refusal(
                "variable", name, "has a value with a NUL character", "leave it out"
            )
        env[name] = variable.value
    return tuple(env.items())


def _sized(what: str, texts: Iterable[str], most: int) -> None:
    size = sum(len(text.encode()) for text in texts)
    if size > most:
        remedy = f"give at most {most}; put larger data into a file"
        raise bounds.refusal(what, f"of {size} bytes", "is too large", remedy)


def cordon_of(message: pb.CordonNodeRequest) -> tuple[str, str]:
    return bounds.node_id_of(message.node_id), bounds.sentence(message.reason)


def drain_of(message: pb.DrainNodeRequest) -> tuple[str, int, str]:
    """Read the node to drain, the time allowed for it in ms, and the reason."""
    deadline_ms = bounds.within("deadline_ms", message.deadline_ms, 0, bounds.TIMEOUT_MS)
    reason = bounds.sentence(message.reason) or "an operator asked for it"
    return bounds.node_id_of(message.node_id), deadline_ms, reason


def stop_of(message: pb.StopJobRequest) -> Stop:
    """Read which run to end and why."""
    return Stop(bounds.uid("run", message.run), _wish(message.reason))


def restart_of(message: pb.RestartJobRequest) -> Restart:
    """Read which round to end and why."""
    run = bounds.uid("run", message.run)
    return Restart(run, message.round, _wish(message.reason))


def scale_of(message: pb.ScaleJobRequest) -> Scale:
    """Read a run's new bounds and the reason for the change."""
    run = bounds.uid("run", message.run)
    return Scale(run, *nnodes_of(message), _wish(message.reason))


def _wish(reason: str) -> str:
    return bounds.sentence(reason) or "an operator asked for it"


def history_limit(asked: int) -> int:
    """Read how many history rows are requested."""
    return bounds.within("limit", asked or bounds.HISTORY_DEFAULT, 1, HISTORY_ROWS)


TOKEN_LIFE_MOST_MS = 3_650 * DAY_MS
"""Ten years. A token needed for longer should not expire at all."""


def token_life_of(message: pb.CreateTokenRequest) -> int:
    """Read how long a token is valid, in ms, or 0 if it never expires."""
    return bounds.within("expires_in_ms", message.expires_in_ms, 0, TOKEN_LIFE_MOST_MS)
