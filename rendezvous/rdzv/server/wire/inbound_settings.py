"""Converts settings and labels from nodes and operators to bounded and validated values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rdzv.core.model import ScaleUp, Settings
from rdzv.server.settings import bounds
from rdzv.v1 import rdzv_pb2 as pb

_SCALE_UPS: Mapping[int, ScaleUp] = {
    pb.SCALE_UP_UNSPECIFIED: ScaleUp.EAGER,
    pb.SCALE_UP_EAGER: ScaleUp.EAGER,
    pb.SCALE_UP_ON_RESTART: ScaleUp.ON_RESTART,
    pb.SCALE_UP_AFTER: ScaleUp.AFTER,
}
_DEFAULT = Settings(min_nodes=1, max_nodes=1)
_WORKER_END = re.compile(r"[0-9]{1,3}|(?:[^\W\d]\w*\.)*[^\W\d]\w*")
_LABEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


def settings_of(message: pb.Settings) -> Settings:
    """Read a run's settings."""
    min_nodes, max_nodes = nnodes_of(message, "--nnodes: ")
    return Settings(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=bounds.within(
            "--max-restarts: max_restarts", message.max_restarts, 0, bounds.RESTARTS
        )
        if message.HasField("max_restarts")
        else None,
        join_timeout_ms=bounds.within(
            "join_timeout_ms", message.join_timeout_ms, 1, bounds.TIMEOUT_MS
        ),
        last_call_timeout_ms=bounds.within(
            "last_call_timeout_ms", message.last_call_timeout_ms, 0, bounds.TIMEOUT_MS
        ),
        scale_up=bounds.one_of("scale_up", message.scale_up, _SCALE_UPS),
        restart_window_ms=bounds.within(
            "restart_window_ms", message.restart_window_ms, 0, bounds.TIMEOUT_MS
        ),
        scale_up_after_ms=bounds.within(
            "scale_up_after_ms", message.scale_up_after_ms, 0, bounds.TIMEOUT_MS
        ),
        restart_backoff_ms=_backoff_ms(message, "restart_backoff_ms"),
        restart_backoff_max_ms=_backoff_ms(message, "restart_backoff_max_ms"),
        max_preemptions=_budget(message, "max_preemptions"),
        max_store_failures=_budget(message, "max_store_failures"),
        no_progress_restarts=bounds.within(
            "no_progress_restarts", message.no_progress_restarts, 0, bounds.RESTARTS
        ),
        restart_on=_worker_ends("restart_on", message.restart_on),
        no_restart_on=_worker_ends("no_restart_on", message.no_restart_on),
    )


def _worker_ends(what: str, names: Sequence[str]) -> tuple[str, ...]:
    if len(names) > bounds.WORKER_ENDS:
        raise bounds.refusal(what, len(names), "are too many", f"give at most {bounds.WORKER_ENDS}")
    allowed = "exit codes, and types of exceptions as in a traceback"
    checked = (bounds.spelled(what, n, _WORKER_END, bounds.NAME_CHARS, allowed) for n in names)
    return tuple(sorted(set(checked)))


def _backoff_ms(message: pb.Settings, name: str) -> int:
    """Read a backoff time, or return the server's default if it is not set."""
    if not message.HasField(name):  # type: ignore[arg-type]
        return int(getattr(_DEFAULT, name))
    return bounds.within(name, getattr(message, name), 0, bounds.TIMEOUT_MS)


def _budget(message: pb.Settings, name: str) -> int | None:
    """Read how many rounds may end for one cause, or return None if there is no limit."""
    if not message.HasField(name):  # type: ignore[arg-type]
        return None
    return bounds.within(name, getattr(message, name), 0, bounds.RESTARTS)


def nnodes_of(message: pb.Settings | pb.ScaleJobRequest, flag: str = "") -> tuple[int, int]:
    """Read `min_nodes` and `max_nodes`. In errors, `flag` precedes their names."""
    most = bounds.NODES_PER_JOB
    min_nodes = bounds.within(f"{flag}min_nodes", message.min_nodes, 1, most)
    max_nodes = bounds.within(f"{flag}max_nodes", message.max_nodes, 1, most)
    if min_nodes > max_nodes:
        reason = f"is above max_nodes {max_nodes}"
        raise bounds.refusal(f"{flag}min_nodes", min_nodes, reason, "give MIN:MAX")
    return min_nodes, max_nodes


def labels_of(messages: Sequence[pb.Label]) -> tuple[tuple[str, str], ...]:
    """Read labels and return them sorted by name."""
    if len(messages) > bounds.LABELS:
        raise bounds.refusal(
            "labels", len(messages), "are too many", f"give at most {bounds.LABELS}"
        )
    allowed = "letters, digits and . _ / -"
    labels = {}
    for label in messages:
        name = bounds.spelled("label", label.name, _LABEL_NAME, bounds.NAME_CHARS, allowed)
        if name in labels:
            raise bounds.refusal("label", name, "is given twice", "give it once")
        labels[name] = bounds.label(f"label {name}", label.value)
    return tuple(sorted(labels.items()))
