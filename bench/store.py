"""What a commit costs in each store, and what torchrun's rendezvous commits to instead.

Measured: `Store.compare_and_swap` as the server calls it, from a membership of N nodes to the
answer that it is stored, with one row of history; its encoding is part of it. W writers at once,
each with a job of its own: a server writes different jobs at once, never one. Latency (median,
p99) and commits per second; the CPU time of this process, without that of etcd's members.

Right before each case: `fdatasync`, the least that durable means on this disk at that moment, 4 KiB
appended to a file and synced.

The peer, right before each case too: `compare_set` of a pickled state of as many nodes in
torch's TCPStore, as torchrun's c10d back-end does it, from as many connections at once. It is not
durable: the line says what a durable commit costs beside a volatile one. `x` is the ratio of the
median latencies, ours to the peer's: below 1, ours is faster; `rate` that of commits per second:
above 1, ours is. With many writers the peer's threads wait for one interpreter in turns, which
makes its median say little; its rate, and its p99, say more.

Not measured: the network (all is on loopback; three etcd members share this machine and its disk,
where real ones share neither), reading, history beyond one row, and contention: nobody else writes
a job of ours, while torchrun's nodes all write one key.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from measure import Spread, emit, end_on_sigterm, load, say_conditions
from peer import Peer

from rdzv.core.model import Membership, Offer, Participant, Round, Settings
from rdzv.errors import RendezvousConnectionError
from rdzv.stores import codec
from rdzv.stores.base import Record, Store
from rdzv.stores.election import Election
from rdzv.stores.etcd import EtcdStore
from rdzv.stores.etcd_client import EtcdClient
from rdzv.stores.memory import MemoryStore
from rdzv.stores.sqlite import SqliteStore
from rdzv.structs import replace

STORES = (
    "memory",
    "sqlite",
    "etcd-1-no-fsync",
    "etcd-1",
    "etcd-3-no-fsync",
    "etcd-3",
)
NODES = (3, 100, 1_000, 10_000)
WRITERS = (1, 8, 64)

CASE_TIMEOUT_S = 120.0
LEASE_S = 30
"""Long, so that a machine busy with this benchmark deposes no server."""


def membership(nodes: int) -> Membership:
    """Return a job whose round of `nodes` nodes, 8 workers each, runs."""
    participants = tuple(
        Participant(
            node_id=f"node-{number:05d}",
            incarnation=(1_763_700_000 << 32) + number,
            offer=Offer(
                address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
                local_world_size=8,
                role="trainer",
                topology=f"rack-{number // 32}",
                host_name=f"node-{number:05d}.cluster.local",
                machine=f"{number:032x}",
                store_port=40_000 + number % 10_000,
                can_host_store=True,
            ),
            rank_first=8 * number,
            role_rank_first=8 * number,
            role_world_size=8 * nodes,
        )
        for number in range(nodes)
    )
    return Membership(
        rdzv_id="job",
        run="0badcafe0bad",
        run_number=1,
        settings=Settings(nodes, nodes, 3),
        began_at_ms=1_763_700_000_000,
        round=Round(0, participants, "10.0.0.0", 40_000, True, 0, 1_763_700_001_000),
        next_round=1,
    )


@dataclass
class Samples:
    """The results of one case."""

    latencies: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    failed: int = 0
    """Commits that the store did not answer in time; each was read back, and written again."""

    @property
    def per_s(self) -> float:
        """Commits in a second, by all writers together."""
        return len(self.latencies) / self.elapsed_s

    @property
    def cpu_us(self) -> float:
        """Microseconds of CPU for one commit, in the process that requests it."""
        return 1e6 * self.cpu_s / len(self.latencies)


class Writers:
    """Jobs of one size that are all written at once."""

    def __init__(self, store: Store, kind: Membership, count: int) -> None:
        nodes = len(kind.round.participants) if kind.round else 0
        self._store = store
        self._jobs = [replace(kind, rdzv_id=f"{nodes}-{count}-{i}") for i in range(count)]
        self._samples = Samples()

    async def measure(self, seconds: float) -> Samples:
        """Write until the time is over, each job at least once after the first."""
        create = [self._store.compare_and_swap(job.rdzv_id, job, 0) for job in self._jobs]
        revisions = await asyncio.gather(*create)
        began, cpu = time.perf_counter(), time.process_time()
        pairs = zip(self._jobs, revisions, strict=True)
        await asyncio.gather(*(self._write(job, at, began + seconds) for job, at in pairs))
        self._samples.elapsed_s = time.perf_counter() - began
        self._samples.cpu_s = time.process_time() - cpu
        return self._samples

    async def _write(self, job: Membership, revision: int, end: float) -> None:
        row = Record(1_763_700_002_000, job.rdzv_id, job.run, "RoundEnded", "round 0 ended: a test")
        latencies = self._samples.latencies
        while True:
            job = replace(job, next_round=job.next_round + 1)
            began = time.perf_counter()
            try:
                revision = await self._store.compare_and_swap(job.rdzv_id, job, revision, (row,))
                latencies.append(time.perf_counter() - began)
            except RendezvousConnectionError:
                self._samples.failed += 1
                stored = await self._store.load(job.rdzv_id)
                assert stored is not None
                revision = stored.revision
            if time.perf_counter() >= end:
                return
            # A store that never waits would let no other writer run.
            await asyncio.sleep(0)


@contextmanager
def members(name: str, directory: Path) -> Iterator[tuple[str, ...]]:
    """Run the etcd members that a store needs; yield their endpoints."""
    if not name.startswith("etcd-"):
        yield ()
        return
    from etcd_cluster import EtcdCluster

    fsync = not name.endswith("-no-fsync")
    with EtcdCluster.running(directory, int(name.split("-")[1]), fsync=fsync) as cluster:
        yield tuple(str(member.endpoint) for member in cluster.members)


@asynccontextmanager
async def opened(name: str, endpoints: Sequence[str], directory: Path) -> AsyncIterator[Store]:
    """Open a store; an etcd is led by this process meanwhile."""
    if name == "memory":
        yield MemoryStore()
    elif name == "sqlite":
        store = await SqliteStore.open(directory / "data")
        try:
            yield store
        finally:
            await store.close()
    else:
        from rdzv.stores.etcd_config import EtcdConfig

        timeout_ms = int(CASE_TIMEOUT_S * 1000 / 4)
        config = EtcdConfig.parse(",".join(endpoints), ttl_s=LEASE_S, timeout_ms=timeout_ms)
        async with (
            EtcdClient.connected(config) as client,
            Election.running(client, "127.0.0.1:1") as election,
        ):
            yield EtcdStore(client, await election.campaign())


def sync_floor(directory: Path, seconds: float) -> Spread:
    """Measure the minimum for a durable write here: 4 KiB appended to a file, and fdatasync."""
    file = directory / "floor"
    samples: list[float] = []
    end = time.perf_counter() + seconds
    with file.open("wb", buffering=0) as out:
        while time.perf_counter() < end or not samples:
            began = time.perf_counter()
            out.write(bytes(4096))
            os.fdatasync(out.fileno())
            samples.append(time.perf_counter() - began)
    file.unlink()
    return Spread.of(samples)


def ms(seconds: float) -> str:
    """Format a time in milliseconds, with three digits."""
    return f"{1000 * seconds:.3g} ms"


def peer_samples(peer: Peer, nodes: int, writers: int, seconds: float) -> Samples:
    """Return the same samples of the peer."""
    answer = peer.ask("state", nodes=nodes, writers=writers, seconds=seconds)
    return Samples(answer["latencies"], answer["elapsed_s"], answer["cpu_s"])


async def measure_store(
    name: str,
    endpoints: Sequence[str],
    directory: Path,
    peer: Peer,
    cases: Sequence[tuple[int, int]],
    seconds: float,
) -> None:
    """Print every case of one store."""
    async with opened(name, endpoints, directory) as store:
        for nodes, writers in cases:
            kind = membership(nodes)
            theirs = await asyncio.to_thread(peer_samples, peer, nodes, writers, seconds / 2)
            floor = await asyncio.to_thread(sync_floor, directory, seconds / 10)
            async with asyncio.timeout(CASE_TIMEOUT_S):
                ours = await Writers(store, kind, writers).measure(seconds)
            if ours.latencies:
                say_case(name, kind, writers, ours, theirs, floor)
            else:
                emit(f"store {name} nodes={nodes} writers={writers}: every commit failed")


def say_case(
    name: str, kind: Membership, writers: int, ours: Samples, theirs: Samples, floor: Spread
) -> None:
    """Print one case, its peer, and the disk's time just before."""
    nodes = len(kind.round.participants) if kind.round else 0
    mine, other = Spread.of(ours.latencies), Spread.of(theirs.latencies)
    ratio, cpu_ratio = mine.median / other.median, ours.cpu_us / theirs.cpu_us
    rate_ratio = ours.per_s / theirs.per_s
    emit(
        f"store {name:<15} nodes={nodes:<5} writers={writers:<2}  "
        f"{ms(mine.median):>8} p99 {ms(mine.p99):>8} {ours.per_s:7.0f}/s "
        f"cpu {ours.cpu_us:6.0f} us   "
        f"compare_set {ms(other.median):>8} p99 {ms(other.p99):>8} {theirs.per_s:7.0f}/s "
        f"cpu {theirs.cpu_us:6.0f} us   x{ratio:.2g} (rate x{rate_ratio:.2g}, "
        f"cpu x{cpu_ratio:.2g})  fdatasync {ms(floor.median)}  "
        f"load {load():.0f}{f'  {ours.failed} failed' if ours.failed else ''}",
        bench="store",
        case=name,
        nodes=nodes,
        writers=writers,
        bytes=len(codec.encode(kind)),
        latency_s=mine.as_json(),
        per_s=round(ours.per_s, 1),
        cpu_us=round(ours.cpu_us, 1),
        failed=ours.failed,
        peer="torch TCPStore compare_set, not durable",
        peer_latency_s=other.as_json(),
        peer_per_s=round(theirs.per_s, 1),
        peer_cpu_us=round(theirs.cpu_us, 1),
        ratio=float(f"{ratio:.3g}"),
        rate_ratio=float(f"{rate_ratio:.3g}"),
        fdatasync_s=floor.as_json(),
        cpu_ratio=float(f"{cpu_ratio:.3g}"),
        load=load(),
    )


def say_floors(peer: Peer, directory: Path, seconds: float) -> None:
    """Print the lower bounds: a bare round trip, and one synced write."""
    answer = peer.ask("raw", seconds=seconds)
    for name, spread in (
        ("compare_set of 100 bytes", Spread.of(answer["latencies"])),
        ("4 KiB and fdatasync", sync_floor(directory, seconds)),
    ):
        emit(
            f"floor {name}: {ms(spread.median)} p99 {ms(spread.p99)}",
            bench="store",
            case=f"floor: {name}",
            latency_s=spread.as_json(),
            load=load(),
        )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="half a minute: two sizes, two numbers of writers")
    add("--stores", default=",".join(STORES), help="which of them, with commas (default: all)")
    add("--nodes", default="", help=f"sizes, with commas (default: {NODES})")
    add("--writers", default="", help=f"writers at once, with commas (default: {WRITERS})")
    add("--seconds", type=float, default=0.0, help="for each case (default 1.5; --quick 0.4)")
    add("--directory", type=Path, help="where data is written, and removed again (default: /tmp)")
    chosen = parser.parse_args()
    if unknown := set(chosen.stores.split(",")) - set(STORES):
        parser.error(f"--stores: no {', '.join(sorted(unknown))}; there are {', '.join(STORES)}")
    try:
        chosen.nodes = _numbers(chosen.nodes) or ((3, 1_000) if chosen.quick else NODES)
        chosen.writers = _numbers(chosen.writers) or ((1, 8) if chosen.quick else WRITERS)
    except ValueError as error:
        parser.error(f"--nodes and --writers take numbers above 0, with commas: {error}")
    chosen.seconds = chosen.seconds or (0.4 if chosen.quick else 1.5)
    return chosen


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(",") if part)
    if any(number < 1 for number in numbers):
        raise ValueError(text)
    return numbers


def main() -> None:
    """Measure, and leave nothing behind."""
    chosen = arguments()
    end_on_sigterm()
    cases = [(nodes, writers) for nodes in chosen.nodes for writers in chosen.writers]
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="rdzv-bench-", dir=chosen.directory)
        directory = Path(stack.enter_context(temporary))
        peer = stack.enter_context(Peer.running())
        say_conditions("store", directory)
        say_floors(peer, directory, chosen.seconds)
        for name in chosen.stores.split(","):
            below = directory / name
            below.mkdir()
            with members(name, below) as endpoints:
                asyncio.run(
                    measure_store(name, endpoints, below, peer, cases, chosen.seconds),
                )


if __name__ == "__main__":
    main()
