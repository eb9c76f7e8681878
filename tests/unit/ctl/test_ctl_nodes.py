"""rdzvctl nodes, cordon and uncordon; a submitted job's status; YAML; completion of names.

Golden files as in test_ctl.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC
from pathlib import Path

import control_samples
import grpc
import pytest
import yaml
from click.shell_completion import ShellComplete
from fake_control import FakeControl, serving

from rdzv.client import ControlClient, parse_endpoint
from rdzv.ctl import as_text, as_text_nodes, command_line
from rdzv.ctl.__main__ import rdzvctl, run
from rdzv.ctl.layout import Page
from rdzv.errors import UnknownNodeError
from rdzv.structs import replace
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import Server

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "ctl"
PAGE = Page(width=100, colour=False, now_s=1_700_049_600.0, zone=UTC)
GIB = 1 << 30


class NodesControl(FakeControl):
    """Has nodes, and cordons them."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = {node.node_id: node for node in sample()}

    def ListNodes(  # noqa: N802
        self, request: pb.ListNodesRequest, context: grpc.ServicerContext
    ) -> pb.ListNodesResponse:
        self._misbehave(context)
        return pb.ListNodesResponse(nodes=self.nodes.values())

    def CordonNode(  # noqa: N802
        self, request: pb.CordonNodeRequest, context: grpc.ServicerContext
    ) -> pb.Node:
        self._misbehave(context)
        node = self.nodes[request.node_id]
        node.cordoned, node.cordon_reason = True, request.reason
        return node

    def UncordonNode(  # noqa: N802
        self, request: pb.UncordonNodeRequest, context: grpc.ServicerContext
    ) -> pb.Node:
        self._misbehave(context)
        node = self.nodes[request.node_id]
        node.cordoned, node.cordon_reason = False, ""
        return node


def sample() -> list[pb.Node]:
    """One node that trains, one that is free, one that was told to accept no more, a rdzvrun."""
    h100 = [pb.Gpu(uuid=f"GPU-{i}", name="NVIDIA H100", memory_bytes=80 * GIB) for i in range(8)]
    labels = [pb.Label(name="gpu", value="h100"), pb.Label(name="zone", value="a")]
    big = pb.Resources(
        cpus=96,
        memory_bytes=1_024 * GIB,
        gpus=h100,
        labels=labels,
        capacity=4,
        topology="rack-1",
    )
    return [
        pb.Node(
            node_id="gpu-10",
            state="connected",
            state_age_ms=7_500_000,
            program="rdzv-agent",
            address="10.0.0.10",
            agent_version="0.1.0",
            resources=big,
            gpus_free=8,
        ),
        pb.Node(
            node_id="gpu-2",
            state="connected",
            state_age_ms=90_000_000,
            program="rdzv-agent",
            address="10.0.0.2",
            agent_version="0.1.0",
            resources=big,
            gpus_free=2,
            metrics="10.0.0.2:29481",
            jobs=[
                pb.NodeJob(rdzv_id="llm", gpus=4, state="seated"),
                pb.NodeJob(rdzv_id="eval", gpus=2, state="placed"),
            ],
        ),
        pb.Node(
            node_id="gpu-3",
            state="away",
            state_age_ms=4_000,
            program="rdzv-agent",
            address="10.0.0.3",
            agent_version="0.1.0",
            resources=pb.Resources(cpus=8, memory_bytes=1536 << 20, capacity=1),
            gpus_free=0,
            cordoned=True,
            cordon_reason="by ada at head-1: its disk fails",
            cordon_age_ms=86_400_000,
            jobs=[pb.NodeJob(rdzv_id="bert", state="holding")],
        ),
        pb.Node(
            node_id="login-1-4711",
            state="connected",
            state_age_ms=60_000,
            program="rdzvrun",
            address="10.0.0.1",
            jobs=[pb.NodeJob(rdzv_id=f"j{i}", state="seated") for i in range(5)],
        ),
        pb.Node(
            node_id="old-7",
            state="gone",
            cordoned=True,
            cordon_age_ms=180_000_000,
        ),
    ]


def submitted() -> pb.JobStatus:
    """A job of which one node has joined, one is awaited, and one has declined."""
    status = control_samples.joining()
    del status.nodes[1:]
    status.submission.CopyFrom(
        pb.Submission(
            submitted_by="ada at head-1",
            submitter="ada",
            age_ms=300_000,
            args=["--nnodes=3:4", "--", "train me.py", "--lr", "1"],
            env_names=["TOKEN", "HF_HOME"],
            chdir="/home/ada/gpt",
            labels=[pb.Label(name="gpu", value="h100")],
            priority=5,
            gpus_per_node=8,
            placed=["n1", "n4"],
            jobs_before=2,
            declined=[pb.DeclinedNode(node_id="n9", reason="no folder /home/ada/gpt there")],
        )
    )
    return status


@pytest.fixture
def control() -> NodesControl:
    return NodesControl()


@pytest.fixture
def server(control: NodesControl, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(control) as endpoint:
        monkeypatch.setenv("RDZV_SERVER", endpoint)
        yield endpoint


def compare(name: str, text: str) -> None:
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("RDZV_REWRITE"):
        file.write_text(text)
    assert text == file.read_text()


# ------------------------------------------------------------------------------ nodes


@pytest.mark.quick
def test_golden_nodes(control: NodesControl) -> None:
    with serving(control) as endpoint, ControlClient(parse_endpoint(endpoint)) as client:
        found = client.nodes()
    compare("nodes", as_text_nodes.nodes("here", found, PAGE) + "\n")
    narrow = Page(width=80, colour=False, now_s=PAGE.now_s, zone=UTC)
    lines = as_text_nodes.nodes("here", found, narrow).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:3] == ["NODE", "STATE", "GPUS_FREE"]
    wide = Page(width=None, colour=False, now_s=PAGE.now_s, zone=UTC)
    for node in found:
        compare(f"node-{node.node_id}", as_text_nodes.node(node, PAGE) + "\n")
        assert node.node_id in as_text_nodes.nodes("here", found, wide)


def test_one_node_is_told_in_full(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["nodes", "gpu-2"]) == 0
    said = capsys.readouterr().out
    assert "2 of 8 free: 8 x NVIDIA H100 of 80 GiB" in said
    assert "http://10.0.0.2:29481/metrics" in said
    assert run(["nodes", "gpu-99"]) == 1
    said = capsys.readouterr().err
    assert "no node gpu-99 is known; `rdzvctl nodes` lists the known ones" in said


def test_nodes_for_programs(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["nodes", "-o", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["version", "nodes", "store_away"]
    first = document["nodes"][0]
    assert list(first) == [
        "node_id",
        "state",
        "state_age_ms",
        "program",
        "address",
        "agent_version",
        "resources",
        "gpus_free",
        "jobs",
        "cordoned",
        "cordon_reason",
        "cordon_age_ms",
        "metrics",
        *("quarantine", "quarantine_age_ms", "quarantine_left_ms"),
        *("unhealthy", "unhealthy_age_ms"),
        "drain",
        "drain_reason",
        "drain_left_ms",
        "drained_by_operator",
        "cordoned_besides",
        "drain_age_ms",
    ]
    assert list(first["resources"]) == [
        *("cpus", "memory_bytes", "gpus", "labels", "capacity", "topology"),
    ]
    assert first["resources"]["labels"] == {"gpu": "h100", "zone": "a"}
    assert list(first["resources"]["gpus"][0]) == ["uuid", "name", "memory_bytes"]
    assert document["nodes"][1]["jobs"][1] == {"rdzv_id": "eval", "gpus": 2, "state": "placed"}
    assert (first["cordoned"], first["cordon_reason"], first["cordon_age_ms"]) == (
        False,
        None,
        None,
    )
    rdzvrun = document["nodes"][3]
    assert (rdzvrun["resources"], rdzvrun["gpus_free"]) == (None, None)
    assert run(["nodes", "gpu-2", "-o", "yaml"]) == 0
    one = yaml.safe_load(capsys.readouterr().out)
    assert (one["version"], one["node_id"], one["gpus_free"]) == (1, "gpu-2", 2)


def test_no_nodes_in_words(
    control: NodesControl, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    control.nodes.clear()
    assert run(["nodes"]) == 0
    assert capsys.readouterr().out == f"no nodes at {server}\n"


@pytest.mark.quick
def test_a_node_is_cordoned_and_uncordoned(
    control: NodesControl, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cordon", "gpu-2", "--reason", "its fan is loud"]) == 0
    assert capsys.readouterr().out == "gpu-2 is cordoned; it has llm, eval (placed)\n"
    reason = control.nodes["gpu-2"].cordon_reason
    assert reason.startswith("by ")
    assert reason.endswith(": its fan is loud")
    assert run(["cordon", "gpu-10", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["cordoned"] is True
    assert run(["uncordon", "gpu-2"]) == 0
    assert capsys.readouterr().out == "gpu-2 is uncordoned: submitted jobs are placed on it again\n"
    assert run(["uncordon", "login-1-4711"]) == 0
    assert capsys.readouterr().out == (
        "login-1-4711 is uncordoned: its rdzvrun takes no submitted jobs, though\n"
    )


def test_escapes_of_nodes_are_harmless(
    control: NodesControl, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "\x1b]0;evil\x07"
    node = control.nodes["gpu-2"]
    node.cordoned, node.cordon_reason, node.program = True, bad, bad
    node.resources.labels[0].value = bad
    node.resources.gpus[0].name = bad
    node.jobs[0].rdzv_id = bad
    node.state = bad
    for words in (["nodes"], ["nodes", "gpu-2"], ["cordon", "gpu-2"], ["nodes", "-o", "yaml"]):
        assert run(words) == 0
        captured = capsys.readouterr()
        assert "\x1b" not in captured.out + captured.err


@pytest.mark.parametrize("words", [["nodes"], ["cordon", "n"], ["uncordon", "n"]])
def test_bad_servers(
    control: NodesControl, server: str, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert run(["--server=127.0.0.1:1", *words]) == 75
    assert "connection refused" in capsys.readouterr().err
    control.error = grpc.StatusCode.UNIMPLEMENTED
    assert run(words) == 75
    assert "not an rdzv server, or an older one" in capsys.readouterr().err
    control.error = UnknownNodeError("no node n is known")
    assert run(words) == 1
    assert "no node n is known" in capsys.readouterr().err
    control.error, control.hangs = None, True
    assert run([*words, "--timeout=0.2"]) == 75
    assert "no answer within 0.2 s" in capsys.readouterr().err


# ------------------------------------------------------------------------------ status and list


def test_golden_status_of_a_submitted_job(control: NodesControl) -> None:
    control.jobs["gpt-small"] = submitted()
    with serving(control) as endpoint, ControlClient(parse_endpoint(endpoint)) as client:
        compare("submitted", as_text.status(client.status("gpt-small"), PAGE) + "\n")


def test_of_a_job_that_has_ended_no_node_is_awaited(control: NodesControl) -> None:
    control.jobs["gpt-small"] = job = submitted()
    job.nodes[0].state = "left"
    with serving(control) as endpoint, ControlClient(parse_endpoint(endpoint)) as client:
        assert "n1, n4; not joined yet" in as_text.status(client.status("gpt-small"), PAGE)
        for state in ("succeeded", "failed", "stopped"):
            job.state = state
            assert "not joined yet" not in as_text.status(client.status("gpt-small"), PAGE)


def test_a_submission_for_programs(
    control: NodesControl, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    control.jobs["gpt-small"] = submitted()
    assert run(["status", "gpt-small", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["submission"] == {
        "submitted_by": "ada at head-1",
        "age_ms": 300_000,
        "args": ["--nnodes=3:4", "--", "train me.py", "--lr", "1"],
        "env_names": ["TOKEN", "HF_HOME"],
        "chdir": "/home/ada/gpt",
        "labels": {"gpu": "h100"},
        "priority": 5,
        "gpus_per_node": 8,
        "placed": ["n1", "n4"],
        "jobs_before": 2,
        "declined": [{"node_id": "n9", "reason": "no folder /home/ada/gpt there"}],
        "submitter": "ada",
        "account": None,
    }
    control.jobs["gpt-small"] = control_samples.joining()
    assert run(["status", "gpt-small", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["submission"] is None


def test_a_job_that_waits_is_listed_with_its_reason(
    control: NodesControl, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submitted()
    control_samples.give_reason(job, "2 jobs are served before it")
    control.jobs["gpt-small"] = job
    assert run(["list"]) == 0
    assert "2 jobs are served before it" in capsys.readouterr().out


# ------------------------------------------------------------------------------ YAML


@pytest.mark.parametrize("words", ["status gpt-small", "list", "events gpt-small", "nodes"])
def test_yaml_says_what_json_says(
    control: NodesControl, server: str, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    control.jobs["gpt-small"] = control_samples.failed()
    control.history = control_samples.history()
    control.history[0].text = 'a "quoted": {text}, # no comment\x1b[2J \u202e é'
    assert run([*words.split(), "-o", "json"]) == 0
    expected = capsys.readouterr().out
    assert run([*words.split(), "-o", "yaml"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text) == json.loads(expected)
    assert list(yaml.safe_load(text)) == list(json.loads(expected))
    assert text.isascii()
    assert "\x1b" not in text


def test_a_traceback_is_a_block_in_yaml(
    control: NodesControl, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    control.jobs["gpt-small"] = control_samples.failed()
    assert run(["status", "gpt-small", "-o", "yaml"]) == 0
    assert "traceback: |\n" in capsys.readouterr().out


# ------------------------------------------------------------------------------ completion


def completed(*words: str) -> list[str]:
    """Complete the last word as a shell would."""
    completion = ShellComplete(rdzvctl, {}, "rdzvctl", "_RDZVCTL_COMPLETE")
    *before, incomplete = words
    return [item.value for item in completion.get_completions(before, incomplete)]


def test_names_are_completed_from_the_server(
    control: NodesControl, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.jobs["gpt-small"] = control_samples.running()
    control.jobs["gpt-large"] = control_samples.running()
    control.jobs["gpt-large"].rdzv_id = "gpt-large"
    assert completed("status", "gpt-s") == ["gpt-small"]
    assert sorted(completed("logs", "gpt")) == ["gpt-large", "gpt-small"]
    assert sorted(completed("cordon", "gpu")) == ["gpu-10", "gpu-2", "gpu-3"]
    assert completed("nodes", "old") == ["old-7"]
    assert completed("--server", "127.0.0.1:1", "status", "gpt") == []
    monkeypatch.setenv("RDZV_SERVER", "127.0.0.1:1")
    assert completed("--server", server, "status", "gpt-s") == ["gpt-small"]
    assert completed("status", "--server", server, "gpt-s") == ["gpt-small"]
    assert completed("--server", "no port:x", "status", "") == []


def test_a_server_that_does_not_answer_completes_nothing(
    control: NodesControl, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "COMPLETION_TIMEOUT_S", 0.1)
    control.hangs = True
    assert completed("status", "g") == []


@pytest.mark.quick
def test_a_server_that_is_open_to_everyone_is_warned_of() -> None:
    shut = Server("10.0.0.4:29400", True, 5, "memory", "1.2.3", 60_000)
    why = "nothing here is encrypted or authenticated"
    open_to_all = replace(shut, address="10.0.0.5:29400", leads=False, insecure=why)
    assert "insecure" not in as_text.servers([shut], PAGE)
    last = as_text.servers([open_to_all, shut], PAGE).splitlines()[-1]
    assert last == f"insecure: {why}; anyone who can reach 10.0.0.5:29400 can run and end jobs"


@pytest.mark.quick
def test_flags_of_submit_are_completed() -> None:
    assert completed("submit", "--nproc") == ["--nproc-per-node"]
    assert completed("submit", "--gpus") == ["--gpus-per-node"]
    assert completed("submit", "--use") == ["--user"]
    assert completed("submit", "--stand") == []
    assert completed("subm") == ["submit"]
    assert "uncordon" in completed("unc")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_is_told_how(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert "_RDZVCTL_COMPLETE" in capsys.readouterr().out


def test_quarantined_nodes_say_why_and_for_how_long(control: NodesControl) -> None:
    node = control.nodes["gpu-10"]
    node.quarantine = "at fault 3 times within 20 s, last in llm: exit code 3"
    node.quarantine_age_ms, node.quarantine_left_ms = 3_600_000, 39_600_000
    with serving(control) as endpoint, ControlClient(parse_endpoint(endpoint)) as client:
        found = client.nodes()
    compare("nodes-quarantined", as_text_nodes.nodes("here", found, PAGE) + "\n")
    one = next(node for node in found if node.node_id == "gpu-10")
    compare("node-quarantined", as_text_nodes.node(one, PAGE) + "\n")
    left = (one.quarantine_age_ms, one.quarantine_left_ms)
    assert left == (3_600_000, 39_600_000)
