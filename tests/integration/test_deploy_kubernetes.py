"""deploy/kubernetes: all references resolve, objects fit their schemas, and commands work.

They are rendered by tests/support/kustomize.py, and by kubectl if there is one that can. Core
objects are validated with Kubernetes' own schemas (kubernetes-validate), others (JobSet, Trainer,
the Prometheus operator) against the requirements of their documentation, written down here.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import BIN, JOB, cluster_without_server
from ports import free_port
from rdzv_kube.__main__ import main as rdzv_kube

from rdzv.agent.app.agent_settings import AgentSettings
from rdzv.agent.cli.options import parse_launch
from rdzv.server.__main__ import main as rdzvd
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.settings.toml_files import load
from tests.support.kustomize import CLUSTER_WIDE, Object, render

pytestmark = pytest.mark.clusters

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSIONS = ("1.31", "1.34")
FOLDERS = ("rdzvd", "three-on-etcd", "agents", "rdzv-kube", "monitoring", "examples")

validate = pytest.importorskip(
    "kubernetes_validate", reason="its schemas are in the package kubernetes-validate"
)

OTHERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): (
        *("spec.replicatedJobs.0.name", "spec.replicatedJobs.0.replicas"),
        "spec.replicatedJobs.0.template.spec.template.spec.containers.0.image",
    ),
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): (
        *("spec.mlPolicy.numNodes", "spec.mlPolicy.torch", "metadata.labels"),
        "spec.template.spec.replicatedJobs.0.template.spec.template.spec.containers.0.image",
    ),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): ("spec.runtimeRef.name", "spec.runtimeRef.kind"),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): ("spec.selector", "spec.endpoints.0.port"),
    ("monitoring.coreos.com/v1", "PrometheusRule"): (
        *("spec.groups.0.name", "spec.groups.0.rules.0.expr"),
    ),
}
"""By kind, the fields without which objects of other projects are refused."""

RENDERED = {name: render(FOLDER / name) for name in FOLDERS}
ALL = [(folder, each) for folder, objects in RENDERED.items() for each in objects]

BY_TRAINER = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1"}
BY_TRAINER |= {"PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29400"}
"""What Trainer's torch policy sets, by its documents."""


def one(folder: str, kind: str, name: str) -> Object:
    (found,) = [e for e in RENDERED[folder] if (e["kind"], e["metadata"]["name"]) == (kind, name)]
    return found


def names(*folders: str) -> set[tuple[str, str]]:
    return {(e["kind"], e["metadata"]["name"]) for folder in folders for e in RENDERED[folder]}


def templates(item: Any) -> Iterator[Object]:
    """Yield every pod template in an object, with its labels and its spec."""
    if isinstance(item, dict):
        if "containers" in item.get("spec", {}) and item.get("kind") != "Pod":
            yield item
        for value in item.values():
            yield from templates(value)
    elif isinstance(item, list):
        for value in item:
            yield from templates(value)


PODS = [
    pytest.param(folder, template, id=f"{folder}-{each['kind']}-{each['metadata']['name']}")
    for folder, each in ALL
    for template in templates(each)
]


def container(template: Object) -> Object:
    (found,) = template["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def only_template(folder: str, kind: str, name: str) -> Object:
    (found,) = templates(one(folder, kind, name))
    return found


def words(template: Object, **more: str) -> list[str]:
    """Return a container's command, as it is run in a pod."""
    found = container(template)
    values = {each["name"]: each.get("value", f"x-{each['name'].lower()}") for each in env(found)}
    values |= {"POD": "train-0-x7k2p", "POD_IP": "10.0.0.7", "JOB": "train"} | more
    return [
        re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], word)
        for word in (*found["command"], *found.get("args", ()))
    ]


def env(found: Object) -> list[Object]:
    listed: list[Object] = found.get("env", [])
    return listed


def readme_commands() -> list[list[str]]:
    blocks = re.findall(r"\n\n((?:    .*\n)+)", (FOLDER / "README.md").read_text())
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def made_by_hand() -> dict[tuple[str, str, str], set[str]]:
    """Return what the commands of the README create: the keys, by namespace, kind and name."""
    found: dict[tuple[str, str, str], set[str]] = {}
    kinds = {"secret": "Secret", "configmap": "ConfigMap"}
    for command in readme_commands():
        if command[0] != "kubectl" or "create" not in command:
            continue
        at = command.index("create")
        if command[at + 1] not in kinds:
            continue
        name = command[at + (3 if command[at + 1] == "secret" else 2)]
        files = [w.removeprefix("--from-file=") for w in command if w.startswith("--from-file=")]
        keys = {file.partition("=")[0] if "=" in file else Path(file).name for file in files}
        found[command[command.index("-n") + 1], kinds[command[at + 1]], name] = keys
    return found


# ------------------------------------------------------------------------------- what is there


def test_all_that_is_promised_is_there() -> None:
    assert names("rdzvd") == {
        *(("ServiceAccount", "rdzvd"), ("ServiceAccount", "rdzv-ops"), ("Service", "rdzvd")),
        *(("NetworkPolicy", "rdzvd"), ("StatefulSet", "rdzvd"), ("ConfigMap", "rdzvd")),
    }
    more = {("Service", "rdzvd-pods"), ("PodDisruptionBudget", "rdzvd")}
    assert names("three-on-etcd") == names("rdzvd") | more
    assert names("agents") == {
        *(("ServiceAccount", "rdzv-agent"), ("DaemonSet", "rdzv-agent")),
        ("ConfigMap", "rdzv-agent"),
    }
    assert names("rdzv-kube") == {
        *(("ServiceAccount", "rdzv-kube"), ("ClusterRole", "rdzv-kube")),
        *(("ClusterRoleBinding", "rdzv-kube"), ("Deployment", "rdzv-kube")),
    }
    assert names("monitoring") == {("ServiceMonitor", "rdzvd"), ("PrometheusRule", "rdzvd")}
    assert names("examples") == {
        *(("ServiceAccount", "train"), ("PodDisruptionBudget", "train"), ("Job", "train")),
        *(("JobSet", "train-set"), ("ClusterTrainingRuntime", "torch-rdzv")),
        ("TrainJob", "train-on-four"),
    }


@pytest.mark.parametrize(
    ("folder", "item"), ALL, ids=[f"{f}-{e['kind']}-{e['metadata']['name']}" for f, e in ALL]
)
def test_each_fits_its_schema(folder: str, item: Object) -> None:
    required = OTHERS.get((item["apiVersion"], item["kind"]))
    if required is None:
        for version in VERSIONS:
            validate.validate(item, version, strict=True)
        return
    for path in required:
        at: Any = item
        for part in path.split("."):
            at = at[int(part)] if isinstance(at, list) else at[part]


@pytest.mark.parametrize(("folder", "template"), PODS)
def test_each_template_of_pods_fits_the_schema_of_a_pod(folder: str, template: Object) -> None:
    """So also those in JobSets and runtimes."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
    for version in VERSIONS:
        validate.validate(pod, version, strict=True)


# -------------------------------------------------------------------------------- references


def known(folder: str) -> set[tuple[str, str, str]]:
    """Return the objects that pods of a folder may refer to: namespace, kind and name."""
    found = {
        (each["metadata"].get("namespace", ""), each["kind"], each["metadata"]["name"])
        for _, each in ALL
    }
    return found | set(made_by_hand())


@pytest.mark.parametrize(("folder", "template"), PODS)
def test_what_a_pod_names_is_there(folder: str, template: Object) -> None:
    namespace = "training" if folder == "examples" else "rdzv"
    spec, there = template["spec"], known(folder)
    named: list[tuple[str, str]] = []
    files: dict[str, set[str]] = {}
    for volume in spec["volumes"]:
        sources = volume.get("projected", {}).get("sources", [volume])
        for source in sources:
            if "configMap" in source:
                named.append(("ConfigMap", source["configMap"]["name"]))
            if "secret" in source:
                named.append(("Secret", source["secret"]["secretName"]))
                assert source["secret"]["defaultMode"] & 0o007 == 0, "for fsGroup, and nobody else"
            if "serviceAccountToken" in source:
                assert source["serviceAccountToken"]["audience"] == "rdzvd"
                files.setdefault(volume["name"], set()).add(source["serviceAccountToken"]["path"])
        for kind, name in named:
            keys = made_by_hand().get((namespace, kind, name), set())
            files.setdefault(volume["name"], set()).update(keys)
    named.append(("ServiceAccount", spec["serviceAccountName"]))
    for kind, name in named:
        assert (namespace, kind, name) in there, f"there is no {kind} {name} in {namespace}"
    claims = one("rdzvd", "StatefulSet", "rdzvd")["spec"]["volumeClaimTemplates"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in claims if folder == "rdzvd"}
    found = container(template)
    mounts = {mount["name"]: mount["mountPath"] for mount in found["volumeMounts"]}
    assert set(mounts) <= volumes
    # References into a mounted secret or token name one of its files.
    text = json.dumps([env(found), found["command"], found.get("args", ())])
    for name in ("rdzvd", "tls", "etcd"):
        if name in mounts:
            for file in re.findall(rf"{mounts[name]}/([\w.-]+)", text):
                assert file in files[name], f"{file} is not in the volume {name}"
    variables = {each["name"] for each in env(found)} | set(BY_TRAINER)
    asked = set(re.findall(r"\$\((\w+)\)", json.dumps([found["command"], found.get("args", ())])))
    assert asked <= variables


@pytest.mark.parametrize("folder", FOLDERS)
def test_services_policies_and_budgets_are_about_pods_that_are_there(folder: str) -> None:
    with_pods = [each for _, each in ALL]
    labelled = [
        (template["metadata"]["labels"], container(template))
        for each in with_pods
        for template in templates(each)
        if "metadata" in template
    ]
    for each in RENDERED[folder]:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            ports = {
                port["name"]
                for labels, found in labelled
                if spec["selector"].items() <= labels.items()
                for port in found.get("ports", ())
            }
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        elif each["kind"] in ("NetworkPolicy", "PodDisruptionBudget"):
            wanted = spec.get("podSelector", spec.get("selector"))["matchLabels"]
            # Kubernetes' own labels are on the pods of a Job.
            jobs = [{"batch.kubernetes.io/job-name": e["metadata"]["name"]} for e in with_pods]
            pods = [labels for labels, _ in labelled] + jobs
            assert any(wanted.items() <= labels.items() for labels in pods)
        elif each["kind"] == "StatefulSet":
            assert ("Service", spec["serviceName"]) in names(folder)
        elif each["kind"] == "ClusterRoleBinding":
            assert (each["roleRef"]["kind"], each["roleRef"]["name"]) in names(folder)
            for subject in each["subjects"]:
                account = ("rdzv", subject["kind"], subject["name"])
                assert (subject["namespace"], *account[1:]) == account
                assert account in known(folder)
        elif each["kind"] == "ServiceMonitor":
            labels = spec["selector"]["matchLabels"]
            (service,) = [
                e
                for e in RENDERED["three-on-etcd"]
                if e["kind"] == "Service" and labels.items() <= e["metadata"]["labels"].items()
            ]
            (endpoint,) = spec["endpoints"]
            assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
            secret = endpoint["authorization"]["credentials"]
            assert secret["key"] in made_by_hand()["rdzv", "Secret", secret["name"]]
            ca = endpoint["tlsConfig"]["ca"]["configMap"]
            assert ca["key"] in made_by_hand()["rdzv", "ConfigMap", ca["name"]]
        elif each["kind"] == "TrainJob":
            ref = spec["runtimeRef"]
            assert (ref["kind"], ref["name"]) in names(folder)
            assert ref["kind"] in CLUSTER_WIDE


def test_the_rules_for_the_operator_are_current() -> None:
    path = FOLDER / "monitoring" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, made in generate.FILES.items():
        assert (path.parent / name).read_text() == generate.written(made()), f"run {path}"


# --------------------------------------------------------------------------- what they run


def test_rdzvd_is_asked_where_it_answers() -> None:
    settings = load(RdzvdSettings, FOLDER / "rdzvd/rdzvd.toml").settings
    assert settings.http is not None
    server = container(only_template("rdzvd", "StatefulSet", "rdzvd"))
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports == {"grpc": settings.listen.port, "http": settings.http.port}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = server[probe]["httpGet"]
        assert (asked["port"], asked["scheme"]) == ("http", "HTTPS")
        assert asked["path"] == ("/readyz" if probe == "readinessProbe" else "/healthz")
    service = one("rdzvd", "Service", "rdzvd")["spec"]["ports"]
    assert {port["name"]: port["port"] for port in service} == ports
    mounts = [mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")]
    assert str(settings.data_dir).startswith(tuple(mounts))


def test_three_servers_wait_for_no_readiness_that_one_that_stands_by_never_has() -> None:
    spec = one("three-on-etcd", "StatefulSet", "rdzvd")["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"]) == (3, "Parallel")
    assert "volumeClaimTemplates" not in spec
    (template,) = templates(spec)
    assert container(template)["readinessProbe"]["httpGet"]["path"] == "/healthz"


@pytest.mark.parametrize("folder", ["rdzvd", "three-on-etcd"])
def test_the_servers_command_line_is_one_of_rdzvd(folder: str) -> None:
    name, *options = words(only_template(folder, "StatefulSet", "rdzvd"), POD="rdzvd-1")
    context = rdzvd.make_context(name, options)
    assert context.params["file"] == Path("/etc/rdzv/rdzvd.toml")
    if folder == "three-on-etcd":
        assert context.params["store"] == "etcd"
        assert str(context.params["advertise"]) == "rdzvd-1.rdzvd-pods.rdzv.svc:29400"


def test_accounts_that_pods_have_are_accounts_that_the_server_knows() -> None:
    accounts = load(RdzvdSettings, FOLDER / "rdzvd/rdzvd.toml").settings.oidc.account
    known = {(one.namespace, one.name): one for one in accounts}
    assert known["rdzv", "rdzv-agent"].known_as == "node"
    for name in ("rdzv-kube", "rdzv-ops"):
        assert known["rdzv", name].roles == ("admin",)
    assert known["training", None].roles == ("submit",)


class AnyMachine(AgentSettings, frozen=True):
    """Settings without the rules, which need this machine's accounts and programs."""

    rules = ()


def test_the_agents_configuration_is_one_of_rdzv_agent() -> None:
    settings = load(AnyMachine, FOLDER / "agents/agent.toml").settings
    template = only_template("agents", "DaemonSet", "rdzv-agent")
    agent = container(template)
    assert words(template) == ["rdzv-agent", "--config=/etc/rdzv/agent.toml"]
    mounts = {mount["mountPath"] for mount in agent["volumeMounts"]}
    assert {str(settings.state_dir), str(settings.runtime_dir)} <= mounts
    grace_s = template["spec"]["terminationGracePeriodSeconds"]
    assert settings.drain_deadline_ms < grace_s * 1000
    (node_id,) = env(agent)
    assert node_id["name"] == "RDZV_NODE_ID"
    assert node_id["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


def test_the_watchers_command_line_is_one_of_rdzv_kube() -> None:
    template = only_template("rdzv-kube", "Deployment", "rdzv-kube")
    name, *options = words(template)
    context = rdzv_kube.make_context(name, options)
    assert context.params["server"] == "rdzvd.rdzv.svc:29400"
    (rule,) = one("rdzv-kube", "ClusterRole", "rdzv-kube")["rules"]
    assert (rule["resources"], rule["verbs"]) == (["nodes", "pods"], ["get", "list", "watch"])
    label, _, value = context.params["pod_selector"].partition("=")
    for kind, found in (("Job", "train"), ("JobSet", "train-set")):
        assert only_template("examples", kind, found)["metadata"]["labels"][label] == value


@pytest.mark.parametrize(
    ("kind", "name"),
    [("Job", "train"), ("JobSet", "train-set"), ("ClusterTrainingRuntime", "torch-rdzv")],
)
def test_the_jobs_command_line_is_one_of_rdzvrun(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_trainer = BY_TRAINER if kind == "ClusterTrainingRuntime" else {}
    for variable, value in by_trainer.items():
        monkeypatch.setenv(variable, value)
    program, *options = words(only_template("examples", kind, name), **by_trainer)
    assert program == "rdzvrun"
    launch, meeting = parse_launch(options)
    assert (launch.job.rdzv_id, launch.job.node_id) == ("train", "train-0-x7k2p")
    assert [str(endpoint) for endpoint in meeting.endpoints] == ["rdzvd.rdzv.svc:29400"]
    settings = launch.job.settings
    assert (settings.min_nodes, settings.max_nodes) == (2, 4)
    if kind == "Job":
        spec = one("examples", "Job", "train")["spec"]
        assert settings.max_nodes < spec["parallelism"] == spec["completions"], "there is a spare"
        budget = one("examples", "PodDisruptionBudget", "train")["spec"]
        assert budget["minAvailable"] == settings.min_nodes


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_exit_codes_mean_what_they_mean_to_rdzvrun(kind: str) -> None:
    spec = one("examples", kind, "train" if kind == "Job" else "train-set")["spec"]
    job = spec if kind == "Job" else spec["replicatedJobs"][0]["template"]["spec"]
    actions = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }
    assert actions == {75: "Count", 1: "FailJob", 2: "FailJob", 77: "FailJob", 93: "FailJob"}


def test_who_may_reach_the_server_are_the_nodes_and_the_watcher() -> None:
    policy = one("rdzvd", "NetworkPolicy", "rdzvd")["spec"]["ingress"][0]["from"]
    allowed = [each["podSelector"]["matchLabels"] for each in policy]
    for folder, kind, name in (
        ("agents", "DaemonSet", "rdzv-agent"),
        ("rdzv-kube", "Deployment", "rdzv-kube"),
        ("examples", "Job", "train"),
        ("examples", "JobSet", "train-set"),
        ("examples", "ClusterTrainingRuntime", "torch-rdzv"),
    ):
        labels = only_template(folder, kind, name)["metadata"]["labels"]
        assert any(wanted.items() <= labels.items() for wanted in allowed)


@pytest.mark.parametrize(("folder", "template"), PODS)
def test_everyone_has_time_to_end_in_order(folder: str, template: Object) -> None:
    spec = template["spec"]
    assert spec["terminationGracePeriodSeconds"] >= (10 if folder == "rdzv-kube" else 20)
    if folder != "examples":
        assert spec["securityContext"]["runAsNonRoot"] is True


# ------------------------------------------------------------------------------- as it is run


def test_rdzvd_serves_probes_agents_jobs_and_people_by_their_accounts(tmp_path: Path) -> None:
    """From the ConfigMap, with the certificate of the README; the issuer is ours."""
    pytest.importorskip("jwt", reason="PyJWT is in the extra oidc")
    from tests.support.issuer import issuing

    for command in readme_commands():
        if command[:2] == ["rdzvctl", "certs"]:
            done = [str(BIN / "rdzvctl"), *command[1:]]
            subprocess.run(done, cwd=tmp_path, check=True, capture_output=True)
    # The name by which the test reaches it is not one of the cluster.
    again = ["certs", "server", "--dir=tls", "--server=localhost,rdzvd.rdzv.svc", "--force"]
    subprocess.run([str(BIN / "rdzvctl"), *again], cwd=tmp_path, check=True, capture_output=True)
    tls, own, http = tmp_path / "tls", tmp_path / "own", free_port()
    own.write_text("of-rdzvd")
    with issuing(tmp_path / "issuer") as issuer, cluster_without_server(tmp_path) as c:
        issuer.wants_token = "of-rdzvd"
        text = one("rdzvd", "ConfigMap", "rdzvd")["data"]["rdzvd.toml"]
        mount = "/var/run/secrets/kubernetes.io/serviceaccount"
        for old, new in (
            ("https://kubernetes.default.svc.cluster.local", issuer.url),
            (f"{mount}/ca.crt", str(issuer.ca)),
            (f"{mount}/token", str(own)),
            ('"/tls/', f'"{tls}/'),
        ):
            assert old in text
            text = text.replace(old, new)
        config = tmp_path / "rdzvd.toml"
        config.write_text(text)
        c.start_server_by(
            [
                *(str(BIN / "rdzvd"), f"--config={config}", f"--data-dir={tmp_path / 'data'}"),
                *("--listen=localhost:0", f"--http=localhost:{http}"),
            ]
        )
        trusting = ssl.create_default_context(cafile=tls / "ca.crt")
        at = f"https://localhost:{http}"
        for path in ("/healthz", "/readyz"):
            with urllib.request.urlopen(at + path, context=trusting) as answer:
                assert answer.status == 200
        for path in ("/metrics", "/api/v1/jobs"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(at + path, context=trusting)
        c.endpoint = f"localhost:{c.endpoint.rpartition(':')[2]}"

        def shown(account: str, namespace: str, **claims: str) -> dict[str, str]:
            file = tmp_path / f"token-{account}"
            file.write_text(issuer.token(account, namespace=namespace, **claims))
            return {"RDZV_TLS_CA": str(tls / "ca.crt"), "RDZV_TOKEN_FILE": str(file)}

        people = shown("rdzv-ops", "rdzv")
        node = c.start_node("train-0-x7k2p", nnodes="1:1", environ=shown("train", "training"))
        c.wait_for_round(0, workers=1)
        done_ = c.run(
            *("rdzvctl", f"--server={c.endpoint}", "status", JOB, "-o", "json"), environ=people
        )
        assert json.loads(done_.stdout)["owner"] == "train@training", done_.stderr
        drained = ("rdzvctl", f"--server={c.endpoint}", "cordon", "train-0-x7k2p")
        assert c.run(*drained, environ=shown("train", "training")).returncode == 77
        assert c.run(*drained, environ=shown("rdzv-kube", "rdzv")).returncode == 0
        c.finish()
        assert node.wait() == 0
