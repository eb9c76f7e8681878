"""A real Slurm, Debian's, on five hosts that are namespaces of this machine. Needs root.

The hosts share files and processes; network, host names and daemons are their own. It ends with the
body. `fetch.sh` gets the packages, once; `boot.sh` is the first process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import BIN

HERE = Path(__file__).parent
PACKAGES = HERE.parents[2] / "build" / "slurm"
DEPLOY = HERE.parents[2] / "deploy" / "slurm"
NODES = ("n1", "n2", "n3", "n4")
ENDPOINT = "10.9.0.1:29400"
DEADLINE_S = 240.0


class Slurm:
    """The running Slurm, and an rdzvd on its host `ctl`."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._pid = pid
        """The pid of its first process, as this machine sees it."""
        self.folder = folder
        self.reports = folder / "reports"
        self.finish_file = folder / "finish"
        self.reports.mkdir()
        self.server: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------ programs on `ctl`

    def command(self, *words: str) -> list[str]:
        enter = ["nsenter", f"--target={self._pid}", "--mount", "--net", "--uts", "--ipc", "--pid"]
        return [*enter, *words]

    def environ(self, more: Mapping[str, str] = {}) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name != "TMPDIR"},
            "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "RDZV_TEST_REPORTS": str(self.reports),
            "RDZV_TEST_FINISH": str(self.finish_file),
            **more,
        }

    def run(self, *words: str, environ: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; the caller checks its outcome."""
        return subprocess.run(
            self.command(*words),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            env=self.environ(environ),
            cwd=self.folder,
        )

    def do(self, *words: str, environ: Mapping[str, str] = {}) -> str:
        """Run a command that must succeed; return its output."""
        done = self.run(*words, environ=environ)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self.describe()}"
        return done.stdout

    def start_server(self) -> None:
        """Start rdzvd, or restart it with its previous data."""
        with (self.folder / "rdzvd.log").open("ab") as log:
            self.server = subprocess.Popen(
                self.command(
                    *(str(BIN / "rdzvd"), f"--listen={ENDPOINT}", "--insecure"),
                    f"--data-dir={self.folder / 'rdzvd'}",
                ),
                stdout=log,
                stderr=log,
                env=self.environ(),
            )
        self.wait(
            "rdzvd answers",
            lambda: self.run("rdzvctl", f"--server={ENDPOINT}", "list").returncode == 0,
        )

    def kill_server(self) -> None:
        assert self.server is not None
        self.do("sh", "-c", f"kill -9 $(pgrep -f '^[^ ]*python[^ ]* .*rdzvd --listen={ENDPOINT}')")
        self.server.wait(DEADLINE_S)

    def ctl(self, *words: str) -> str:
        return self.do("rdzvctl", f"--server={ENDPOINT}", *words)

    # ------------------------------------------------------------------ jobs

    def sbatch(
        self, *script: str, options: tuple[str, ...] = (), environ: Mapping[str, str] = {}
    ) -> str:
        """Submit deploy/slurm's script; return the number of the Slurm job."""
        output = f"--output={self.folder}/slurm-%j.out"
        words = ["sbatch", "--parsable", output, *options, str(DEPLOY / "rdzv.sbatch"), *script]
        return self.do(*words, environ={"RDZV_ENDPOINT": ENDPOINT, **environ}).strip()

    def output(self, job: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"slurm-{job}.out").read_text()
        return ""

    def job(self, job: str) -> dict[str, str]:
        """Return the output of `scontrol show job`."""
        text = self.do("scontrol", "--oneliner", "show", "job", job)
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def wait_for_job(self, job: str, state: str) -> dict[str, str]:
        """Wait until Slurm shows a job in a state."""
        self.wait(f"job {job} is {state}", lambda: self.job(job)["JobState"] == state)
        return self.job(job)

    def node_state(self, node: str) -> str:
        found = re.search(r"State=(\S+)", self.do("scontrol", "show", "node", node))
        assert found
        return found[1]

    def kill_node(self, node: str) -> None:
        """Cut a node off and kill all of its processes, as when its power fails."""
        self.do("ip", "link", "set", f"to-{node}", "down")
        uts = Path(f"/proc/{self.pid_of(node)}/ns/uts").readlink()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "ns/uts").readlink() == uts:
                    os.kill(int(process.name), signal.SIGKILL)

    def pid_of(self, node: str) -> int:
        """Return the pid of a node's slurmd, as this machine sees it."""
        inside = (self.folder / f"{node}.pid").read_text().strip()
        namespace = Path(f"/proc/{self._pid}/ns/pid").readlink()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "ns/pid").readlink() == namespace:
                    found = re.search(r"^NSpid:.*\s(\d+)$", (process / "status").read_text(), re.M)
                    if found and found[1] == inside:
                        return int(process.name)
        raise AssertionError(f"slurmd of {node} is gone\n{self.describe()}")

    # ------------------------------------------------------------------ what rdzvd says

    def status(self, rdzv_id: str) -> dict[str, Any]:
        """Return the document of a job; an empty one before its first join."""
        done = self.run("rdzvctl", f"--server={ENDPOINT}", "status", rdzv_id, "-o", "json")
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def states(self, rdzv_id: str) -> dict[str, str]:
        """Return the state of each node of a job, by its name in Slurm."""
        nodes = self.status(rdzv_id).get("nodes", [])
        return {node["node_id"].partition(".")[0]: node["state"] for node in nodes}

    def wait_for_round(self, rdzv_id: str, number: int, workers: int) -> list[dict[str, Any]]:
        """Wait until all workers of a round have reported; return their reports by RANK."""

        def complete() -> list[dict[str, Any]]:
            found = [
                report
                for report in self._reports()
                if report["RDZV_ROUND"] == str(number) and report["TORCHELASTIC_RUN_ID"] == rdzv_id
            ]
            return found if len(found) >= workers else []

        found = self.wait(f"round {number} of {rdzv_id} has {workers} workers", complete)
        return sorted(found, key=lambda report: int(report["RANK"]))

    # ------------------------------------------------------------------ waiting

    def wait(self, what: str, holds: Callable[[], Any]) -> Any:
        """Wait until a condition holds, and return its result."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := holds()):
            assert time.monotonic() < deadline, (
                f"waited {DEADLINE_S:g} s until {what}\n{self.describe()}"
            )
            time.sleep(0.1)
        return found

    def describe(self) -> str:
        """Show all output, for a test that failed."""
        logs = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in logs)

    def _reports(self) -> Iterator[dict[str, Any]]:
        for path in self.reports.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                report = json.loads(path.read_text())
                yield {**report, "begun_unix": path.stat().st_mtime}


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Run a Slurm of four nodes, and rdzvd; skip the test if that is impossible."""
    _skip_without()
    made: Slurm | None = None
    command = ["setpriv", "--pdeathsig=KILL", "unshare", "-mnuipf", "--kill-child", "--mount-proc"]
    command += ["sh", str(HERE / "boot.sh"), str(PACKAGES), str(folder)]
    with (
        (folder / "boot.log").open("w+") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            made = _when_up(process, folder)
            yield made
        except BaseException:
            print((folder / "boot.log").read_text())
            raise
        finally:
            # When the first process of its namespace ends, everything in it does.
            process.kill()
            if made is not None and made.server is not None:
                made.server.wait()


def _skip_without() -> None:
    if os.geteuid() != 0:
        pytest.skip("namespaces of hosts take root")
    for program in ("unshare", "nsenter", "setpriv", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here (Debian: util-linux, iproute2)")
    if (PACKAGES / "usr/sbin/slurmd").exists():
        return
    if shutil.which("apt-get") is None:
        pytest.skip("Slurm is a package of Debian here, and there is no apt-get")
    PACKAGES.parent.mkdir(exist_ok=True)
    done = subprocess.run(
        [str(HERE / "fetch.sh"), str(PACKAGES)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"Debian's Slurm cannot be had: {done.stderr.strip()[-200:]}")


def _when_up(process: subprocess.Popen[bytes], folder: Path) -> Slurm:
    deadline = time.monotonic() + DEADLINE_S
    made: Slurm | None = None
    while time.monotonic() < deadline:
        assert process.poll() is None, f"it did not boot: {(folder / 'boot.log').read_text()}"
        if made is None and (folder / "booted").exists():
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            made = Slurm(int(children.split()[0]), folder)
        if made is not None and made.run("sinfo", "-h", "-o", "%D %T").stdout.split() == [
            "4",
            "idle",
        ]:
            made.start_server()
            return made
        time.sleep(0.1)
    raise AssertionError(f"no Slurm within {DEADLINE_S:g} s: {made.describe() if made else ''}")
