"""Which job gets which nodes: tables for each rule, and random queues for the guarantees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import SETTLED
from rdzv.core.commands import Place, Submit
from rdzv.core.fleet import job_queue
from rdzv.core.fleet.job_queue import Demand, Host, Plan, nearest_miss, place_queued_jobs
from rdzv.core.fleet.node_resources import Gpu, NodeResources, gpus_needed
from rdzv.core.model import DeclinedNode, JobSpec, ScaleUp, Settings, SubmittedRun
from rdzv.core.reason import ReasonItem
from rdzv.structs import replace
from tests.support.builders import Job as CoreJob


def a_node(
    node_id: str,
    *,
    gpus: int = 0,
    capacity: int = 1,
    topology: str = "",
    taken: Mapping[tuple[str, str], int] | None = None,
    unusable: str = "",
    cordoned: bool = False,
    quarantined: bool = False,
    **labels: str,
) -> Host:
    resources = NodeResources(
        gpus=tuple(Gpu(f"{node_id}-{i}", "H100", 0) for i in range(gpus)),
        labels=tuple(sorted(labels.items())),
        capacity=capacity,
        topology=topology,
    )
    why = ReasonItem("fan", state=unusable) if unusable else None
    return Host(node_id, resources, taken or {}, why, cordoned or quarantined, quarantined)


def a_job(
    name: str,
    nodes: tuple[int, int] = (1, 1),
    *,
    at_ms: int = 0,
    priority: int = 0,
    here: Sequence[str] = (),
    idle: Sequence[str] = (),
    going: Sequence[str] = (),
    declined: Mapping[str, str] | None = None,
    may_grow: bool = True,
    gpus: int | None = None,
    workers: int = 1,
    **labels: str,
) -> Demand:
    spec = JobSpec(
        args=("train.py",),
        labels=tuple(sorted(labels.items())),
        priority=priority,
        gpus_per_node=gpus,
        local_world_size=workers,
    )
    return Demand(
        rdzv_id=name,
        run=f"{name}-run",
        spec=spec,
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        at_ms=at_ms,
        here=frozenset(here),
        idle=tuple(idle),
        going=frozenset(going),
        declined=declined or {},
        may_grow=may_grow,
    )


def reason(made: Plan, name: str) -> str:
    return str(made.waits[name].reason)


BUSY = a_node("n0", taken={("old", "r"): 0})
THREE = [a_node("n1"), a_node("n2"), a_node("n3")]


# ------------------------------------------------------------------ nodes that are about to leave


def test_a_node_that_is_about_to_leave_is_replaced_before_it_does() -> None:
    job = a_job("a", (2, 2), here=("n1", "n2"), going=("n1",))
    assert place_queued_jobs([job], [a_node("n1", unusable="drained"), *THREE[2:]]).places == {
        "a": ("n3",)
    }


def test_it_is_replaced_once() -> None:
    job = a_job("a", (2, 2), here=("n1", "n2", "n3"), idle=("n3",), going=("n1",))
    assert place_queued_jobs([job], [a_node("n4")]) == Plan()


def test_its_seat_is_no_growth() -> None:
    """Newcomers wait for a natural end of the round, but a node that leaves is replaced at once."""
    job = a_job("a", (1, 4), here=("n1", "n2"), going=("n2",), may_grow=False)
    spares = [a_node("n3"), a_node("n4")]
    assert place_queued_jobs([job], spares).places == {"a": ("n3",)}
    replaced = replace(job, here=frozenset(("n1", "n2", "n3")), idle=("n3",))
    assert place_queued_jobs([replaced], spares).places == {}


def test_who_stays_after_all_leaves_its_replacement_without_use() -> None:
    job = a_job("a", (2, 2), here=("n1", "n2", "n3"), idle=("n3",))
    assert place_queued_jobs([job], THREE).surplus == {"a": ("n3",)}


def test_a_job_that_would_have_too_few_says_what_it_needs() -> None:
    job = a_job("a", (2, 2), here=("n1", "n2"), going=("n2",))
    made = place_queued_jobs(
        [job], [a_node("n1"), a_node("n2", unusable="drained", cordoned=True), BUSY]
    )
    assert reason(made, "a") == (
        "needs 1 more node once n2 has left, none is free; n0: taken by old"
    )
    # And no later job gets a node that it could use.
    assert place_queued_jobs([job, a_job("b", at_ms=1)], [BUSY]).places == {}


def test_a_job_that_a_drain_leaves_with_too_few_keeps_nothing_back() -> None:
    """Its drained node comes back when an operator says so, and that time is unknown."""
    job = a_job("a", (2, 2), here=("n1", "n2"), going=("n2",))
    drained = a_node("n2", unusable="drained", cordoned=True)
    shared = a_node("n1", capacity=2, taken={("a", "a-run"): 0})
    made = place_queued_jobs([job, a_job("b", at_ms=1)], [shared, drained])
    assert made.places == {"b": ("n1",)}
    assert "if all other jobs had ended it would still lack 1 node" in reason(made, "a")
    # The job waits for a node that is only away, and keeps all nodes that it could use.
    away = a_node("n3", unusable="away")
    assert place_queued_jobs([job, a_job("b", at_ms=1)], [shared, drained, away]).places == {}


def test_a_job_that_a_quarantine_leaves_with_too_few_holds_nothing() -> None:
    """The quarantined node is away for hours; others may use what the job still has."""
    job = a_job("a", (2, 2), here=("n1",))
    mine = a_node("n1", taken={("a", "a-run"): 0})
    barred = a_node("n2", unusable="quarantined", quarantined=True)
    made = place_queued_jobs([job], [mine, barred])
    assert made.stranded == {"a": ("n1",)}
    assert reason(made, "a") == (
        "needs 1 more node, none is free; if all other jobs had ended it would still lack 1 node; "
        "n2 (quarantined): fan"
    )
    holds = {
        "its workers are still there": ([replace(job, seated=True)], [mine, barred]),
        "it has enough": ([a_job("a", (1, 2), here=("n1",))], [mine, barred]),
        "another node is free": ([job], [mine, barred, a_node("n3")]),
        "another node is taken, and may be free soon": ([job], [mine, barred, BUSY]),
        "the node is cordoned, and it is not known for how long": (
            [job],
            [mine, a_node("n2", unusable="cordoned", cordoned=True)],
        ),
        "it would lack one without the quarantine, too": (
            [a_job("a", (3, 3), here=("n1",))],
            [mine, barred],
        ),
        "the quarantined node could not run it": (
            [a_job("a", (2, 2), here=("n1",), declined={"n2": "no"})],
            [mine, barred],
        ),
    }
    for why, (jobs, hosts) in holds.items():
        assert place_queued_jobs(jobs, hosts).stranded == {}, why
    # Nodes may still be on their way back to this server.
    assert place_queued_jobs([job], [mine, barred], settled=False).stranded == {}
    # One that has nothing has nothing to give back.
    assert place_queued_jobs([a_job("a", (2, 2))], [a_node("n1"), barred]).stranded == {}


# ------------------------------------------------------------------ one job


def test_a_job_gets_all_it_needs_at_once() -> None:
    assert place_queued_jobs([a_job("a", (2, 2))], THREE).places == {"a": ("n1", "n2")}


def test_a_job_grows_to_max_nodes_in_the_same_step() -> None:
    assert place_queued_jobs([a_job("a", (1, 4))], THREE).places == {"a": ("n1", "n2", "n3")}


def test_no_node_is_hoarded_for_a_job_that_can_not_start() -> None:
    made = place_queued_jobs([a_job("a", (4, 4))], THREE)
    assert made.places == {}
    assert reason(made, "a") == (
        "needs 4 nodes, 3 are free (n1, n2, n3); if all other jobs had ended it would "
        "still lack 1 node"
    )


def test_labels_must_all_be_there() -> None:
    nodes = [a_node("n1", gpu="a100"), a_node("n2", gpu="h100", zone="b"), a_node("n3")]
    assert place_queued_jobs([a_job("a", gpu="h100")], nodes).places == {"a": ("n2",)}
    made = place_queued_jobs([a_job("a", (2, 2), gpu="h100")], nodes)
    assert reason(made, "a") == (
        "needs 2 nodes with gpu=h100, 1 is free (n2); if all other jobs had ended it would "
        "still lack 1 node; n1: has gpu=a100; 1 other: does not fit either"
    )


def test_who_waits_hears_of_nodes_that_have_declined() -> None:
    nodes = [a_node("n1"), a_node("n2", taken={("old", "r"): 0}), a_node("n3", gpu="a100")]
    waits = a_job("a", declined={"n1": "no such folder: /data"})
    assert reason(place_queued_jobs([waits], nodes[:2]), "a") == (
        "needs 1 node, none is free; n2: taken by old; n1: could not run it (no such folder: /data)"
    )
    # Also of a job that keeps running with too few, if another node fits its needs better.
    waits = replace(a_job("a", (3, 3), declined={"n1": "no folder"}, here=("n2",)), seated=True)
    assert reason(place_queued_jobs([waits], nodes), "a").endswith(
        "n1: could not run it (no folder)"
    )


def test_who_waits_hears_what_for() -> None:
    nodes = [
        a_node("n1", taken={("old", "r"): 0}),
        a_node("n2", unusable="cordoned", cordoned=True),
        a_node("n3", unusable="away"),
    ]
    assert reason(place_queued_jobs([a_job("a")], [*nodes, BUSY]), "a") == (
        "needs 1 node, none is free; n0, n1: taken by old; n2 (cordoned): fan; n3 (away): fan"
    )
    assert reason(place_queued_jobs([a_job("a")], []), "a") == (
        "needs 1 node, and no rdzv-agent is connected; start rdzv-agent on the nodes"
    )


def test_a_job_that_could_not_start_if_all_others_had_ended_keeps_nothing_back() -> None:
    later = a_job("later", at_ms=2)
    assert place_queued_jobs([a_job("wide", (4, 4), at_ms=1), later], THREE).places == {
        "later": ("n1",)
    }
    assert place_queued_jobs([a_job("wide", (3, 3), at_ms=1), later], THREE[1:]).places == {
        "later": ("n2",)
    }
    nodes = [*THREE[:2], a_node("n3", unusable="cordoned", cordoned=True)]
    assert place_queued_jobs([a_job("wide", (3, 3), at_ms=1), later], nodes).places == {
        "later": ("n1",)
    }
    # If the others may still be on their way back, it does.
    wide = a_job("wide", (3, 3), at_ms=1)
    assert place_queued_jobs([wide, later], THREE[1:], settled=False).places == {}
    nodes = [*THREE[:2], a_node("n3", unusable="away")]
    assert place_queued_jobs([a_job("wide", (3, 3), at_ms=1), later], nodes).places == {}


def test_a_job_that_lost_a_node_gets_another() -> None:
    made = place_queued_jobs([a_job("a", (3, 3), here=("n1", "n2"))], THREE)
    assert made.places == {"a": ("n3",)}


def test_a_node_that_could_not_run_it_is_not_chosen_again() -> None:
    made = place_queued_jobs([a_job("a", declined={"n1": "no such folder: /data"})], THREE)
    assert made.places == {"a": ("n2",)}


def test_a_job_is_given_up_when_no_node_is_left_that_could_run_it() -> None:
    declined = {node.node_id: "no such folder: /data" for node in THREE}
    job = a_job("a", declined=declined)
    assert place_queued_jobs([job], THREE).hopeless == {
        "a": "no node could run it: n1, n2, n3: no such folder: /data"
    }
    assert place_queued_jobs([job], THREE, settled=False).hopeless == {}
    assert place_queued_jobs([replace(job, here=frozenset(("n4",)))], THREE).hopeless == {}
    # Nor does it keep its nodes if the remaining ones are too few.
    pair = a_job("a", (2, 2), here=("n3",), declined={"n1": "no", "n2": "no"})
    assert place_queued_jobs([pair], THREE).hopeless == {"a": "no node could run it: n1, n2: no"}
    assert place_queued_jobs([replace(pair, seated=True)], THREE).hopeless == {}
    assert place_queued_jobs([pair], [*THREE, a_node("n4")]).hopeless == {}


def test_of_many_reasons_why_no_node_could_run_it_a_few_are_told() -> None:
    declined = {f"x{i}": f"no folder {min(i, 4)}" for i in range(16)} | {"y": "no folder 0"}
    assert place_queued_jobs([a_job("a", declined=declined)], THREE).hopeless == {
        "a": "no node could run it: x0, y: no folder 0; x1: no folder 1; x2: no folder 2; "
        "and 13 more nodes"
    }
    many = a_job("a", declined={f"x{i}": "no" for i in range(16)})
    assert "x7 and 8 more: no" in place_queued_jobs([many], THREE).hopeless["a"]


def test_what_was_scaled_down_is_taken_back_from_the_latest() -> None:
    job = a_job("a", (1, 2), here=("n1", "n2", "n3", "n4"), idle=("n2", "n3", "n4"))
    assert place_queued_jobs([job], []).surplus == {"a": ("n3", "n4")}
    assert place_queued_jobs([replace(job, idle=())], []).surplus == {}


# ------------------------------------------------------------------ a queue


def test_first_in_first_out() -> None:
    jobs = [a_job("late", at_ms=2), a_job("early", at_ms=1)]
    made = place_queued_jobs(jobs, [a_node("n1")])
    assert made.places == {"early": ("n1",)}
    assert made.waits["late"].jobs_before == 0
    assert reason(made, "late") == "needs 1 node, none is free; n1: taken by early"


def test_priority_comes_before_time() -> None:
    jobs = [a_job("early", at_ms=1), a_job("urgent", at_ms=2, priority=1)]
    assert place_queued_jobs(jobs, [a_node("n1")]).places == {"urgent": ("n1",)}


def test_a_later_job_starts_only_on_what_no_earlier_one_could_use() -> None:
    nodes = [
        a_node("n1", gpu="h100"),
        a_node("n2"),
        a_node("n3", gpu="h100", taken={("x", "r"): 0}),
    ]
    jobs = [
        a_job("wide", (2, 2), at_ms=1, gpu="h100"),
        a_job("small", at_ms=2, gpu="h100"),
        a_job("any", at_ms=3),
    ]
    made = place_queued_jobs(jobs, nodes)
    assert made.places == {"any": ("n2",)}
    assert reason(made, "small") == (
        "needs 1 node with gpu=h100, none is free; n1: kept for wide, which is before it; "
        "n3: taken by x"
    )
    assert made.waits["small"].jobs_before == 1


def test_growth_comes_after_those_who_wait() -> None:
    running = a_job("running", (1, 3), here=("n1",), at_ms=1)
    waiting = a_job("waiting", at_ms=2)
    assert place_queued_jobs([running, waiting], THREE[1:2]).places == {"waiting": ("n2",)}
    made = place_queued_jobs([running, waiting], THREE[1:])
    assert made.places == {"waiting": ("n2",), "running": ("n3",)}


def test_a_job_does_not_grow_onto_what_a_waiting_one_could_use() -> None:
    running = a_job("running", (1, 3), here=("n1",), at_ms=1)
    assert (
        place_queued_jobs([running, a_job("wide", (3, 3), at_ms=2)], [BUSY, *THREE[1:]]).places
        == {}
    )


def test_a_job_grows_only_when_it_may() -> None:
    job = a_job("a", (1, 3), here=("n1",), may_grow=False)
    assert place_queued_jobs([job], THREE).places == {}


# ------------------------------------------------------------------ GPUs and places


def test_gpus_are_counted() -> None:
    gpus = NodeResources(gpus=tuple(Gpu(str(i), "", 0) for i in range(8)))
    assert gpus_needed(JobSpec(("t",), gpus_per_node=3), gpus) == 3
    assert gpus_needed(JobSpec(("t",), local_world_size=4), gpus) == 4
    assert gpus_needed(JobSpec(("t",)), gpus) == 8
    assert gpus_needed(JobSpec(("t",), local_world_size=4), NodeResources()) == 0


def test_several_jobs_share_a_node_that_has_room() -> None:
    node = a_node("n1", gpus=8, capacity=3)
    jobs = [a_job(name, workers=4, at_ms=i) for i, name in enumerate("abc")]
    made = place_queued_jobs(jobs, [node])
    assert made.places == {"a": ("n1",), "b": ("n1",)}
    assert reason(made, "c") == "needs 1 node, none is free; n1: taken by a, b"


def test_a_node_takes_no_more_jobs_than_its_capacity() -> None:
    jobs = [a_job(name, at_ms=i) for i, name in enumerate("abc")]
    assert set(place_queued_jobs(jobs, [a_node("n1", capacity=2)]).places) == {"a", "b"}


def test_a_node_without_enough_gpus_never_fits() -> None:
    assert nearest_miss(JobSpec(("t",), gpus_per_node=8), [a_node("n1", gpus=4)]) == (
        "n1 has 4 GPUs"
    )
    assert nearest_miss(JobSpec(("t",), gpus_per_node=4), [a_node("n1", gpus=4)]) is None
    assert nearest_miss(JobSpec(("t",), needs_gpu=True), [a_node("n1")]) == "n1 has no GPU"
    assert nearest_miss(JobSpec(("t",), needs_gpu=True), [a_node("n1", gpus=1)]) is None
    assert nearest_miss(JobSpec(("t",)), []) is None


def test_the_nearest_miss_lacks_least() -> None:
    nodes = [a_node("n1"), a_node("n2", gpu="h100", zone="a"), a_node("n3", zone="b")]
    spec = JobSpec(("t",), labels=(("gpu", "h100"), ("zone", "b")))
    assert nearest_miss(spec, nodes) == "n2 has zone=a"


# ------------------------------------------------------------------ places in the network


def test_nodes_of_one_place_are_chosen_together() -> None:
    nodes = [
        a_node("n1", topology="rack1"),
        a_node("n2", topology="rack2"),
        a_node("n3", topology="rack1", taken={("x", "r"): 0}),
        a_node("n4", topology="rack2"),
    ]
    assert place_queued_jobs([a_job("a", (2, 2))], nodes).places == {"a": ("n2", "n4")}


def test_a_job_grows_where_it_is() -> None:
    nodes = [
        a_node("n1", topology="rack1"),
        a_node("n2", topology="rack1"),
        a_node("n3", topology="rack2", taken={("a", "a-run"): 0}),
        a_node("n4", topology="rack2"),
    ]
    assert place_queued_jobs([a_job("a", (1, 2), here=("n3",))], nodes).places == {"a": ("n4",)}


def test_what_is_used_anyway_comes_first() -> None:
    nodes = [
        a_node("n1", gpus=8, capacity=8),
        a_node("n2", gpus=8, capacity=8, taken={("x", "r"): 4}),
    ]
    assert place_queued_jobs([a_job("a", workers=2)], nodes).places == {"a": ("n2",)}


# ------------------------------------------------------------------ random queues


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[Demand], list[Host]]:
    label = st.sampled_from(["a", "b"])
    nodes = [
        a_node(
            f"n{number}",
            gpus=draw(st.integers(0, 4)),
            capacity=draw(st.integers(0, 3)),
            topology=draw(st.sampled_from(["", "r1", "r2"])),
            taken={("old", "r"): draw(st.integers(0, 2))} if draw(st.booleans()) else {},
            unusable=draw(st.sampled_from(["", "", "", "away"])),
            **({"kind": draw(label)} if draw(st.booleans()) else {}),
        )
        for number in range(draw(st.integers(0, 6)))
    ]
    jobs = []
    for number in range(draw(st.integers(0, 5))):
        least = draw(st.integers(1, 3))
        jobs.append(
            a_job(
                f"j{number}",
                (least, least + draw(st.integers(0, 3))),
                at_ms=draw(st.integers(0, 3)),
                priority=draw(st.integers(0, 1)),
                here=draw(st.lists(st.sampled_from(["n0", "n1", "gone"]), unique=True)),
                declined={"n2": "no"} if draw(st.booleans()) else {},
                gpus=draw(st.one_of(st.none(), st.integers(0, 3))),
                workers=draw(st.integers(0, 3)),
                may_grow=draw(st.booleans()),
                **({"kind": draw(label)} if draw(st.booleans()) else {}),
            )
        )
    return jobs, nodes


def fits(job: Demand, host: Host) -> bool:
    has = dict(host.resources.labels)
    return (
        host.node_id not in job.declined
        and all(has.get(name) == value for name, value in job.spec.labels)
        and gpus_needed(job.spec, host.resources) <= len(host.resources.gpus)
    )


@pytest.mark.slow
@given(queues())
@settings(SETTLED, max_examples=300)
def test_every_plan_keeps_the_promises(queue: tuple[list[Demand], list[Host]]) -> None:
    jobs, hosts = queue
    made = place_queued_jobs(jobs, hosts)
    by_name = {job.rdzv_id: job for job in jobs}
    order = sorted(jobs, key=lambda job: (-job.spec.priority, job.at_ms, job.rdzv_id))
    for host in hosts:
        mine = [by_name[name] for name, nodes in made.places.items() if host.node_id in nodes]
        assert len(mine) <= host.places_free, "capacity"
        assert sum(gpus_needed(job.spec, host.resources) for job in mine) <= host.gpus_free, "GPUs"
        assert not (mine and host.unusable), "unusable"
        assert all(fits(job, host) for job in mine), "labels"
    for name, nodes in made.places.items():
        job = by_name[name]
        have = len(job.here) + len(nodes)
        assert job.min_nodes <= have, "gang"
        assert len(job.here) < job.min_nodes or job.may_grow, "growth"
        assert have <= max(job.max_nodes, len(job.here)), "max"
        assert not job.here & set(nodes), "twice"
    waiting = [job for job in order if job.rdzv_id in made.waits]
    for earlier in waiting:
        could = {host.node_id for host in hosts if fits(earlier, host)}
        if len(could | earlier.here) < earlier.min_nodes:
            continue
        for later in order[order.index(earlier) + 1 :]:
            assert not could & set(made.places.get(later.rdzv_id, ())), "overtaken"
        for other in jobs:
            # Jobs that started earlier may use the node; a job that only grows may not.
            if len(other.here) >= other.min_nodes:
                assert not could & set(made.places.get(other.rdzv_id, ())), "growth before a start"
    short = {j.rdzv_id for j in jobs if len(j.here) < j.min_nodes}
    assert short == (made.waits.keys() | made.hopeless.keys()) | (short & made.places.keys())
    assert not made.waits.keys() & made.places.keys()
    assert all(wait.reason for wait in made.waits.values())
    assert [made.waits[job.rdzv_id].jobs_before for job in waiting] == [*range(len(waiting))]


@pytest.mark.slow
@given(queues())
@settings(SETTLED)
def test_what_was_placed_is_not_placed_again(queue: tuple[list[Demand], list[Host]]) -> None:
    """Once a plan is carried out, there is nothing more to do."""
    jobs, hosts = queue
    made = place_queued_jobs(jobs, hosts)
    after = [
        replace(job, here=job.here | {*made.places.get(job.rdzv_id, ())})
        for job in jobs
        if job.rdzv_id not in made.hopeless
    ]
    by_name = {job.rdzv_id: job for job in jobs}
    placed = [
        replace(
            host,
            taken={
                **host.taken,
                **{
                    (name, by_name[name].run): gpus_needed(by_name[name].spec, host.resources)
                    for name, nodes in made.places.items()
                    if host.node_id in nodes
                },
            },
        )
        for host in hosts
    ]
    again = place_queued_jobs(after, placed)
    assert again.places == {}
    assert again.hopeless == {}


@pytest.mark.parametrize(
    ("scale_up", "at_ms", "grows_at_ms", "may_grow"),
    [
        (ScaleUp.EAGER, 0, None, True),
        # The mere passing of time changes nothing, so no timer is set.
        (ScaleUp.ON_RESTART, 0, None, False),
        (ScaleUp.ON_RESTART, 10**12, None, False),
        (ScaleUp.AFTER, 59_999, 60_000, False),
        (ScaleUp.AFTER, 60_000, 60_000, True),
    ],
)
def test_when_a_running_job_may_have_more_nodes(
    scale_up: ScaleUp, at_ms: int, grows_at_ms: int | None, may_grow: bool
) -> None:
    launched = Settings(1, 3, last_call_timeout_ms=0, scale_up=scale_up, scale_up_after_ms=60_000)
    job = CoreJob(launched)
    job.do(Submit("run-1", launched, JobSpec(("train.py",)), "ada"))
    job.do(Place("run-1", ("n1",)))
    job.join("n1", run="run-1")
    job.pass_until(10_000)
    assert job.round.live
    began_ms = job.round.at_ms
    found = job_queue.grows_at_ms(job.state)
    assert found == (None if grows_at_ms is None else began_ms + grows_at_ms)
    wanted = job_queue.demand(job.state, began_ms + at_ms)
    assert wanted is not None
    assert wanted.may_grow is may_grow


def test_a_node_that_declines_again_is_listed_once_beside_the_others() -> None:
    submission = SubmittedRun(JobSpec(()), "ada", 0).with_placed(["n1", "n2", "n3"])
    for node_id, reason in (("n1", "no folder"), ("n2", "no GPU"), ("n1", "no account")):
        submission = submission.with_declined(node_id, reason)
    assert submission.placed == ("n3",)
    assert submission.declined == (DeclinedNode("n2", "no GPU"), DeclinedNode("n1", "no account"))
