"""A real Prometheus, with the delivered configuration, scrapes a real rdzvd and its nodes.

Each rule, each alert, and each query of each dashboard is evaluated while the condition that it is
about holds.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster import BIN, JOB, WORKERS, Cluster, cluster
from etcd_cluster import EtcdCluster, Member
from grafana import panel_queries, variable_queries
from ports import free_port, free_ports
from runbook import questions
from test_daemon import Daemons
from test_store_faults import set_file_limit

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
FOLDER = ROOT / "deploy" / "prometheus"
DIES_WITH_US = ("setpriv", "--pdeathsig=KILL")
"""Also if the tests are killed before they can clean up."""
WITH_TLS = {"RdzvCertificateExpires"}
"""These depend on metrics that a server without certificates does not have."""
SLOW = "RdzvSlowCommit"
"""Fires by itself on a machine that is busy otherwise, and is right then."""
SLOW_COMMITS = (
    "max_over_time(rdzv_commit_seconds_count[15m]) - ignoring(le) "
    'max_over_time(rdzv_commit_seconds_bucket{le="0.25"}[15m]) > 0'
)
"""The servers whose commits took longer than it allows, by their own counts."""
NEVER_DRIVEN = {
    *(SLOW, "RdzvJobSilent", "RdzvProcessesStuck", "RdzvMetricsIncomplete"),
    *("RdzvQueueStuck", "RdzvBudgetNearlySpent", "RdzvNodeQuarantined"),
    *WITH_TLS,
}
"""Conditions that no test can cause in seconds; promtool's unit test shows that they fire."""
MISSING = {"RdzvServerMissing", "RdzvAgentMissing", "RdzvQueueStuck"}
"""These ask for missing metrics; the others compare existing ones."""


def tool(name: str) -> str:
    """Return the path of a program, or skip the test."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's package prometheus has it)")
    return found


def fetch(url: str) -> tuple[str, str]:
    """Return the content at a URL, and its type."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


@dataclass(frozen=True)
class Rule:
    """A recording rule or an alert, as Prometheus has read it."""

    name: str
    kind: str
    query: str
    health: str
    error: str


class Prometheus:
    """A Prometheus on loopback, and its data."""

    def __init__(self, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def ask(self, path: str, **query: str) -> Any:
        text, _ = fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}")
        answer = json.loads(text)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> dict[str, float]:
        """Evaluate now; return the values that are numbers, by labels."""
        found = {
            json.dumps(one["metric"], sort_keys=True): float(one["value"][1])
            for one in self.ask("query", query=expression)["result"]
        }
        return {labels: value for labels, value in found.items() if not math.isnan(value)}

    def rules(self) -> list[Rule]:
        groups = self.ask("rules")["groups"]
        return [
            Rule(r["name"], r["type"], r["query"], r["health"], r.get("lastError", ""))
            for group in groups
            for r in group["rules"]
        ]

    def alerts(self) -> set[str]:
        """Name the alerts that fire, or will when they have waited long enough."""
        return {one["labels"]["alertname"] for one in self.ask("alerts")["alerts"]}

    def up(self, kind: str, count: int) -> bool:
        """Whether it answers, and has scraped this many of this kind."""
        try:
            return len(self.query(f'up{{rdzv_kind="{kind}"}} == 1')) == count
        except OSError:
            return False

    def wait_until(self, what: str, holds: Callable[[], Any], timeout_s: float = 120) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := holds()):
            if time.monotonic() > deadline:
                log = self.log.read_text()
                raise AssertionError(f"waited {timeout_s:g} s until {what}; Prometheus:\n{log}")
            time.sleep(0.1)
        return found


@contextmanager
def prometheus(folder: Path, http: str, other: str, port: int) -> Iterator[Prometheus]:
    """Run one with the delivered rules and configuration, but faster, and with a second job."""
    text = (FOLDER / "prometheus.yml").read_text()
    # The second job is like the first, of another server.
    _, _, delivered = text.partition("  - job_name: rdzv\n")
    delivered = delivered.partition("\n# alerting")[0]
    second = "  - job_name: rdzv-two\n" + delivered.replace("127.0.0.1:29480", other)
    for old, new in (
        ("15s", "500ms"),
        ("http://127.0.0.1:29480/sd", f"http://{http}/sd\n        refresh_interval: 1s"),
        ("- rules.yml", f"- {FOLDER / 'rules.yml'}"),
        ("- alerts.yml", f"- {FOLDER / 'alerts.yml'}"),
    ):
        assert old in text
        text = text.replace(old, new)
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(text.replace("scrape_configs:\n", f"scrape_configs:\n{second}"))
    command = [*DIES_WITH_US, tool("prometheus"), f"--config.file={config}"]
    command += [f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Prometheus(port, log)
    finally:
        process.kill()
        process.wait()


@contextmanager
def on_etcd(folder: Path, port: int) -> Iterator[Member]:
    """Run an rdzvd that leads on an etcd of one member, and yield it."""
    (folder / "etcd").mkdir()
    with EtcdCluster.running(folder / "etcd") as etcd:
        (member,) = etcd.members
        command = [*DIES_WITH_US, str(BIN / "rdzvd"), "--listen=127.0.0.1:0", "--store=etcd"]
        command += [f"--http=127.0.0.1:{port}", f"--etcd-endpoints={member.endpoint}"]
        with (folder / "on-etcd.log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("rdzvd ready")
            yield member
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def left_side(query: str) -> str:
    """Return the value that an alert compares; the alert itself if it ends in no comparison."""
    return re.sub(r" (>=?|<|==) [0-9.]+$", "", query)


@pytest.mark.timeout(900)
def test_every_rule_and_alert_says_something_when_it_happens(tmp_path: Path) -> None:
    tool("prometheus")
    http_port, other_port, port, c10d_port = free_ports(4)
    http, other = f"127.0.0.1:{http_port}", f"127.0.0.1:{other_port}"
    with on_etcd(tmp_path, other_port) as etcd, cluster(tmp_path) as c:
        c.kill_server()
        # Which node's worker fails in a round is by chance: often enough it is the same one.
        config = tmp_path / "rdzvd.toml"
        config.write_text("[quarantine]\nfailures = 0\n")
        c.start_server(f"--config={config}", "--http", http, f"--c10d=127.0.0.1:{c10d_port}")
        # One of two nodes of torch's own rendezvous, which waits for the other.
        torchrun = [str(BIN / "torchrun"), "--rdzv-backend=c10d", "--rdzv-id=torchs", "--nnodes=2"]
        torchrun += [f"--rdzv-endpoint=127.0.0.1:{c10d_port}", str(WORKERS / "report.py")]
        c.start("torchs", torchrun)
        with prometheus(tmp_path, http, other, port) as p:
            p.wait_until("both servers are scraped", lambda: p.up("server", 2))
            fired = drive(c, p, etcd, http)
            names = {rule.name for rule in p.rules() if rule.kind == "alerting"}
            assert fired - {SLOW} == names - NEVER_DRIVEN
            assert SLOW not in fired or p.query(SLOW_COMMITS), "it fires, and no commit was slow"


def every_panel_has_data(p: Prometheus, instance: str, fails: Path) -> None:
    """Wait until every query of every dashboard has data, for some choice of its variables.

    Whenever Prometheus has seen a round's workers save and report a step, the file `fails` is
    created: one of them fails, and the others continue. Were it created at any time, every round
    might end before the panels about snapshots have data.
    """
    values = {
        "job": ["rdzv"],
        "rdzv_id": [JOB, "submitted", "crash", "kept"],
        "node_id": ["g1"],
        "instance": [instance],
    }
    left = panel_queries()
    assert len(left) > 100

    def all_have() -> bool:
        if p.query('rdzv_job_snapshot_lost_steps{rdzv_id="kept"}'):
            fails.touch()
        left[:] = [q for q in left if not any(p.query(text) for text in q.with_values(values))]
        return not left

    try:
        p.wait_until("every panel has data", all_have)
    except AssertionError as error:
        raise AssertionError("without data:\n" + "\n".join(map(str, left))) from error
    chosen = {"job": "rdzv", "rdzv_id": JOB, "node_id": "g1", "instance": instance}
    for board, series, label in variable_queries():
        found = {
            name[label] for name in p.ask("series", **{"match[]": series.replace("$job", "rdzv")})
        }
        assert chosen[label] in found, (board, series)


def what_dashboards_draw_is_told(c: Cluster) -> None:
    """Ask rdzvctl for the same story, in sentences and as a trace."""
    explained = c.run("rdzvctl", "--server", c.endpoint, "explain", JOB)
    assert (explained.returncode, explained.stderr) == (0, "")
    assert "node lost: twice, " in explained.stdout
    for question in questions():
        asked = question.replace("JOB", "submitted").replace("NODE", "g1").split()[1:]
        answered = c.run("rdzvctl", "--server", c.endpoint, *asked)
        assert (answered.returncode, answered.stderr) == (0, ""), question
        assert answered.stdout, question
    traced = c.run("rdzvctl", "--server", c.endpoint, "trace", JOB, "-o", "-")
    slices = [e["name"] for e in json.loads(traced.stdout)["traceEvents"] if e["ph"] == "X"]
    assert {"round 0", "round 1"} <= set(slices)


def what_rules_say_is_there(p: Prometheus) -> None:
    """Wait until every rule has data."""
    for rule in p.rules():
        assert (rule.health, rule.error) == ("ok", ""), rule
        if rule.kind == "recording":
            p.wait_until(f"{rule.name} has data", lambda name=rule.name: p.query(name))
        elif rule.name not in MISSING | WITH_TLS:
            compared = left_side(rule.query)
            p.wait_until(f"{rule.name} has data: {compared}", lambda what=compared: p.query(what))


def what_is_counted_is_right(p: Prometheus, http: str, fails: Path) -> None:
    """Check known numbers, and everything that is drawn."""

    def says(query: str) -> dict[str, float]:
        """Wait until a query has an answer, since scrapes take some time."""
        found = p.wait_until(f"{query} says something", lambda: p.query(query))
        assert isinstance(found, dict)
        return found

    (node,) = says('rdzv_agent_gpus{state="running"} == 2')
    assert json.loads(node)["node_id"] == "g1"
    assert len(says('rdzv_jobs{state="queued"} == 1')) == 1
    every_panel_has_data(p, http, fails)
    lost = f'rdzv_job_membership_changes_total{{rdzv_id="{JOB}",kind="lost"}}'
    assert len(says(f"{lost} == 2")) == 1
    (goodput,) = says(f'rdzv:job_goodput:ratio_rate1h{{rdzv_id="{JOB}"}} > 0').values()
    assert goodput < 1


def drive(c: Cluster, p: Prometheus, etcd: Member, http: str) -> set[str]:
    """Cause every problem that an alert is about; return the alerts that were seen."""
    seen: set[str] = set()

    def fires(*names: str) -> None:
        def all_do() -> bool:
            seen.update(p.alerts())
            return set(names) <= seen

        p.wait_until(f"{names} fire; {seen} have", all_do)

    etcd.kill()
    d = Daemons(c)
    g1 = d.start("g1", 'gpus = "GPU-a,GPU-b"\ncapacity = 2\n')
    d.start("g2")  # A second node for the job whose snapshots would survive the loss of one.
    p.wait_until("the agents are scraped through the server", lambda: p.up("agent", 2))
    # These workers' reports must not be confused with those of the last job.
    apart = c.folder / "apart"
    apart.mkdir()
    env = (("RDZV_TEST_REPORTS", str(apart)),)
    budgets = ("--max-preemptions=9", "--max-store-failures=9", "--no-progress-restarts=9")
    fails = c.folder / "fails"
    kept = ("--nnodes=2", "--nproc-per-node=2", "--max-restarts=10000")
    saving = (str(SUPPORT / "linked_worker.py"), f"fails:{fails}", "saves:4096")
    d.submit("kept", *kept, *saving, env=env, gpus_per_node=0)
    for name in ("submitted", "queued"):
        d.submit(name, "--nproc-per-node=2", *budgets, str(WORKERS / "steps.py"), env=env)
    c.start_node(
        "crashes",
        # Several scrapes must see it: a counter that is first seen at its end has not grown. So it
        # crashes for as long as needed.
        *("--rdzv-id=crash", "--max-restarts=10000", "--restart-backoff=1.5:1.5"),
        nnodes="1:1",
        args=("exit=3",),
        environ={"RDZV_TEST_REPORTS": str(apart)},
    )
    c.start_node(
        *("fails", "--rdzv-id=fails"),
        nnodes="1:1",
        args=("exit=3",),
        environ={"RDZV_TEST_REPORTS": str(apart)},
    )
    unready = {"worker": str(SUPPORT / "linked_worker.py"), "args": ("elastic", "unready:/")}
    for name in ("s1", "s2"):  # The second one waits, and its standby fails.
        c.start_node(name, "--rdzv-id=spare", nnodes="1:1", environ=dict(env), **unready)
    c.start_node("n1", nnodes="2:2")
    n2 = c.start_node("n2", nnodes="2:2")
    c.wait_for_round(0, workers=2)
    n2.kill_tree()
    fires("RdzvJobBelowMin", "RdzvNoLeader")
    n2 = c.start_node("n2", nnodes="2:2")
    c.wait_for_round(1, workers=2)
    n2.kill_tree()
    fires("RdzvNodeFlaps", "RdzvJobCrashLoop", "RdzvJobFailed", "RdzvStandbyCold")

    what_rules_say_is_there(p)
    what_is_counted_is_right(p, http, fails)
    what_dashboards_draw_is_told(c)

    # Prometheus keeps the nodes that the server lists, whether or not they answer.
    g1.kill_tree()
    p.wait_until("the agent that was killed is missed", lambda: "RdzvAgentMissing" in p.alerts())
    seen.add("RdzvAgentMissing")

    # The next join cannot be written.
    assert c.server is not None
    set_file_limit(c.server, 0)
    c.start_node("n3", "--rdzv-id=other", nnodes="1:1")
    fires("RdzvStoreAway")
    c.kill_server()
    fires("RdzvServerMissing")
    # Its nodes are not missed as well, for they run on.
    assert not {one for one in p.query('ALERTS{alertname="RdzvAgentMissing"}') if "g2" in one}
    return seen


def test_what_a_server_says_of_where_it_is(tmp_path: Path) -> None:
    port = free_port()
    with cluster(tmp_path) as c:
        c.kill_server()
        c.start_server("--http", f"127.0.0.1:{port}")
        text, kind = fetch(f"http://127.0.0.1:{port}/sd")
        assert kind.startswith("application/json")
        server = {"targets": [f"127.0.0.1:{port}"], "labels": {"rdzv_kind": "server"}}
        assert json.loads(text) == [server]
        Daemons(c).start("g1")
        path = "/metrics/nodes/g1"
        agent = {"rdzv_kind": "agent", "node_id": "g1", "__metrics_path__": path}
        assert json.loads(fetch(f"http://127.0.0.1:{port}/sd")[0]) == [
            server,
            {**server, "labels": agent},
        ]
        text, kind = fetch(f"http://127.0.0.1:{port}{path}")
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
        for name in ("rdzv_agent_capacity 1.0", "process_open_fds ", "python_info{"):
            assert f"\n{name}" in text
        with pytest.raises(urllib.error.HTTPError, match="503"):
            fetch(f"http://127.0.0.1:{port}/metrics/nodes/g2")
        text, kind = fetch(f"http://127.0.0.1:{port}/metrics")
        assert kind == "text/plain; version=0.0.4; charset=utf-8"
        for name in ("rdzv_leads 1.0", "process_open_fds ", "python_info{"):
            assert f"\n{name}" in text
        refused = c.run("rdzvd", f"--http=0.0.0.0:{port}", "--store=memory")
        assert refused.returncode == 2
        assert "--insecure" in refused.stderr


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    promtool = tool("promtool")
    tests = sorted(str(path) for path in (FOLDER / "tests").glob("*.yml"))
    for args in (["check", "config", "prometheus.yml"], ["test", "rules", *tests]):
        done = subprocess.run(
            [promtool, *args], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_and_says_where_it_is_explained() -> None:
    alerts = (FOLDER / "alerts.yml").read_text()
    names = re.findall(r"- alert: (\w+)", alerts)
    tested = (FOLDER / "tests" / "alerts.yml").read_text()
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert headings, "the runbook has sections"
    assert sorted(names) == sorted(headings)
    for name in names:
        assert f'#{name.lower()}"\n' in alerts
        fires = rf"alertname: {name}\n +eval_time: \w+\n +exp_alerts:"
        stays_silent = rf"alertname: {name}, eval_time: \w+}}"
        assert re.search(fires, tested), f"{name} is never seen to fire"
        assert re.search(stays_silent, tested), f"{name} is never seen to be silent"
