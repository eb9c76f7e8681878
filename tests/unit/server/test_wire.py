"""Decoding of messages: valid ones keep their meaning, invalid ones are refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rdzv import bounds
from rdzv.core import commands, model
from rdzv.core.fleet.nodes import AgentKind
from rdzv.errors import InvalidRequestError
from rdzv.messages import Hello
from rdzv.server import wire
from rdzv.structs import replace
from rdzv.transport.endpoints import Listen
from rdzv.transport.wire import read, write
from rdzv.v1 import rdzv_pb2 as pb

N1 = wire.Speaker("n1", 7)


def hello(**changes: object) -> pb.Hello:
    good = {
        "protocol_version": 1,
        "node_id": "n1",
        "instance": "0b-ad",
        "kind": pb.AGENT_KIND_DAEMON,
        "address": "fe80::1%eth0",
        "pid": 99,
        "leadership": 3,
        "incarnation": 7,
    }
    return pb.Hello(**(good | changes))  # type: ignore[arg-type]


def settings(**changes: object) -> pb.Settings:
    good = {
        "min_nodes": 2,
        "max_nodes": 4,
        "max_restarts": 3,
        "join_timeout_ms": 600_000,
        "last_call_timeout_ms": 30_000,
        "scale_up": pb.SCALE_UP_ON_RESTART,
        "restart_window_ms": 60_000,
    }
    return pb.Settings(**(good | changes))  # type: ignore[arg-type]


def offer(**changes: object) -> pb.Offer:
    good = {
        "address": "10.0.0.5",
        "host_name": "n1.cluster",
        "machine": "4026531840@n1",
        "local_world_size": 8,
        "role": "trainer",
        "topology": "rack 1",
        "store_port": 4711,
        "can_host_store": True,
        "shutdown_timeout_ms": 30_000,
    }
    return pb.Offer(**(good | changes))  # type: ignore[arg-type]


def failure(**changes: object) -> pb.WorkerFailure:
    good = {"local_rank": 3, "rank": 11, "pid": 99, "signal": 9, "message": "killed", "age_ms": 5}
    return pb.WorkerFailure(**(good | changes))  # type: ignore[arg-type]


def join(**changes: object) -> pb.Join:
    good = {"rdzv_id": "job-7", "run": "feed", "settings": settings(), "offer": offer()}
    return pb.Join(**(good | changes))  # type: ignore[arg-type]


def parked(local_rank: int, **changes: object) -> pb.KeptWorker:
    return pb.KeptWorker(local_rank=local_rank, **changes)  # type: ignore[arg-type]


def mark(**changes: object) -> pb.SnapshotMark:
    good = {"lineage": 2, "step": 40, "series": "2.a1b2", "shards": 2}
    return pb.SnapshotMark(**(good | changes))  # type: ignore[arg-type]


def snapshot(mark: pb.SnapshotMark = mark(), **changes: object) -> pb.Snapshot:  # noqa: B008
    good = {"local_rank": 3, "mark": mark, "shard": 1, "bytes": 1 << 30, "digest": "f00"}
    return pb.Snapshot(**(good | changes))  # type: ignore[arg-type]


# ---------------------------------------------------------------- what nodes say


def test_hello() -> None:
    assert wire.hello_of(hello()) == Hello(
        "n1", "0b-ad", AgentKind.DAEMON, "fe80::1%eth0", 99, 3, 7
    )
    assert wire.hello_of(hello(fence_after_ms=4_000)).fence_after_ms == 4_000


NOW_MS = 5_000


def heard(**body: Any) -> commands.Command:
    """Return what the server hears of bytes: optional fields distinguish "0" from "unset"."""
    message = pb.NodeMessage.FromString(pb.NodeMessage(**body).SerializeToString())
    rdzv_id, command = wire.command_of(message, N1, NOW_MS)
    assert rdzv_id == "job-7"
    return command


def test_kept_workers_are_heard_in_any_order() -> None:
    """No sealed step is not the same as step 0."""
    kept = [
        parked(7, step=2**53, torn=True),
        parked(0),
        parked(3, step=0, shard=1, shards=2, oldest_step=0),
    ]
    said = heard(join=join(kept=kept))
    assert isinstance(said, commands.Join)
    assert said.kept == (
        model.KeptWorker(0),
        model.KeptWorker(3, 0, False, 1, 2, 0),
        model.KeptWorker(7, 2**53, torn=True),
    )


def test_a_join_does_not_depend_on_snapshots() -> None:
    """If they cannot be read, the node joins without any."""
    assert heard(join=join(snapshots=[snapshot(), snapshot(shard=2)])) == heard(join=join())


LINE = pb.Assignment(
    rdzv_id="job-7",
    run="feed",
    round=2,
    group_rank=1,
    group_world_size=3,
    rank_first=2,
    world_size=6,
    role_rank_first=2,
    role_world_size=6,
    master_addr="10.0.0.9",
    master_port=29501,
    use_agent_store=True,
    restarts=4,
)


def believed(**changes: Any) -> tuple[commands.Command, ...]:
    good = {"phase": pb.Belief.RUNNING, "join": join(), "round": LINE}
    return wire.belief_of(pb.Belief(**(good | changes)), N1, NOW_MS).commands


@pytest.mark.parametrize("given", [{}, {"group_world_size": 2}])
def test_a_round_that_is_half_known_is_no_report(given: dict[str, int]) -> None:
    line = pb.Assignment(rdzv_id="job-7", run="feed", round=2, **given)
    assert believed(round=line) == (commands.Resume("n1", 7, "feed", 2, recovery=None),)


def test_who_was_kept_is_read_as_a_set_beside_the_most_that_a_round_can_tell() -> None:
    line = pb.Assignment(kept=[3, 0, 3], snapshot_loads=3, lineage=2)
    line.MergeFrom(LINE)
    (resume,) = believed(round=line)
    assert isinstance(resume, commands.Resume) and resume.recovery
    assert resume.recovery.assignment.kept == (0, 3)


def test_a_reason_is_read_as_one_line() -> None:
    failed = commands.ReportStoreHost("n1", 7, "feed", 2, "died hard")
    of = {"rdzv_id": "job-7", "run": "feed", "round": 2}
    assert heard(store_host_failed=pb.StoreHostFailed(**of, reason="died\nhard")) == failed
    assert failed in believed(store_host_failed="died\nhard")


def read_join(**changes: object) -> Callable[[], object]:
    return lambda: wire.command_of(pb.NodeMessage(join=join(**changes)), N1, NOW_MS)


def read_held(*snapshots: pb.Snapshot) -> Callable[[], object]:
    held = pb.SnapshotsHeld(rdzv_id="job-7", run="feed", snapshots=snapshots)
    return lambda: wire.report_of(pb.NodeMessage(snapshots_held=held))


def read_hello(**changes: object) -> Callable[[], object]:
    return lambda: wire.hello_of(hello(**changes))


def read_belief(**changes: object) -> Callable[[], object]:
    return lambda: believed(**changes)


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (read_hello(node_id=""), "node_id '' is empty; give letters"),
        (read_hello(node_id="a/b"), "node_id 'a/b' has characters that are not allowed; use"),
        (read_hello(node_id=".."), "node_id '..'"),
        (read_hello(node_id="-rf"), "node_id '-rf'"),
        (read_hello(node_id="ä"), "node_id 'ä'"),
        (read_hello(node_id="n1\n"), "node_id"),
        (read_hello(fence_after_ms=2**40), "fence_after '1099511627.776 s'"),
        (read_hello(node_id="x" * 129), "has 129 characters; give at most 128"),
        (read_hello(instance="a b"), "instance 'a b'"),
        (read_hello(kind=0), "kind 0 is not known to this server; give one of 1, 2"),
        (read_hello(address="a b"), "address 'a b'"),
        (read_hello(protocol_version=0), "speaks protocol 0, this server speaks 1; upgrade the a"),
        (read_hello(protocol_version=2), "speaks protocol 2, this server speaks 1; upgrade the s"),
        (read_hello(beliefs=[pb.Belief()] * 257), "has 257 jobs; at most 256"),
        (read_join(rdzv_id=""), "rdzv_id '' is empty"),
        (read_join(rdzv_id="job/7"), "rdzv_id 'job/7'"),
        (read_join(run="a/b"), "run 'a/b'"),
        (read_join(settings=settings(min_nodes=0)), "min_nodes 0 is out of bounds; give 1 to"),
        (read_join(settings=settings(max_nodes=1_000_001)), "max_nodes 1000001 is out of bounds"),
        (read_join(settings=settings(min_nodes=5)), "min_nodes 5 is above max_nodes 4; give MIN"),
        (read_join(settings=settings(max_restarts=2**31)), "max_restarts 2147483648"),
        (read_join(settings=settings(join_timeout_ms=0)), "join_timeout '0 s' is out of bounds"),
        (read_join(settings=settings(join_timeout_ms=2**63)), "join_timeout '"),
        (read_join(settings=settings(last_call_timeout_ms=2**63)), "last_call_timeout '"),
        (read_join(settings=settings(restart_window_ms=2**63)), "restart_window '"),
        (read_join(settings=settings(restart_backoff_ms=2**63)), "restart_backoff '"),
        (read_join(settings=settings(restart_backoff_max_ms=2**63)), "restart_backoff_max '"),
        (read_join(settings=settings(max_preemptions=2**31)), "max_preemptions 2147483648"),
        (read_join(settings=settings(max_store_failures=2**31)), "max_store_failures 2147483648"),
        (read_join(settings=settings(no_progress_restarts=2**31)), "no_progress_restarts 21"),
        (read_join(settings=settings(restart_on=["1"] * 33)), "restart_on 33 are too many; give a"),
        (read_join(settings=settings(no_restart_on=["x" * 129])), "has 129 characters; give at"),
        (read_join(settings=settings(no_restart_on=["a b"])), "no_restart_on 'a b' has characters"),
        (read_join(settings=settings(scale_up=7)), "scale_up 7 is not known"),
        (read_join(offer=offer(address="")), "address '' is empty; give a host name or"),
        (read_join(offer=offer(address="http://x")), "address 'http://x'"),
        (read_join(offer=offer(host_name="a b")), "host_name 'a b'"),
        (read_join(offer=offer(local_world_size=0)), "local_world_size 0 is out of bounds"),
        (read_join(offer=offer(local_world_size=4_097)), "local_world_size 4097"),
        (read_join(offer=offer(store_port=0)), "store_port 0 is out of bounds; give 1 to 65535"),
        (read_join(offer=offer(store_port=65_536)), "store_port 65536"),
        (read_join(offer=offer(role="a\x1b[2J")), "role"),
        (read_join(offer=offer(topology="x" * 300)), "topology"),
        (read_join(offer=offer(shutdown_timeout_ms=2**63)), "shutdown_timeout '"),
        (read_join(failures=[failure(local_rank=4_096)]), "local_rank 4096"),
        (read_held(snapshot(shard=2)), "snapshots.shard 2 is out of bounds; give 0 to 1"),
        (read_held(snapshot(mark(shards=0))), "snapshots.mark.shards 0 is out of bounds"),
        (read_held(snapshot(mark(shards=2**31))), "snapshots.mark.shards 2147483648 is out"),
        (read_held(snapshot(mark(step=2**60))), "snapshots.mark.step 1152921504606846976 is"),
        (read_held(snapshot(mark(series=""))), "snapshots.mark.series '' is empty"),
        (read_held(snapshot(mark(series="a" * 256))), "has 256 characters; give at most 255"),
        (read_held(snapshot(local_rank=4096)), "snapshots.local_rank 4096 is out of bounds"),
        (read_held(snapshot(bytes=2**63)), "bytes 9223372036854775808 is out of"),
        (read_held(snapshot(digest="a\n")), "digest 'a\\n' has characters"),
        (read_held(*[snapshot()] * (8 * 4096 + 1)), "snapshots 32769 are too many; give at most"),
        (read_join(kept=[parked(8)]), "kept.local_rank 8 is out of bounds; give 0 to 7"),
        (read_join(kept=[parked(2**32 - 1)]), "kept.local_rank 4294967295 is out of bounds"),
        (read_join(kept=[parked(0), parked(3), parked(0)]), "kept 3 workers have 2 local_ranks"),
        (read_join(kept=[parked(n % 8) for n in range(9)]), "kept 9 are more parked workers"),
        (read_join(kept=[parked(0, step=2**53 + 1)]), "kept.step 9007199254740993 is out of"),
        (read_join(kept=[parked(0, step=2**64 - 1)]), "kept.step 18446744073709551615"),
        (read_join(kept=[parked(0, shard=1)]), "kept.shard 1 is out of bounds; give 0 to 0"),
        (read_join(kept=[parked(0, shards=2**31)]), "kept.shards 2147483648 is out of bounds"),
        (read_join(kept=[parked(0, oldest_step=2**63)]), "kept.oldest_step 92233720368547758"),
        (read_belief(phase=0), "phase 0 is not known"),
        (read_belief(phase=9), "phase 9 is not known"),
        (read_belief(round=None), "needs a round and its run"),
        (read_belief(round=pb.Assignment(rdzv_id="other")), "rdzv_id 'other' is not job-7"),
        (read_belief(join=pb.Join()), "min_nodes 0"),
        (read_belief(phase=pb.Belief.LEAVING), "cause 0 is not known"),
        (lambda: wire.command_of(pb.NodeMessage(), N1, NOW_MS), "has no place here"),
        (
            lambda: wire.command_of(pb.NodeMessage(hello=hello()), N1, NOW_MS),
            "send Hello only once",
        ),
        (lambda: wire.away_ms_of(pb.Away()), "deadline '0 s' is out of bounds"),
        (lambda: wire.away_ms_of(pb.Away(deadline_ms=2**40)), "deadline '"),
        (lambda: Listen.parse("host"), "'host' cannot be used: it has no port"),
        (lambda: Listen.parse("host:65536"), "'65536' is not a port; a port is a number from 0"),
        (lambda: Listen.parse("host:" + "9" * 5_000), "is not a port; a port is a number from 0"),
        (lambda: Listen.parse("::1:80"), "more than one colon; write IPv6 as [ADDRESS]:PORT"),
    ],
)
def test_what_is_wrong_is_refused_with_value_reason_and_remedy(
    read: Callable[[], object], says: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read()
    assert says in str(refused.value)
    assert "; " in str(refused.value)
    assert len(str(refused.value)) < 400


def test_what_people_read_is_cut_not_refused() -> None:
    failures = [failure(message="m" * 5_000, traceback="t" * 50_000 + "the end", age_ms=2**60)]
    command = wire.command_of(
        pb.NodeMessage(failed=pb.Failed(rdzv_id="j", run="r", failures=failures)), N1, NOW_MS
    )[1]
    assert isinstance(command, commands.Fail)
    (cut,) = command.failures
    assert (len(cut.message), cut.message[-3:]) == (1_000, "...")
    assert len(cut.traceback) == 16_384
    assert cut.traceback.startswith("...t")
    assert cut.traceback.endswith("the end")
    assert cut.at_ms == NOW_MS - bounds.TIMEOUT_MS


def test_of_too_many_failures_the_earliest_are_kept() -> None:
    failures = [failure(local_rank=n, age_ms=n) for n in range(100)]
    message = pb.NodeMessage(failed=pb.Failed(rdzv_id="j", run="r", failures=failures))
    command = wire.command_of(message, N1, NOW_MS)[1]
    assert isinstance(command, commands.Fail)
    assert [f.local_rank for f in command.failures] == list(range(99, 35, -1))


def test_a_refusal_names_the_job_even_of_a_bad_message() -> None:
    assert wire.job_named_in(pb.NodeMessage(join=pb.Join(rdzv_id="a/b"))) == "a/b"
    assert wire.job_named_in(pb.NodeMessage(heartbeat=pb.Heartbeat())) == ""
    assert wire.job_named_in(pb.NodeMessage()) == ""
    assert wire.job_named_in(pb.Belief(join=pb.Join(rdzv_id="a/b"))) == "a/b"


def test_who_knows_no_backoff_leaves_it_to_the_server() -> None:
    read = [
        wire.command_of(pb.NodeMessage(join=join(settings=one)), N1, NOW_MS)[1]
        for one in (
            settings(),
            settings(restart_backoff_ms=1_000, restart_backoff_max_ms=60_000),
            settings(restart_backoff_ms=0, max_preemptions=0),
        )
    ]
    first, same, other = (one.settings for one in read if isinstance(one, commands.Join))
    assert first == same
    assert (first.max_preemptions, first.max_store_failures) == (None, None)
    assert (other.restart_backoff_ms, other.restart_backoff_max_ms) == (0, 60_000)
    assert other.max_preemptions == 0


@pytest.mark.parametrize(
    "given",
    [
        *({}, {"restart_backoff_ms": 7}, {"restart_backoff_max_ms": 900_000}),
        *({"max_preemptions": 3}, {"restart_on": ("137", "3"), "no_restart_on": ("a.Übel",)}),
    ],
)
def test_settings_are_read_as_they_were_said(given: dict[str, Any]) -> None:
    said = replace(model.Settings(2, 4, max_restarts=3), **given)
    message = write(pb.Settings(), said)
    assert read(model.Settings, message, checked=True) == said
    # Nodes with and without support for it must send the same.
    for name in ("restart_backoff_ms", "restart_backoff_max_ms"):
        assert message.HasField(name) == (name in given)
