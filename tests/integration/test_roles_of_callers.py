"""Tokens, owners and the audit log, with real rdzvd, rdzvrun and rdzvctl processes."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import JOB, Cluster, cluster

DENIED = 77


class Guarded:
    """A server that requires authentication, and the files with people's tokens."""

    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.folder = running.folder
        self.admin = running.folder / "admin-token"

    def ctl(self, token: Path | None, *args: str) -> tuple[int, str, str]:
        environ = {"RDZV_SERVER": self.running.endpoint}
        if token is not None:
            environ["RDZV_TOKEN_FILE"] = str(token)
        found = self.running.run("rdzvctl", *args, environ=environ)
        return found.returncode, found.stdout, found.stderr

    def token(self, name: str, *roles: str) -> Path:
        """Create a token, and the file in which its owner keeps it."""
        words = [f"--role={role}" for role in roles]
        code, text, said = self.ctl(self.admin, "tokens", "create", name, *words, "--expires=1d")
        assert code == 0, said
        file = self.folder / f"token-{name}"
        file.write_text(text)
        return file

    def nodes(self, token: Path) -> dict[str, str]:
        """Return the state of each node of the job; none while the server does not answer."""
        code, text, _ = self.ctl(token, "status", JOB, "-o", "json")
        found = json.loads(text)["nodes"] if code == 0 else ()
        return {node["node_id"]: node["state"] for node in found}

    def wait_for_job(self, token: Path, holds: str) -> None:
        """Wait until the job's status, as its owner sees it, has these words."""
        self.running.wait_until(
            f"the status says {holds!r}", lambda: holds in self.ctl(token, "status", JOB)[1]
        )


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    admin = tmp_path / "admin-token"
    with cluster(tmp_path, "--auth=required", f"--init-admin-token={admin}") as running:
        yield Guarded(running)


def test_tokens_owners_and_the_audit(guarded: Guarded) -> None:
    running = guarded.running
    assert stat.S_IMODE(guarded.admin.stat().st_mode) == 0o600
    secret = guarded.admin.read_text().strip()

    code, _, said = guarded.ctl(None, "list")
    assert (code, "give a client certificate, or a token" in said) == (DENIED, True), said

    ada, bob = guarded.token("ada", "submit"), guarded.token("bob", "submit")
    code, _, said = guarded.ctl(bob, "tokens", "list")
    assert code == DENIED
    assert "bob (token" in said
    assert "needs the role admin, and it has submit" in said

    # Nobody without a token gets into a job, nor anybody else into ada's.
    stranger = running.start_node("n0", nnodes="2")
    assert stranger.wait() == DENIED, stranger.text
    nodes = [
        running.start_node(name, nnodes="2", environ={"RDZV_TOKEN_FILE": str(ada)})
        for name in ("n1", "n2")
    ]
    guarded.wait_for_job(ada, "running")
    thief = running.start_node("n3", nnodes="2", environ={"RDZV_TOKEN_FILE": str(bob)})
    assert thief.wait() == DENIED, thief.text
    assert "it belongs to ada" in thief.text

    code, _, said = guarded.ctl(bob, "stop", JOB)
    assert (code, "it belongs to ada" in said) == (DENIED, True), said
    code, shown, _ = guarded.ctl(bob, "status", JOB, "-o", "json")
    assert (code, json.loads(shown)["owner"]) == (0, "ada")

    # The server restarts and still knows the roles; no worker notices.
    running.kill_server()
    running.start_server()
    assert guarded.admin.read_text().strip() == secret
    running.wait_until(
        "both nodes are back",
        lambda: guarded.nodes(ada) == {"n1": "seated", "n2": "seated"},
    )
    code, _, said = guarded.ctl(ada, "stop", JOB, "--reason=enough")
    assert code == 0, said
    for node in nodes:
        node.wait()

    _, events, _ = guarded.ctl(bob, "events", JOB)
    assert "[ada (token" in events
    _, audit, _ = guarded.ctl(guarded.admin, "audit", "-o", "json")
    changes = [(row["name"], row["text"]) for row in json.loads(audit)["events"]]
    assert [name for name, _ in changes] == ["create token", "create token", "stop job"]
    assert changes[-1][1].startswith(f"stop job {JOB} (running -> st")
    assert "[ada (token " in changes[-1][1]
    assert "enough" in changes[-1][1]

    code, _, said = guarded.ctl(guarded.admin, "tokens", "revoke", "bob")
    assert code == 0, said
    code, _, said = guarded.ctl(bob, "list")
    assert (code, "not known here, or was revoked" in said) == (DENIED, True)
    _, shown, _ = guarded.ctl(guarded.admin, "tokens", "list")
    assert "ada" in shown
    assert "bob" not in shown
    # No token appears in any output.
    texts = [running.server_log, audit, shown, events, *(node.text for node in running.nodes)]
    for file in (guarded.admin, ada, bob):
        part = file.read_text().strip().split("_", 2)[2]
        assert not [text for text in texts if part in text]


def test_a_jobs_secret_keeps_strangers_out(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("4c6f72656d20697073756d\n")
    known = {"RDZV_JOB_SECRET_FILE": str(file)}
    with cluster(tmp_path) as running:
        nodes = [running.start_node(name, nnodes="2", environ=known) for name in ("n1", "n2")]
        running.wait_for_state("running")
        for name, environ in (("n3", {}), ("n4", {"RDZV_JOB_SECRET": "0123456789abcdef"})):
            stranger = running.start_node(name, nnodes="2", environ=environ)
            assert stranger.wait() == DENIED, stranger.text
            assert f"{name} cannot join {JOB}" in stranger.text
        running.finish()
        assert [node.wait() for node in nodes] == [0, 0]
        assert running.status().has_secret
        assert "4c6f72656d20697073756d" not in running.server_log
