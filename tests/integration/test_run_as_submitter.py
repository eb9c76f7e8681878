"""Submitted jobs run as their submitters' accounts, from the token to the worker's process."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster import BIN, Cluster, Node, cluster

from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc as pb_grpc
from tests.support.accounts import (
    SECRET,
    Identity,
    needs_root,
    own_folder,
    passable_folder,
    roots_secret,
)

pytestmark = [pytest.mark.timeout(240), needs_root]

NOBODY = pwd.getpwnam("nobody")
"""The one account without rights that every machine has."""


class Site:
    """A server that requires tokens, and a node that maps the names of their owners."""

    def __init__(self, running: Cluster, admin: Path) -> None:
        self.running = running
        self.folder = running.folder
        self.admin = admin
        self.home = own_folder(self.folder, "home", Identity(NOBODY.pw_uid, NOBODY.pw_gid))

    def ctl(self, token: Path, *args: str) -> str:
        environ = {"RDZV_SERVER": self.running.endpoint, "RDZV_TOKEN_FILE": str(token)}
        found = self.running.run("rdzvctl", *args, environ=environ)
        assert found.returncode == 0, found
        return found.stdout

    def token(self, name: str, role: str) -> Path:
        file = self.folder / f"token-{name}"
        file.touch(mode=0o600)
        shown = (("authorization", f"Bearer {self.admin.read_text().strip()}"),)
        request = pb.CreateTokenRequest(name=name, roles=[role])
        with grpc.insecure_channel(self.running.endpoint) as channel:
            stub: Any = pb_grpc.ControlStub(channel)
            file.write_text(stub.CreateToken(request, metadata=shown, timeout=60).text)
        return file

    def start_agent(self) -> Node:
        config = self.folder / "agent.toml"
        config.write_text(
            f'server = "{self.running.endpoint}"\nnode_id = "n1"\naddress = "127.0.0.1"\n'
            f'token_file = "{self.folder}/token-n1"\ngpus = "none"\n'
            f'state_dir = "{self.folder}/state"\nruntime_dir = "{self.folder}/run"\n'
            '[[user]]\nname = "ada"\naccounts = ["nobody"]\numask = "0027"\n'
            'limits = { nofile = "60:70" }\n'
        )
        command = [str(BIN / "rdzv-agent"), "--config", str(config)]
        return self.running.start("n1", command, environ={"SECRET": "of the agent"})

    def submit(self, token: Path, name: str, script: str, *flags: str) -> None:
        words = [f"--rdzv-id={name}", "--no-python", "--nproc-per-node=1", f"--chdir={self.home}"]
        self.ctl(token, "submit", *words, *flags, "/bin/sh", "-c", script)

    def state(self, name: str) -> str:
        return str(json.loads(self.ctl(self.admin, "status", name, "-o", "json"))["state"])

    def until_state(self, name: str, state: str) -> None:
        self.running.wait_until(f"{name} is {state}", lambda: self.state(name) == state)

    def until_status(self, name: str, words: str) -> None:
        """Wait until a job's status contains a text, wherever its lines are broken."""

        def said() -> bool:
            return words in " ".join(self.ctl(self.admin, "status", name).split())

        self.running.wait_until(f"{name}: {words!r}", said)


@pytest.fixture
def site() -> Iterator[Site]:
    with passable_folder() as folder:
        admin = folder / "admin-token"
        # A slow machine must not take an agent for lost while the next one starts.
        config = folder / "rdzvd.toml"
        config.write_text('[lease]\nduration = "10 min"\nlongest = "10 min"\n')
        options = ("--auth=required", f"--init-admin-token={admin}", f"--config={config}")
        with cluster(folder, *options) as running:
            yield Site(running, admin)


PYTHON = Path("/usr/bin/python3")
"""An interpreter that every account may run."""

SPECS = """
import os
from types import SimpleNamespace
def make(**asked):
    home, secret = os.environ["HOME_OF_JOB"], os.environ["SECRET_OF_ROOT"]
    out = secret if os.environ["OUT"] == "secret" else home + "/out.log"
    files = {"stdouts": {0: out}, "stderrs": {0: home + "/err.log"}, "error_files": {0: ""},
             "tee_stdouts": {0: out}, "tee_stderrs": {0: secret}}
    return SimpleNamespace(reify=lambda envs: SimpleNamespace(**files))
"""


def with_logs_specs(folder: Path) -> Path:
    """Put a class for --logs-specs, and a stand-in for torch, where every account finds it."""
    path = folder / "packages"
    package = path / "torch" / "distributed" / "elastic" / "multiprocessing"
    package.mkdir(parents=True)
    for name in ("torch", "torch/distributed", "torch/distributed/elastic"):
        (path / name / "__init__.py").touch()
    std = "import enum\nStd = enum.IntFlag('Std', {'NONE': 0, 'OUT': 1, 'ERR': 2, 'ALL': 3})\n"
    (package / "__init__.py").write_text(std)
    (path / "my_specs.py").write_text(SPECS)
    info = path / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = my_specs:make\n")
    return path


TWICE = """
id -un; umask; ulimit -n; env
if [ -e failed ]; then exit 0; fi
touch started
while [ ! -e go ]; do sleep 0.1; done
touch failed; exit 3
"""


def test_a_job_is_its_submitters_also_after_its_agent_was_killed(site: Site) -> None:
    ada, bob = site.token("ada", "submit"), site.token("bob", "submit")
    site.token("n1", "node")
    agent = site.start_agent()
    site.running.wait_until("n1 is connected", lambda: "connected" in site.ctl(site.admin, "nodes"))

    site.submit(ada, "of-ada", TWICE, "--max-restarts=1")
    site.running.wait_until("it runs", (site.home / "started").exists)
    assert (site.home / "started").stat().st_uid == NOBODY.pw_uid

    agent.process.kill()
    agent.process.wait()
    again = site.start_agent()
    site.running.wait_for_text(again, "adopted")
    (site.home / "go").touch()
    site.until_state("of-ada", "succeeded")
    assert (site.home / "failed").stat().st_uid == NOBODY.pw_uid

    for number in ("0", "1"):
        said = site.ctl(ada, "logs", "of-ada", f"--round={number}", "--rank=0").splitlines()
        assert said[:3] == ["nobody", "0027", "60"]
        assert f"HOME={NOBODY.pw_dir}" in said
        assert "USER=nobody" in said
        assert not [line for line in said if line.startswith("SECRET=")]
    (run, _) = sorted((site.folder / "state" / "runs" / "of-ada").iterdir())
    found = run.stat()
    assert (found.st_uid, found.st_mode & 0o777) == (NOBODY.pw_uid, 0o700)

    # A caller without an account here, or who asks for another's, is declined, with the reason.
    site.submit(bob, "of-bob", "true")
    site.until_status("of-bob", "no account is mapped to its submitter 'bob' on this node")
    site.submit(ada, "as-root", "true", "--user=root")
    site.until_status("as-root", "may not run jobs as 'root' on this node, only as nobody")
    assert not os.path.lexists(site.folder / "state" / "runs" / "of-bob")


@pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no {PYTHON}")
def test_logs_specs_of_a_job_reach_no_file_of_roots(site: Site) -> None:
    ada = site.token("ada", "submit")
    site.token("n1", "node")
    secret, packages = roots_secret(site.folder), with_logs_specs(site.folder)
    agent = site.start_agent()
    site.running.wait_until("n1 is connected", lambda: "connected" in site.ctl(site.admin, "nodes"))

    def submit(name: str, out: str) -> None:
        environ = {
            "PYTHONPATH": str(packages),
            "PYTHON_EXEC": str(PYTHON),
            "HOME_OF_JOB": str(site.home),
            "SECRET_OF_ROOT": str(secret),
            "OUT": out,
        }
        flags = [f"--env={key}={value}" for key, value in environ.items()]
        site.submit(ada, name, "echo said; echo wrong >&2", *flags, "--logs-specs=mine")

    submit("bad", "secret")
    site.until_status("bad", "Permission denied")
    assert secret.read_text() == SECRET

    old = site.home / "out.log"
    old.write_text("of a former attempt")
    os.chown(old, NOBODY.pw_uid, NOBODY.pw_gid)
    submit("good", "own")
    site.until_state("good", "succeeded")
    assert old.read_text() == "said\n"
    assert site.ctl(ada, "logs", "good", "--stdout").split() == ["[rank", "0]", "said"]
    assert secret.read_text() == SECRET
    assert SECRET not in agent.text
    assert "\nsaid\n" not in agent.text, "its agent's console is the node's log"
