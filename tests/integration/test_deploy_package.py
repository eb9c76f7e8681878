"""The Debian package on a machine with systemd: installed, started, reloaded, removed."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from booted import Booted, booted

pytestmark = pytest.mark.clusters

ROOT = Path(__file__).parents[2]
PACKAGE = "/run/given/rdzv.deb"
CAP_SYS_RESOURCE = 24
SERVER_FILE = "/etc/rdzv/rdzvd.toml"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the package."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("there is no dpkg-deb here")
    if not Path("/usr/bin/python3").resolve().name.startswith("python3."):
        pytest.skip("there is no /usr/bin/python3 here (Debian: python3)")
    folder = tmp_path_factory.mktemp("given")
    pip = f"{sys.executable} -m pip --disable-pip-version-check --quiet"
    done = subprocess.run(
        [str(ROOT / "deploy/debian/build"), str(folder)],
        env={**os.environ, "PIP": pip, "COMPRESSION": "none"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    Path(done.stdout.strip()).rename(folder / "rdzv.deb")
    return folder


@pytest.fixture(scope="module")
def machine(given: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    """Boot a machine and install the package. The tests of this file are one story, in order."""
    with booted(tmp_path_factory.mktemp("boot"), given) as machine:
        machine.do("dpkg", "--install", PACKAGE)
        yield machine


def most_locked_memory() -> str:
    """Return the output of `ulimit -l` under the unit's limit.

    systemd raises a limit as far as it may, which in a container is not beyond that of its host.
    """
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if capabilities >> CAP_SYS_RESOURCE & 1 or hard == resource.RLIM_INFINITY:
        return "unlimited"
    return str(hard // 1024)


def eventually(what: Callable[[], bool], machine: Booted) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline, machine.log
        time.sleep(0.1)


def test_installing_it_starts_nothing(machine: Booted) -> None:
    for unit in ("rdzvd", "rdzv-agent"):
        assert machine.run("systemctl", "is-enabled", unit).stdout.strip() == "disabled"
        assert machine.show(unit, "ActiveState") == {"ActiveState": "inactive"}
    for program in ("rdzvd", "rdzvrun", "rdzvctl"):
        assert machine.do(program, "--version").startswith(program)
    assert machine.do("id", "-un", "rdzv").strip() == "rdzv"
    assert machine.do("dpkg", "--verify", "rdzv") == ""


def test_nothing_in_it_names_the_folder_that_it_was_built_in(given: Path, tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "-x", given / "rdzv.deb", tmp_path], check=True)
    found = subprocess.run(
        ["grep", "-rl", "/stage/opt/rdzv", tmp_path], capture_output=True, text=True, check=False
    )
    assert found.stdout == ""
    shebang = (tmp_path / "opt/rdzv/bin/rdzvd").read_text().splitlines()[0]
    assert shebang == "#!/opt/rdzv/bin/python"


def test_the_server_starts_as_its_own_account_and_says_when_it_is_ready(machine: Booted) -> None:
    machine.do("systemctl", "enable", "--now", "rdzvd")
    shown = machine.show("rdzvd", "ActiveState", "StatusText", "User", "Type")
    assert (shown["ActiveState"], shown["Type"], shown["User"]) == ("active", "notify", "rdzv")
    assert shown["StatusText"].startswith("listening on 127.0.0.1:29400, data in /var/lib/rdzv")
    assert machine.do("stat", "-c", "%U %a", "/var/lib/rdzv", "/var/lib/rdzv/rdzv.db") == (
        "rdzv 700\nrdzv 600\n"
    )
    machine.do("rdzvctl", "list")


def test_a_reload_applies_what_is_in_order_and_fails_on_what_is_not(machine: Booted) -> None:
    file = machine.path(SERVER_FILE)
    usual = file.read_text()
    file.write_text(f'{usual}log_level = "debug"\n')
    machine.do("systemctl", "reload", "rdzvd")
    eventually(lambda: 'log_level is now "debug"' in machine.log, machine)
    file.write_text(f"{usual}log_lavel = 1\n")
    assert machine.run("systemctl", "reload", "rdzvd").returncode != 0
    assert "`log_lavel` is unknown; did you mean `log_level`?" in machine.log
    assert machine.show("rdzvd", "ActiveState") == {"ActiveState": "active"}
    # A broken configuration prevents a restart, too.
    assert machine.run("systemctl", "restart", "rdzvd").returncode != 0
    file.write_text(usual)
    machine.do("systemctl", "restart", "rdzvd")


def test_a_server_that_is_killed_comes_back(machine: Booted) -> None:
    before = machine.show("rdzvd", "MainPID")["MainPID"]
    machine.do("kill", "-9", before)
    eventually(
        lambda: (
            machine.show("rdzvd", "ActiveState", "MainPID")
            not in ({"ActiveState": "active", "MainPID": before},)
            and machine.run("rdzvctl", "list").returncode == 0
        ),
        machine,
    )


def test_the_agent_serves_its_node_with_the_configuration_that_it_brings(machine: Booted) -> None:
    machine.do("systemctl", "start", "rdzv-agent")
    name = machine.do("hostname").strip()
    eventually(lambda: name in machine.run("rdzvctl", "nodes").stdout, machine)
    pid = machine.show("rdzv-agent", "MainPID")
    file = machine.path("/etc/rdzv/agent.toml")
    usual = file.read_text()
    file.write_text(f"{usual}capacity = 3\n")
    machine.do("systemctl", "reload", "rdzv-agent")
    eventually(lambda: "capacity is now 3 (it was 1)" in machine.log, machine)
    file.write_text(f"{usual}capacitty = 3\n")
    assert machine.run("systemctl", "reload", "rdzv-agent").returncode != 0
    file.write_text(usual)
    assert machine.show("rdzv-agent", "MainPID") == pid
    machine.do("systemctl", "stop", "rdzv-agent")


# ---------------------------------------------------------------------- workers outlive their agent

STEADY = """#!/bin/sh
trap 'echo bye >>{said}; exit 0' TERM
echo $$ >>{said}
while :; do sleep 0.1; done
"""
DEAF = """#!/bin/sh
trap '' TERM
echo $$ >>{said}
while :; do sleep 0.1; done
"""
IMPATIENT = "[Service]\nWatchdogSec=3\nTimeoutStopSec=20\n"


def begin_job(machine: Booted, name: str, script: str, said: str) -> int:
    """Submit a job of one worker; return its pid once it runs."""
    worker = machine.path(f"/srv/{name}")
    worker.write_text(script.format(said=said))
    worker.chmod(0o755)
    submitted = ("--rdzv-id", name, "--nnodes=1", "--no-python", f"/srv/{name}")
    machine.do("rdzvctl", "submit", "--chdir=/", *submitted)
    file = machine.path(said)
    eventually(lambda: file.exists() and file.read_text().endswith("\n"), machine)
    return int(file.read_text())


def begin_agent(machine: Booted) -> None:
    """Start the agent, with a server that waits for it however slow this machine is."""
    file = machine.path(SERVER_FILE)
    file.write_text(f'{file.read_text()}[lease]\nduration = "60 s"\nlongest = "60 s"\n')
    machine.do("systemctl", "restart", "rdzvd")
    drop_in = machine.path("/run/systemd/system/rdzv-agent.service.d")
    drop_in.mkdir(parents=True, exist_ok=True)
    (drop_in / "test.conf").write_text(IMPATIENT)
    machine.do("systemctl", "daemon-reload")
    machine.do("systemctl", "start", "rdzv-agent")


def agent_pid(machine: Booted) -> int:
    return int(machine.show("rdzv-agent", "MainPID")["MainPID"])


def adoptions(machine: Booted) -> int:
    said = machine.do("journalctl", "--no-pager", "-u", "rdzv-agent")
    return said.count("steady: adopted, with runner pid")


def goes_on(machine: Booted, worker: int, before: int, adopted: int) -> None:
    """Wait until another agent has adopted the worker; check that the job has noticed nothing."""
    eventually(lambda: adoptions(machine) == adopted, machine)
    assert agent_pid(machine) not in (0, before)
    assert machine.path(f"/proc/{worker}/cgroup").exists()
    status = json.loads(machine.do("rdzvctl", "status", "steady", "-o", "json"))
    assert (status["state"], status["round"], status["restarts"]) == ("running", 0, 0)


def test_a_restart_of_the_agent_disturbs_no_worker(machine: Booted) -> None:
    begin_agent(machine)
    worker = begin_job(machine, "steady", STEADY, "/var/lib/rdzv-agent/steady")
    before = agent_pid(machine)
    machine.do("systemctl", "restart", "rdzv-agent")
    goes_on(machine, worker, before, 1)
    assert "SIGTERM from systemd's restart; leaving this node's jobs" in machine.log


def steady_worker(machine: Booted) -> int:
    return int(machine.path("/var/lib/rdzv-agent/steady").read_text())


def test_nor_does_a_crash(machine: Booted) -> None:
    worker, before = steady_worker(machine), agent_pid(machine)
    machine.do("kill", "-9", str(before))
    goes_on(machine, worker, before, 2)


def test_nor_does_an_event_loop_that_hangs(machine: Booted) -> None:
    worker, before = steady_worker(machine), agent_pid(machine)
    machine.do("kill", "-STOP", str(before))
    goes_on(machine, worker, before, 3)
    assert "Watchdog timeout" in machine.log


def test_nor_does_an_upgrade_of_the_package(machine: Booted) -> None:
    worker, before = steady_worker(machine), agent_pid(machine)
    machine.do("dpkg", "--install", PACKAGE)
    goes_on(machine, worker, before, 4)


def test_a_stop_lets_it_save_and_ends_it(machine: Booted) -> None:
    worker = steady_worker(machine)
    machine.do("systemctl", "stop", "rdzv-agent")
    assert not machine.path(f"/proc/{worker}/cgroup").exists()
    assert machine.path("/var/lib/rdzv-agent/steady").read_text().endswith("\nbye\n")
    assert machine.run("pgrep", "-u", "rdzv-agent").stdout == ""
    machine.do("rdzvctl", "stop", "steady")


def test_a_stop_also_ends_what_the_agent_had_no_time_for(machine: Booted) -> None:
    drop_in = machine.path("/run/systemd/system/rdzv-agent.service.d/test.conf")
    # Nor may it ask for more time, as it does to let its workers save.
    drop_in.write_text("[Service]\nType=exec\nNotifyAccess=none\nWatchdogSec=0\nTimeoutStopSec=1\n")
    machine.do("systemctl", "daemon-reload")
    machine.do("systemctl", "start", "rdzv-agent")
    worker = begin_job(machine, "deaf", DEAF, "/var/lib/rdzv-agent/deaf")
    machine.do("systemctl", "stop", "rdzv-agent")
    assert not machine.path(f"/proc/{worker}/cgroup").exists()
    assert machine.run("pgrep", "-u", "rdzv-agent").stdout == ""
    machine.do("rdzvctl", "stop", "deaf")
    drop_in.unlink()
    machine.do("systemctl", "daemon-reload")


def test_the_agent_runs_a_job_as_its_own_account_and_a_stop_ends_it_in_order(
    machine: Booted,
) -> None:
    worker = machine.path("/srv/worker")
    worker.write_text(
        "#!/bin/sh\n"
        "trap 'echo bye >>/var/lib/rdzv-agent/said; exit 0' TERM\n"
        "{ id -un; ulimit -l; } >/var/lib/rdzv-agent/said\n"
        "while :; do sleep 0.1; done\n"
    )
    worker.chmod(0o755)
    args = '["--rdzv-id=night", "--nnodes=1", "--no-python", "/srv/worker"]'
    machine.path("/etc/rdzv/agent.toml").write_text(
        f'server = "127.0.0.1:29400"\n[[job]]\nargs = {args}\n'
    )
    machine.do("systemctl", "start", "rdzv-agent")
    said = machine.path("/var/lib/rdzv-agent/said")
    eventually(lambda: said.exists() and len(said.read_text().splitlines()) == 2, machine)
    assert said.read_text() == f"rdzv-agent\n{most_locked_memory()}\n"
    assert "running" in machine.do("rdzvctl", "list")
    machine.do("systemctl", "stop", "rdzv-agent")
    assert said.read_text().endswith("bye\n")
    assert machine.run("pgrep", "-u", "rdzv-agent").stdout == ""


@pytest.mark.parametrize(
    ("unit", "line", "priority"),
    [
        ("rdzvd", "night: run 1 (", "6"),
        ("rdzv-agent", "joined night (run ", "6"),
        ("rdzv-agent", "night: received SIGTERM; leaving the job", "4"),
    ],
)
def test_a_line_in_the_journal_has_its_priority_and_no_second_time(
    machine: Booted, unit: str, line: str, priority: str
) -> None:
    said = machine.do("journalctl", "--no-pager", "-u", unit, "-o", "json")
    entries = [json.loads(entry) for entry in said.splitlines()]
    found = [entry["PRIORITY"] for entry in entries if str(entry["MESSAGE"]).startswith(line)]
    assert found == [priority]


def test_an_upgrade_restarts_the_server_and_keeps_what_was_configured(machine: Booted) -> None:
    file = machine.path(SERVER_FILE)
    mine = f"{file.read_text()}\n[limits]\njobs = 77\n"
    file.write_text(mine)
    before = machine.show("rdzvd", "MainPID")
    machine.do("dpkg", "--install", PACKAGE)
    assert file.read_text() == mine
    assert machine.show("rdzvd", "ActiveState") == {"ActiveState": "active"}
    assert machine.show("rdzvd", "MainPID") != before
    assert "jobs = 77" in machine.do("rdzvd", "--print-config")


def test_an_upgrade_leaves_a_server_alone_that_could_not_start_again(machine: Booted) -> None:
    file = machine.path(SERVER_FILE)
    usual = file.read_text()
    file.write_text(f"nonsense = 1\n{usual}")
    before = machine.show("rdzvd", "MainPID")
    done = machine.run("dpkg", "--install", PACKAGE)
    assert done.returncode == 0
    assert "rdzvd is not restarted: correct its configuration" in done.stderr
    assert machine.show("rdzvd", "MainPID") == before
    file.write_text(usual)
    machine.do("systemctl", "reload", "rdzvd")


# ---------------------------------------------------------------------- jobs as their submitters

DROP_IN = "/etc/systemd/system/rdzv-agent.service.d/run-as.conf"
ADMIN = "/var/lib/rdzv/admin-token"
ASKS = f'auth = "required"\ninit_admin_token = "{ADMIN}"\n'
NODE_TOKEN = "/srv/node-token"
WHOSE = """#!/bin/sh
# What the job is, and may do; then it stays.
tell() {{ if "$@" >/dev/null 2>&1; then echo may; else echo may not; fi; }}
cd {home}
{{
  id -un
  id -Gn
  grep -E '^(CapEff|CapBnd):' /proc/self/status | tr -d '\\t'
  echo "list: $(tell ls /var/lib/rdzv-agent) $(tell ls /run/rdzv-agent)"
  echo "read: $(tell cat {token})"
  echo "signal: $(tell kill -0 {agent}) $(tell kill -0 $PPID)"
  echo "talk: $(tell {python} -c 'import glob, socket, sys
for path in sys.argv[1:]: socket.socket(socket.AF_UNIX).connect(path)' {sockets})"
}} >whose.new 2>&1
mv whose.new whose
trap 'echo bye >>whose; exit 0' TERM
while :; do sleep 0.1; done
"""


def ctl(machine: Booted, token: str, *args: str) -> subprocess.CompletedProcess[str]:
    return machine.run("env", f"RDZV_TOKEN_FILE={token}", "rdzvctl", *args)


def what_it_permits(machine: Booted) -> dict[str, str]:
    """Return the settings of the agent's unit that restrict its rights and paths."""
    lines = machine.do("systemctl", "show", "--all", "rdzv-agent").splitlines()
    found = dict(line.split("=", 1) for line in lines)
    settings = (
        "User|Group|SupplementaryGroups|Dynamic|UMask|Capability|Ambient|NoNew|SecureBits|PAM|"
        "Protect|Private|Restrict|SystemCall|Device|Read.*Paths|Inaccessible|.*ExecPaths|Bind|Root|Mount|Proc|.*Directory|"
        "Environment|PassEnv|UnsetEnv|Limit|Tasks|OOM|Delegate|Kill|SendSIG|Notify|Type|Lock|IPC"
    )
    return {name: found[name] for name in found if re.match(settings, name)}


@pytest.fixture(scope="module")
def callers(machine: Booted) -> Booted:
    """Let the server require authentication, and the agent map one of two submitters."""
    server, agent = machine.path(SERVER_FILE), machine.path("/etc/rdzv/agent.toml")
    server.write_text(f"{ASKS}{server.read_text()}")
    machine.do("systemctl", "restart", "rdzvd")
    node = machine.do("hostname").strip()
    for name, role in (("ada", "submit"), ("bob", "submit"), (node, "node")):
        made = ctl(machine, ADMIN, "tokens", "create", name, "--role", role)
        assert made.returncode == 0, made.stderr
        file = machine.path(NODE_TOKEN if role == "node" else f"/srv/token-{name}")
        file.touch(mode=0o600)
        file.write_text(made.stdout)
    machine.do("chown", "rdzv-agent:", NODE_TOKEN)
    machine.do("useradd", "--create-home", "ada")
    agent.write_text(
        f'server = "127.0.0.1:29400"\ntoken_file = "{NODE_TOKEN}"\ncapacity = 2\n'
        '[[user]]\nname = "ada"\n'
    )
    return machine


def test_an_agent_that_is_not_root_runs_nothing_as_another(callers: Booted) -> None:
    assert callers.run("systemctl", "start", "rdzv-agent").returncode != 0
    assert "[[user]]" in callers.do("journalctl", "--no-pager", "-u", "rdzv-agent", "-n", "20")
    callers.do("systemctl", "stop", "rdzv-agent")


def test_the_drop_in_makes_it_root_and_changes_nothing_else(callers: Booted) -> None:
    before = what_it_permits(callers)
    callers.path(DROP_IN).parent.mkdir(parents=True)
    shutil.copy(ROOT / "deploy/systemd/run-as.conf", callers.path(DROP_IN))
    callers.do("systemctl", "daemon-reload")
    assert callers.run("systemd-analyze", "verify", "rdzv-agent.service").stderr == ""
    after = what_it_permits(callers)
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    assert changed == {
        **{"User": "root", "Group": "root"},
        **{"StateDirectoryMode": "0711", "RuntimeDirectoryMode": "0711"},
    }
    callers.do("systemctl", "start", "rdzv-agent")
    node = callers.do("hostname").strip()
    eventually(lambda: node in ctl(callers, ADMIN, "nodes").stdout, callers)
    found = callers.do("stat", "-c", "%U %a", "/var/lib/rdzv-agent", "/run/rdzv-agent")
    assert found == "root 711\nroot 711\n"


def said_by_ada(machine: Booted) -> list[str]:
    file = machine.path("/home/ada/whose")
    return file.read_text().splitlines() if file.exists() else []


def test_a_job_is_its_submitters_and_may_nothing_of_the_agents(callers: Booted) -> None:
    sockets = callers.do("sh", "-c", "find /run/rdzv-agent -type s").split()
    script = callers.path("/srv/whose")
    script.write_text(
        WHOSE.format(
            home="/home/ada",
            token=NODE_TOKEN,
            agent=agent_pid(callers),
            python="/opt/rdzv/bin/python",
            sockets=" ".join(sockets) or "/run/rdzv-agent/none",
        )
    )
    script.chmod(0o755)
    submitted = ("--rdzv-id=whose", "--nnodes=1", "--no-python", "--chdir=/home/ada", "/srv/whose")
    done = ctl(callers, "/srv/token-ada", "submit", *submitted)
    assert done.returncode == 0, done.stderr
    eventually(lambda: bool(said_by_ada(callers)), callers)
    assert said_by_ada(callers) == [
        *("ada", "ada", "CapEff:0000000000000000"),
        said_by_ada(callers)[3],
        *("list: may not may not", "read: may not", "signal: may not may not", "talk: may not"),
    ]


def test_who_has_no_account_is_declined(callers: Booted) -> None:
    submitted = ("--rdzv-id=of-bob", "--nnodes=1", "--no-python", "--chdir=/", "/bin/true")
    done = ctl(callers, "/srv/token-bob", "submit", *submitted)
    assert done.returncode == 0, done.stderr

    def declined() -> bool:
        told = json.loads(ctl(callers, ADMIN, "status", "of-bob", "-o", "json").stdout)
        return bool(told["submission"]["declined"])

    eventually(declined, callers)
    assert ctl(callers, ADMIN, "stop", "of-bob").returncode == 0


def test_an_upgrade_restarts_that_agent_too_and_disturbs_no_job(callers: Booted) -> None:
    """The upgrade checks the configuration under the account that the agent runs as."""
    before = agent_pid(callers)
    done = callers.run("dpkg", "--install", PACKAGE)
    assert (done.returncode, "is not restarted" in done.stderr) == (0, False), done.stderr
    assert agent_pid(callers) not in (0, before)
    callers.do("systemctl", "reload", "rdzv-agent")
    eventually(lambda: "whose: adopted, with runner pid" in callers.log, callers)
    status = json.loads(ctl(callers, ADMIN, "status", "whose", "-o", "json").stdout)
    assert (status["state"], status["round"], status["restarts"]) == ("running", 0, 0)
    assert status["owner"] == "ada"


def test_a_stop_lets_a_submitters_job_save_and_leaves_nothing_of_it(callers: Booted) -> None:
    callers.do("systemctl", "stop", "rdzv-agent")
    assert said_by_ada(callers)[-1] == "bye"
    assert callers.run("pgrep", "-u", "ada").stdout == ""


def test_without_the_drop_in_it_is_its_own_account_again(callers: Booted) -> None:
    callers.path(DROP_IN).unlink()
    server = callers.path(SERVER_FILE)
    server.write_text(server.read_text().removeprefix(ASKS))
    # A server that has created tokens does not start without requiring them.
    callers.do("systemctl", "stop", "rdzvd")
    callers.do("sh", "-c", "rm /var/lib/rdzv/*")
    callers.path("/etc/rdzv/agent.toml").write_text('server = "127.0.0.1:29400"\n')
    callers.do("systemctl", "daemon-reload")
    callers.do("systemctl", "start", "rdzvd", "rdzv-agent")
    found = callers.do("stat", "-c", "%U %a", "/var/lib/rdzv-agent", "/run/rdzv-agent")
    assert found == "rdzv-agent 750\nrdzv-agent 755\n"
    callers.do("systemctl", "stop", "rdzv-agent")


def test_removing_it_stops_the_server_and_keeps_data_until_it_is_purged(machine: Booted) -> None:
    machine.do("dpkg", "--remove", "rdzv")
    assert machine.show("rdzvd", "LoadState", "ActiveState") == {
        "LoadState": "not-found",
        "ActiveState": "inactive",
    }
    assert machine.path(SERVER_FILE).exists()
    assert machine.path("/var/lib/rdzv/rdzv.db").exists()
    assert not machine.path("/opt/rdzv").exists()
    machine.do("dpkg", "--purge", "rdzv")
    for gone in ("/etc/rdzv", "/var/lib/rdzv", "/var/lib/rdzv-agent"):
        assert not machine.path(gone).exists()


def test_a_shutdown_of_the_machine_lets_workers_save(machine: Booted, given: Path) -> None:
    """The last message: the output is in the folder that this machine can see, too."""
    given.chmod(0o755)
    seen = given / "seen"
    seen.mkdir()
    seen.chmod(0o777)
    machine.do("dpkg", "--install", PACKAGE)
    machine.do("systemctl", "start", "rdzvd", "rdzv-agent")
    begin_job(machine, "steady", STEADY, "/run/given/seen/said")
    machine.run("systemctl", "poweroff")
    eventually_gone(machine)
    assert (seen / "said").read_text().endswith("\nbye\n")


def eventually_gone(machine: Booted) -> None:
    deadline = time.monotonic() + 60
    while machine.up:
        assert time.monotonic() < deadline, machine.log
        time.sleep(0.1)
