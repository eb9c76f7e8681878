"""What rdzv-kube asks of rdzvd, as tables: a cluster and rdzvd's nodes, and the commands."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import rdzv_kube
from hypothesis import given
from hypothesis import strategies as st
from rdzv_kube.objects import Cluster, Machine, Pod, Taint, machine_of, pod_of
from rdzv_kube.plan import Command, Cordon, Drain, Lift, Rules, decide

from rdzv.structs import replace
from rdzv.view.answers import Node

NOW_S = 1_795_428_000.0
OUT = Taint("node.kubernetes.io/out-of-service", "NoExecute")
POD = Pod("team-a", "train-0", "gpu-7", grace_s=60)
IN_POD = "Kubernetes: pod team-a/train-0 on node gpu-7"


def node(node_id: str, **more: Any) -> Node:
    """Return a node that rdzvd knows; `drain` is the reason of an operator's, with its time."""
    known: dict[str, Any] = {
        **{"node_id": node_id, "state": "connected", "state_age_ms": 0, "program": "rdzvrun"},
        **{"address": None, "agent_version": None, "resources": None, "gpus_free": None},
        **{"jobs": (), "cordoned": False, "cordon_reason": None, "cordon_age_ms": None},
    }
    return Node(**known | more)


def agent(node_id: str = "gpu-7", **more: Any) -> Node:
    return node(node_id, program="rdzv-agent", **more)


def cordoned(reason: str) -> dict[str, Any]:
    return {"cordoned": True, "cordon_reason": reason, "cordon_age_ms": 0}


def drained(reason: str, left_s: float = 100) -> dict[str, Any]:
    drain = {"drain": "draining", "drain_reason": reason, "drained_by_operator": True}
    return {**cordoned(reason), **drain, "drain_left_ms": round(left_s * 1000)}


def besides(reason: str) -> dict[str, Any]:
    """Return what a drained node has if it is cordoned, too."""
    return {"cordon_reason": reason, "cordoned_besides": True}


def leaving(reason: str = "preempted") -> dict[str, Any]:
    return {"drain": "draining", "drain_reason": reason, "drain_left_ms": 20_000}


def commands(cluster: Cluster, *nodes: Node, rules: Rules | None = None) -> tuple[Command, ...]:
    found = decide(cluster, nodes, rules or Rules(), NOW_S)
    assert not found.doubts
    return found.commands


def one(found: Machine | Pod, *others: Machine) -> Cluster:
    if isinstance(found, Machine):
        return Cluster((found, *others))
    return Cluster(others, (found,))


TAINTED = "Kubernetes: node gpu-7 has the taint node.kubernetes.io/out-of-service"
CLOSED = "Kubernetes: node gpu-7 is unschedulable"
DELETED = f"{IN_POD} is being deleted"

DECISIONS: list[tuple[str, Machine | Pod, Node, tuple[Command, ...]]] = [
    ("all is well", Machine("gpu-7"), agent(), ()),
    ("a pod is well", POD, node("train-0"), ()),
    ("a taint", Machine("gpu-7", taints=(OUT,)), agent(), (Drain("gpu-7", 300, TAINTED),)),
    ("another taint", Machine("gpu-7", taints=(Taint("team", "NoSchedule"),)), agent(), ()),
    ("unschedulable", Machine("gpu-7", unschedulable=True), agent(), (Cordon("gpu-7", CLOSED),)),
    (
        "deleted",
        Machine("gpu-7", deleting=True),
        agent(),
        (Drain("gpu-7", 300, "Kubernetes: node gpu-7 is being deleted"),),
    ),
    (
        "a pod that is deleted has what is left of its grace period, less what its end takes",
        Pod("team-a", "train-0", "gpu-7", grace_s=60, killed_at_s=NOW_S + 40),
        node("train-0"),
        (Drain("train-0", 35, DELETED),),
    ),
    (
        "a clock that is behind gives no more than the grace period",
        Pod("team-a", "train-0", "gpu-7", grace_s=60, killed_at_s=NOW_S + 4_000),
        node("train-0"),
        (Drain("train-0", 55, DELETED),),
    ),
    (
        "a clock that is ahead leaves a moment",
        Pod("team-a", "train-0", "gpu-7", grace_s=60, killed_at_s=NOW_S - 4_000),
        node("train-0"),
        (Drain("train-0", 1, DELETED),),
    ),
    (
        "a pod that is about to be deleted",
        Pod("team-a", "train-0", "gpu-7", grace_s=60, disrupted="preempted by a pod"),
        node("train-0"),
        (Drain("train-0", 55, f"{IN_POD} is about to be deleted (preempted by a pod)"),),
    ),
    ("a pod that has ended", Pod("team-a", "train-0", ended=True), node("train-0"), ()),
    (
        "by its host and process id",
        Pod("team-a", "train-0", "gpu-7", grace_s=60, disrupted="x"),
        node("train-0-17"),
        (Drain("train-0-17", 55, f"{IN_POD} is about to be deleted (x)"),),
    ),
    # Already there.
    ("drained by us", Machine("gpu-7", taints=(OUT,)), agent(**drained(TAINTED)), ()),
    ("drained by ada", Machine("gpu-7", taints=(OUT,)), agent(**drained("by ada")), ()),
    ("leaves by itself", Machine("gpu-7", taints=(OUT,)), agent(**leaving()), ()),
    ("cordoned by us", Machine("gpu-7", unschedulable=True), agent(**cordoned(CLOSED)), ()),
    ("cordoned by ada", Machine("gpu-7", unschedulable=True), agent(**cordoned("by ada")), ()),
    (
        "a cordon of ours becomes a drain",
        Machine("gpu-7", unschedulable=True, taints=(OUT,)),
        agent(**cordoned(CLOSED)),
        (Drain("gpu-7", 300, TAINTED),),
    ),
    (
        "a sooner end brings the deadline forward",
        Pod("team-a", "train-0", "gpu-7", grace_s=60, killed_at_s=NOW_S + 20),
        node("train-0", **drained(f"{IN_POD} is about to be deleted (x)", 50)),
        (Drain("train-0", 15, DELETED),),
    ),
    (
        "the same end, seen a little later",
        Pod("team-a", "train-0", "gpu-7", grace_s=60, killed_at_s=NOW_S + 20),
        node("train-0", **drained(DELETED, 16)),
        (),
    ),
    # No longer needed.
    ("a drain of ours", Machine("gpu-7"), agent(**drained(TAINTED)), (Lift("gpu-7"),)),
    (
        "a cordon of ours",
        Machine("gpu-7"),
        agent(**cordoned(CLOSED)),
        (Lift("gpu-7", cordon=True),),
    ),
    ("a drain of ada's", Machine("gpu-7"), agent(**drained("by ada")), ()),
    ("a cordon of ada's", Machine("gpu-7"), agent(**cordoned("by ada")), ()),
    ("ours, without its machine", Machine("x"), agent(**drained(TAINTED)), (Lift("gpu-7"),)),
    (
        "ours, without its pod",
        Machine("gpu-7"),
        node("train-0", state="gone", program=None, **drained(DELETED, 0)),
        (Lift("train-0"),),
    ),
    (
        "a drain of ours becomes a cordon",
        Machine("gpu-7", unschedulable=True),
        agent(**drained(TAINTED)),
        (Lift("gpu-7"), Cordon("gpu-7", CLOSED)),
    ),
    # A person's cordon stays when the drain is over, and so does ours while it is wanted.
    (
        "a machine that ada has cordoned goes",
        Machine("gpu-7", taints=(OUT,)),
        agent(**cordoned("by ada")),
        (Drain("gpu-7", 300, TAINTED),),
    ),
    (
        "and stays after all",
        Machine("gpu-7"),
        agent(**drained(TAINTED) | besides("by ada")),
        (Lift("gpu-7"),),
    ),
    (
        "also where we would cordon it",
        Machine("gpu-7", unschedulable=True),
        agent(**drained(TAINTED) | besides("by ada")),
        (Lift("gpu-7"),),
    ),
    (
        "a drain and a cordon of ours",
        Machine("gpu-7"),
        agent(**drained(TAINTED) | besides(CLOSED)),
        (Lift("gpu-7", cordon=True),),
    ),
    (
        "of which the cordon is still wanted",
        Machine("gpu-7", unschedulable=True),
        agent(**drained(TAINTED) | besides(CLOSED)),
        (Lift("gpu-7"),),
    ),
    (
        "a cordon of ours under ada's drain",
        Machine("gpu-7"),
        agent(**drained("by ada") | besides(CLOSED)),
        (),
    ),
]


@pytest.mark.parametrize(
    ("found", "known", "wanted"), [d[1:] for d in DECISIONS], ids=[d[0] for d in DECISIONS]
)
def test_a_decision(found: Machine | Pod, known: Node, wanted: tuple[Command, ...]) -> None:
    assert commands(one(found), known) == wanted


def test_a_pod_goes_with_its_machine_within_its_own_grace_period() -> None:
    machine = Machine("gpu-7", taints=(OUT,))
    why = f"{IN_POD}, which has the taint node.kubernetes.io/out-of-service"
    assert commands(one(POD, machine), node("train-0")) == (Drain("train-0", 55, why),)
    assert commands(one(POD, Machine("gpu-7", unschedulable=True)), node("train-0")) == ()


def test_nothing_is_lifted_while_the_cluster_is_not_followed() -> None:
    """The last known state may be old; its commands are sent all the same."""
    blind = Cluster((Machine("gpu-7"), Machine("gpu-8", taints=(OUT,))), current=False)
    reason = "Kubernetes: node gpu-8 has the taint node.kubernetes.io/out-of-service"
    assert commands(blind, agent(**drained(TAINTED)), agent("gpu-8")) == (
        Drain("gpu-8", 300, reason),
    )


def test_taints_and_conditions_are_chosen() -> None:
    rules = Rules(frozenset({"team/leaving"}), frozenset({"KernelDeadlock"}), deadline_s=20)
    sick = Machine("a", conditions=("Ready", "KernelDeadlock"))
    machines = (sick, Machine("b", taints=(OUT,)), Machine("c", taints=(Taint("team/leaving"),)))
    assert commands(Cluster(machines), *map(agent, "abc"), rules=rules) == (
        Drain("a", 20, "Kubernetes: node a has the condition KernelDeadlock"),
        Drain("c", 20, "Kubernetes: node c has the taint team/leaving"),
    )


def test_nodes_that_share_a_name_are_not_drained_by_guess() -> None:
    doomed = Pod("team-b", "train-0", "gpu-8", disrupted="evicted")
    found = decide(Cluster((), (POD, doomed)), [node("train-0")], Rules(), NOW_S)
    assert found.commands == ()
    assert found.doubts == (
        "train-0 may be any of pod team-a/train-0, pod team-b/train-0, so it is not drained; give "
        "each its own name, with --node-id=$(POD).$(NAMESPACE), or follow one namespace with "
        "--namespace",
    )


def test_an_agent_is_not_taken_for_a_pod_by_its_number() -> None:
    assert commands(one(Pod("team-a", "gpu", disrupted="x")), agent("gpu-7")) == ()


def after(known: Node, command: Command) -> Node:
    """Return rdzvd's state after a command."""
    has_drain = known.drain is not None and known.drained_by_operator
    has_cordon = known.cordoned_besides or (known.cordoned and not has_drain)
    match command:
        case Drain(_, deadline_s, reason):
            change = drained(reason, deadline_s)
            if has_cordon:
                change |= besides(known.cordon_reason or "")
        case Cordon(_, reason):
            change = besides(reason) if has_drain else cordoned(reason)
        case Lift(_, cordon):
            none = {"drain": None, "drain_reason": None, "drain_left_ms": None}
            change = {**none, "drained_by_operator": False, "cordoned_besides": False}
            if cordon or not has_cordon:
                change |= {"cordoned": False, "cordon_reason": None}
    return replace(known, **change)


MACHINES = st.builds(
    Machine,
    st.just("gpu-7"),
    unschedulable=st.booleans(),
    deleting=st.booleans(),
    taints=st.sampled_from([(), (OUT,)]),
)
PODS = st.builds(
    Pod,
    st.just("team-a"),
    st.just("train-0"),
    st.just("gpu-7"),
    killed_at_s=st.none() | st.floats(NOW_S - 100, NOW_S + 100),
    disrupted=st.sampled_from(["", "evicted"]),
    ended=st.booleans(),
)
ORDERS = st.sampled_from(
    [
        *({}, cordoned("by ada"), drained("by ada", 5), leaving()),
        drained("by ada", 5) | besides("by eve"),
    ]
)


@pytest.mark.slow
@given(st.lists(MACHINES, max_size=1), st.lists(PODS, max_size=1), ORDERS, ORDERS)
def test_a_plan_is_carried_out_once_and_takes_back_only_its_own(
    machines: list[Machine], pods: list[Pod], of_agent: dict[str, Any], of_pod: dict[str, Any]
) -> None:
    """A second look at the same state sends nothing; in the end, all is as before."""
    before = {one.node_id: one for one in (agent(**of_agent), node("train-0", **of_pod))}
    known = dict(before)
    for cluster in (Cluster(tuple(machines), tuple(pods)), Cluster((Machine("gpu-7"),))):
        for command in commands(cluster, *known.values()):
            known[command.node_id] = after(known[command.node_id], command)
        assert commands(cluster, *known.values()) == ()
    for name, now in known.items():
        then = before[name]
        assert (now.cordoned, now.drain, now.cordon_reason, now.cordoned_besides) == (
            *(then.cordoned, then.drain),
            *(then.cordon_reason, then.cordoned_besides),
        )


def test_objects_are_read_from_json_and_odd_ones_do_no_harm() -> None:
    read = machine_of(
        {
            "metadata": {"name": "gpu-7", "deletionTimestamp": "2026-11-23T10:00:00Z"},
            "spec": {"unschedulable": True, "taints": [{"key": "k", "effect": "NoExecute"}, 4]},
            "status": {
                "conditions": [
                    {"type": "Ready", "status": "True"},
                    {"type": "DiskPressure", "status": "False"},
                ]
            },
        }
    )
    assert read == Machine("gpu-7", True, True, (Taint("k", "NoExecute"),), ("Ready",))
    pod = pod_of(
        {
            "metadata": {
                "namespace": "team-a",
                "name": "train-0",
                "deletionTimestamp": "2026-11-23T10:00:00Z",
                "deletionGracePeriodSeconds": 20,
            },
            "spec": {"nodeName": "gpu-7", "terminationGracePeriodSeconds": 60},
            "status": {
                "phase": "Running",
                "conditions": [
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "EvictionByAPI",
                    }
                ],
            },
        }
    )
    assert pod == Pod("team-a", "train-0", "gpu-7", 20, NOW_S, "EvictionByAPI")
    for odd in ({}, {"metadata": None, "spec": [], "status": {"conditions": {}}}):
        assert machine_of(odd) == Machine("")
        assert pod_of(odd) == Pod("", "")


def test_rdzvd_is_spoken_to_through_the_client_alone_and_plans_need_nothing() -> None:
    found: dict[str, set[str]] = {}
    for path in Path(rdzv_kube.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        found[path.name] = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    ours = {name for names in found.values() for name in names if name.startswith("rdzv.")}
    told = {"rdzv.client", "rdzv.transport.channels", "rdzv.errors", "rdzv.view.answers"}
    assert ours == {*told, "rdzv.runtime.log_format", "rdzv.structs", "rdzv.version"}
    pure = {"rdzv_kube.objects", "rdzv.structs", "rdzv.view.answers"}
    assert {name for name in found["plan.py"] if name.startswith("rdzv")} == pure
