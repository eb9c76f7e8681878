"""Service accounts' tokens, with real rdzvd, rdzvrun and rdzvctl processes, and a real issuer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import JOB, Cluster, cluster

pytest.importorskip("jwt", reason="PyJWT is in the extra oidc")

from tests.support.issuer import Issuer, Key, issuing
from tests.support.tls_files import Files, put

DENIED = 77

CONFIG = """
[tls]
cert = "{tls}/server.crt"
key = "{tls}/server.key"
[oidc]
issuer = "{issuer}"
ca = "{ca}"
token_file = "{own}"
[[oidc.account]]
namespace = "team-a"
roles = ["submit"]
[[oidc.account]]
namespace = "rdzv"
name = "agent"
roles = ["node"]
known_as = "node"
"""


@pytest.fixture
def issuer(tmp_path: Path) -> Iterator[Issuer]:
    with issuing(tmp_path / "issuer") as running:
        running.wants_token = "of-rdzvd"
        yield running


@pytest.fixture
def running(tmp_path: Path, issuer: Issuer) -> Iterator[Cluster]:
    tls, own = tmp_path / "tls", tmp_path / "own-token"
    Files(tls)
    own.write_text("of-rdzvd")
    file = tmp_path / "rdzvd.toml"
    file.write_text(CONFIG.format(tls=tls, issuer=issuer.url, ca=issuer.ca, own=own))
    with cluster(tmp_path, f"--config={file}") as c:
        yield c


def shown(c: Cluster, file: Path) -> dict[str, str]:
    return {
        "RDZV_TLS_CA": str(c.folder / "tls/ca.crt"),
        "RDZV_TOKEN_FILE": str(file),
        "RDZV_SERVER": c.endpoint,
    }


def test_pods_call_with_the_tokens_that_kubelet_gives_them(
    running: Cluster, issuer: Issuer
) -> None:
    alice, agent = running.folder / "alice-token", running.folder / "agent-token"
    alice.write_text(issuer.token("alice"))
    agent.write_text(issuer.token("agent", namespace="rdzv", node="gpu-7"))

    def ctl(*args: str) -> tuple[int, str, str]:
        found = running.run("rdzvctl", *args, environ=shown(running, alice))
        return found.returncode, found.stdout, found.stderr

    pod = running.start_node("train-0", nnodes="1:1", environ=shown(running, alice))
    running.wait_for_round(0, workers=1)
    code, text, said = ctl("status", JOB, "-o", "json")
    assert (code, json.loads(text)["owner"]) == (0, "alice@team-a"), said

    # An agent may act for the node that its pod is on, and for no other.
    other = running.start_node("gpu-8", nnodes="1:1", environ=shown(running, agent))
    assert other.wait() == DENIED
    assert "gpu-7 (service account rdzv/agent) may not act for node gpu-8" in other.text

    # The server restarts while the issuer is away: a node retries until it is back, and trains on.
    issuer.away = True
    running.kill_server()
    running.start_server()
    running.wait_for_log("cannot fetch the keys of")
    issuer.away = False
    running.wait_until("the node is back", lambda: ctl("status", JOB)[0] == 0)

    # kubelet renews the file; until then an old token is refused, with the reason.
    late = running.folder / "late"
    late.write_text(issuer.token("alice", exp=int(time.time()) - 60))
    put(late, alice)
    code, _, said = ctl("list")
    assert (code, "the token expired at" in said) == (DENIED, True), said
    issuer.keys.insert(0, Key("two"))
    late.write_text(issuer.token("alice"))
    put(late, alice)
    running.wait_until("the new key is known", lambda: ctl("list")[0] == 0)

    running.finish()
    assert pod.wait() == 0, pod.text
    assert "eyJ" not in running.server_log, "no token is in the log"
