"""A release, from its files alone: installed in an empty folder, it trains, and is upgraded."""

from __future__ import annotations

import fnmatch
import getpass
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from installed import (
    ROOT,
    Programs,
    build,
    environment,
    environment_with_torch,
    run,
    status,
)

from rdzv.demo.programs import descendants, environ_of

pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]

FORMER = "34801fd928496b659557aaeab356becaaf89255c"
"""A commit that stands for the previous release, since none is published; agents and runners of
before it are not adopted.
"""
ENDLESS = ("--epochs=100000", "--step-seconds=0.02")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="hatchling is not installed; run: make setup")
    pytest.importorskip("torch", reason="torch is not installed")
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def programs(files: Path) -> Path:
    """Install the wheel of this tree; return the folder of its programs."""
    return environment(files / "env", build(files / "dist"))


@pytest.fixture(scope="module")
def job_python(files: Path, programs: Path) -> Path:
    """Make an interpreter for jobs: it has torch and rdzv.worker, and nothing else of rdzv."""
    (wheel,) = (files / "dist").glob("rdzv_worker-*.whl")
    return environment_with_torch(files / "job", wheel)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    yield made
    made.end()


def training_of(programs: Path) -> Path:
    (script,) = programs.parent.glob("lib/python3*/site-packages/rdzv/demo/training.py")
    return script


def start_server(started: Programs, programs: Path, listen: str = "127.0.0.1:0") -> str:
    """Start rdzvd on its previous data; return its address."""
    log = started.log("rdzvd")
    before = log.read_text().count(" ready: listening on ") if log.exists() else 0
    data = f"--data-dir={started.folder / 'data'}"
    started.start("rdzvd", programs / "rdzvd", f"--listen={listen}", data)

    def ready() -> list[str]:
        found = re.findall(r"ready: listening on ([^,\s]+)", log.read_text())
        return found if len(found) > before else []

    return str(started.until("rdzvd is ready", ready)[-1])


def test_it_is_complete_and_nothing_leads_to_the_checkout(programs: Path, tmp_path: Path) -> None:
    python = programs / "python"
    for program in ("rdzvd", "rdzv-agent", "rdzvrun", "rdzvctl"):
        assert run(programs / program, "--version", folder=tmp_path).startswith(program)
    found = run(python, "-c", "import sys; print(sys.path)", folder=tmp_path)
    assert str(ROOT / "rendezvous") not in found
    run(sys.executable, "-m", "pip", "--python", python, "check", folder=tmp_path)
    for name in (
        "systemd/rdzvd.service",
        "prometheus/alerts.yml",
        "grafana/dashboards",
        "slurm/rdzv.sbatch",
        "slurm/submit_with_submitit.py",
    ):
        assert (programs.parent / "share/rdzv" / name).exists()
    assert os.access(programs.parent / "share/rdzv/slurm/rdzv-slurm-drain", os.X_OK)


def test_a_new_engineers_walk(programs: Path, job_python: Path, started: Programs) -> None:
    """Install, demo, two nodes, a kill, status, explain, documents: from the built files alone."""
    ctl, folder = programs / "rdzvctl", started.folder
    began_s = time.monotonic()
    demo = started.start("demo", ctl, "demo", "--python", job_python)
    said = started.until("it speaks", started.log("demo").read_text)
    # Within a second on an idle machine.
    assert time.monotonic() - began_s < 10
    assert said.startswith("rdzv ")
    assert demo.wait(400) == 0, started.log("demo").read_text()
    assert "the demo has passed" in started.log("demo").read_text()

    # The package contains the script of the quick start, too.
    quick_start = run(ctl, "docs", "one-machine", folder=folder)
    (script,) = re.findall(r'```python title="train.py"\n(.*?)```', quick_start, re.DOTALL)
    (folder / "train.py").write_text(script)
    server = start_server(started, programs)
    group = (f"--rdzv-endpoint={server}", "--rdzv-id=first", "--nnodes=1:2", "--max-restarts=3")
    for name in ("n1", "n2"):
        command = (programs / "rdzvrun", *group, f"--node-id={name}", "train.py")
        started.start(name, *command, PYTHON_EXEC=str(job_python))
    log = started.log("n1")
    started.until("both train", lambda: "of 2, MASTER" in log.read_text())
    started.until("they have a snapshot", (folder / "snapshot.pt").exists)
    started.started["n2"].kill()
    asked = (f"--server={server}", "first")
    assert "1:2" in run(ctl, "status", *asked, folder=folder)
    assert started.started["n1"].wait(200) == 0, log.read_text()
    found = status(ctl, server, "first", folder)
    assert (found["state"], found["round"], found["restarts"]) == ("succeeded", 1, 0)
    told = run(ctl, "explain", *asked, folder=folder)
    assert "(node lost)" in told and "Round 1 is complete: 1 worker on n1" in told

    assert "troubleshooting" in run(ctl, "docs", folder=folder)
    assert "75" in run(ctl, "docs", "troubleshooting", folder=folder)


def test_without_torch_the_demo_says_what_to_do(programs: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [programs / "rdzvctl", "demo"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "has no torch" in done.stderr and "--python PATH" in done.stderr


def test_one_machine_trains(programs: Path, job_python: Path, tmp_path: Path) -> None:
    group = ("--standalone", "--nproc-per-node=2")
    script = (training_of(programs), f"--snapshot={tmp_path / 'snapshot.pt'}", "--epochs=2")
    said = run(programs / "rdzvrun", *group, *script, folder=tmp_path, PYTHON_EXEC=str(job_python))
    assert "training finished: epoch 2" in said


def test_a_script_with_rdzv_worker_survives_a_kill_with_the_wheel_for_jobs_alone(
    programs: Path, job_python: Path, started: Programs
) -> None:
    for name in ("train_kept.py", "toy.py"):
        shutil.copy(ROOT / "examples" / name, started.folder)
    run(job_python, "-c", "import rdzv.worker", folder=started.folder)
    without = "import importlib.util as u; assert u.find_spec('rdzv.client') is None"
    run(job_python, "-c", without, folder=started.folder)
    group = ("--standalone", "--nproc-per-node=2", "--max-restarts=3")
    script = ("train_kept.py", "--epochs=8", "--step-seconds=0.05")
    job = started.start(
        "job", *(programs / "rdzvrun", *group, *script), PYTHON_EXEC=str(job_python)
    )
    log = started.log("job")
    started.until("it trains", lambda: "epoch 1" in log.read_text())
    of_rank = {environ_of(pid).get(b"RANK"): pid for pid in descendants(job.pid)}
    os.kill(of_rank[b"1"], signal.SIGKILL)
    assert job.wait(120) == 0, log.read_text()
    assert "training finished" in log.read_text()
    assert "going on at step" in log.read_text()


def test_the_files_are_the_same_bytes_from_any_folder_and_from_the_sdist(
    programs: Path, files: Path, tmp_path: Path
) -> None:
    first = files / "dist"
    (tmp_path / "elsewhere").mkdir()
    build(tmp_path / "second", TMPDIR=str(tmp_path / "elsewhere"))
    assert (tmp_path / "second/SHA256SUMS").read_text() == (first / "SHA256SUMS").read_text()
    (sdist,) = first.glob("rdzv-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    commit = ("git", "-C", ROOT, "log", "-1", "--format=%ct")
    epoch = run(*commit, folder=tmp_path).strip()
    release = tmp_path / sdist.name.removesuffix(".tar.gz") / "deploy/release.py"
    third = (release, "--python-only", tmp_path / "third")
    run(sys.executable, *third, folder=tmp_path, SOURCE_DATE_EPOCH=epoch)
    wheels = sorted(first.glob("*.whl"))
    for wheel in wheels:
        assert (tmp_path / "third" / wheel.name).read_bytes() == wheel.read_bytes(), wheel.name
    has_one_owner_of_each_file(wheels)


def has_one_owner_of_each_file(wheels: list[Path]) -> None:
    owners: dict[str, str] = {}
    for wheel in wheels:
        for name in zipfile.ZipFile(wheel).namelist():
            assert owners.setdefault(name, wheel.name) == wheel.name, name
    tracked = run("git", "-C", ROOT, "ls-files", folder=ROOT).split()
    wanted = ("*/rdzv/*.py", "*/rdzv/*.pyi", "*/rdzv/web/*", "*/rdzv/*.proto", "*/py.typed")
    roots = ("proto/", "rendezvous/", "agent/", "worker/")
    lost = [
        name
        for name in tracked
        if name.startswith(roots) and any(fnmatch.fnmatch(name, one) for one in wanted)
        if name.partition("/")[2] not in owners
    ]
    assert lost == []
    assert not [name for name in owners if name.startswith(("tests", "rdzv/worker/tests"))]


PACKAGED = (
    *("./usr/bin/rdzvctl", "./usr/share/rdzv", "./etc/rdzv/agent.toml"),
    *("./opt/rdzv/share/rdzv/rdzv_worker-", "./opt/rdzv/share/rdzv/prometheus/alerts.yml"),
    *(
        "./opt/rdzv/share/rdzv/grafana/dashboards/rdzv-job.json",
        "./usr/share/man/man1/rdzvctl.1.gz",
    ),
    *("./usr/share/man/man8/rdzvd.8.gz", "./usr/share/bash-completion/completions/rdzvctl"),
    *("./usr/share/zsh/vendor-completions/_rdzvctl", "rdzv/documents/hangs.md"),
)


def test_the_debian_package_is_complete_and_the_same_bytes_from_any_folder(
    programs: Path, files: Path, tmp_path: Path
) -> None:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("there is no dpkg-deb here")
    if not Path("/usr/bin/python3").resolve().name.startswith("python3."):
        pytest.skip("there is no /usr/bin/python3 here (Debian: python3)")
    wheels = [next((files / "dist").glob(f"{name}-*.whl")) for name in ("rdzv", "rdzv_worker")]
    sums = set()
    for name in ("one", "another"):
        folder = tmp_path / name
        (folder / "temporary").mkdir(parents=True)
        settings = {"SOURCE_DATE_EPOCH": "1700000000", "TMPDIR": str(folder / "temporary")}
        pip = f"{sys.executable} -m pip --disable-pip-version-check --quiet"
        build_script = ROOT / "deploy/debian/build"
        run(build_script, folder, *wheels, folder=tmp_path, PIP=pip, COMPRESSION="none", **settings)
        (package,) = folder.glob("*.deb")
        sums.add(hashlib.sha256(package.read_bytes()).hexdigest())
    assert len(sums) == 1
    listed = run("dpkg-deb", "--contents", package, folder=tmp_path)
    assert [name for name in PACKAGED if name not in listed] == []


def interpreters() -> list[Path]:
    """List the Pythons of this machine that are older than rdzv's own, but old enough for jobs."""
    names = [f"python3.{minor}" for minor in range(9, 11)]
    found = [Path(path) for name in names if (path := shutil.which(name))]
    found += sorted(Path.home().glob(".pyenv/versions/3.9.*/bin/python"))
    found += sorted(Path.home().glob(".pyenv/versions/3.10.*/bin/python"))
    return [
        path
        for path in found
        if subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
    ]


WORKER = """
import os, pathlib, sys, time
mine = pathlib.Path(os.environ["MINE"]) / f"{os.environ['RDZV_ROUND']}-{os.environ['RANK']}"
mine.write_text(f"{sys.version_info[0]}.{sys.version_info[1]} {os.getpid()}")
while not (mine.parent / "finish").exists():
    time.sleep(0.05)
"""


def test_jobs_run_in_older_interpreters_warm_and_cold(programs: Path, started: Programs) -> None:
    """Without torch, which the demo has: the zygote, its hook, and a store host that gives up."""
    found = interpreters()
    if not found:
        pytest.skip("there is no Python 3.9 or 3.10 here")
    script = started.folder / "worker.py"
    script.write_text(WORKER)
    for number, python in enumerate(found):
        mine = started.folder / f"{number}"
        mine.mkdir()
        group = ("--standalone", "--nproc-per-node=2", "--warm=json", "--max-restarts=3")
        name = f"run-{number}"
        run_ = started.start(
            name,
            *(programs / "rdzvrun", *group, script),
            **{"PYTHON_EXEC": str(python), "MINE": str(mine)},
        )
        started.until("both run", lambda mine=mine: len(list(mine.glob("0-*"))) == 2)
        log = started.log(name)
        started.until("workers can be warm", lambda log=log: "can be warm" in log.read_text())
        version, pid = (mine / "0-1").read_text().split()
        assert version in ("3.9", "3.10")
        os.kill(int(pid), signal.SIGKILL)
        started.until("both run again", lambda mine=mine: len(list(mine.glob("1-*"))) == 2)
        (mine / "finish").touch()
        assert run_.wait(60) == 0, log.read_text()
        assert "restarts 1 of 3" in log.read_text()
        assert "start cold" not in log.read_text().partition("can be warm")[2]


class Upgraded:
    """A server and two agents that are replaced by other versions under a training job."""

    def __init__(self, started: Programs, python: Path, script: Path) -> None:
        self.started, self.python, self.script = started, python, script
        self.folder = started.folder
        self.server = "127.0.0.1:0"

    def start_server(self, programs: Path) -> None:
        if "rdzvd" in self.started.started:
            self.started.started["rdzvd"].terminate()
            assert self.started.started["rdzvd"].wait(60) == 0
        self.server = start_server(self.started, programs, self.server)

    def start_agents(self, programs: Path) -> None:
        """Start both agents; running ones leave their jobs to them."""
        for name in ("n1", "n2"):
            if name in self.started.started:
                self.started.started[name].send_signal(signal.SIGUSR2)
                assert self.started.started[name].wait(60) == 0
            config = self.folder / f"{name}.toml"
            own = self.folder / name
            config.write_text(
                f'server = "{self.server}"\nnode_id = "{name}"\naddress = "127.0.0.1"\n'
                f'state_dir = "{own}"\nruntime_dir = "{own}/run"\npython = "{self.python}"\n'
                f'gpus = "none"\naccount = "{getpass.getuser()}"\n'
            )
            self.started.start(name, programs / "rdzv-agent", "--config", config)

    def submit(self, programs: Path) -> None:
        launch = ("--rdzv-id=night", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=9")
        script = (self.script, f"--snapshot={self.folder / 'night.pt'}", *ENDLESS)
        server = f"--server={self.server}"
        run(programs / "rdzvctl", server, "submit", *launch, "--", *script, folder=self.folder)

    def trains_on(self, programs: Path, round_: int, restarts: int) -> None:
        """Wait until it has trained two more epochs in this round, with both nodes."""

        def seen() -> tuple[Any, ...]:
            found = status(programs / "rdzvctl", self.server, "night", self.folder)
            nodes = [node["state"] for node in found["nodes"]]
            return found["state"], found["round"], found["restarts"], nodes

        wanted = ("running", round_, restarts, ["seated", "seated"])
        self.started.until(f"it is {wanted}", lambda: seen() == wanted)
        snapshot = self.folder / "night.pt"
        for _ in range(2):
            before = snapshot.stat().st_mtime_ns if snapshot.exists() else 0
            self.started.until(
                "it trains on",
                lambda before=before: snapshot.exists() and snapshot.stat().st_mtime_ns > before,
            )
        assert seen() == wanted

    def workers(self) -> list[int]:
        """Return the pids of the job's workers, under whichever agent."""
        said = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        mark = str(self.folder / "night.pt").encode()
        return [pid for pid in said if mark in cmdline(pid) and b"RANK" in environ_of(pid)]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def former(files: Path) -> Path:
    """Install the previous release; return the folder of its programs."""
    known = ["git", "-C", str(ROOT), "cat-file", "-e", f"{FORMER}^{{commit}}"]
    if shutil.which("git") is None or subprocess.run(known, check=False).returncode != 0:
        pytest.skip(f"this tree has no history with the commit {FORMER[:8]}")
    tree = files / "former"
    tree.mkdir()
    archive = ["git", "-C", str(ROOT), "archive", FORMER]
    packed = subprocess.run(archive, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", tree], input=packed, check=True)
    return environment(files / "former-env", build(files / "former-dist", tree))


def test_an_upgrade_and_the_way_back_disturb_no_training(
    programs: Path, former: Path, job_python: Path, started: Programs
) -> None:
    story = Upgraded(started, job_python, training_of(programs))
    story.start_server(former)
    story.start_agents(former)
    story.submit(former)
    story.trains_on(former, round_=0, restarts=0)
    workers = story.workers()
    assert len(workers) == 2

    # Forwards: the server first.
    story.start_server(programs)
    story.trains_on(programs, round_=0, restarts=0)
    story.start_agents(programs)
    story.trains_on(programs, round_=0, restarts=0)
    assert story.workers() == workers

    # The new version does not only watch: it ends a round, and forms the next one.
    os.kill(workers[0], signal.SIGKILL)
    story.trains_on(programs, round_=1, restarts=1)
    workers = story.workers()

    # Back: the nodes first.
    story.start_agents(former)
    story.trains_on(programs, round_=1, restarts=1)
    story.start_server(former)
    story.trains_on(former, round_=1, restarts=1)
    assert story.workers() == workers
    os.kill(workers[1], signal.SIGKILL)
    story.trains_on(former, round_=2, restarts=2)

    server = f"--server={story.server}"
    run(former / "rdzvctl", server, "stop", "night", folder=started.folder)
    started.until("all workers are gone", lambda: not story.workers())
