"""The queue of submitted jobs and the nodes they get, as a pure function of all jobs and nodes.

These rules apply, in order of precedence:

* Jobs are served by priority and, within a priority, strictly first in, first out.
* A job gets `min_nodes` at once or no nodes at all, so nodes are never hoarded for a job that
  cannot start.
* A later job may start only on nodes that no earlier waiting job could use, so no job starves. A
  job could use a node if it has the job's labels and enough GPUs, busy or not. If too few such
  nodes are known, the job cannot use any, and reserves none until there are more.
* After that, jobs grow to `max_nodes` on nodes that no job still waiting could use.
* Nothing is taken from a running job. One that has stopped, and to which a quarantine leaves fewer
  than `min_nodes`, goes back to the queue at once, so that others may use the nodes it still has.

A waiting job always gets a reason. The choice of a node is made here and stored with its job; the
node itself reports what it actually has left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field

from rdzv.core.fleet.node_resources import NodeResources, gpus_needed
from rdzv.core.life.failures import some_succeeded
from rdzv.core.model import MAX_DECLINED, JobSpec, ScaleUp, State, is_placeholder
from rdzv.core.reason import Reason, ReasonItem
from rdzv.core.words import counted, listed
from rdzv.structs import replace, struct


@struct(frozen=True)
class Host:
    """A node that accepts submitted jobs."""

    node_id: str
    resources: NodeResources
    taken: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """The number of GPUs taken by each job placed on the node or held by it, by rdzv_id and run."""
    unusable: ReasonItem | None = None
    cordoned: bool = False
    """Whether the node is unusable until an operator changes that, or for an unknown period."""
    quarantined: bool = False

    @property
    def gpus_free(self) -> int:
        return max(len(self.resources.gpus) - sum(self.taken.values()), 0)

    @property
    def places_free(self) -> int:
        return max(self.resources.capacity - len(self.taken), 0)


@struct(frozen=True)
class Demand:
    """A submitted job that has not ended."""

    rdzv_id: str
    run: str
    spec: JobSpec
    min_nodes: int
    max_nodes: int
    at_ms: int
    here: frozenset[str] = frozenset()
    """The nodes placed for the job, and those that have joined on their own."""
    idle: tuple[str, ...] = ()
    """While a round is running, the placed nodes that have no seat and are staying, in the order of
    choice."""
    going: frozenset[str] = frozenset()
    """The nodes in `here` that are about to leave; replacements should arrive before they are gone.
    """
    declined: Mapping[str, str] = field(default_factory=dict)
    may_grow: bool = True
    seated: bool = False
    """Whether any node has a seat and may therefore have workers."""

    @property
    def staying(self) -> int:
        return len(self.here) - len(self.going)

    @property
    def missing(self) -> int:
        return max(self.min_nodes - self.staying, 0)

    @property
    def unreplaced(self) -> int:
        """The number of leaving nodes for which no replacement is waiting yet."""
        return max(len(self.going) - len(self.idle), 0)


@struct(frozen=True)
class QueuedWait:
    """The reason why a job has no nodes yet, or not enough of them."""

    reason: Reason
    jobs_before: int


@struct(frozen=True)
class Plan:
    """The decisions to be made now, by rdzv_id."""

    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    surplus: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hopeless: Mapping[str, str] = field(default_factory=dict)
    stranded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The nodes of each job that cannot run while other nodes are quarantined."""
    waits: Mapping[str, QueuedWait] = field(default_factory=dict)


def demand(state: State, now_ms: int, going: Collection[str] = ()) -> Demand | None:
    """Return a job's demand, or None if it was not submitted, has ended, or is being stopped.

    `going` are the nodes that are about to leave all their jobs.
    """
    membership, submission = state.membership, state.membership.submission
    if submission is None or membership.ended is not None or membership.stopping:
        return None
    round_ = membership.round
    runs = round_ is not None and round_.live
    # The node behind a placeholder is usually one of the placed nodes.
    others = [n for n in (*state.seats, *state.waiting, *state.stuck) if not is_placeholder(n)]
    all_reported = len(others) == len(state.seats) + len(state.waiting) + len(state.stuck)
    here = frozenset((*submission.placed, *others))
    return Demand(
        rdzv_id=membership.rdzv_id,
        run=membership.run,
        spec=submission.spec,
        min_nodes=membership.min_nodes,
        max_nodes=membership.max_nodes,
        at_ms=submission.at_ms,
        here=here,
        idle=tuple(n for n in submission.placed if n not in state.seats and n not in going)
        if runs and all_reported
        else (),
        going=here.intersection(going),
        declined={declined.node_id: declined.reason for declined in submission.declined},
        may_grow=_may_grow(state, now_ms),
        seated=bool(state.seats),
    )


def _may_grow(state: State, now_ms: int) -> bool:
    round_, settings = state.membership.round, state.membership.settings
    if round_ is None or not round_.live:
        return True
    if settings.scale_up is ScaleUp.ON_RESTART or some_succeeded(state):
        return False
    at_ms = grows_at_ms(state)
    return at_ms is None or at_ms <= now_ms


def grows_at_ms(state: State) -> int | None:
    """Return when a running job may get more nodes merely because time passes, or None if never."""
    round_, settings = state.membership.round, state.membership.settings
    if round_ is None or not round_.live or some_succeeded(state):
        return None
    if settings.scale_up is ScaleUp.AFTER:
        return round_.at_ms + settings.scale_up_after_ms
    return None


_MOST_REASONS = 3


def place_queued_jobs(
    demands: Iterable[Demand], hosts: Iterable[Host], *, settled: bool = True
) -> Plan:
    """Decide which queued jobs get which nodes now.

    Until the server is `settled`, nodes may be missing only because they have not reconnected yet,
    so no job is given up or considered short of nodes.
    """
    work = _Plan(tuple(sorted(hosts, key=lambda host: host.node_id)), settled=settled)
    queue = sorted(demands, key=lambda job: (-job.spec.priority, job.at_ms, job.rdzv_id))
    hopeless = {job.rdzv_id: why for job in queue if settled and (why := _hopeless(job, work))}
    jobs = [job for job in queue if job.rdzv_id not in hopeless]
    for job in jobs:
        if job.missing:
            work.start(job)
    for job in jobs:
        work.grow(job)
    surplus = {job.rdzv_id: _surplus(job) for job in jobs if job.staying > job.max_nodes}
    return Plan(
        places={rdzv_id: tuple(node_ids) for rdzv_id, node_ids in work.places.items()},
        surplus={rdzv_id: node_ids for rdzv_id, node_ids in surplus.items() if node_ids},
        hopeless=hopeless,
        stranded=work.stranded,
        waits=work.waits,
    )


def _surplus(job: Demand) -> tuple[str, ...]:
    """Return the nodes without a seat that exceed the size to which an operator scaled the job."""
    return job.idle[-(job.staying - job.max_nodes) :]


class _Plan:
    def __init__(self, hosts: Sequence[Host], *, settled: bool) -> None:
        self.hosts = hosts
        self.settled = settled
        self.places: dict[str, list[str]] = {}
        self.waits: dict[str, QueuedWait] = {}
        self.stranded: dict[str, tuple[str, ...]] = {}
        self._places_free = {host.node_id: host.places_free for host in hosts}
        self._gpus_free = {host.node_id: host.gpus_free for host in hosts}
        self._kept_for: dict[str, str] = {}
        """The first waiting job that could use each node, by node_id."""

    def start(self, job: Demand) -> None:
        """Give a job all the nodes it needs to run, or reserve the nodes that it could use."""
        fitting = [host for host in self.hosts if not _misfit(job, host)]
        ready = [host for host in fitting if self._ready(job, host)]
        if len(ready) >= job.missing:
            self._give(job, ready, job.missing)
            return
        self.waits[job.rdzv_id] = QueuedWait(self._why_queued(job, fitting, ready), len(self.waits))
        if not (lacking := self._lacking(job, fitting)):
            for host in fitting:
                self._kept_for.setdefault(host.node_id, job.rdzv_id)
        elif job.here and not job.seated:
            barred = {host.node_id for host in fitting if host.quarantined} - job.here
            if len(barred) >= lacking:
                self.stranded[job.rdzv_id] = tuple(sorted(job.here))

    def _lacking(self, job: Demand, fitting: Sequence[Host]) -> int:
        """Return how many nodes the job would lack if all others had ended, as far as known."""
        if not self.settled:
            return 0
        could = {host.node_id for host in fitting if not host.cordoned} | (job.here - job.going)
        return max(job.min_nodes - len(could), 0)

    def grow(self, job: Demand) -> None:
        """Give leftover nodes to a job that can run, and replace the nodes that are leaving it."""
        new = len(self.places.get(job.rdzv_id, ()))
        have = job.staying + new
        wanted = job.max_nodes - have
        if not job.may_grow:
            wanted = min(wanted, job.unreplaced - new)
        if have < job.min_nodes or wanted <= 0:
            return
        already = {*job.here, *self.places.get(job.rdzv_id, ())}
        ready = [
            host
            for host in self.hosts
            if host.node_id not in already and not _misfit(job, host) and self._ready(job, host)
        ]
        self._give(job, ready, min(wanted, len(ready)))

    def _ready(self, job: Demand, host: Host) -> bool:
        return (
            host.node_id not in job.here
            and not host.unusable
            and host.node_id not in self._kept_for
            and (job.rdzv_id, job.run) not in host.taken
            and self._has_room(job, host)
        )

    def _has_room(self, job: Demand, host: Host) -> bool:
        needed = gpus_needed(job.spec, host.resources)
        return self._places_free[host.node_id] > 0 and self._gpus_free[host.node_id] >= needed

    def _give(self, job: Demand, ready: Sequence[Host], number: int) -> None:
        for host in self._nearest(job, ready)[:number]:
            self.places.setdefault(job.rdzv_id, []).append(host.node_id)
            self._places_free[host.node_id] -= 1
            self._gpus_free[host.node_id] -= gpus_needed(job.spec, host.resources)

    def _nearest(self, job: Demand, ready: Sequence[Host]) -> list[Host]:
        """Sort nodes by location: first near the job's own nodes, then where most nodes are free.

        Within a location, nodes already in use come first, so that whole nodes stay free.
        """
        chosen = {*job.here, *self.places.get(job.rdzv_id, ())}
        mine = Counter(h.resources.topology for h in self.hosts if h.node_id in chosen)
        free = Counter(host.resources.topology for host in ready)

        def key(host: Host) -> tuple[int, int, str, int, int, str]:
            place, node_id = host.resources.topology, host.node_id
            room = (self._gpus_free[node_id], self._places_free[node_id])
            return (-mine[place], -free[place], place, *room, node_id)

        return sorted(ready, key=key)

    def _why_queued(self, job: Demand, fitting: Sequence[Host], ready: Sequence[Host]) -> Reason:
        """Explain a job's wait: "needs 2 nodes with gpu=h100, 1 is free (n3)"; n4 is away."""
        more = "more node" if job.here else "node"
        gone = f" once {listed(sorted(job.going))} {_has(job.going)} left" if job.going else ""
        text = f"needs {counted(job.missing, more)}{_wanted(job.spec)}{gone}"
        if not self.hosts:
            return Reason(
                f"{text}, and no rdzv-agent is connected", "start rdzv-agent on the nodes"
            )
        verb = "is" if len(ready) == 1 or (not ready and job.missing == 1) else "are"
        text += f", {len(ready) or 'none'} {verb} free"
        text += f" ({listed(host.node_id for host in ready)})" if ready else ""
        if lacking := self._lacking(job, fitting):
            text += f"; if all other jobs had ended it would still lack {counted(lacking, 'node')}"
        taken: dict[ReasonItem, list[str]] = {}
        for host in fitting:
            if host not in ready and (why := self._why_not(job, host)):
                taken.setdefault(why, []).append(host.node_id)
        items = [replace(why, who=listed(node_ids)) for why, node_ids in taken.items()]
        misfits = [host for host in self.hosts if host not in fitting]
        named = [host for host in misfits if host.node_id in job.declined][:_MOST_REASONS]
        too_few = len(fitting) < job.min_nodes
        if misfits and too_few and not named:
            named = [min(misfits, key=lambda host: _distance(job, host))]
        items += [ReasonItem(_misfit(job, host), host.node_id) for host in named]
        if others := len(misfits) - len(named) if too_few else 0:
            do = "does" if others == 1 else "do"
            items.append(ReasonItem(f"{do} not fit either", counted(others, "other")))
        return Reason(text, items=tuple(items))

    def _why_not(self, job: Demand, host: Host) -> ReasonItem | None:
        """Explain why a fitting node is not given to the job now; None if the job has it."""
        node_id = host.node_id
        if node_id in job.here:
            return None
        if host.unusable:
            return host.unusable
        if not self._has_room(job, host):
            names = [rdzv_id for rdzv_id, _ in host.taken]
            names += [name for name, node_ids in self.places.items() if node_id in node_ids]
            return ReasonItem(f"taken by {listed(sorted(names))}" if names else "takes no job")
        if node_id in self._kept_for:
            return ReasonItem(f"kept for {self._kept_for[node_id]}, which is before it")
        return ReasonItem("an earlier attempt at this job is still there")


def _has(names: Collection[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _hopeless(job: Demand, work: _Plan) -> str:
    """Explain why a job will never run because too few nodes could run it, or return ""."""
    if not job.declined or not job.missing or job.seated:
        return ""
    left = {host.node_id for host in work.hosts if not _misfit(job, host)} | job.here
    if len(left) >= job.min_nodes and len(job.declined) < MAX_DECLINED:
        return ""
    declined: dict[str, list[str]] = {}
    for node_id, reason in job.declined.items():
        declined.setdefault(reason, []).append(node_id)
    whys = [f"{listed(node_ids)}: {reason}" for reason, node_ids in declined.items()]
    others = sum(len(node_ids) for node_ids in list(declined.values())[_MOST_REASONS:])
    return f"no node could run it: {'; '.join(whys[:_MOST_REASONS])}" + (
        f"; and {counted(others, 'more node')}" if others else ""
    )


def nearest_miss(spec: JobSpec, hosts: Iterable[Host]) -> str | None:
    """Return what the best match lacks if no known node could ever take the job, or else None."""
    job = Demand("", "", spec, 1, 1, 0)
    ranked = sorted(hosts, key=lambda host: _distance(job, host))
    misfit = _misfit(job, ranked[0]) if ranked else ""
    return f"{ranked[0].node_id} {misfit}" if misfit else None


def _distance(job: Demand, host: Host) -> tuple[int, str]:
    has = dict(host.resources.labels)
    lacks = sum(1 for name, value in job.spec.labels if has.get(name) != value)
    there = len(host.resources.gpus)
    short = gpus_needed(job.spec, host.resources) > there or (job.spec.needs_gpu and not there)
    return lacks + short + (host.node_id in job.declined), host.node_id


def _misfit(job: Demand, host: Host) -> str:
    """Say what keeps the node from ever taking the job, or return "" if it could."""
    if (reason := job.declined.get(host.node_id)) is not None:
        return f"could not run it ({reason})"
    has = dict(host.resources.labels)
    for name, value in job.spec.labels:
        if name not in has:
            return f"has no label {name}"
        if has[name] != value:
            return f"has {name}={has[name]}"
    needed, there = gpus_needed(job.spec, host.resources), len(host.resources.gpus)
    if needed > there or (job.spec.needs_gpu and not there):
        return f"has {counted(there, 'GPU') if there else 'no GPU'}"
    return ""


def _wanted(spec: JobSpec) -> str:
    """Describe a job's requirements for each node, such as " with gpu=h100 and 8 GPUs"."""
    wanted = [f"{name}={value}" for name, value in spec.labels]
    if spec.gpus_per_node:
        wanted.append(counted(spec.gpus_per_node, "GPU"))
    return f" with {' and '.join(wanted)}" if wanted else ""
