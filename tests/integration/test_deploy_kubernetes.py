"""deploy/kubernetes: the manifests fit Kubernetes' schemas, and what they run, our parsers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rdzv.agent import agent_config
from rdzv.agent.options import parse_launch
from rdzv.knobs import Knobs, load
from rdzv.server.__main__ import main as rdzvd
from rdzv.server.config import Config
from rdzv.server.configuration import KNOBS, make_config

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSIONS = ("1.31", "1.34")

validate = pytest.importorskip(
    "kubernetes_validate", reason="its schemas are in the package kubernetes-validate"
)
yaml = pytest.importorskip("yaml")


def documents() -> list[dict[str, Any]]:
    """Return every object of every manifest."""
    files = sorted(FOLDER.glob("*.yaml"))
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in documents() if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def pod(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["spec"]["template"]["spec"]
    return found


def container(document: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(document)["containers"]
    assert isinstance(found, dict)
    return found


def server_config(tmp_path: Path) -> Config:
    file = tmp_path / "rdzvd.toml"
    file.write_text(one("ConfigMap", "rdzvd")["data"]["rdzvd.toml"])
    return make_config(load(KNOBS, file))


def test_all_that_is_promised_is_there() -> None:
    assert {(d["kind"], d["metadata"]["name"]) for d in documents()} == {
        *(("ConfigMap", "rdzvd"), ("Service", "rdzvd"), ("NetworkPolicy", "rdzvd")),
        *(("StatefulSet", "rdzvd"), ("ConfigMap", "rdzv-agent"), ("DaemonSet", "rdzv-agent")),
        ("Job", "train"),
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "document", documents(), ids=lambda d: f"{d['kind']}-{d['metadata']['name']}"
)
def test_each_fits_its_schema(document: dict[str, Any], version: str) -> None:
    validate.validate(document, version, strict=True)


def test_a_field_that_kubernetes_does_not_know_is_noticed() -> None:
    document = one("StatefulSet", "rdzvd")
    container(document)["livenessprobe"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(document, VERSIONS[0], strict=True)


def test_rdzvd_is_asked_where_it_answers(tmp_path: Path) -> None:
    config = server_config(tmp_path)
    assert config.http is not None
    server = container(one("StatefulSet", "rdzvd"))
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports == {"grpc": config.listen.port, "http": config.http.port}
    assert server["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert server["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    service = {port["name"]: port["port"] for port in one("Service", "rdzvd")["spec"]["ports"]}
    assert service == ports
    mounts = [mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")]
    assert str(config.data_dir).startswith(tuple(mounts))


def test_the_servers_command_line_is_one_of_rdzvd(tmp_path: Path) -> None:
    name, *options = container(one("StatefulSet", "rdzvd"))["command"]
    assert name == "rdzvd"
    context = rdzvd.make_context(name, options)
    mounts = container(one("StatefulSet", "rdzvd"))["volumeMounts"]
    (folder,) = [mount["mountPath"] for mount in mounts if mount["name"] == "config"]
    assert context.params["file"] == Path(folder) / "rdzvd.toml"


def test_the_agents_configuration_is_one_of_rdzv_agent(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(one("ConfigMap", "rdzv-agent")["data"]["agent.toml"])
    # Its rules ask for this machine's accounts and programs.
    known = Knobs(agent_config.KNOBS.program, agent_config.KNOBS.knobs)
    values = load(known, file)
    server = values.get("server", str)
    assert server == f"rdzvd:{server_config(tmp_path).listen.port}"
    agent = container(one("DaemonSet", "rdzv-agent"))
    assert agent["command"] == ["rdzv-agent", "--config=/etc/rdzv/agent.toml"]
    mounts = {mount["mountPath"] for mount in agent["volumeMounts"]}
    assert {str(values.get(key, Path)) for key in ("state_dir", "runtime_dir")} <= mounts


def test_the_jobs_command_line_is_one_of_rdzvrun(tmp_path: Path) -> None:
    document = one("Job", "train")
    runner = container(document)
    values = {"JOB": "train", "POD": "train-0-x7k2p", "POD_IP": "10.0.0.7"}
    assert {each["name"] for each in runner["env"]} == values.keys()
    name, *words = [
        re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word)
        for word in (*runner["command"], *runner["args"])
    ]
    assert name == "rdzvrun"
    launch, meeting = parse_launch(words)
    assert (launch.job.rdzv_id, launch.job.node_id) == ("train", "train-0-x7k2p")
    assert [str(endpoint) for endpoint in meeting.endpoints] == [
        f"rdzvd:{server_config(tmp_path).listen.port}"
    ]
    settings = launch.job.settings
    assert settings.max_nodes < document["spec"]["parallelism"], "there is a spare"
    assert document["spec"]["parallelism"] == document["spec"]["completions"]


def test_exit_codes_mean_what_they_mean_to_rdzvrun() -> None:
    rules = one("Job", "train")["spec"]["podFailurePolicy"]["rules"]
    actions = {
        code: rule["action"]
        for rule in rules
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }
    assert actions == {75: "Count", 1: "FailJob", 2: "FailJob", 93: "FailJob"}


def test_who_may_reach_the_server_are_the_nodes() -> None:
    policy = one("NetworkPolicy", "rdzvd")["spec"]["ingress"][0]["from"][0]["podSelector"]
    for document in (one("DaemonSet", "rdzv-agent"), one("Job", "train")):
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert policy["matchLabels"].items() <= labels.items()


def test_everyone_has_time_to_end_in_order() -> None:
    for document in (one("StatefulSet", "rdzvd"), one("DaemonSet", "rdzv-agent")):
        assert pod(document)["terminationGracePeriodSeconds"] >= 20
        assert pod(document)["securityContext"]["runAsNonRoot"] is True
