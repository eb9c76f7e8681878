"""rdzvctl nodes, cordon and uncordon; YAML; completion of names."""

from __future__ import annotations

import json
from datetime import UTC

import control_samples
import grpc
import pytest
import yaml
from click.shell_completion import ShellComplete
from fake_control import Ctl, FakeControl, serving

from rdzv.client import ControlClient, parse_endpoint
from rdzv.ctl import as_text, as_text_lists, command_line
from rdzv.ctl.__main__ import rdzvctl
from rdzv.ctl.layout import Page
from rdzv.errors import UnknownNodeError
from rdzv.structs import replace
from rdzv.view.answers import Server

pytestmark = pytest.mark.slow

PAGE = Page(width=100, colour=False, now_s=1_700_049_600.0, zone=UTC)


@pytest.fixture
def control() -> FakeControl:
    control = FakeControl()
    control.nodes = {node.node_id: node for node in control_samples.nodes()}
    return control


# ------------------------------------------------------------------------------ nodes


def test_no_nodes_in_words(control: FakeControl, server: str, ctl: Ctl) -> None:
    control.nodes.clear()
    assert ctl("nodes").out == f"no nodes at {server}\n"


@pytest.mark.quick
def test_a_node_is_cordoned_and_uncordoned(control: FakeControl, server: str, ctl: Ctl) -> None:
    assert (
        ctl("cordon", "gpu-2", "--reason", "its fan is loud").out
        == "gpu-2 is cordoned; it has llm, eval (placed)\n"
    )
    reason = control.nodes["gpu-2"].cordon_reason
    assert reason.startswith("by ")
    assert reason.endswith(": its fan is loud")
    assert json.loads(ctl("cordon", "gpu-10", "-o", "json").out)["cordoned"] is True
    assert (
        ctl("uncordon", "gpu-2").out
        == "gpu-2 is uncordoned: submitted jobs are placed on it again\n"
    )
    assert ctl("uncordon", "login-1-4711").out == (
        "login-1-4711 is uncordoned: its rdzvrun takes no submitted jobs, though\n"
    )


def test_escapes_of_nodes_are_harmless(control: FakeControl, server: str, ctl: Ctl) -> None:
    bad = "\x1b]0;evil\x07"
    node = control.nodes["gpu-2"]
    node.cordoned, node.cordon_reason, node.program = True, bad, bad
    node.resources.labels[0].value = bad
    node.resources.gpus[0].name = bad
    node.jobs[0].rdzv_id = bad
    node.state = bad
    for words in (["nodes"], ["nodes", "gpu-2"], ["cordon", "gpu-2"], ["nodes", "-o", "yaml"]):
        captured = ctl(*words)
        assert "\x1b" not in captured.out + captured.err


@pytest.mark.parametrize("words", [["nodes"], ["cordon", "n"], ["uncordon", "n"]])
def test_bad_servers(control: FakeControl, server: str, ctl: Ctl, words: list[str]) -> None:
    assert "connection refused" in ctl("--server=127.0.0.1:1", *words, code=75).err
    control.error = grpc.StatusCode.UNIMPLEMENTED
    assert "not an rdzv server, or an older one" in ctl(*words, code=75).err
    control.error = UnknownNodeError("no node n is known")
    assert "no node n is known" in ctl(*words, code=1).err
    control.error, control.hangs = None, True
    assert "no answer within 0.2 s" in ctl(*words, "--timeout=0.2", code=75).err


# ------------------------------------------------------------------------------ status and list


def test_of_a_job_that_has_ended_no_node_is_awaited(control: FakeControl) -> None:
    control.jobs["gpt-small"] = job = control_samples.submitted()
    job.nodes[0].state = "left"
    with serving(control) as endpoint, ControlClient(parse_endpoint(endpoint)) as client:
        assert "n1, n4; not joined yet" in as_text.status(client.status("gpt-small"), PAGE)
        for state in ("succeeded", "failed", "stopped"):
            job.state = state
            assert "not joined yet" not in as_text.status(client.status("gpt-small"), PAGE)


# ------------------------------------------------------------------------------ YAML


@pytest.mark.parametrize("words", ["status gpt-small", "list", "events gpt-small", "nodes"])
def test_yaml_says_what_json_says(control: FakeControl, server: str, ctl: Ctl, words: str) -> None:
    control.jobs["gpt-small"] = control_samples.failed()
    control.history = control_samples.history()
    control.history[0].text = 'a "quoted": {text}, # no comment\x1b[2J \u202e é'
    expected = ctl(*words.split(), "-o", "json").out
    text = ctl(*words.split(), "-o", "yaml").out
    assert yaml.safe_load(text) == json.loads(expected)
    assert list(yaml.safe_load(text)) == list(json.loads(expected))
    assert text.isascii()
    assert "\x1b" not in text


# ------------------------------------------------------------------------------ completion


def completed(*words: str) -> list[str]:
    """Complete the last word as a shell would."""
    completion = ShellComplete(rdzvctl, {}, "rdzvctl", "_RDZVCTL_COMPLETE")
    *before, incomplete = words
    return [item.value for item in completion.get_completions(before, incomplete)]


def test_names_are_completed_from_the_server(
    control: FakeControl, server: str, monkeypatch: pytest.MonkeyPatch
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
    control: FakeControl, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "COMPLETION_TIMEOUT_S", 0.1)
    control.hangs = True
    assert completed("status", "g") == []


@pytest.mark.quick
def test_a_server_that_is_open_to_everyone_is_warned_of() -> None:
    shut = Server("10.0.0.4:29400", True, 5, "memory", "1.2.3", 60_000)
    why = "nothing here is encrypted or authenticated"
    open_to_all = replace(shut, address="10.0.0.5:29400", leads=False, insecure=why)
    assert "insecure" not in as_text_lists.servers([shut], PAGE)
    last = as_text_lists.servers([open_to_all, shut], PAGE).splitlines()[-1]
    assert last == f"insecure: {why}; anyone who can reach 10.0.0.5:29400 can run and end jobs"


@pytest.mark.quick
def test_flags_of_submit_are_completed() -> None:
    assert completed("submit", "--nproc") == ["--nproc-per-node"]
    assert completed("submit", "--gpus") == ["--gpus-per-node"]
    assert completed("submit", "--use") == ["--user"]
    assert completed("submit", "--standa") == []
    assert completed("subm") == ["submit"]
    assert "uncordon" in completed("unc")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_is_told_how(shell: str, ctl: Ctl) -> None:
    assert "_RDZVCTL_COMPLETE" in ctl("completion", shell).out
