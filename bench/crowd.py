"""The crowd of the scale benchmark: simulated nodes of one job, in a process of their own.

Run by path as a child process. It takes one act a line on stdin, and answers each with a JSON line
on stdout; it ends with stdin. Times are by CLOCK_MONOTONIC, which all processes here share.

* `{"act": "gather", "nodes": N, "endpoint": "HOST:PORT"}`: N nodes of a job of N connect, each by a
  connection of its own, and all but one join; answered when all of those are admitted;
* `{"act": "form"}`: the last one joins; answered when every node was told the round;
* `{"act": "lose"}`: the stream of one node ends without a word; answered when all others were told
  the next round;
* `{"act": "hold", "seconds": S}`: nothing but heartbeats;
* `{"act": "await", "since_s": T}`: answered when every stream was welcomed again after T.

Each answer has what was said and heard in the meantime: messages, and bytes of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from simulated import SimulatedNode, until

from rdzv.agent.core import events
from rdzv.agent.core.model import Job
from rdzv.client import parse_endpoint
from rdzv.core.model import Settings
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc

JOB = "crowd"
AT_ONCE = 256
"""So many nodes connect at once: one process cannot do for 10,000 machines what each does."""
TIMEOUT_S = 120.0
FOREVER_MS = 3_600_000


@dataclass(slots=True)
class Traffic:
    """What was said and heard."""

    up: int = 0
    down: int = 0
    up_bytes: int = 0
    down_bytes: int = 0

    def say(self, message: pb.NodeMessage) -> bytes:
        """Write a message."""
        data = message.SerializeToString()
        self.up += 1
        self.up_bytes += len(data)
        return data

    def hear(self, data: bytes) -> pb.ServerMessage:
        """Read a message."""
        self.down += 1
        self.down_bytes += len(data)
        return pb.ServerMessage.FromString(data)

    def take(self) -> dict[str, int]:
        """Return what has come since it was last taken."""
        taken = {
            "up": self.up,
            "down": self.down,
            "up_bytes": self.up_bytes,
            "down_bytes": self.down_bytes,
        }
        self.up = self.down = self.up_bytes = self.down_bytes = 0
        return taken


TRAFFIC = Traffic()


class CountingStub:
    """The stub of the nodes' service; counts."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.Attach = channel.stream_stream(
            "/rdzv.v1.Rendezvous/Attach",
            request_serializer=TRAFFIC.say,
            response_deserializer=TRAFFIC.hear,
        )


class Crowd:
    """All nodes, and what is asked of them."""

    def __init__(self) -> None:
        self._nodes: list[SimulatedNode] = []
        self._links: list[asyncio.Task[None]] = []

    async def act(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do one thing, and return what came of it."""
        match asked["act"]:
            case "gather":
                return await self._gather(asked["nodes"], asked["endpoint"])
            case "form":
                return await self._form()
            case "lose":
                return await self._lose()
            case "hold":
                await asyncio.sleep(asked["seconds"])
                return {}
            case _:
                return await self._await(asked["since_s"])

    async def _gather(self, nodes: int, endpoint: str) -> dict[str, Any]:
        at = [parse_endpoint(endpoint)]
        settings = Settings(
            max(nodes - 1, 1), nodes, max_restarts=1_000, last_call_timeout_ms=FOREVER_MS
        )
        names = [f"node-{number:05d}" for number in range(nodes)]
        self._nodes = [SimulatedNode(n, at, Job(JOB, n, settings, 8)) for n in names]
        began_s = time.monotonic()
        connecting = asyncio.Semaphore(AT_ONCE)

        async def connect(node: SimulatedNode) -> None:
            async with connecting:
                self._start(node)
                await node.admitted.wait()

        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
            for node in self._nodes[:-1]:
                tasks.create_task(connect(node))
        return {"took_s": time.monotonic() - began_s}

    def _start(self, node: SimulatedNode) -> None:
        node.post(events.Ticked())
        self._links.append(asyncio.create_task(node.link.run()))

    async def _form(self) -> dict[str, Any]:
        began_s = time.monotonic()
        self._start(self._nodes[-1])
        return await self._told(0, began_s)

    async def _lose(self) -> dict[str, Any]:
        lost, link = self._nodes.pop(0), self._links.pop(0)
        round_ = self._nodes[0].round
        began_s = time.monotonic()
        link.cancel()
        await asyncio.wait([link])
        lost.close()
        return await self._told(round_ + 1, began_s)

    async def _told(self, round_: int, since_s: float) -> dict[str, Any]:
        nodes = self._nodes
        await self._all(
            f"round {round_} runs on all nodes", lambda: all(n.round >= round_ for n in nodes)
        )
        started_s = [node.started_s[node.round] for node in nodes]
        return {"took_s": max(started_s) - since_s, "first_s": min(started_s) - since_s}

    async def _await(self, since_s: float) -> dict[str, Any]:
        nodes, rounds = self._nodes, {node.round for node in self._nodes}
        await self._all("all are back", lambda: all(n.connected_s > since_s for n in nodes))
        return {
            "took_s": max(node.connected_s for node in nodes) - since_s,
            "first_s": min(node.connected_s for node in nodes) - since_s,
            "disturbed": sum(1 for node in nodes if {node.round} != rounds),
        }

    async def _all(self, what: str, holds: Callable[[], bool]) -> None:
        await until(what, holds, TIMEOUT_S)


async def main() -> None:
    """Act until stdin ends."""
    # That a server is lost is what is measured; ten thousand nodes need not say so.
    logging.getLogger("rdzv.agent").setLevel(logging.CRITICAL)
    rdzv_pb2_grpc.RendezvousStub = CountingStub  # type: ignore[misc,assignment]
    crowd = Crowd()
    while line := await asyncio.to_thread(sys.stdin.readline):
        began_cpu_s = time.process_time()
        try:
            answer = await crowd.act(json.loads(line))
        except TimeoutError as error:
            answer = {"failed": str(error)}
        answer |= {"traffic": TRAFFIC.take(), "cpu_s": time.process_time() - began_cpu_s}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    finally:
        # Its streams end with it; ten thousand goodbyes would take longer than what was measured.
        os._exit(0)
