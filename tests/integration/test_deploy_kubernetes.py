"""deploy/kubernetes: the manifests fit Kubernetes' schemas, and what they run, our parsers.

The commands of its README make the secrets, and rdzvd is started with them from its ConfigMap.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cluster import BIN, JOB, cluster_without_server
from ports import free_port

from rdzv.agent.app.agent_settings import AgentSettings
from rdzv.agent.cli.options import parse_launch
from rdzv.server.__main__ import main as rdzvd
from rdzv.server.settings.config import Config
from rdzv.server.settings.configuration import make_config
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.settings.toml_files import load

pytestmark = pytest.mark.clusters

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


def server_file(tmp_path: Path, secret: Path) -> Path:
    """Write what rdzvd is configured by, its secret being mounted elsewhere than in a pod."""
    file = tmp_path / "rdzvd.toml"
    mount = tls_mount(one("StatefulSet", "rdzvd"))
    file.write_text(
        one("ConfigMap", "rdzvd")["data"]["rdzvd.toml"].replace(f'"{mount}/', f'"{secret}/')
    )
    return file


def tls_mount(document: dict[str, Any]) -> str:
    (found,) = [m for m in container(document)["volumeMounts"] if m["name"] == "tls"]
    assert found["readOnly"] is True
    return str(found["mountPath"])


def secret_of(document: dict[str, Any]) -> str:
    (found,) = [volume["secret"] for volume in pod(document)["volumes"] if volume["name"] == "tls"]
    assert found["defaultMode"] & 0o007 == 0, "for the group that fsGroup names, and nobody else"
    return str(found["secretName"])


def readme_commands() -> list[list[str]]:
    blocks = re.findall(r"\n\n((?:    .*\n)+)", (FOLDER / "README.md").read_text())
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one for each secret of the README, made by its commands."""
    folder = tmp_path_factory.mktemp("kubernetes")
    for command in readme_commands():
        if command[:2] == ["rdzvctl", "certs"]:
            done = [BIN / "rdzvctl", *(word.replace("NODE", "node-1") for word in command[1:])]
            subprocess.run(done, cwd=folder, check=True, capture_output=True)
        elif command[3:6] == ["create", "secret", "generic"]:
            (folder / command[6]).mkdir()
            for option in command[7:]:
                name, _, source = option.removeprefix("--from-file=").rpartition("=")
                shutil.copy(folder / source, folder / command[6] / (name or Path(source).name))
    return folder


@pytest.fixture
def server_config(tmp_path: Path, secrets: Path) -> Config:
    secret = secrets / secret_of(one("StatefulSet", "rdzvd"))
    return make_config(load(RdzvdSettings, server_file(tmp_path, secret)).settings)


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


def test_rdzvd_is_asked_where_it_answers(server_config: Config) -> None:
    config = server_config
    assert config.http is not None
    server = container(one("StatefulSet", "rdzvd"))
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports == {"grpc": config.listen.port, "http": config.http.port}
    assert server["livenessProbe"]["httpGet"] == {
        **{"path": "/healthz", "port": "http", "scheme": "HTTPS"}
    }
    assert server["startupProbe"]["httpGet"] == server["livenessProbe"]["httpGet"]
    assert server["readinessProbe"]["httpGet"] == {
        **{"path": "/readyz", "port": "http", "scheme": "HTTPS"}
    }
    service = {port["name"]: port["port"] for port in one("Service", "rdzvd")["spec"]["ports"]}
    assert service == ports
    mounts = [mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")]
    assert str(config.data_dir).startswith(tuple(mounts))


def test_whoever_reaches_the_server_has_to_say_who_they_are(server_config: Config) -> None:
    assert server_config.auth
    assert not server_config.insecure
    assert server_config.exposed == ""
    assert server_config.tls is not None
    assert server_config.tls.client_ca is not None
    assert secret_of(one("StatefulSet", "rdzvd")) == "rdzvd-tls"


def test_no_secret_has_the_key_that_signs(secrets: Path) -> None:
    files = {str(file.relative_to(secrets)) for file in secrets.glob("*-tls/*")}
    assert files == {
        *("rdzvd-tls/server.crt", "rdzvd-tls/server.key", "rdzvd-tls/ca.crt"),
        *("train-tls/tls.crt", "train-tls/tls.key", "train-tls/ca.crt"),
    }


def test_rdzvd_serves_probes_and_a_job_with_the_secrets_of_the_readme(
    tmp_path: Path, secrets: Path
) -> None:
    """By HTTP a probe hears how it is, and nobody more without a proof; the job's pods come in."""
    secret = secrets / secret_of(one("StatefulSet", "rdzvd"))
    job = one("Job", "train")
    shown = {
        each["name"]: str(
            secrets / secret_of(job) / Path(each["value"]).relative_to(tls_mount(job))
        )
        for each in container(job)["env"]
        if each["name"].startswith("RDZV_TLS_")
    }
    http = free_port()
    with cluster_without_server(tmp_path) as c:
        config = server_file(tmp_path, secret)
        c.start_server_by(
            [
                *(str(BIN / "rdzvd"), f"--config={config}", f"--data-dir={tmp_path / 'data'}"),
                *("--listen=localhost:0", f"--http=localhost:{http}"),
            ]
        )
        trusting = ssl.create_default_context(cafile=secret / "ca.crt")
        at = f"https://localhost:{http}"
        for path in ("/healthz", "/readyz"):
            with urllib.request.urlopen(at + path, context=trusting) as answer:
                assert answer.status == 200
        for path in ("/metrics", "/api/v1/jobs"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(at + path, context=trusting)
        c.endpoint = f"localhost:{c.endpoint.rpartition(':')[2]}"
        node = c.start_node("train-0-x7k2p", nnodes="1:1", environ=shown)
        c.wait_for_round(0, workers=1)
        ops = {
            "RDZV_TLS_CA": str(secrets / "tls/ca.crt"),
            "RDZV_TLS_CERT": str(secrets / "tls/client-ops.crt"),
            "RDZV_TLS_KEY": str(secrets / "tls/client-ops.key"),
        }
        done = c.run("rdzvctl", f"--server={c.endpoint}", "status", JOB, "-o", "json", environ=ops)
        assert json.loads(done.stdout)["owner"] == "alice", done.stderr
        c.finish()
        assert node.wait() == 0


def test_the_servers_command_line_is_one_of_rdzvd(tmp_path: Path) -> None:
    name, *options = container(one("StatefulSet", "rdzvd"))["command"]
    assert name == "rdzvd"
    context = rdzvd.make_context(name, options)
    mounts = container(one("StatefulSet", "rdzvd"))["volumeMounts"]
    (folder,) = [mount["mountPath"] for mount in mounts if mount["name"] == "config"]
    assert context.params["file"] == Path(folder) / "rdzvd.toml"


class AnyMachine(AgentSettings, frozen=True):
    """Settings without the rules, which ask for this machine's accounts and programs."""

    rules = ()


def test_the_agents_configuration_is_one_of_rdzv_agent(
    tmp_path: Path, server_config: Config
) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(one("ConfigMap", "rdzv-agent")["data"]["agent.toml"])
    settings = load(AnyMachine, file).settings
    assert settings.server == f"rdzvd:{server_config.listen.port}"
    agent = container(one("DaemonSet", "rdzv-agent"))
    assert agent["command"] == ["rdzv-agent", "--config=/etc/rdzv/agent.toml"]
    mounts = {mount["mountPath"] for mount in agent["volumeMounts"]}
    assert {str(settings.state_dir), str(settings.runtime_dir)} <= mounts


def test_an_agent_shows_its_own_nodes_certificate(tmp_path: Path) -> None:
    """From the node, not from a secret that all nodes have; the README says what is put there."""
    document = one("DaemonSet", "rdzv-agent")
    (tls,) = [volume for volume in pod(document)["volumes"] if volume["name"] == "tls"]
    config = tmp_path / "agent.toml"
    config.write_text(one("ConfigMap", "rdzv-agent")["data"]["agent.toml"])
    ours = load(AnyMachine, config).settings.tls
    named = {file for file in (ours.ca, ours.cert, ours.key) if file is not None}
    assert len(named) == 3
    assert {file.parent for file in named} == {Path(tls_mount(document))}
    installs = [words for words in readme_commands() if words[0] == "install"]
    user = str(pod(document)["securityContext"]["runAsUser"])
    assert all(words[words.index("-o") + 1] == user for words in installs)
    text = " ".join(word for words in installs for word in words)
    for file in named:
        assert f"{tls['hostPath']['path']}/{file.name}" in text or f" {file.name} " in text


def test_the_jobs_command_line_is_one_of_rdzvrun(server_config: Config) -> None:
    document = one("Job", "train")
    runner = container(document)
    values = {"JOB": "train", "POD": "train-0-x7k2p", "POD_IP": "10.0.0.7"}
    said = {each["name"] for each in runner["env"] if "valueFrom" in each}
    assert said == values.keys()
    name, *words = [
        re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word)
        for word in (*runner["command"], *runner["args"])
    ]
    assert name == "rdzvrun"
    launch, meeting = parse_launch(words)
    assert (launch.job.rdzv_id, launch.job.node_id) == ("train", "train-0-x7k2p")
    assert [str(endpoint) for endpoint in meeting.endpoints] == [
        f"rdzvd:{server_config.listen.port}"
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
    assert actions == {75: "Count", 1: "FailJob", 2: "FailJob", 77: "FailJob", 93: "FailJob"}


def test_who_may_reach_the_server_are_the_nodes() -> None:
    policy = one("NetworkPolicy", "rdzvd")["spec"]["ingress"][0]["from"][0]["podSelector"]
    for document in (one("DaemonSet", "rdzv-agent"), one("Job", "train")):
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert policy["matchLabels"].items() <= labels.items()


def test_everyone_has_time_to_end_in_order() -> None:
    for document in (one("StatefulSet", "rdzvd"), one("DaemonSet", "rdzv-agent")):
        assert pod(document)["terminationGracePeriodSeconds"] >= 20
        assert pod(document)["securityContext"]["runAsNonRoot"] is True
