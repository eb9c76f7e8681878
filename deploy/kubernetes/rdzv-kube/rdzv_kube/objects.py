"""Parses Kubernetes nodes and pods from the API's JSON.

A field that is missing or has the wrong type is treated as unset: the API server validates its
objects, and a watcher that stopped at an invalid object would protect no node.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rdzv.structs import struct

Json = Mapping[str, Any]

DISRUPTION = "DisruptionTarget"
"""The condition on a pod that Kubernetes is about to delete, for example to evict or preempt it."""

DEFAULT_GRACE_S = 30.0
"""The grace period of a pod that specifies none."""


@struct(frozen=True)
class Taint:
    """A taint on a Kubernetes node."""

    key: str
    effect: str = ""


@struct(frozen=True)
class Machine:
    """A Kubernetes node, called a machine here because a pod may also be a node of rdzvd."""

    name: str
    unschedulable: bool = False
    deleting: bool = False
    taints: tuple[Taint, ...] = ()
    conditions: tuple[str, ...] = ()
    """The types of the conditions that are true."""


@struct(frozen=True)
class Pod:
    """A pod that is one of rdzvd's nodes because an rdzvrun runs in it."""

    namespace: str
    name: str
    machine: str = ""
    """The Kubernetes node on which the pod runs; empty until it is scheduled."""
    grace_s: float = DEFAULT_GRACE_S
    killed_at_s: float | None = None
    """When the pod will be killed, as the API server's Unix time; None unless it is being
    deleted."""
    disrupted: str = ""
    """Why Kubernetes is about to delete the pod; empty if it is not."""
    ended: bool = False
    """Whether all of the pod's containers have ended."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@struct(frozen=True)
class Cluster:
    """The known state of a cluster."""

    machines: tuple[Machine, ...] = ()
    pods: tuple[Pod, ...] = ()
    current: bool = True
    """Whether the state is up to date; if it is not, no drain or cordon is lifted."""


def key_of(item: Json) -> str:
    metadata = _table(item, "metadata")
    return f"{_text(metadata, 'namespace')}/{_text(metadata, 'name')}"


def machine_of(item: Json) -> Machine:
    """Parse a Kubernetes node."""
    metadata, spec = _table(item, "metadata"), _table(item, "spec")
    return Machine(
        _text(metadata, "name"),
        unschedulable=spec.get("unschedulable") is True,
        deleting=bool(_text(metadata, "deletionTimestamp")),
        taints=tuple(Taint(_text(t, "key"), _text(t, "effect")) for t in _tables(spec, "taints")),
        conditions=tuple(_text(condition, "type") for condition in _true_conditions(item)),
    )


def pod_of(item: Json) -> Pod:
    metadata, spec, status = (_table(item, key) for key in ("metadata", "spec", "status"))
    grace = metadata.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds"))
    disruption = next((c for c in _true_conditions(item) if c.get("type") == DISRUPTION), None)
    why = _text(disruption, "message") or _text(disruption, "reason") if disruption else ""
    return Pod(
        _text(metadata, "namespace"),
        _text(metadata, "name"),
        _text(spec, "nodeName"),
        grace_s=float(grace) if isinstance(grace, int | float) else DEFAULT_GRACE_S,
        killed_at_s=_unix_s(_text(metadata, "deletionTimestamp")),
        disrupted=(why or DISRUPTION) if disruption is not None else "",
        ended=_text(status, "phase") in ("Succeeded", "Failed"),
    )


def _true_conditions(item: Json) -> list[Json]:
    conditions = _tables(_table(item, "status"), "conditions")
    return [condition for condition in conditions if condition.get("status") == "True"]


def _table(item: Json, key: str) -> Json:
    found = item.get(key)
    return found if isinstance(found, dict) else {}


def _tables(item: Json, key: str) -> list[Json]:
    found = item.get(key)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _text(item: Json, key: str) -> str:
    found = item.get(key)
    return found if isinstance(found, str) else ""


def _unix_s(text: str) -> float | None:
    """Parse a Kubernetes timestamp, or return None if it is empty or invalid.

    >>> _unix_s("2026-11-23T10:00:00Z"), _unix_s("")
    (1795428000.0, None)
    """
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None
