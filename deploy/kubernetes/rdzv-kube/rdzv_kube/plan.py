"""Decides which of rdzvd's nodes to drain and cordon, based only on the cluster and those nodes.

One of rdzvd's nodes is either a machine (a DaemonSet's agent, named after the machine) or a pod
(rdzvrun, named after the pod, or after the pod and its process id). Our own drains and cordons are
those whose reason begins with `MARK`, so no state is kept between plans.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rdzv.structs import struct
from rdzv.view.answers import Node
from rdzv_kube.objects import Cluster, Machine, Pod

MARK = "Kubernetes: "
"""The prefix of the reasons that rdzv-kube gives for its drains and cordons."""

LEAVING_TAINTS = (
    "node.kubernetes.io/out-of-service",
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
)
"""The taints that cause a machine to be drained, unless the command line names others."""

MARGIN_S = 5.0
"""How long before kubelet kills the pod a drain ends: rdzvd gives workers 5 s between SIGTERM and
SIGKILL."""

LEAST_S = 1.0
"""The shortest drain deadline."""

SOONER_S = 3.0
"""A new deadline replaces a running drain's deadline only if it is earlier by more than this."""


@struct(frozen=True)
class Rules:
    """The rules for which machines to drain and how much time their workers have."""

    taints: frozenset[str] = frozenset(LEAVING_TAINTS)
    conditions: frozenset[str] = frozenset()
    """The condition types that cause a machine to be drained while they are true."""
    deadline_s: float = 300.0
    """The deadline for an agent's workers; a pod's workers have the pod's grace period instead."""


@struct(frozen=True)
class Drain:
    """A command to drain a node, or to bring forward the deadline of its running drain."""

    node_id: str
    deadline_s: float
    reason: str


@struct(frozen=True)
class Cordon:
    """A command to stop placing submitted jobs on a node."""

    node_id: str
    reason: str


@struct(frozen=True)
class Lift:
    """A command to lift our drain and, with `cordon`, the cordon, which must be ours, too."""

    node_id: str
    cordon: bool = False


Command = Drain | Cordon | Lift


@struct(frozen=True)
class Plan:
    """The commands for rdzvd, and warnings about nodes that share a name."""

    commands: tuple[Command, ...] = ()
    doubts: tuple[str, ...] = ()


@struct(frozen=True)
class _Wish:
    """A node's desired state: a drain, or a cordon if there is no deadline."""

    reason: str
    deadline_s: float | None = None


def decide(cluster: Cluster, nodes: Sequence[Node], rules: Rules, now_s: float) -> Plan:
    """Return the commands that bring rdzvd's nodes to the state that the cluster requires.

    A drain is never extended, and other people's drains are left alone. Once the commands have
    taken effect, the next plan is empty.
    """
    machines = {machine.name: machine for machine in cluster.machines}
    pods: dict[str, list[Pod]] = {}
    for pod in cluster.pods:
        pods.setdefault(pod.name, []).append(pod)
    commands: list[Command] = []
    doubts: list[str] = []
    for node in sorted(nodes, key=lambda node: node.node_id):
        found = _found(node, machines, pods)
        if len(found) > 1:
            doubts.append(_doubt(node, found))
            continue
        wish = _wish_for(found[0], machines, rules, now_s) if found else None
        commands += _commands(node, wish, lifts=cluster.current)
    return Plan(tuple(commands), tuple(doubts))


def _found(
    node: Node, machines: Mapping[str, Machine], pods: Mapping[str, Sequence[Pod]]
) -> list[Machine | Pod]:
    name = node.node_id
    found: list[Machine | Pod] = [*pods.get(name, ())]
    if name in machines:
        found.append(machines[name])
    if found or node.program != "rdzvrun":
        return found
    # By default, rdzvrun's node id consists of its host name (the pod's name) and its process id.
    return [*pods.get(re.sub(r"-[0-9]+$", "", name), ())]


def _doubt(node: Node, found: Sequence[Machine | Pod]) -> str:
    names = ", ".join(f"pod {one}" if isinstance(one, Pod) else f"node {one.name}" for one in found)
    return (
        f"{node.node_id} may be any of {names}, so it is not drained; give each its own name, with "
        "--node-id=$(POD).$(NAMESPACE), or follow one namespace with --namespace"
    )


def _wish_for(
    found: Machine | Pod, machines: Mapping[str, Machine], rules: Rules, now_s: float
) -> _Wish | None:
    """Return the desired state of the node on this machine or pod, or None if there is none."""
    if isinstance(found, Machine):
        if why := _leaving(found, rules):
            return _Wish(f"{MARK}node {found.name} {why}", rules.deadline_s)
        if found.unschedulable:
            return _Wish(f"{MARK}node {found.name} is unschedulable")
        return None
    if found.ended:
        return None
    where = f"pod {found}" + (f" on node {found.machine}" if found.machine else "")
    if found.killed_at_s is not None:
        # The two clocks may differ, but the pod never has more than its grace period.
        left_s = min(found.killed_at_s - now_s, found.grace_s)
        why = f" ({found.disrupted})" if found.disrupted else ""
        return _Wish(f"{MARK}{where} is being deleted{why}", _less_margin(left_s))
    if found.disrupted:
        why = f"is about to be deleted ({found.disrupted})"
        return _Wish(f"{MARK}{where} {why}", _less_margin(found.grace_s))
    machine = machines.get(found.machine)
    if machine is not None and (why := _leaving(machine, rules)):
        return _Wish(f"{MARK}{where}, which {why}", _less_margin(found.grace_s))
    return None


def _leaving(machine: Machine, rules: Rules) -> str:
    """Return why a machine is about to be removed; empty if it is staying."""
    if machine.deleting:
        return "is being deleted"
    taints = sorted({taint.key for taint in machine.taints} & rules.taints)
    if taints:
        return f"has the taint {' and '.join(taints)}"
    conditions = sorted(rules.conditions.intersection(machine.conditions))
    return f"has the condition {' and '.join(conditions)}" if conditions else ""


def _less_margin(grace_s: float) -> float:
    return max(LEAST_S, grace_s - MARGIN_S)


def _commands(node: Node, wish: _Wish | None, *, lifts: bool) -> list[Command]:
    name, drained = node.node_id, node.drain is not None and node.drained_by_operator
    drain_is_ours = drained and (node.drain_reason or "").startswith(MARK)
    cordon_is_ours = node.cordoned and (node.cordon_reason or "").startswith(MARK)
    if wish is not None and wish.deadline_s is not None:
        left_s = (node.drain_left_ms or 0) / 1000
        sooner = drain_is_ours and wish.deadline_s < left_s - SOONER_S
        return [Drain(name, wish.deadline_s, wish.reason)] if node.drain is None or sooner else []
    cordon = [Cordon(name, wish.reason)] if wish is not None else []
    if not node.cordoned and node.drain is None:
        return [*cordon]
    if not drained:
        return [Lift(name, cordon=True)] if cordon_is_ours and wish is None and lifts else []
    if not drain_is_ours or not lifts:
        return []
    if node.cordoned_besides:
        return [Lift(name, cordon=cordon_is_ours and wish is None)]
    return [Lift(name), *cordon]
