"""deploy/slurm/rdzv-slurm-drain: which drains are missing, and which are superfluous."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[3] / "deploy" / "slurm" / "rdzv-slurm-drain"
FAN = "drained in Slurm: bad fan"


def _loaded() -> ModuleType:
    loader = SourceFileLoader("rdzv_slurm_drain", str(PROGRAM))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    made = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = made  # Its dataclasses look up their own module.
    loader.exec_module(made)
    return made


bridge: Any = _loaded()


def slurm(name: str = "n1", *, drained: bool = True, reason: str = "bad fan") -> Any:
    return bridge.SlurmNode(name, drained, reason)


def rdzv(node_id: str = "n1.17", *, connected: bool = True, drain: str | None = None) -> Any:
    return bridge.RdzvNode(node_id, connected, drain)


@pytest.mark.parametrize(
    ("in_slurm", "in_rdzv", "todo"),
    [
        pytest.param([slurm()], [rdzv()], [("n1.17", "5m", FAN)], id="a task's node"),
        pytest.param([slurm()], [rdzv("n1")], [("n1", "5m", FAN)], id="a daemon's node"),
        pytest.param(
            [slurm()],
            [rdzv("n1.17"), rdzv("n1.18")],
            [("n1.17", "5m", FAN), ("n1.18", "5m", FAN)],
            id="two jobs on one node",
        ),
        pytest.param(
            [slurm("gpu1.cluster")],
            [rdzv("gpu1.cluster.17")],
            [("gpu1.cluster.17", "5m", FAN)],
            id="a name with a dot",
        ),
        pytest.param(
            [slurm(reason="bad fan deadline=90s")],
            [rdzv()],
            [("n1.17", "90s", f"{FAN} deadline=90s")],
            id="its own deadline",
        ),
        pytest.param(
            [slurm(reason="")], [rdzv()], [("n1.17", "5m", "drained in Slurm")], id="no reason"
        ),
        pytest.param([slurm()], [rdzv(drain=f"by root: {FAN}")], [], id="drained already"),
        pytest.param([slurm()], [rdzv(drain="by ada: kernel")], [], id="drained by an operator"),
        pytest.param([slurm()], [rdzv(connected=False)], [], id="not there any more"),
        pytest.param([slurm("n2")], [rdzv("n1.17")], [], id="another node"),
        pytest.param([slurm("n1")], [rdzv("n11.17")], [], id="a longer name"),
        pytest.param([], [rdzv()], [], id="a node that is not Slurm's"),
        pytest.param([slurm(drained=False)], [rdzv()], [], id="nothing to do"),
        pytest.param(
            [slurm(drained=False)], [rdzv(drain=f"by root: {FAN}")], [("n1.17",)], id="resumed"
        ),
        pytest.param(
            [slurm(drained=False)],
            [rdzv(connected=False, drain=f"by root: {FAN}")],
            [("n1.17",)],
            id="resumed, and gone",
        ),
        pytest.param(
            [slurm(drained=False)], [rdzv(drain="by ada: kernel")], [], id="an operator's drain"
        ),
        pytest.param(
            [], [rdzv(drain=f"by root: {FAN}")], [], id="Slurm's node is not known any more"
        ),
    ],
)
def test_plan(in_slurm: list[Any], in_rdzv: list[Any], todo: list[tuple[str, ...]]) -> None:
    found = [
        (step.node_id, step.deadline, step.reason)
        if isinstance(step, bridge.Drain)
        else (step.node_id,)
        for step in bridge.plan(in_slurm, in_rdzv, "5m")
    ]
    assert found == todo


@pytest.mark.parametrize(
    ("state", "drained"),
    [
        *(("drained", True), ("draining", True), ("drained*", True), ("drng", True)),
        *(("draining@", True), ("idle", False), ("mixed", False), ("allocated", False)),
        *(("down*", False), ("maint", False), ("DRAINED", True)),
    ],
)
def test_states_of_slurm(state: str, drained: bool) -> None:
    assert bridge.parse_sinfo(f"n1|{state}|none\n") == [slurm(drained=drained, reason="")]


def test_a_node_of_two_partitions_is_one_and_a_reason_may_have_any_character() -> None:
    text = "n1|drained|a|b\nn2|idle|none\nn1|drained|a|b\n"
    assert bridge.parse_sinfo(text) == [
        slurm("n1", reason="a|b"),
        slurm("n2", drained=False, reason=""),
    ]


def test_rdzvctls_document_is_read() -> None:
    nodes = [
        {"node_id": "n1.17", "state": "connected", "drain": None, "drain_reason": None},
        {"node_id": "n2.17", "state": "away", "drain": "drained", "drain_reason": "by ada"},
    ]
    expected = [rdzv("n1.17"), rdzv("n2.17", connected=False, drain="by ada")]
    assert bridge.parse_nodes(json.dumps({"nodes": nodes})) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--deadline=soon", "--deadline is 'soon'; give a number and s, m or h, such as 5m"),
        ("--interval=0", "--interval is 0.0; give seconds above 0"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(option: str, says: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), option], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert says in done.stderr


def test_without_slurm_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert not bridge.look_once(["rdzvctl"], "5m")
    err = capsys.readouterr().err
    assert "nothing was looked at: " in err and "sinfo" in err
