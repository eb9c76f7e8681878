"""The loop of rdzv-kube with an rdzvd that comes and goes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, cast

import pytest
from rdzv_kube import reconciling
from rdzv_kube.following import Following
from rdzv_kube.objects import Machine, Pod, Taint
from rdzv_kube.plan import LEAVING_TAINTS, Rules
from rdzv_kube.reconciling import Reconciling

from rdzv.client import ControlClient
from rdzv.errors import RendezvousConnectionError, UnknownNodeError
from rdzv.structs import replace
from rdzv.view.answers import Node
from tests.support.kubernetes_stand_in import until
from tests.unit.kube.test_plan import agent, cordoned, drained, node


class Rdzvd:
    """The part of a server's nodes that the loop uses."""

    def __init__(self, *nodes: Node) -> None:
        self.known = {one.node_id: one for one in nodes}
        self.away = False
        self.calls: list[str] = []

    def __enter__(self) -> Rdzvd:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        pass

    def nodes(self) -> tuple[Node, ...]:
        if self.away:
            raise RendezvousConnectionError("no answer from head:29400")
        return tuple(self.known.values())

    def drain(self, node_id: str, deadline_ms: int, reason: str, *, force: bool) -> None:
        self._change("drain", node_id, drained(reason, deadline_ms / 1000))

    def cordon(self, node_id: str, reason: str) -> None:
        self._change("cordon", node_id, cordoned(reason))

    def undrain(self, node_id: str, reason: str, *, cordon: bool) -> None:
        none = {"drain": None, "drained_by_operator": False, "cordon_reason": None}
        self._change("lift", node_id, {**none, "cordoned": False})

    def _change(self, verb: str, node_id: str, change: dict[str, Any]) -> None:
        if node_id not in self.known:
            raise UnknownNodeError(f"no node {node_id} is known here")
        self.calls.append(f"{verb} {node_id}")
        self.known[node_id] = replace(self.known[node_id], **change)


class Seen:
    """The objects that are followed, without an API server."""

    def __init__(self, *objects: Machine | Pod) -> None:
        self.objects: tuple[Machine | Pod, ...] | None = objects
        self.trouble = ""


def reconcile(
    rdzvd: Rdzvd,
    machines: Seen,
    changed: threading.Event | None = None,
    pods: Seen | None = None,
) -> Reconciling:
    return Reconciling(
        cast(Following[Machine], machines),
        cast(Following[Pod], pods or Seen()),
        cast(Callable[[], ControlClient], lambda: rdzvd),
        Rules(),
        changed or threading.Event(),
    )


def gone(name: str) -> Machine:
    return Machine(name, taints=(Taint(LEAVING_TAINTS[0]),))


def test_it_does_nothing_before_both_kinds_were_listed() -> None:
    """A cluster not yet seen looks like one without nodes, and all cordons would be lifted."""
    rdzvd, machines = Rdzvd(agent("a", **drained("Kubernetes: node a is being deleted"))), Seen()
    machines.objects = None
    reconcile(rdzvd, machines).once()
    assert rdzvd.calls == []
    machines.objects, machines.trouble = (), "the API server answers 403"
    reconcile(rdzvd, machines).once()
    assert rdzvd.calls == []


@pytest.mark.slow
def test_what_changes_while_rdzvd_is_away_is_told_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reconciling, "EVERY_S", 0.01)
    rdzvd, machines = Rdzvd(agent("a"), agent("b")), Seen(Machine("a"), Machine("b"))
    stop, changed = threading.Event(), threading.Event()
    thread = threading.Thread(target=reconcile(rdzvd, machines, changed).run, args=(stop,))
    thread.start()
    rdzvd.away = True
    machines.objects = (gone("a"), Machine("b", unschedulable=True))
    changed.set()
    until(lambda: "rdzvd cannot be updated: no answer from head:29400" in caplog.text)
    rdzvd.away = False
    until(lambda: len(rdzvd.calls) == 2)
    machines.objects = (Machine("a"), Machine("b"))
    changed.set()
    until(lambda: len(rdzvd.calls) == 4)
    stop.set()
    changed.set()
    thread.join(10)
    assert rdzvd.calls == ["drain a", "cordon b", "lift a", "lift b"]
    assert caplog.text.count("rdzvd cannot be updated") == 1, "once, however often it is tried"


def test_a_node_that_has_left_meanwhile_holds_up_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rdzvd = Rdzvd(agent("a"), agent("b"))
    known = rdzvd.nodes()
    del rdzvd.known["a"]
    with caplog.at_level(logging.INFO, "rdzv.kube"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(rdzvd, "nodes", lambda: known)
        reconcile(rdzvd, Seen(gone("a"), gone("b"))).once()
    assert rdzvd.calls == ["drain b"]
    assert "a has left in the meantime" in caplog.text


def test_a_doubt_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    rdzvd = Rdzvd(node("train-0"))
    pods = Seen(Pod("team-a", "train-0"), Pod("team-b", "train-0"))
    loop = reconcile(rdzvd, Seen(), pods=pods)
    for _ in range(3):
        loop.once()
    assert caplog.text.count("train-0 may be any of") == 1
    pods.objects = ()
    loop.once()
    pods.objects = (Pod("team-a", "train-0"), Pod("team-b", "train-0"))
    loop.once()
    assert caplog.text.count("train-0 may be any of") == 2, "it is another one"
