"""The Debian package on a machine with systemd: installed, started, reloaded, removed."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from booted import Booted, booted

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
    """Return what `ulimit -l` says where the unit's limit is in effect.

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
    assert "`log_lavel` is unknown; the nearest known key is `log_level`" in machine.log
    assert machine.show("rdzvd", "ActiveState") == {"ActiveState": "active"}
    # What is broken is not restarted into either.
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
    """Start the agent, with a server that is patient with it, however slow this machine is."""
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
    """Wait until another agent has adopted the worker; insist that the job has noticed nothing."""
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
    assert "SIGTERM, of a restart by systemd; the jobs of this node are left" in machine.log


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
    """The last word: what it has written is in the folder that this machine can see, too."""
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
