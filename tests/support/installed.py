"""rdzv as a user has it: installed from a release, without a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def run(*command: str | Path, folder: Path, **environ: str) -> str:
    """Run a command to its end, in an environment without the checkout; return its output."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**clean_environ(), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def clean_environ() -> dict[str, str]:
    """Return this environment without variables of the checkout or of a launch."""
    dropped = ("RDZV_", "PET_", "PYTHON", "VIRTUAL_ENV", "COV_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def build(out: Path, root: Path = ROOT, **environ: str) -> Path:
    """Build wheels and sdist of a checkout into `out`; return the wheel of rdzv."""
    out.mkdir(parents=True, exist_ok=True)
    if (root / "deploy/release.py").exists() and root == ROOT:
        program = root / "deploy/release.py"
        run(sys.executable, program, "--python-only", out, folder=root, **environ)
    else:
        targets = ("build", "-t", "wheel", "-d", out)
        run(sys.executable, "-m", "hatchling", *targets, folder=root)
    (wheel,) = out.glob("rdzv-*.whl")
    return wheel


def environment(folder: Path, *wheels: Path) -> Path:
    """Create an environment with these wheels and the release's libraries; return its bin."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder.parent)
    constraints = ("--constraint", ROOT / "deploy/constraints.txt")
    pip = (*PIP, "--python", folder / "bin/python")
    if wheels:
        run(*pip, "install", *constraints, *wheels, folder=folder)
    return folder / "bin"


def environment_with_torch(folder: Path, *wheels: Path) -> Path:
    """Create an environment with this one's torch and these wheels; return its interpreter."""
    bin_folder = environment(folder, *wheels)
    (packages,) = folder.glob("lib/python3*/site-packages")
    import torch
    import typing_extensions

    # Each line of such a file is a folder of modules, whose own .pth files are not read. What torch
    # needs may be in another one (`environment-beside` of the Makefile).
    folders = [Path(torch.__file__).parents[1], Path(typing_extensions.__file__).parent]
    (packages / "torch.pth").write_text("\n".join(map(str, folders)))
    return bin_folder / "python"


@dataclass
class Programs:
    """Programs of installed environments that run in the background, and end with the test."""

    folder: Path
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *command: str | Path, **environ: str) -> subprocess.Popen[bytes]:
        """Start a program; its output goes to NAME.log."""
        with self.log(name).open("ab") as log:
            self.started[name] = subprocess.Popen(
                [str(word) for word in command],
                cwd=self.folder,
                env={**clean_environ(), **environ},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.started[name]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def until(self, what: str, holds: Callable[[], Any]) -> Any:
        """Wait until a condition holds; on a failure show the output of all programs."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := holds()):
            logs = "\n".join(f"--- {n}\n{self.log(n).read_text()[-3000:]}" for n in self.started)
            assert time.monotonic() < deadline, f"not in time: {what}\n{logs}"
            time.sleep(0.05)
        return found

    def end(self) -> None:
        """End all programs in order, and kill what is left."""
        for process in self.started.values():
            if process.poll() is None:
                process.terminate()
        for process in self.started.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
                continue
            process.kill()
            process.wait()


def status(rdzvctl: Path, server: str, job: str, folder: Path) -> dict[str, Any]:
    """Return a job's status from rdzvctl."""
    said = run(rdzvctl, f"--server={server}", "status", job, "-o", "json", folder=folder)
    answer = json.loads(said)
    assert isinstance(answer, dict)
    return answer
