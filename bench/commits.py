"""How many commits and bytes, and how much CPU, each of a job's operations costs the server.

Counted: what one `Driver` writes to a store in memory, while all nodes of one job send, one after
another, the messages of real nodes. Counts depend on no clock and no machine. CPU is that of the
whole process: the decision, the encoding, and the messages to every node, without gRPC. `encode` is
the store's part of it.

* form: all nodes join.
* fail: one worker fails, everyone stops and joins again.
* fail-all: the same, and a worker of every node fails because of it, as in a broken collective.
* lose: a rack of nodes is lost at once, the others stop and join again.
* adopt: a server that has lost its state receives the reports of all nodes of a running round, all
  at once: how many commits that takes depends a little on the machine.
* succeed: all nodes succeed, each in a commit of its own.

The peer, in the same run: torchrun's c10d rendezvous, in which every join writes the whole state.
Its nodes join one after another here, so none of them has to retry: this is its minimum cost.

Heartbeats write nothing here; torchrun's heartbeats, not counted, write the whole state each.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from measure import emit, end_on_sigterm, load, say_conditions
from peer import Peer
from simulated import until

from rdzv.core.commands import Fail, Join, Resume, Succeed
from rdzv.core.fleet.nodes import AgentKind
from rdzv.core.model import Assignment, Failure, Membership, Offer, RecoveryReport, Settings
from rdzv.messages import Belief, Closed, Hello
from rdzv.runtime.clock import Clock
from rdzv.server.driver import Driver
from rdzv.server.sessions.streams import Stream
from rdzv.server.settings.server_settings import RdzvdSettings
from rdzv.stores.base import Record
from rdzv.stores.memory import MemoryStore
from rdzv.transport.endpoints import Listen

JOB = "bench"
CASES = ("form", "fail", "fail-all", "lose", "adopt", "succeed")
NODES = (100, 1_000)
RACK = 32
HEARTBEAT_S = 0.5
TIMEOUT_S = 300.0
MOST_OF_PEER = 2_000
"""Its cost grows with the square of the nodes: at 10,000 it writes some 15 GB."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The amount written, and the CPU time that it took."""

    commits: int = 0
    appends: int = 0
    """Commits with history only."""
    rows: int = 0
    membership_bytes: int = 0
    encode_s: float = 0.0
    cpu_s: float = 0.0

    def since(self, before: Cost) -> Cost:
        """Return the difference to an earlier cost."""
        return Cost(
            self.commits - before.commits,
            self.appends - before.appends,
            self.rows - before.rows,
            self.membership_bytes - before.membership_bytes,
            self.encode_s - before.encode_s,
            self.cpu_s - before.cpu_s,
        )


class CountingStore(MemoryStore):
    """A store in memory that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self._commits = self._appends = self._rows = self._bytes = 0
        self._encode_s = 0.0

    @property
    def cost(self) -> Cost:
        """The total cost so far."""
        return Cost(
            self._commits,
            self._appends,
            self._rows,
            self._bytes,
            self._encode_s,
            time.process_time(),
        )

    async def compare_and_swap(
        self,
        rdzv_id: str,
        membership: Membership,
        revision: int,
        records: Sequence[Record] = (),
    ) -> int:
        """Write a membership and its records; count them."""
        began = time.process_time()
        revision = await super().compare_and_swap(rdzv_id, membership, revision, records)
        self._encode_s += time.process_time() - began
        self._commits += 1
        self._rows += len(records)
        later = self.successes.get(rdzv_id)
        self._bytes += len(later[-1] if later else self.jobs[rdzv_id][0])
        return revision

    async def append(self, records: Sequence[Record]) -> None:
        """Write records; count them."""
        await super().append(records)
        self._appends += 1
        self._rows += len(records)


class Node:
    """One node: its stream, and the last messages it received."""

    def __init__(self, driver: Driver, number: int, settings: Settings) -> None:
        self._driver = driver
        self._settings = settings
        self._offer = Offer(
            address=f"10.0.{number >> 8}.{number & 255}",
            local_world_size=8,
            topology=f"rack-{number // RACK}",
            machine=f"{number:032x}",
            store_port=20_000 + number,
            can_host_store=True,
        )
        self.node_id = f"node-{number:05d}"
        self.line: Assignment | None = None
        self.closed = False
        self.attach(driver)

    def attach(self, driver: Driver) -> None:
        """Open a stream to a server."""
        self._driver = driver
        hello = Hello(self.node_id, "one", AgentKind.FOREGROUND, self._offer.address, 1, 0, 0)
        self.stream: Stream = driver.connections.attach(hello)

    async def read(self) -> None:
        """Receive messages forever."""
        stream = self.stream
        while several := await stream.outbox.take():
            for told in several:
                if isinstance(told, Assignment):
                    self.line = told
                elif isinstance(told, Closed):
                    self.closed = True

    @property
    def round(self) -> int:
        """The latest round announced to it."""
        return self.line.round if self.line else -1

    def beat(self) -> None:
        """Send a heartbeat: while no node is heard at all, none is given up."""
        self._driver.connections.heard(self.stream)

    async def join(self) -> None:
        """Join; after a round, confirm that its workers are gone."""
        left = self.line.round if self.line else None
        await self._driver.commands.hear(self.stream, JOB, self._join(left))

    def _join(self, left: int | None) -> Join:
        run = self.line.run if self.line else ""
        speaker = (self.node_id, self.stream.incarnation)
        return Join(*speaker, run, self._settings, self._offer, left_round=left)

    async def fail(self) -> None:
        """Report that one worker has failed."""
        assert self.line is not None
        why, now_ms = "Signal 9 (SIGKILL)", Clock().now_ms()
        report = Failure(0, self.line.rank_first, 4711, None, 9, why, "", now_ms)
        speaker = (self.node_id, self.stream.incarnation, self.line.run, self.line.round)
        await self._driver.commands.hear(self.stream, JOB, Fail(*speaker, (report,)))

    async def succeed(self) -> None:
        """Report that all workers have succeeded."""
        assert self.line is not None
        speaker = (self.node_id, self.stream.incarnation, self.line.run, self.line.round)
        await self._driver.commands.hear(self.stream, JOB, Succeed(*speaker))

    async def say_what_it_runs(self) -> None:
        """Connect to a server that may not know the round."""
        line = self.line
        assert line is not None
        claim = RecoveryReport(line, self._settings, self._offer)
        resume = Resume(self.node_id, self.stream.incarnation, line.run, line.round, claim)
        belief = Belief(JOB, line.run, line.round, has_workers=True, commands=(resume,))
        await self._driver.recovery.greet(self.stream, (belief,))


class Group:
    """All nodes of the job, and their actions. Created by `running`."""

    def __init__(self, nodes: list[Node], tasks: asyncio.TaskGroup) -> None:
        self.nodes = nodes
        self._tasks = tasks
        self._readers: list[asyncio.Task[None]] = []
        self._listen()

    def _listen(self) -> None:
        self.stop()
        self._readers = [self._tasks.create_task(node.read()) for node in self.nodes]
        self._readers.append(self._tasks.create_task(self._beat()))

    async def _beat(self) -> None:
        while True:
            for node in self.nodes:
                node.beat()
            await asyncio.sleep(HEARTBEAT_S)

    def stop(self) -> None:
        """Stop reading and sending heartbeats."""
        for reader in self._readers:
            reader.cancel()

    async def form(self) -> None:
        """Let all nodes join."""
        round_ = max(node.round for node in self.nodes) + 1
        for node in self.nodes:
            await node.join()
        every = self.nodes
        await until("all have a line", lambda: all(n.round == round_ for n in every), TIMEOUT_S)

    async def fail(self) -> None:
        """One worker fails."""
        await self.nodes[0].fail()
        await self.form()

    async def fail_all(self) -> None:
        """One worker fails, and then others on all nodes."""
        for node in self.nodes:
            await node.fail()
        await self.form()

    async def lose(self, driver: Driver) -> None:
        """A rack is lost."""
        lost, self.nodes = self.nodes[:RACK], self.nodes[RACK:]
        for node in lost:
            driver.connections.detach(node.stream)
        names = {node.node_id for node in lost}
        end = time.monotonic() + TIMEOUT_S
        while not names <= {
            n.node_id for n in (await driver.operations.status(JOB)).nodes if n.state == "lost"
        }:
            if time.monotonic() > end:
                raise TimeoutError("the rack is not lost")
            await asyncio.sleep(0.2)
        await self.form()

    async def adopt(self, driver: Driver) -> None:
        """Report to a server without state."""
        for node in self.nodes:
            node.attach(driver)
        self._listen()
        async with asyncio.TaskGroup() as tasks:
            for node in self.nodes:
                tasks.create_task(node.say_what_it_runs())

    async def succeed(self) -> None:
        """All workers succeed."""
        for node in self.nodes:
            await node.succeed()
        every = self.nodes
        await until("all hear the end", lambda: all(node.closed for node in every), TIMEOUT_S)


@asynccontextmanager
async def serving(store: CountingStore) -> AsyncIterator[Driver]:
    """Run a server without gRPC."""
    config = RdzvdSettings(listen=Listen("127.0.0.1", 0))
    async with Driver.running(store, Clock(), config) as driver:
        yield driver


async def measure_job(count: int, peer: Peer, cases: Sequence[str]) -> None:
    """Print the cost of each operation of a job with this many nodes."""
    settings = Settings(max(count - RACK, 1), count, max_restarts=1_000)
    store, empty = CountingStore(), CountingStore()
    async with (
        serving(store) as driver,
        serving(empty) as other,
        asyncio.TaskGroup() as tasks,
    ):
        group = Group([Node(driver, number, settings) for number in range(count)], tasks)
        theirs = peer.ask("formation", nodes=count) if count <= MOST_OF_PEER else None

        async def cost(name: str, act: Callable[[], Awaitable[None]], at: CountingStore) -> None:
            if name not in cases:
                return
            before = at.cost
            await act()
            say_cost(name, count, at.cost.since(before), theirs if name == "form" else None)

        await cost("form", group.form, store)
        await cost("fail", group.fail, store)
        await cost("fail-all", group.fail_all, store)
        if count > RACK:
            await cost("lose", lambda: group.lose(driver), store)
        await cost("adopt", lambda: group.adopt(other), empty)
        adopted = "adopt" in cases
        await cost("succeed", group.succeed, empty if adopted else store)
        group.stop()


def say_cost(what: str, nodes: int, cost: Cost, theirs: dict[str, float] | None) -> None:
    """Print one operation's cost."""
    line = (
        f"commits {what:<8} nodes={nodes:<5}  {cost.commits:>5} of membership, "
        f"{cost.membership_bytes / 1e6:8.2f} MB, {cost.appends:>3} of history alone, "
        f"{cost.rows:>5} rows   cpu {1e3 * cost.cpu_s:7.0f} ms, "
        f"{1e6 * cost.cpu_s / nodes:6.0f} us/node, encode {1e3 * cost.encode_s:6.0f} ms"
    )
    if theirs is not None:
        bytes_ratio = cost.membership_bytes / theirs["bytes"]
        line += (
            f"   c10d at the least: {theirs['commits']} commits, {theirs['bytes'] / 1e6:.0f} MB, "
            f"cpu {1e3 * theirs['cpu_s']:.0f} ms; "
            f"commits x{cost.commits / theirs['commits']:.2g}, bytes x{bytes_ratio:.2g}, "
            f"cpu x{cost.cpu_s / theirs['cpu_s']:.2g}"
        )
    emit(
        line,
        bench="commits",
        case=what,
        nodes=nodes,
        commits=cost.commits,
        appends=cost.appends,
        rows=cost.rows,
        membership_bytes=cost.membership_bytes,
        cpu_s=round(cost.cpu_s, 4),
        encode_s=round(cost.encode_s, 4),
        peer=dict(theirs) if theirs else None,
        load=load(),
    )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="100 nodes only")
    add("--nodes", default="", help=f"sizes of the job, with commas (default: {NODES})")
    add("--cases", default=",".join(CASES), help="which, with commas; `form` is always first")
    chosen = parser.parse_args()
    chosen.cases = ("form", *chosen.cases.split(","))
    if unknown := set(chosen.cases) - set(CASES):
        parser.error(f"--cases: no {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    try:
        sizes = tuple(int(part) for part in chosen.nodes.split(",") if part)
    except ValueError:
        parser.error(f"--nodes {chosen.nodes} are no numbers; give, for example, 100,1000")
    if any(not 1 <= size <= 10_000 for size in sizes):
        parser.error(f"--nodes {chosen.nodes}: a job has 1 to 10000 nodes")
    chosen.nodes = sizes or (NODES[:1] if chosen.quick else NODES)
    return chosen


def main() -> None:
    """Count."""
    chosen = arguments()
    end_on_sigterm()
    logging.disable(logging.ERROR)
    say_conditions("commits", Path("/tmp"))
    with Peer.running() as peer:
        for count in chosen.nodes:
            asyncio.run(measure_job(count, peer, chosen.cases))


if __name__ == "__main__":
    main()
