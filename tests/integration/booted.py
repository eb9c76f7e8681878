"""A machine of its own, for tests of an installation: systemd as its first process.

It sees this machine's files through an overlay in memory, so it may write anywhere; its processes,
network, host name and cgroups are its own. It ends with the body.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DEADLINE_S = 100.0

_BOOT = r"""
set -eu
machine=$1 given=$2
mount --make-rprivate /
mount -t tmpfs tmpfs "$machine"
root=$machine/root
mkdir "$machine/upper" "$machine/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$machine/upper,workdir=$machine/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for folder in run tmp dev; do mount -t tmpfs tmpfs "$root/$folder"; done
chmod 1777 "$root/tmp"
for device in null zero full random urandom tty; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts" "$root/run/given" "$root/run/old"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount --bind "$given" "$root/run/given"
ip link set lo up
cd "$root"
pivot_root . run/old
# What only a real machine has does not begin in a container.
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -c \
  'umount -l /run/old && rmdir /run/old && exec /lib/systemd/systemd --unit=basic.target'
"""


class Booted:
    """The running machine."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        """The pid of its first process, as this machine sees it."""

    def run(self, *command: str, timeout_s: float = DEADLINE_S) -> subprocess.CompletedProcess[str]:
        """Run a command inside; the caller checks its outcome."""
        root = f"/proc/{self._pid}/root"
        enter = ["nsenter", "-t", str(self._pid), "-m", "-p", "-n", "-i", "-u", "-C"]
        return subprocess.run(
            [*enter, f"--root={root}", f"--wd={root}", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
        )

    def do(self, *command: str) -> str:
        """Run a command that must succeed; return its output."""
        done = self.run(*command)
        said = f"{done.stdout}{done.stderr}"
        assert done.returncode == 0, f"{command} ended with {done.returncode}: {said}\n{self.log}"
        return done.stdout

    @property
    def up(self) -> bool:
        """Whether it is still running."""
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self._pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] not in "ZX"
        return False

    @property
    def log(self) -> str:
        """The log of its services."""
        return self.run("journalctl", "--no-pager", "-o", "short", "-n", "200").stdout

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Return properties of a unit."""
        lines = self.do("systemctl", "show", unit, f"--property={','.join(names)}").splitlines()
        return dict(line.split("=", 1) for line in lines)

    def path(self, path: str) -> Path:
        """Return a file of the machine, as this machine sees it."""
        return Path(f"/proc/{self._pid}/root{path}")


@contextmanager
def booted(tmp_path: Path, given: Path) -> Iterator[Booted]:
    """Boot a machine that finds the folder `given` at /run/given; skip the test if impossible."""
    _skip_without()
    machine = tmp_path / "machine"
    machine.mkdir()
    command = ["setpriv", "--pdeathsig=KILL", "unshare", "-mpniuC", "--fork", "--kill-child"]
    command += ["sh", "-c", _BOOT, "boot", str(machine), str(given)]
    with (
        (tmp_path / "boot.log").open("w+") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            yield _when_up(process, tmp_path / "boot.log")
        finally:
            # When the first process of its namespace ends, everything in it does.
            process.kill()


def _skip_without() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can boot a machine of its own")
    for program in ("unshare", "nsenter", "setpriv", "pivot_root", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here (Debian: util-linux, iproute2)")
    if not Path("/lib/systemd/systemd").exists():
        pytest.skip("there is no systemd here (Debian: systemd)")
    if subprocess.run(["unshare", "-mpniuC", "--fork", "true"], check=False).returncode != 0:
        pytest.skip("namespaces cannot be made here")


def _when_up(process: subprocess.Popen[bytes], log: Path) -> Booted:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"it did not boot: {log.read_text()}"
        with contextlib.suppress(FileNotFoundError, ValueError, AssertionError):
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            machine = Booted(int(child))
            if machine.do("systemctl", "is-system-running").strip() == "running":
                return machine
        time.sleep(0.1)
    raise AssertionError(f"it did not boot within {DEADLINE_S:g} s: {log.read_text()}")
