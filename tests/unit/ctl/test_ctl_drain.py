"""rdzvctl drain and undrain, as typed: one node, or one after another.

The server is a fake: each story sets what it answers about nodes and jobs, one answer after the
other, so the expected state comes when the story wants it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from rdzv.ctl import rolling_drain
from rdzv.ctl.__main__ import run
from rdzv.errors import ERROR_CODE_METADATA_KEY
from rdzv.v1 import rdzv_pb2 as pb
from tests.support import control_samples
from tests.support.fake_control import Capture, Ctl, FakeControl
from tests.support.fake_control import serving as serving_control

pytestmark = pytest.mark.slow

WHO = "by "


class Floor(FakeControl):
    """Three nodes of a rack, which become empty while they are polled."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = {name: self._node(name) for name in ("n1", "n2", "n10")}
        self.nodes["other"] = pb.Node(node_id="other", state="connected")
        self.asked: list[str] = []
        self.too_few: list[str] = []
        """Why nodes may not be drained yet, one reason per request."""
        self.preempted = False
        """Whether the nodes are about to leave by themselves."""
        self.reasons: list[str] = []
        """Who asked for what takes no reason of the user's."""
        self.looks = 0
        """How often a node is polled before it is empty."""

    @staticmethod
    def _node(name: str) -> pb.Node:
        return pb.Node(
            node_id=name,
            state="connected",
            program="rdzv-agent",
            resources=pb.Resources(capacity=1, labels=[pb.Label(name="rack", value="a1")]),
            jobs=[pb.NodeJob(rdzv_id="job", state="seated")],
        )

    def ListNodes(  # noqa: N802
        self, request: pb.ListNodesRequest, context: grpc.ServicerContext
    ) -> pb.ListNodesResponse:
        self._misbehave(context)
        named = request.node_ids or list(self.nodes)
        found = [self.nodes[name] for name in named if name in self.nodes]
        for node in found if request.node_ids else ():
            if node.drain == "draining":
                self.looks -= 1
                if self.looks <= 0:
                    node.drain = "drained"
                    del node.jobs[:]
        return pb.ListNodesResponse(nodes=found)

    def DrainNode(  # noqa: N802
        self, request: pb.DrainNodeRequest, context: grpc.ServicerContext
    ) -> pb.Node:
        self._misbehave(context)
        if not request.force and self.too_few:
            trailing = ((ERROR_CODE_METADATA_KEY, "TooFewNodesError"),)
            context.set_trailing_metadata(trailing)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.too_few.pop(0))
        force = " by force" if request.force else ""
        self.asked.append(f"drain {request.node_id} {request.deadline_ms}{force}")
        node = self.nodes[request.node_id]
        node.drain, node.drain_left_ms = "draining", request.deadline_ms
        node.drain_reason, node.drained_by_operator, node.cordoned = request.reason, True, True
        if not node.jobs:
            node.drain = "drained"
        return node

    def UndrainNode(  # noqa: N802
        self, request: pb.UndrainNodeRequest, context: grpc.ServicerContext
    ) -> pb.Node:
        self._misbehave(context)
        self.asked.append(f"undrain {request.node_id}")
        self.reasons.append(request.reason)
        node = self.nodes[request.node_id]
        node.drain, node.drained_by_operator = "", False
        node.cordoned, node.cordoned_besides = node.cordoned_besides, False
        if self.preempted:
            node.drain, node.drain_reason = "draining", "preempted"
        return node

    def UncordonNode(  # noqa: N802
        self, request: pb.UncordonNodeRequest, context: grpc.ServicerContext
    ) -> pb.Node:
        self.reasons.append(request.reason)
        return self.nodes[request.node_id]

    def ForgetJob(  # noqa: N802
        self, request: pb.ForgetJobRequest, context: grpc.ServicerContext
    ) -> pb.ForgetJobResponse:
        self.reasons.append(request.reason)
        return pb.ForgetJobResponse()


@pytest.fixture(name="floor")
def _floor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Floor]:
    monkeypatch.setattr(rolling_drain, "LOOK_EVERY_S", 0.0)
    floor = Floor()
    with serving_control(floor) as endpoint:
        monkeypatch.setenv("RDZV_SERVER", endpoint)
        yield floor


Out = Callable[[], str]


@pytest.fixture(name="out")
def _out(capsys: Capture) -> Out:
    return lambda: capsys.readouterr().out


# ------------------------------------------------------------------ one node


@pytest.mark.quick
def test_a_node_is_drained_and_undrained(floor: Floor, out: Out) -> None:
    assert run(["drain", "n1", "--reason", "new kernel"]) == 0
    assert out() == "n1 is draining; its workers have 5 min 0 s, and it has job\n"
    assert floor.asked == ["drain n1 300000"]
    reason = floor.nodes["n1"].drain_reason
    assert reason.startswith(WHO)
    assert reason.endswith(": new kernel")
    assert run(["undrain", "n1"]) == 0
    assert out() == "the drain of n1 is lifted: submitted jobs are placed on it again\n"
    assert run(["drain", "n1", "--deadline=90s", "-o", "json"]) == 0
    document = json.loads(out())
    assert (document["drain"], document["drain_left_ms"]) == ("draining", 90_000)


def test_the_audit_hears_who_takes_something_back(floor: Floor) -> None:
    for words in (["undrain", "n1"], ["uncordon", "n1"], ["forget", "job"]):
        assert run(words) == 0
    assert len(floor.reasons) == 3
    assert all(reason.startswith(WHO) and " at " in reason for reason in floor.reasons)


def test_a_drain_that_stops_a_job_needs_force(floor: Floor, ctl: Ctl) -> None:
    floor.too_few = ["job would have 1 of the 2 nodes that it needs: it stops"]
    said = ctl("drain", "n1", code=1)
    assert said.out == ""
    assert said.err.startswith(
        "rdzvctl: n1 is not drained: without it, job would have 1 of the 2 nodes that it needs: it "
        "stops; --force drains it anyway (asked "
    )
    assert floor.asked == []
    floor.too_few = ["job would have 1 of the 2 nodes that it needs: it stops"]
    assert ctl("drain", "n1", "--force").out.startswith(
        "n1 is draining; its workers have 5 min 0 s"
    )
    assert floor.asked == ["drain n1 300000 by force"]


def test_a_node_that_is_about_to_go_by_itself_can_not_be_kept(floor: Floor, out: Out) -> None:
    floor.preempted = True
    assert run(["undrain", "n1"]) == 0
    assert out() == "n1 is about to leave by itself: preempted\n"


def test_who_waits_hears_for_what(floor: Floor, ctl: Ctl) -> None:
    floor.looks = 3
    said = ctl("drain", "n1", "--wait")
    assert said.out == "n1 is drained\n"
    assert said.err == "n1: waiting for job to leave\n"


def test_nodes_show_how_far_they_are(floor: Floor, out: Out) -> None:
    run(["drain", "n1", "--reason", "fan"])
    floor.nodes["n1"].state_age_ms, floor.nodes["n1"].drain_age_ms = 9_000_000, 61_000
    floor.nodes["n2"].drain, floor.nodes["n2"].drain_reason = "drained", "by bob: roof leaks"
    out()
    run(["nodes"])
    lines = {line.split()[0]: line for line in out().splitlines()}
    assert "draining" in lines["n1"]
    assert "1 min 1 s" in lines["n1"], "not for how long it is connected"
    assert "leaves in 5 min 0 s: by" in lines["n1"]
    assert "drained" in lines["n2"]
    assert "by bob: roof leaks" in lines["n2"]
    assert run(["nodes", "n1"]) == 0
    assert re.search(r"draining     since [^,]+, leaves in 5 min 0 s: by", out())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "name a NODE, or give --all-of"),
        (["n1", "--deadline=soon"], "--deadline=soon is not a time"),
        (["n1", "--deadline=200h"], "--deadline=200h is too long; give at most 7 days"),
        (["n1", "--deadline=-5"], "--deadline=-5 is not a time"),
        (["n1", "--all-of=a=b"], "name a NODE, or give --all-of"),
        (["--all-of=a"], "--all-of=a is not LABEL=VALUE"),
        (["--all-of=rack=a1", "--force"], "leave --force out"),
        (["n1", "--undrain-after=true"], "--undrain-after goes with --all-of"),
        (["--all-of=rack=a1", "-o", "json"], "as text only"),
    ],
)
def test_words_that_make_no_sense_change_nothing(
    floor: Floor, words: list[str], why: str, ctl: Ctl
) -> None:
    assert why in ctl("drain", *words, code=2).err
    assert floor.asked == []


# ------------------------------------------------------------------ one after another


def test_a_roll_drains_one_after_another_when_each_may_go(
    floor: Floor, out: Out, tmp_path: Path
) -> None:
    floor.jobs["job"] = control_samples.running()
    floor.too_few = ["job would have 1 of the 2 nodes that it needs"] * 3
    done = tmp_path / "done"
    command = f"echo $RDZV_NODE >> {done}"
    words = ["drain", "--all-of=rack=a1", "--deadline=1m", f"--undrain-after={command}"]
    assert run(words) == 0
    text = out()
    assert text.splitlines()[:3] == [
        "3 with rack=a1: n1, n2, n10",
        "1 of 3, n1: waiting: job would have 1 of the 2 nodes that it needs",
        "1 of 3, n1: draining",
    ]
    assert text.splitlines()[-1] == "3 of 3, n10: undrained"
    assert floor.asked == [
        f"{what} {name}{more}"
        for name in ("n1", "n2", "n10")
        for what, more in (("drain", " 60000"), ("undrain", ""))
    ]
    assert done.read_text().split() == ["n1", "n2", "n10"]


def test_a_roll_takes_back_no_cordon_and_no_drain_of_somebody_else(floor: Floor, out: Out) -> None:
    floor.jobs["job"] = control_samples.running()
    broken, drained = floor.nodes["n1"], floor.nodes["n2"]
    broken.cordoned = broken.cordoned_besides = True
    drained.drain, drained.drain_reason = "drained", "by bob: roof leaks"
    drained.drained_by_operator = True
    assert run(["drain", "--all-of=rack=a1", "--undrain-after=true", "--reason=kernel"]) == 0
    lines = out().splitlines()
    assert "1 of 3, n1: undrained, and still cordoned" in lines
    assert (
        "2 of 3, n2: it is drained already, and stays so (by bob: roof leaks); skipping it" in lines
    )
    assert lines[-1] == "3 of 3, n10: undrained"
    assert floor.asked == [
        f"{what} {name}{more}"
        for name in ("n1", "n10")
        for what, more in (("drain", " 300000"), ("undrain", ""))
    ]


def test_a_roll_goes_on_with_its_own_drains_alone(floor: Floor, out: Out) -> None:
    """Not with those that its user ordered for another reason; the server may have signed them."""
    floor.jobs["job"] = control_samples.running()
    run(["drain", "n1", "--reason=roof leaks"])
    run(["drain", "n2"])
    floor.nodes["n2"].drain_reason += " [ada (token 7)]"
    floor.asked.clear()
    assert run(["drain", "--all-of=rack=a1", "--undrain-after=true"]) == 0
    assert floor.asked == ["undrain n2", "drain n10 300000", "undrain n10"]


def test_an_undrained_node_that_is_cordoned_says_so(floor: Floor, out: Out) -> None:
    node = floor.nodes["n1"]
    node.cordoned, node.cordoned_besides, node.cordon_reason = True, True, "by ada: fan"
    node.drain, node.drain_reason, node.drained_by_operator = "drained", "by bob: roll", True
    assert run(["nodes", "n1"]) == 0
    shown = out()
    assert "drained, cordoned" in shown.splitlines()[0]
    assert "by ada: fan" in shown and "by bob: roll" in shown
    assert run(["nodes"]) == 0
    assert "by bob: roll; cordoned by ada: fan" in out()
    assert run(["undrain", "n1"]) == 0
    assert out() == (
        "n1 is not drained, but still cordoned (by ada: fan), so it gets no submitted jobs; "
        "`rdzvctl uncordon n1` lifts that\n"
    )


def test_a_command_that_fails_ends_the_roll_and_leaves_its_node_drained(
    floor: Floor, out: Out
) -> None:
    assert run(["drain", "--all-of=rack=a1", "--undrain-after=exit 7"]) == 3
    assert out().splitlines()[-1] == (
        "1 of 3, n1: the command of --undrain-after exited with 7; it stays drained"
    )
    assert floor.asked == ["drain n1 300000"]


def test_a_roll_goes_on_where_it_was(floor: Floor, out: Out) -> None:
    floor.jobs["job"] = control_samples.running()
    run(["drain", "n1"])
    assert run(["drain", "--all-of=rack=a1"]) == 0
    assert "1 of 3, n1: it is already drained" in out()
    assert floor.asked == [
        *(f"drain {n} 300000" for n in ("n1", "n2", "n10")),
    ]


def test_nobody_has_the_label(floor: Floor, ctl: Ctl) -> None:
    assert "no known node has the label rack=b9" in ctl("drain", "--all-of=rack=b9", code=1).err


def test_ctrl_c_says_that_what_is_drained_stays_so(
    floor: Floor, monkeypatch: pytest.MonkeyPatch, ctl: Ctl
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    floor.looks = 99
    # Not `time.sleep` itself: threads left behind by earlier commands sleep, too.
    monkeypatch.setattr(rolling_drain, "time", SimpleNamespace(sleep=interrupt))
    assert (
        "drained nodes stay drained; `rdzvctl undrain` lifts that"
        in ctl("drain", "n1", "--wait", code=130).err
    )
    assert floor.nodes["n1"].drain == "draining"
