"""The network between the hosts of a lane: a switch of Ethernet frames that loses and delays them.

Run by path, with only the standard library: `switch.py NAME=MAC ...` creates one TAP device for
each name and forwards between them by MAC address. Its parent moves the devices into network
namespaces. It is a separate process, so that the harness's work delays no frame.

The kernel's own TCP answers lost frames with its own retransmissions and backoff. So 30 % loss, a
delay, and a partition of one direction are real; a proxy in user space could only imitate what TCP
makes of them.

It takes one JSON object per line on stdin and answers each with one on stdout once it holds:
`{"rules": [[FROM, TO, LOSS, DELAY_MS], ...]}` replaces all rules, and the answer has how many
frames the previous rules have harmed. It ends with its stdin.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
MAX_DELAYED = 20_000
"""The most frames in flight; more are dropped, as by a router with a full queue."""
BATCH = 64
"""How many frames are read from one device before the others get their turn."""


class Switch:
    """Forwards frames between TAP devices, according to the present rules."""

    def __init__(self, macs: dict[str, bytes], seed: int) -> None:
        self._devices = {name: open_tap(name) for name in macs}
        self._names = {fd: name for name, fd in self._devices.items()}
        self._owners = {mac: name for name, mac in macs.items()}
        self._rules: dict[tuple[str, str], tuple[float, float]] = {}
        self._delayed: list[tuple[float, int, int, bytes]] = []
        self._sequence = 0
        self._harmed = 0
        self._random = random.Random(seed)
        self._commands = b""

    def run(self) -> None:
        """Forward until stdin ends."""
        poller = select.epoll()
        os.set_blocking(0, False)
        for fd in (0, *self._devices.values()):
            poller.register(fd, select.EPOLLIN)
        say({"ready": True})
        while True:
            for fd, _ in poller.poll(self._next_wait_s()):
                if fd != 0:
                    self._read(fd)
                elif not self._obey():
                    return
            self._release()

    def _next_wait_s(self) -> float:
        return max(self._delayed[0][0] - time.monotonic(), 0.0) if self._delayed else -1.0

    def _read(self, fd: int) -> None:
        source = self._names[fd]
        for _ in range(BATCH):
            try:
                frame = os.read(fd, 65_536)
            except OSError:  # Nothing more for now, or the device is down.
                return
            # Neighbours are fixed, so flooding is unnecessary; broadcasts are noise.
            if target := self._owners.get(frame[:6]):
                self._forward(source, target, frame)

    def _forward(self, source: str, target: str, frame: bytes) -> None:
        loss, delay_s = self._rules.get((source, target), (0.0, 0.0))
        if loss > 0 and self._random.random() < loss:
            self._harmed += 1
        elif delay_s > 0:
            self._harmed += 1
            if len(self._delayed) < MAX_DELAYED:
                self._sequence += 1
                at = time.monotonic() + delay_s
                heapq.heappush(self._delayed, (at, self._sequence, self._devices[target], frame))
        else:
            send(self._devices[target], frame)

    def _release(self) -> None:
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            *_, fd, frame = heapq.heappop(self._delayed)
            send(fd, frame)

    def _obey(self) -> bool:
        """Obey a line of stdin; return whether there is more to come."""
        read = os.read(0, 65_536)
        *lines, self._commands = (self._commands + read).split(b"\n")
        for line in lines:
            rules = json.loads(line)["rules"]
            self._rules = {(a, b): (loss, ms / 1000) for a, b, loss, ms in rules}
            say({"harmed": self._harmed})
            self._harmed = 0
        return bool(read)


def open_tap(name: str) -> int:
    """Create a TAP device; it lives as long as the descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


def send(fd: int, frame: bytes) -> None:
    """Pass a frame to the kernel; if the kernel refuses it, it is lost, as on a full link."""
    try:
        os.write(fd, frame)
    except OSError:
        return


def say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    seed, *links = sys.argv[1:]
    pairs = (link.split("=") for link in links)
    Switch({name: bytes.fromhex(mac.replace(":", "")) for name, mac in pairs}, int(seed)).run()


if __name__ == "__main__":
    main()
