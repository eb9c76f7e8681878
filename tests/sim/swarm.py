"""One history's parameters: sizes, settings and rates of trouble, and the troubles themselves.

All of it follows from the seed. Most rates are zero in most histories (swarm testing), to find also
what only happens in the absence of something else.
"""

from __future__ import annotations

from dataclasses import field
from random import Random

from rdzv.agent.core.model import JobTerms
from rdzv.agent.node.submitted_launch import SERVER_TIMEOUT_MS
from rdzv.core.fleet.node_resources import Gpu, NodeResources, gpus_needed
from rdzv.core.fleet.nodes import AgentKind
from rdzv.core.fleet.quarantine import QuarantineRules
from rdzv.core.model import JobSpec, ScaleUp, Settings
from rdzv.structs import field_names, replace, struct
from tests.sim.agents import NodeSpec

TROUBLES = 40
"""How many troubles, or their opposites, happen in one history."""

SUBMITTED_SHARE = 0.25
"""The share of histories in which jobs are submitted, and placed by the server."""
HANGING_SHARE = 0.2
"""The share of histories in which workers hang."""
AIMED_SHARE = 0.2
"""The share of histories in which servers are killed as a round completes."""
OPERATED_SHARE = 0.5
"""The share of the others in which operators send requests."""

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
"""Troubles of one node, chosen at random."""

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
"""Troubles of a server, or of its store."""

AIMED_TROUBLES = ("server_is_killed_as_a_round_completes",)
"""Troubles of a server at the worst moment, rather than at any."""

OPERATOR_TROUBLES = (
    "operator_scales",
    "operator_restarts",
    "operator_stops",
    "operator_drains",
    "operator_undrains",
    "operator_preempts",
    "operator_cordons",
    "operator_uncordons",
    "operator_submits",
)
"""Operators' requests."""

BUDGETED_SHARE = 0.4
"""The share of histories in which jobs have budgets other than that of restarts."""

BUDGET_TROUBLES = ("crash_loops",)
"""Troubles only of such histories."""

CHANCES = ("slow stop", "workers stuck", "start fails", "store host is late", "peer hangs")
"""Troubles that may occur at any suitable moment, each with its own probability."""


KEEPING_SHARE = 0.4
"""The share of histories in which workers can park, and be kept."""

KEEPING_CHANCES = ("parks never", "dies parked", "torn", "wrong claims", "goes on never")
"""Troubles that may occur there at any suitable moment."""


STANDBY_SHARE = 0.5
"""The share of the histories with kept workers in which nodes that wait have standbys."""

STANDBY_CHANCES = (
    "standby ends",
    "standby never parks",
    "standby is slow",
    "standby dies as it is seated",
    "node dies as it is seated",
)
"""Troubles that may occur there at any suitable moment."""


SHARDED_SHARE = 0.5
"""The share of these histories in which each worker has a part of the state."""


SNAPSHOT_SHARE = 0.4
"""The share of histories in which workers save snapshots in memory."""

COPIES_SHARE = 0.5
"""In how many of these nodes keep copies of each other's."""

SNAPSHOT_CHANCES = ("slot is damaged", "wrong snapshots", "copies fail")
"""Events that happen there whenever possible."""


FENCED_SHARE = 0.25
"""The share of histories in which nodes kill their own workers once they are cut off."""


@struct(frozen=True)
class Trouble:
    """One trouble, `gap_ms` after the previous one."""

    number: int
    gap_ms: int
    name: str
    salt: int
    """The seed of all random choices in it."""

    def __str__(self) -> str:
        return f"{self.number}: {self.name} (after {self.gap_ms} ms)"


@struct(frozen=True)
class Swarm:
    """Sizes, settings and rates of one history."""

    jobs: dict[str, Settings]
    nodes: tuple[NodeSpec, ...]
    servers: int
    rates: dict[str, float]
    """The relative probability of each kind of trouble."""
    chances: dict[str, float]
    latencies_ms: tuple[int, ...]
    store_latencies_ms: tuple[int, ...]
    server_timeout_ms: int
    clock_offsets_ms: tuple[int, ...]
    """How far the servers' clocks differ."""
    specs: dict[str, JobSpec] = field(default_factory=dict)
    """The jobs that are submitted, if nodes take such jobs."""
    quarantine: QuarantineRules = field(default_factory=QuarantineRules)
    keep_timeout_ms: int = 0
    """How long workers may take to park; 0: no worker is kept."""
    park_timeout_ms: int = 600_000
    standby: str = "cold"
    """`hot` if nodes that wait for a seat start their workers in advance."""
    odd_scripts: frozenset[str] = frozenset()
    """The nodes that have another version of the script."""
    fence_after_ms: int = 0
    """After how long a node that is cut off kills its own workers; 0: never."""
    replicas: int = 0
    """How many workers have each part of a sharded state; 0: each has all of a state."""
    snapshot_every_ms: int = 0
    """How long workers take from one snapshot to the next; 0: they save none."""
    snapshot_copies: bool = False
    """Whether nodes keep copies of what others hold."""
    holds_last: bool = True
    """Whether workers also hold the last but one step, if their state is sharded."""

    @classmethod
    def of(cls, seed: int, random: Random, without: frozenset[str] = frozenset()) -> Swarm:
        """Choose sizes and rates."""
        swarm = cls._of(random, without)
        swarm = _with_budgets(swarm, Random(f"{seed}, with budgets"), without)
        swarm = cls._with_hangs(swarm, Random(f"{seed}, with hangs"), without)
        swarm = _with_keeping(swarm, Random(f"{seed}, with keeping"), without)
        swarm = _with_standbys(swarm, Random(f"{seed}, with standbys"), without)
        swarm = _with_fence(swarm, Random(f"{seed}, with a fence"))
        swarm = _with_shards(swarm, Random(f"{seed}, with shards"))
        swarm = _with_snapshots(swarm, Random(f"{seed}, with snapshots"))
        swarm = cls._with_aim(swarm, Random(f"{seed}, with aim"), without)
        return cls._with_operators(swarm, seed, without)

    @classmethod
    def _with_operators(cls, swarm: Swarm, seed: int, without: frozenset[str]) -> Swarm:
        # Drawn independently: most histories are the same as without operators.
        other = Random(f"{seed}, with operators")
        if other.random() < SUBMITTED_SHARE:
            swarm = _with_submitted(swarm, other)
            swarm = _with_budgets(swarm, Random(f"{seed}, submitted, with budgets"), without)
            # Drawn independently, too, with more failures: otherwise hardly any node is at fault.
            fails = swarm.rates["worker_fails"] * 4
            swarm = replace(
                swarm,
                quarantine=_quarantine(Random(f"{seed}, with quarantine")),
                rates={**swarm.rates, "worker_fails": fails},
            )
        elif other.random() >= OPERATED_SHARE:
            return swarm
        rates = {name: other.choice((0.0, 0.3, 1.0)) for name in OPERATOR_TROUBLES}
        if not swarm.specs:
            rates = {name: rates[name] for name in OPERATOR_TROUBLES[:6]}
        rates = {name: 0.0 if name in without else rate for name, rate in rates.items()}
        return replace(swarm, rates={**swarm.rates, **rates})

    @classmethod
    def _with_hangs(cls, swarm: Swarm, random: Random, without: frozenset[str]) -> Swarm:
        """Let workers hang in some histories; all others are unchanged."""
        if random.random() >= HANGING_SHARE or "worker_hangs" in without:
            return swarm
        return replace(swarm, rates={**swarm.rates, "worker_hangs": random.choice((0.3, 1.0, 3.0))})

    @classmethod
    def _with_aim(cls, swarm: Swarm, random: Random, without: frozenset[str]) -> Swarm:
        """Kill servers as rounds complete in some histories; all others are unchanged."""
        if random.random() >= AIMED_SHARE:
            return swarm
        rates = {name: random.choice((0.3, 1.0, 3.0)) for name in AIMED_TROUBLES}
        rates = {name: 0.0 if name in without else rate for name, rate in rates.items()}
        return replace(swarm, rates={**swarm.rates, **rates})

    @classmethod
    def _of(cls, random: Random, without: frozenset[str]) -> Swarm:
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
            chances={name: random.choice((0.0, 0.0, 0.05, 0.3)) for name in CHANCES}
            | dict.fromkeys((*KEEPING_CHANCES, *STANDBY_CHANCES, *SNAPSHOT_CHANCES), 0.0),
            latencies_ms=random.choice(((1,), (1, 2, 5), (1, 5, 20, 200), (1, 2, 1_500))),
            store_latencies_ms=random.choice(((0,), (0,), (1, 3), (1, 20, 300))),
            server_timeout_ms=random.choice((20_000, 600_000)),
            clock_offsets_ms=random.choice(((0,), (0, 700), (0, 3_600_000))),
        )

    def job(self, rdzv_id: str, spec: NodeSpec) -> JobTerms:
        """Return how a job is launched on a node."""
        submitted = self.specs.get(rdzv_id)
        if submitted is not None and spec.resources is not None:
            gpus = gpus_needed(submitted, spec.resources)
            return JobTerms(
                rdzv_id=rdzv_id,
                node_id=spec.name,
                settings=self.jobs[rdzv_id],
                local_world_size=submitted.local_world_size or gpus or 1,
                shutdown_timeout_ms=spec.shutdown_timeout_ms,
                server_timeout_ms=SERVER_TIMEOUT_MS,
                keep_timeout_ms=self.keep_timeout_ms,
                park_timeout_ms=self.park_timeout_ms,
                standby=self.standby,
                fence_after_ms=self.fence_after_ms,
            )
        return JobTerms(
            rdzv_id=rdzv_id,
            node_id=spec.name,
            settings=self.jobs[rdzv_id],
            local_world_size=spec.workers,
            shutdown_timeout_ms=spec.shutdown_timeout_ms,
            server_timeout_ms=self.server_timeout_ms,
            keep_timeout_ms=self.keep_timeout_ms,
            park_timeout_ms=self.park_timeout_ms,
            standby=self.standby,
            fence_after_ms=self.fence_after_ms,
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
        """Describe the parameters in a few lines, which a failure prints first."""
        lines = []
        for name in field_names(type(self)):
            value = getattr(self, name)
            if name in ("rates", "chances"):
                value = ", ".join(f"{name} {rate:g}" for name, rate in value.items() if rate)
            elif name == "specs":
                value = ", ".join(_describe_spec(job, spec) for job, spec in value.items())
            elif name == "nodes":
                value = ", ".join(_describe_node(node) for node in value)
            lines.append(f"{name}: {value}")
        return "\n".join(lines)


def _with_keeping(swarm: Swarm, random: Random, without: frozenset[str]) -> Swarm:
    """Let workers be kept in some histories; all others are unchanged."""
    if random.random() >= KEEPING_SHARE or "collective_fails" in without:
        return swarm
    chances = {name: random.choice((0.0, 0.0, 0.05, 0.3)) for name in KEEPING_CHANCES}
    # A wrong claim takes away from the judge what it could check.
    chances["wrong claims"] = random.choice((0.0, 0.0, 0.0, 0.1))
    return replace(
        swarm,
        keep_timeout_ms=random.choice((500, 10_000)),
        park_timeout_ms=random.choice((2_000, 600_000)),
        chances={**swarm.chances, **chances},
        rates={**swarm.rates, "collective_fails": random.choice((0.0, 0.3, 1.0))},
    )


def _with_standbys(swarm: Swarm, random: Random, without: frozenset[str]) -> Swarm:
    """Let nodes that wait have standbys in some histories; all others are unchanged."""
    if not swarm.keep_timeout_ms or random.random() >= STANDBY_SHARE:
        return swarm
    chances = {name: random.choice((0.0, 0.0, 0.1, 0.3)) for name in STANDBY_CHANCES}
    rates = {"script_changes": random.choice((0.0, 0.3, 1.0)), "node_dies": 1.0}
    # Spares are rare otherwise: nodes come and go, and the next one gets the seat.
    kinds, count = [swarm.nodes[0].kind], len(swarm.nodes)
    nodes = (*swarm.nodes, *(_node(f"n{count + n}", random, kinds) for n in (1, 2)))
    odd = random.choice(nodes).name if random.random() < 0.2 else None
    return replace(
        swarm,
        nodes=nodes,
        standby="hot",
        odd_scripts=frozenset({odd} if odd else ()),
        chances={**swarm.chances, **chances},
        rates={**swarm.rates, **{name: rates[name] for name in rates if name not in without}},
    )


def _with_fence(swarm: Swarm, random: Random) -> Swarm:
    """Fence all nodes in some histories; all others are unchanged."""
    if random.random() >= FENCED_SHARE:
        return swarm
    return replace(swarm, fence_after_ms=random.choice((1_000, 2_500, 4_000)))


def _with_shards(swarm: Swarm, random: Random) -> Swarm:
    """Shard the state in some histories with kept workers; all others are unchanged."""
    if not swarm.keep_timeout_ms or random.random() >= SHARDED_SHARE:
        return swarm
    return replace(swarm, replicas=random.choice((1, 2, 2, 2, 3)), holds_last=random.random() < 0.7)


def _with_snapshots(swarm: Swarm, random: Random) -> Swarm:
    """Save snapshots in some histories; all others are unchanged."""
    if random.random() >= SNAPSHOT_SHARE:
        return swarm
    chances = {
        "slot is damaged": random.choice((0.0, 0.0, 0.1)),
        "wrong snapshots": random.choice((0.0, 0.0, 0.0, 0.1)),
    }
    swarm = replace(
        swarm,
        snapshot_every_ms=random.choice((100, 2_000, 20_000)),
        replicas=swarm.replicas if swarm.keep_timeout_ms else random.choice((0, 1, 2)),
    )
    chances["copies fail"] = random.choice((0.0, 0.1))
    return replace(
        swarm,
        snapshot_copies=random.random() < COPIES_SHARE,
        chances={**swarm.chances, **chances},
    )


def _with_budgets(swarm: Swarm, random: Random, without: frozenset[str]) -> Swarm:
    """Give some jobs limited budgets, or other backoffs."""
    if random.random() < BUDGETED_SHARE:
        jobs = {name: _budgeted(settings, random) for name, settings in swarm.jobs.items()}
        loops = random.choice((0.0, 0.5, 2.0)) if "crash_loops" not in without else 0.0
        swarm = replace(swarm, jobs=jobs, rates={**swarm.rates, "crash_loops": loops})
    return swarm


def _budgeted(settings: Settings, random: Random) -> Settings:
    base_ms, max_ms = random.choice(((0, 60_000), (1_000, 60_000), (200, 5_000)))
    return replace(
        settings,
        max_restarts=random.choice((settings.max_restarts, 20)),
        restart_backoff_ms=base_ms,
        restart_backoff_max_ms=max_ms,
        max_preemptions=random.choice((None, None, 0, 2)),
        max_store_failures=random.choice((None, None, 0, 1)),
        no_progress_restarts=random.choice((0, 0, 1, 2)),
    )


def _with_submitted(swarm: Swarm, random: Random) -> Swarm:
    """Let all nodes take submitted jobs, and several jobs be submitted."""
    names = [f"job-{number}" for number in range(1, random.randint(2, 5) + 1)]
    topologies = random.choice(((("", "rack-1", "rack-2")), ("",)))
    nodes = []
    for number in range(1, random.randint(2, 6) + 1):
        node = _node(f"n{number}", random, [AgentKind.FOREGROUND])
        gpus = tuple(Gpu(f"GPU-{i}", "H100", 2**30) for i in range(random.choice((0, 2, 4))))
        resources = NodeResources(
            cpus=8,
            memory_bytes=2**30,
            gpus=gpus,
            labels=random.choice(((), (("kind", "new"),), (("kind", "old"), ("rack", "1")))),
            capacity=random.choice((1, 1, 2, 3)),
            topology=random.choice(topologies),
        )
        nodes.append(replace(node, resources=resources))
    return replace(
        swarm,
        jobs={name: _settings(random) for name in names},
        specs={name: _spec(random) for name in names},
        nodes=tuple(nodes),
        rates={**swarm.rates, "comes_twice": 0.0, "workers_succeed": 1.0},
        chances={**swarm.chances, "declines": random.choice((0.0, 0.0, 0.1))},
    )


def _quarantine(random: Random) -> QuarantineRules:
    return QuarantineRules(
        failures=random.choice((0, 1, 1, 2, 3)),
        ttl_ms=random.choice((20_000, 12 * 3_600_000)),
        max_nodes=random.choice((0, 0, 2)),
    )


def _spec(random: Random) -> JobSpec:
    return JobSpec(
        args=("train.py",),
        labels=random.choice(((), (), (("kind", "new"),))),
        priority=random.choice((0, 0, 0, 5)),
        gpus_per_node=random.choice((None, None, 0, 1, 2)),
        local_world_size=random.choice((0, 1, 2)),
        needs_gpu=random.random() < 0.2,
    )


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
    text = f"{node.name} ({node.kind}, {node.workers} workers, {node.role}, {node.topology or '-'}"
    if (has := node.resources) is not None:
        labels = " ".join(f"{name}={value}" for name, value in has.labels)
        text += f", {has.capacity} at once, {len(has.gpus)} GPUs, {labels or 'no label'}"
    return f"{text})"


def _describe_spec(name: str, spec: JobSpec) -> str:
    labels = " ".join(f"{name}={value}" for name, value in spec.labels)
    gpus = "-" if spec.gpus_per_node is None else spec.gpus_per_node
    return f"{name} (priority {spec.priority}, {gpus} GPUs, {labels or 'no label'})"
