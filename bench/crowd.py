"""A part of a crowd: simulated nodes of one job, in one process (crowd_processes.py).

Run by path as a child process, with the seconds that an act may take, and its niceness. It takes
one act a line on stdin, and answers each with a JSON line on stdout; it ends with stdin. Times are
by CLOCK_MONOTONIC, which all processes here share.

* `{"act": "gather", "nodes": N, "numbers": [FIRST, END], "endpoints": ["HOST:PORT", ...],
  "tls": FOLDER}`: these nodes of a job of N connect to one of the servers, each by a connection of
  its own, and all but number N - 1 join; answered when all of those are admitted;
* `{"act": "form"}`: the last one joins, where this part has it; answered when every node was told
  the round;
* `{"act": "lose"}`: the stream of node 0 ends without a word, where this part has it; answered when
  all others were told the next round;
* `{"act": "fail", "each": BOOL}`: a worker of node 1 fails, or one of each node; answered when
  all were told the next round;
* `{"act": "hold", "seconds": S}`: nothing but heartbeats;
* `{"act": "await", "since_s": T}`: answered when every stream was welcomed again after T, with the
  longest that a node that was back then waited for the answer to a heartbeat.

An answer says when the act began, and when the first and the last node were told. It has what was
said and heard in the meantime, messages and bytes of them, and the CPU time that it took.
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
from pathlib import Path
from typing import Any

import grpc
from processes import CALLER
from simulated import SimulatedNode, until

from rdzv.agent.core import events
from rdzv.agent.core.model import JobTerms
from rdzv.client import parse_endpoint
from rdzv.core.model import Settings
from rdzv.runtime.tasks import beside
from rdzv.transport.channels import PLAIN, Credentials
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1 import rdzv_pb2_grpc

JOB = "crowd"
AT_ONCE = 64
"""How many nodes of a process connect at once; all of them would overload it."""
ASKED_OF = 50
"""One node in this many sends heartbeats that the server must answer."""
FOREVER_MS = 3_600_000


@dataclass(slots=True)
class Traffic:
    """The messages sent and received."""

    up: int = 0
    down: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    tries: int = 0
    """Streams that nodes have opened."""

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
        """Return the messages received since the last call."""
        taken = {
            "up": self.up,
            "down": self.down,
            "up_bytes": self.up_bytes,
            "down_bytes": self.down_bytes,
            "tries": self.tries,
        }
        self.up = self.down = self.up_bytes = self.down_bytes = self.tries = 0
        return taken


TRAFFIC = Traffic()


class CountingStub:
    """The stub of the nodes' service, which counts messages."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._attach = channel.stream_stream(
            "/rdzv.v1.Rendezvous/Attach",
            request_serializer=TRAFFIC.say,
            response_deserializer=TRAFFIC.hear,
        )

    def Attach(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        """Open a node's stream."""
        TRAFFIC.tries += 1
        return self._attach(*args, **kwargs)


class Crowd:
    """The nodes of this process, and the commands for them."""

    def __init__(self, timeout_s: float, links: asyncio.TaskGroup) -> None:
        """Each act may take `timeout_s`; `links` has the tasks of the nodes."""
        self._timeout_s = timeout_s
        self._tasks = links
        self._nodes: list[SimulatedNode] = []
        self._links: dict[SimulatedNode, asyncio.Task[None]] = {}
        self._last: SimulatedNode | None = None
        """The node that joins last of all, if it is here."""
        self._round = -1
        """The last round that all nodes have received."""

    async def act(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command, and return its result."""
        began_s = time.monotonic()
        match asked["act"]:
            case "gather":
                await self._gather(asked)
                return {"began_s": began_s, "last_s": time.monotonic()}
            case "form":
                if self._last is not None:
                    self._start(self._last)
            case "lose":
                await self._lose()
            case "fail":
                for node in self._nodes:
                    if asked["each"] or node.node_id == _name(1):
                        node.kill_worker()
            case "hold":
                await asyncio.sleep(asked["seconds"])
                return {}
            case _:
                return await self._await(asked["since_s"])
        return {"began_s": began_s} | await self._told()

    async def _gather(self, asked: dict[str, Any]) -> None:
        at, total = [parse_endpoint(one) for one in asked["endpoints"]], asked["nodes"]
        settings = Settings(
            max(total - 1, 1),
            total,
            max_restarts=1_000,
            restart_backoff_ms=0,
            last_call_timeout_ms=FOREVER_MS,
        )
        credentials = credentials_in(asked["tls"])
        self._nodes = [
            SimulatedNode(name, at, JobTerms(JOB, name, settings, 8), credentials)
            for name in map(_name, range(*asked["numbers"]))
        ]
        if self._nodes[-1].node_id == _name(total - 1):
            self._last = self._nodes[-1]
        connecting = asyncio.Semaphore(AT_ONCE)

        async def connect(node: SimulatedNode) -> None:
            async with connecting:
                self._start(node)
                await node.admitted.wait()

        async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as tasks:
            for node in self._nodes:
                if node is not self._last:
                    tasks.create_task(connect(node))

    def _start(self, node: SimulatedNode) -> None:
        node.post(events.Ticked())
        self._links[node] = self._tasks.create_task(node.link.run())

    async def _lose(self) -> None:
        if self._nodes[0].node_id == _name(0):
            lost = self._nodes.pop(0)
            link = self._links.pop(lost)
            link.cancel()
            await asyncio.wait([link])
            lost.close()

    async def _told(self) -> dict[str, Any]:
        nodes, round_ = self._nodes, self._round + 1
        await self._all(f"run round {round_}", lambda node: node.round >= round_)
        self._round = round_
        started_s = [node.started_s[node.round] for node in nodes]
        return {"first_s": min(started_s), "last_s": max(started_s)}

    async def _await(self, since_s: float) -> dict[str, Any]:
        nodes = self._nodes
        async with beside(self._ask_answers(since_s)):
            await self._all("are back", lambda node: node.connected_s > since_s)
        return {
            "answer_s": max(node.slowest_answer_s for node in nodes),
            "began_s": since_s,
            "first_s": min(node.connected_s for node in nodes),
            "last_s": max(node.connected_s for node in nodes),
            "disturbed": sum(1 for node in nodes if node.round != self._round),
        }

    async def _ask_answers(self, since_s: float) -> None:
        """Each second, have some of the nodes that are back ask the server for an answer."""
        while True:
            for node in self._nodes[::ASKED_OF]:
                if node.connected_s > since_s:
                    node.ask_answer()
            await asyncio.sleep(1)

    async def _all(self, do: str, holds: Callable[[SimulatedNode], bool]) -> None:
        """Wait until something holds for all nodes."""
        nodes = self._nodes
        try:
            await until(f"all nodes {do}", lambda: all(map(holds, nodes)), self._timeout_s)
        except TimeoutError as error:
            ends = ", ".join({node.outcome for node in nodes} - {""})
            over = f"; the job has ended: {ends}" if ends else ""
            raise TimeoutError(
                f"{error}; {sum(map(holds, nodes))} of {len(nodes)} do{over}"
            ) from None


def _name(number: int) -> str:
    return f"node-{number:05d}"


def credentials_in(folder: str) -> Credentials:
    """Return the nodes' credentials, made by `rdzvctl certs` in a folder, if one is given."""
    if not folder:
        return PLAIN
    own = Path(folder)
    return Credentials(own / "ca.crt", own / f"client-{CALLER}.crt", own / f"client-{CALLER}.key")


async def main() -> None:
    """Carry out commands until stdin ends."""
    # The loss of a server is what is measured; ten thousand nodes need not log it.
    logging.getLogger("rdzv.agent").setLevel(logging.CRITICAL)
    rdzv_pb2_grpc.RendezvousStub = CountingStub  # type: ignore[misc,assignment]
    timeout_s = float(sys.argv[1])
    os.nice(int(sys.argv[2]))
    asked = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(asked), sys.stdin
    )
    async with asyncio.TaskGroup() as links:
        crowd = Crowd(timeout_s, links)
        async for line in asked:
            began_cpu_s = time.process_time()
            try:
                answer = await crowd.act(json.loads(line))
            except TimeoutError as error:
                act = line.decode().strip()
                answer = {"failed": str(error) or f"no end of {act} in {timeout_s:g} s"}
            answer |= {"traffic": TRAFFIC.take(), "cpu_s": time.process_time() - began_cpu_s}
            print(json.dumps(answer), flush=True)
        # Its streams end with it; ten thousand goodbyes would take longer than the measured act.
        os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
