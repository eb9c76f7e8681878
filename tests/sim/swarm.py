"""What one history is like: sizes, settings and rates of trouble, and the troubles themselves.

All of it follows from the seed. Most rates are zero in most histories (swarm testing), so that what
only happens where something else does not is found too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random

from rdzv.agent.core.model import Job
from rdzv.core.model import ScaleUp, Settings
from rdzv.core.nodes import AgentKind
from tests.sim.agents import NodeSpec

TROUBLES = 40
"""How many things go wrong, or right, in one history."""

NODE_TROUBLES = (
    "worker_fails",
    "workers_succeed",
    "store_host_fails",
    "node_dies",
    "machine_dies",
    "node_flaps",
    "machine_freezes",
    "agent_restarts",
    "agent_upgrades",
    "runner_dies",
    "leaves",
    "is_hurried",
    "link_breaks",
    "link_is_cut",
    "link_is_cut_one_way",
    "repeats",
    "comes_twice",
)
"""What happens to one node, chosen by chance."""

SERVER_TROUBLES = (
    "server_crashes",
    "server_machine_dies",
    "server_stops",
    "server_pauses",
    "server_is_deposed",
    "store_is_away",
    "store_is_slow",
    "store_refuses",
    "store_loses_answers",
    "store_is_backed_up",
    "store_is_forgotten",
    "store_is_restored",
)
"""What happens to a server, or to what it stores."""

CHANCES = ("slow stop", "workers stuck", "start fails", "store host is late", "peer hangs")
"""What may happen whenever it can, each with its own chance."""


@dataclass(frozen=True)
class Trouble:
    """One thing that goes wrong, `gap_ms` after the one before."""

    number: int
    gap_ms: int
    name: str
    salt: int
    """The seed of whatever else is left to chance in it."""

    def __str__(self) -> str:
        return f"{self.number}: {self.name} (after {self.gap_ms} ms)"


@dataclass(frozen=True)
class Swarm:
    """Sizes, settings and rates of one history."""

    jobs: dict[str, Settings]
    nodes: tuple[NodeSpec, ...]
    servers: int
    rates: dict[str, float]
    """How likely each kind of trouble is beside the others."""
    chances: dict[str, float]
    latencies_ms: tuple[int, ...]
    store_latencies_ms: tuple[int, ...]
    server_timeout_ms: int
    clock_offsets_ms: tuple[int, ...]
    """How far the servers' clocks are from each other."""

    @classmethod
    def of(cls, random: Random, without: frozenset[str] = frozenset()) -> Swarm:
        """Choose sizes and rates."""
        names = ["job-7"] if random.random() < 0.9 else ["job-7", "job-8"]
        jobs = {name: _settings(random) for name in names}
        most = max(settings.max_nodes for settings in jobs.values())
        kinds = random.choice([list(AgentKind), *([kind] for kind in AgentKind)])
        count = most + random.choice((0, 0, 1, 2))
        nodes = tuple(_node(f"n{i}", random, kinds) for i in range(1, count + 1))
        kinds_of_trouble = (*NODE_TROUBLES, *SERVER_TROUBLES)
        rates = {name: random.choice((0.0, 0.0, 0.3, 1.0)) for name in kinds_of_trouble}
        rates = {name: 0.0 if name in without else rate for name, rate in rates.items()}
        return cls(
            jobs=jobs,
            nodes=nodes,
            servers=random.choice((1, 1, 2, 3)),
            rates={**rates, "starts": 2.0},
            chances={name: random.choice((0.0, 0.0, 0.05, 0.3)) for name in CHANCES},
            latencies_ms=random.choice(((1,), (1, 2, 5), (1, 5, 20, 200), (1, 2, 1_500))),
            store_latencies_ms=random.choice(((0,), (0,), (1, 3), (1, 20, 300))),
            server_timeout_ms=random.choice((20_000, 600_000)),
            clock_offsets_ms=random.choice(((0,), (0, 700), (0, 3_600_000))),
        )

    def job(self, rdzv_id: str, spec: NodeSpec) -> Job:
        """Say how a job is launched on a node."""
        return Job(
            rdzv_id=rdzv_id,
            node_id=spec.name,
            settings=self.jobs[rdzv_id],
            local_world_size=spec.workers,
            shutdown_timeout_ms=spec.shutdown_timeout_ms,
            server_timeout_ms=self.server_timeout_ms,
        )

    def plan(self, random: Random, count: int = TROUBLES) -> tuple[Trouble, ...]:
        """Choose what goes wrong, and when."""
        names, weights = zip(*self.rates.items(), strict=True)
        chosen = random.choices(names, weights, k=count)
        gaps = (1, 10, 100, 1_000, 5_000)
        return tuple(
            Trouble(number, random.choice(gaps), name, random.getrandbits(32))
            for number, name in enumerate(chosen)
        )

    def describe(self) -> str:
        """Write it in a few lines: what a failure prints first."""
        lines = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("rates", "chances"):
                value = ", ".join(f"{name} {rate:g}" for name, rate in value.items() if rate)
            elif field.name == "nodes":
                value = ", ".join(_describe_node(node) for node in value)
            lines.append(f"{field.name}: {value}")
        return "\n".join(lines)


def _settings(random: Random) -> Settings:
    min_nodes = random.randint(1, 3)
    return Settings(
        min_nodes=min_nodes,
        max_nodes=min_nodes + random.randint(0, 2),
        max_restarts=random.choice((0, 1, 3)),
        last_call_timeout_ms=random.choice((0, 2_000)),
        join_timeout_ms=random.choice((600_000, 600_000, 60_000)),
        scale_up=random.choice(list(ScaleUp)),
        restart_window_ms=random.choice((0, 0, 5_000)),
    )


def _node(name: str, random: Random, kinds: list[AgentKind]) -> NodeSpec:
    return NodeSpec(
        name=name,
        kind=random.choice(kinds),
        workers=random.choice((1, 1, 2, 3)),
        role=random.choice(("default", "default", "reader")),
        topology=random.choice(("", "", "rack-1", "rack-2")),
        can_host_store=random.random() < 0.8,
        shutdown_timeout_ms=random.choice((1_000, 30_000)),
    )


def _describe_node(node: NodeSpec) -> str:
    return f"{node.name} ({node.kind}, {node.workers} workers, {node.role}, {node.topology or '-'})"
