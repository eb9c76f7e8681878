"""Hosts in network namespaces, joined by a switch that can lose and delay frames."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

SWITCH = Path(__file__).with_name("switch.py")
OBSERVER = "watch"
"""The harness's own end, in the namespace that it was started in; no fault touches it."""


@dataclass(frozen=True, slots=True)
class Harm:
    """The harm done to the frames of one direction."""

    source: str
    target: str
    loss: float = 0.0
    delay_ms: int = 0


def cut(a: str, b: str) -> tuple[Harm, ...]:
    """Let no frames through between two hosts."""
    return Harm(a, b, loss=1.0), Harm(b, a, loss=1.0)


def lossy(a: str, b: str, loss: float) -> tuple[Harm, ...]:
    """Lose this share of the frames in either direction."""
    return Harm(a, b, loss=loss), Harm(b, a, loss=loss)


def slow(a: str, b: str, delay_ms: int) -> tuple[Harm, ...]:
    """Delay each frame in either direction by this much, so a round trip takes twice that."""
    return Harm(a, b, delay_ms=delay_ms), Harm(b, a, delay_ms=delay_ms)


class Network:
    """Some hosts, each a network namespace with one interface `eth0`, on one subnet.

    `mark` and `number` distinguish the names from those of other runs and lanes. The subnet is a
    free one of the block 198.18.0.0/15, which is reserved for testing networks.
    """

    def __init__(self, mark: str, number: int, hosts: Sequence[str], seed: int) -> None:
        self._mark = mark
        self._number = number
        self._places = {host: place for place, host in enumerate((*hosts, OBSERVER), start=11)}
        self._seed = seed
        self._subnet = ""
        self._switch: subprocess.Popen[str] | None = None
        self._made: list[str] = []

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _make(self) -> None:
        links = [f"{self._device(host)}={self._mac(host)}" for host in self._places]
        self._switch = subprocess.Popen(
            [sys.executable, "-S", "-E", str(SWITCH), str(self._seed), *links],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()
        with _SUBNETS:
            self._subnet = free_subnet()
            self._plug_in(OBSERVER)
        for host in self.hosts:
            self._plug_in(host)

    def _plug_in(self, host: str) -> None:
        device = self._device(host)
        inside: tuple[str, ...] = ()
        if host != OBSERVER:
            name = self.namespace(host)
            ip("netns", "add", name)
            self._made.append(name)
            ip("link", "set", device, "netns", name)
            inside = ("-n", name)
            ip(*inside, "link", "set", device, "name", "eth0")
            ip(*inside, "link", "set", "lo", "up")
            device = "eth0"
        ip(*inside, "link", "set", device, "address", self._mac(host))
        ip(*inside, "addr", "add", f"{self.address(host)}/24", "dev", device)
        ip(*inside, "link", "set", device, "up")
        for other in self._places.keys() - {host}:
            # A partition should lose the hosts' messages, not their addresses.
            neighbour = ("neigh", "replace", self.address(other), "lladdr", self._mac(other))
            ip(*inside, *neighbour, "nud", "permanent", "dev", device)

    def _device(self, host: str) -> str:
        return f"f{self._mark[:6]}{self._places[host]}x{self._number}"

    def _mac(self, host: str) -> str:
        return f"02:00:00:00:{self._number:02x}:{self._places[host]:02x}"

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(host for host in self._places if host != OBSERVER)

    def namespace(self, host: str) -> str:
        """Return a host's name for `ip netns`."""
        return f"rdzv-faults-{self._mark}-{self._number}-{host}"

    def address(self, host: str) -> str:
        return f"{self._subnet}.{self._places[host]}"

    def on(self, host: str, command: Iterable[str]) -> list[str]:
        """Return a command line that runs a command on a host, in the same process."""
        return ["nsenter", f"--net={self.path(host)}", "--", *command]

    def path(self, host: str) -> Path:
        """Return the file of a host's namespace."""
        return Path("/run/netns", self.namespace(host))

    def harm(self, harms: Iterable[Harm]) -> int:
        """Replace all rules by these; return how many frames the old ones have harmed."""
        assert self._switch is not None
        assert self._switch.stdin is not None
        rules = [
            [self._device(h.source), self._device(h.target), h.loss, h.delay_ms] for h in harms
        ]
        self._switch.stdin.write(json.dumps({"rules": rules}) + "\n")
        self._switch.stdin.flush()
        return int(self._answer()["harmed"])

    def _answer(self) -> dict[str, int]:
        assert self._switch is not None
        assert self._switch.stdout is not None
        line = self._switch.stdout.readline()
        if not line:
            raise RuntimeError(f"the switch has ended with {self._switch.wait()}")
        answer: dict[str, int] = json.loads(line)
        return answer

    def close(self) -> None:
        """Remove everything; the devices end with the switch."""
        if self._switch is not None:
            for pipe in (self._switch.stdin, self._switch.stdout):
                if pipe is not None:
                    pipe.close()
            self._switch.wait(10)
            self._switch = None
        while self._made:
            ip("netns", "del", self._made.pop())


_SUBNETS = threading.Lock()


def free_subnet() -> str:
    """Return the first three numbers of a subnet in which this machine has no address."""
    used = ip("-4", "-o", "addr")
    candidates = [f"198.{18 + n // 256}.{n % 256}" for n in range(512)]
    return random.choice([subnet for subnet in candidates if f" {subnet}." not in used])


def ip(*arguments: str) -> str:
    """Run iproute2's `ip`, and return its output; an error is shown."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
