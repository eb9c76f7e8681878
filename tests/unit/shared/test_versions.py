"""Messages keep their meaning, so programs of different versions understand each other.

`protocol/v1.jsonl` has messages as programs of protocol 1 wrote them, byte for byte, with their
meaning; `protocol/v1.fields.json` has the number and type of every field. Records are only added,
never changed: a change that breaks them needs a new protocol.

    python -m tests.unit.shared.test_versions     # record what was added
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.message import Message

from rdzv import bounds
from rdzv.agent.output import worker_log_reader
from rdzv.agent.server_link import encoding as agent_wire
from rdzv.client import LOG_POSITIONS
from rdzv.errors import InvalidRequestError
from rdzv.messages import Placed, TakeStacks
from rdzv.server import wire
from rdzv.server.diagnosis import worker_logs
from rdzv.structs import as_dict
from rdzv.transport.wire import read
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.version import PROTOCOL_VERSION

FOLDER = Path(__file__).parents[1] / "protocol"
SPEAKER = wire.Speaker("n1", 7)
KINDS = {kind.DESCRIPTOR.name: kind for kind in (pb.NodeMessage, pb.ServerMessage)}


# ------------------------------------------------------------------ what a message means


def meaning(message: Message) -> Any:
    """Return a message as its reader sees it, in plain JSON."""
    if isinstance(message, pb.ServerMessage):
        body = message.WhichOneof("body")
        if body == "read_log":
            return _plain(_read_request(agent_wire.read_request(message.read_log)))
        if body == "take_stacks":
            return as_dict(read(TakeStacks, message.take_stacks))
        if body == "servers":
            return {"addresses": list(message.servers.addresses)}
        if body == "placed":
            return _plain(as_dict(read(Placed, message.placed)))
        event = agent_wire.event(message, now_ms=0)
        said = as_dict(event) if event else _fields(getattr(message, str(body)))
        return _plain({"leadership": message.leadership, "body": body, "said": said})
    assert isinstance(message, pb.NodeMessage)
    match message.WhichOneof("body"):
        case "hello":
            beliefs = [wire.belief_of(b, SPEAKER, 0) for b in message.hello.beliefs]
            hello = as_dict(wire.hello_of(message.hello))
            return _plain({"hello": hello, "beliefs": [_belief(b) for b in beliefs]})
        case "away":
            return {"away_ms": wire.away_ms_of(message.away)}
        case "heartbeat":
            return {"number": message.heartbeat.number}
        case _ if (report := wire.report_of(message)) is not None:
            return _plain(as_dict(report))
        case _:
            rdzv_id, command = wire.command_of(message, SPEAKER)
            return _plain({"rdzv_id": rdzv_id, type(command).__name__: as_dict(command)})


def _read_request(request: Any) -> dict[str, Any]:
    at = [[*place, offset] for place, offset in request.positions.items()]
    return {**as_dict(request), "positions": at}


def _belief(belief: Any) -> dict[str, Any]:
    said = [{type(command).__name__: as_dict(command)} for command in belief.commands]
    return {**as_dict(belief), "commands": said}


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    def name(other: object) -> str:
        if isinstance(other, bytes):
            return other.hex()
        assert isinstance(other, Enum), other
        return str(other.value)

    return json.loads(json.dumps(value, default=name))


def is_part_of(old: Any, new: Any) -> bool:
    """Whether everything that was once read is still read; there may be more."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(
            key in new and is_part_of(value, new[key]) for key, value in old.items()
        )
    if isinstance(old, list):
        return (
            isinstance(new, list)
            and len(old) == len(new)
            and all(is_part_of(*pair) for pair in zip(old, new, strict=True))
        )
    return bool(old == new)


# ------------------------------------------------------------------ the tests


def recorded() -> Iterator[Any]:
    for path in sorted(FOLDER.glob("v*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            yield pytest.param(row, id=f"{path.stem}-{row['name']}")


@pytest.mark.parametrize("row", list(recorded()))
def test_what_was_once_said_keeps_its_meaning(row: dict[str, Any]) -> None:
    message = KINDS[row["kind"]].FromString(bytes.fromhex(row["bytes"]))
    assert is_part_of(row["means"], meaning(message)), json.dumps(meaning(message), indent=1)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("v*.fields.json")), ids=lambda path: path.stem)
def test_no_field_changes_its_number_or_type(path: Path) -> None:
    now = fields_of_all()
    lost = {key: was for key, was in json.loads(path.read_text()).items() if now.get(key) != was}
    assert not lost, "these were changed or removed; older programs still send them"


def test_the_present_protocol_is_recorded_with_every_message() -> None:
    rows = (FOLDER / f"v{PROTOCOL_VERSION}.jsonl").read_text().splitlines()
    names = {json.loads(row)["name"].split(":")[0] for row in rows}
    bodies = {
        field.name
        for kind in (pb.NodeMessage, pb.ServerMessage)
        for field in kind.DESCRIPTOR.oneofs_by_name["body"].fields
    }
    assert bodies <= names


def test_agent_and_server_of_one_build_speak_the_same_protocol() -> None:
    assert worker_log_reader.PIECE_COST == worker_logs.PIECE_COST
    assert bounds.LOG_PIECE_BYTES == worker_log_reader.PIECE_BYTES
    assert bounds.LOG_POSITIONS == LOG_POSITIONS


@pytest.mark.parametrize(("version", "behind"), [(0, "agent"), (6, "agent"), (8, "server")])
def test_a_server_accepts_its_own_protocol_alone(
    version: int, behind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PROTOCOL_VERSION", 7)
    wire.check_protocol(7)
    with pytest.raises(InvalidRequestError, match=f"protocol {version}, .* upgrade the {behind}$"):
        wire.check_protocol(version)


def test_what_is_of_a_later_version_is_passed_over() -> None:
    """New fields and messages do no harm to programs that do not know them."""
    later = b"\xfa\x3e\x03new"
    message = pb.NodeMessage.FromString(next(samples_of_nodes())[1].SerializeToString() + later)
    assert message.WhichOneof("body") == "hello"
    unknown = pb.ServerMessage.FromString(b"\x08\x05\xfa\x3e\x03new")
    assert agent_wire.event(unknown, now_ms=0) is None
    assert agent_wire.rdzv_id_of(unknown) == ""


# ------------------------------------------------------------------ recording


def fields_of_all() -> dict[str, list[Any]]:
    """Return number, type and kind of every field of the protocol, by its full name."""
    found: dict[str, list[Any]] = {}

    def visit(descriptor: Descriptor) -> None:
        for field in descriptor.fields:
            kind = field.message_type or field.enum_type
            of = kind.full_name if kind else ""
            # Not field.label, which newer runtimes of protobuf no longer have.
            found[field.full_name] = [field.number, field.type, of, field.has_presence]
        for enum in descriptor.enum_types:
            found.update(_values(enum))
        for nested in descriptor.nested_types:
            visit(nested)

    for descriptor in pb.DESCRIPTOR.message_types_by_name.values():
        visit(descriptor)
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        found.update(_values(enum))
    return found


def _values(enum: EnumDescriptor) -> dict[str, list[Any]]:
    return {f"{enum.full_name}.{value.name}": [value.number] for value in enum.values}


def _short_hellos() -> Iterator[tuple[str, pb.NodeMessage]]:
    bare = pb.Hello(protocol_version=1, node_id="n", instance="i", kind=1)
    yield "hello:bare", pb.NodeMessage(hello=bare)
    bare.metrics = "10.0.0.5:29481"
    yield "hello:metrics", pb.NodeMessage(hello=bare)


def samples_of_nodes() -> Iterator[tuple[str, pb.NodeMessage]]:
    """Yield every message of a node, with every field set in each possible way."""
    settings = pb.Settings(
        min_nodes=2,
        max_nodes=4,
        max_restarts=0,
        join_timeout_ms=600_000,
        last_call_timeout_ms=30_000,
        scale_up=pb.SCALE_UP_ON_RESTART,
        restart_window_ms=60_000,
    )
    offer = pb.Offer(
        address="10.0.0.5",
        host_name="n1.cluster",
        machine="boot/net",
        local_world_size=8,
        role="trainer",
        topology="rack 1",
        store_port=4711,
        can_host_store=True,
        shutdown_timeout_ms=30_000,
    )
    failures = [
        pb.WorkerFailure(
            local_rank=3, rank=11, pid=99, signal=9, message="m", traceback="t", age_ms=5
        ),
        pb.WorkerFailure(local_rank=2, rank=10, pid=98, exit_code=0, age_ms=4),
    ]
    job = {"rdzv_id": "job-7", "run": "feed"}
    join = pb.Join(**job, settings=settings, offer=offer)
    stopped = pb.Join(
        **job, settings=settings, offer=offer, left_round=2, failures=failures, refuse_reuse=True
    )
    uncounted = pb.Join()
    uncounted.CopyFrom(join)
    uncounted.settings.ClearField("max_restarts")
    leave = pb.Leave(**job, cause=pb.Leave.SIGNAL, reason="SIGTERM", left_round=2)
    line = _line()
    belief = pb.Belief
    hello = pb.Hello(
        protocol_version=1,
        node_id="n1",
        instance="0b-ad",
        kind=pb.AGENT_KIND_DAEMON,
        address="10.0.0.5",
        pid=99,
        leadership=3,
        incarnation=7,
        agent_version="0.1.0",
        beliefs=[
            belief(phase=belief.JOINING, join=join),
            belief(phase=belief.JOINING, join=stopped, round=line, store_host_failed="died"),
            belief(phase=belief.RUNNING, join=join, round=line),
            belief(phase=belief.STOPPING, join=join, round=line, failures=failures),
            belief(phase=belief.SUCCEEDED, join=join, round=line),
            belief(phase=belief.LEAVING, join=join, round=line, leave=leave),
        ],
        fence_after_ms=4_000,
    )
    message = pb.NodeMessage
    yield "hello", message(hello=hello)
    yield from _short_hellos()
    holdings = pb.Holdings(holdings=[pb.Holding(**job, gpus=4), pb.Holding(rdzv_id="j", run="r")])
    taking = pb.Hello(protocol_version=1, node_id="n", instance="i", kind=2, holdings=holdings)
    taking.resources.CopyFrom(
        pb.Resources(
            cpus=96,
            memory_bytes=1 << 40,
            gpus=[pb.Gpu(uuid="GPU-1", name="NVIDIA H100", memory_bytes=80 << 30)],
            labels=[pb.Label(name="gpu", value="h100"), pb.Label(name="spare", value="")],
            capacity=2,
            topology="rack 1",
        )
    )
    yield "hello:resources", message(hello=taking)
    yield "holdings", message(holdings=holdings)
    yield from _samples_of_health()
    yield "holdings:none", message(holdings=pb.Holdings())
    yield "declined", message(declined=pb.Declined(**job, reason="no such folder: /data"))
    yield "join:after", message(join=_after(join))
    yield "join:budgets", message(join=_budgeted(stopped))
    yield "heartbeat", message(heartbeat=pb.Heartbeat(number=5))
    yield "heartbeat:bare", message(heartbeat=pb.Heartbeat())
    yield "join", message(join=stopped)
    yield "join:fresh", message(join=join)
    yield "join:preparing", message(join=_preparing(join))
    yield "join:uncounted", message(join=uncounted)
    yield "failed", message(failed=pb.Failed(**job, round=2, failures=failures))
    yield "succeeded", message(succeeded=pb.Succeeded(**job, round=2))
    for cause in (pb.Leave.SIGNAL, pb.Leave.START_FAILED, pb.Leave.TIMEOUT, pb.Leave.FAILED):
        said = pb.Leave(**job, cause=cause, reason="because")
        yield f"leave:{pb.Leave.Cause.Name(cause)}", message(leave=said)
    yield from _samples_of_leaving(leave)
    yield "stuck", message(stuck=pb.Stuck(**job, round=2, pids=[8, 9]))
    failed = pb.StoreHostFailed(**job, round=2, reason="died")
    yield "store_host_failed", message(store_host_failed=failed)
    yield "away", message(away=pb.Away(deadline_ms=60_000))
    piece = pb.LogPiece(
        request=5, local_rank=3, rank=11, stderr=True, round=2, offset=4_711, data=b"x\xff\n"
    )
    yield "log_piece", message(log_piece=piece)
    yield "log_piece:round", message(log_piece=pb.LogPiece(request=5, round=2))
    last = pb.LogPiece(request=5, last=True, error="it is not there")
    yield "log_piece:last", message(log_piece=last)
    ranks = [
        pb.RankProgress(rank=8, step=1_204, age_ms=300, rate=14.25),
        pb.RankProgress(rank=9, step=0),
    ]
    yield "progress", message(progress=pb.Progress(**job, round=2, ranks=ranks))

    yield from _samples_of_stacks()


def _samples_of_stacks() -> Iterator[tuple[str, pb.NodeMessage]]:
    frames = [pb.StackFrame(name="step", file="/home/ada/train.py", line=41)]
    threads = [
        pb.ThreadStack(name="MainThread", main=True, frames=frames),
        pb.ThreadStack(name="side"),
    ]
    stack = pb.WorkerStack(
        rank=9, local_rank=1, pid=99, state="D", threads=threads, note="n", kernel=["futex_wait"]
    )
    hung = pb.HungWorker(rank=9, local_rank=1, pid=99, silent_ms=61_000, reason="no progress")
    job = {"rdzv_id": "job-7", "run": "feed"}
    arrived = pb.RankArrivals(rank=8, entered_us=[1_000, -5])
    group = pb.GroupArrivals(
        group="0", per_second=2.5, error_us=700, sequences=[4, 5], ranks=[arrived]
    )
    yield "arrivals", pb.NodeMessage(arrivals=pb.Arrivals(**job, round=2, groups=[group]))
    started = [
        pb.StartedWorker(local_rank=0, how="kept"),
        pb.StartedWorker(local_rank=1, how="warm", why="it did not park in time"),
    ]
    sent = pb.WorkersStarted(**job, round=2, workers=started)
    yield "workers_started", pb.NodeMessage(workers_started=sent)
    sent = pb.WorkersStarted(**job, round=2, workers=started, forks=True)
    yield "workers_started:forks", pb.NodeMessage(workers_started=sent)
    mark = pb.SnapshotMark(lineage=2, step=40, series="2.a1b2", shards=2, world_size=4)
    held = pb.Snapshot(local_rank=1, mark=mark, shard=1, bytes=1 << 30, digest="f00")
    yield (
        "snapshots_held",
        pb.NodeMessage(snapshots_held=pb.SnapshotsHeld(**job, snapshots=[held])),
    )
    copy = pb.Snapshot(local_rank=1, mark=mark, shard=0, bytes=1 << 30, digest="f01", copy_of=0)
    carrier = pb.CopyCarrier(port=40_000, token="secret")
    missing = pb.MissingCopies(mark=mark, reason="n2: it does not know the token")
    copies = pb.SnapshotsHeld(**job, snapshots=[copy], carrier=carrier, missing=missing)
    yield "snapshots_held:copies", pb.NodeMessage(snapshots_held=copies)
    carrier = pb.CopyCarrier(port=40_000, token="secret", fingerprint="ab12")
    encrypted = pb.SnapshotsHeld(**job, snapshots=[held], carrier=carrier)
    yield "snapshots_held:encrypted", pb.NodeMessage(snapshots_held=encrypted)
    yield "hung", pb.NodeMessage(hung=pb.Hung(**job, round=2, workers=[hung]))
    yield "hung:none", pb.NodeMessage(hung=pb.Hung(**job, round=2))
    yield "stacks", pb.NodeMessage(stacks=pb.Stacks(request=5, workers=[stack]))
    yield (
        "stacks:last",
        pb.NodeMessage(stacks=pb.Stacks(request=5, last=True, error="all have exited")),
    )


def _samples_of_leaving(leave: pb.Leave) -> Iterator[tuple[str, pb.NodeMessage]]:
    yield "leave", pb.NodeMessage(leave=leave)
    done = pb.Leave()
    done.CopyFrom(leave)
    done.exited_zero = True
    yield "leave:exited_zero", pb.NodeMessage(leave=done)
    draining = pb.Draining(left_ms=60_000, reason="preempted", number=3, own=True)
    yield "draining", pb.NodeMessage(draining=draining)
    leaves = pb.Hello(protocol_version=1, node_id="n", instance="i", kind=2, draining=draining)
    yield "hello:draining", pb.NodeMessage(hello=leaves)


def _preparing(join: pb.Join) -> pb.Join:
    preparing = pb.Join(preparing=True)
    preparing.MergeFrom(join)
    return preparing


def _after(join: pb.Join) -> pb.Join:
    after = pb.Join()
    after.CopyFrom(join)
    after.settings.scale_up, after.settings.scale_up_after_ms = pb.SCALE_UP_AFTER, 600_000
    return after


def _budgeted(stopped: pb.Join) -> pb.Join:
    join = pb.Join(furthest_step=120, snapshot_changed=True)
    join.settings.restart_backoff_ms, join.settings.restart_backoff_max_ms = 0, 5_000
    join.settings.max_preemptions, join.settings.max_store_failures = 7, 0
    join.settings.no_progress_restarts = 3
    join.MergeFrom(stopped)
    return join


def _line() -> pb.Assignment:
    return pb.Assignment(
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
        max_restarts=5,
    )


def _samples_of_health() -> Iterator[tuple[str, pb.NodeMessage]]:
    health = pb.Health(failing=[pb.FailingCheck(name="disk /data", reason="has 1 % free")])
    yield "health", pb.NodeMessage(health=health)
    yield "health:well", pb.NodeMessage(health=pb.Health())
    unwell = pb.Hello(protocol_version=1, node_id="n", instance="i", kind=2, health=health)
    yield "hello:unwell", pb.NodeMessage(hello=unwell)
    passing = pb.Declined(rdzv_id="job-7", run="r1", reason="unhealthy", passing=True)
    yield "declined:passing", pb.NodeMessage(declined=passing)


def keep_copies(mark: pb.SnapshotMark, fingerprint: str) -> pb.KeepCopies:
    """Order one copy."""
    copy = pb.Snapshot(local_rank=1, mark=mark, shard=0, bytes=1 << 30, digest="f01", copy_of=0)
    source = pb.CopySource(
        node_id="n1",
        address="10.0.0.1",
        port=40_000,
        token="secret",
        fingerprint=fingerprint,
        snapshots=[copy],
    )
    return pb.KeepCopies(rdzv_id="job-7", run="feed", mark=mark, sources=[source])


def samples_of_servers() -> Iterator[tuple[str, pb.ServerMessage]]:
    """Yield every message of a server, with every field set."""

    def message(**body: Any) -> pb.ServerMessage:
        return pb.ServerMessage(leadership=1_700_000_000, **body)

    job = {"rdzv_id": "job-7", "run": "feed"}
    welcome = pb.Welcome(
        protocol_version=1,
        incarnation=7,
        heartbeat_interval_ms=1_666,
        lease_ms=5_000,
        server_version="0.1.0",
    )
    yield "welcome", message(welcome=welcome)
    yield "lease", message(lease=pb.Lease(heartbeat_interval_ms=10_000, lease_ms=30_000))
    yield "servers", message(servers=pb.Servers(addresses=["10.0.0.2:29400", "10.0.0.3:29400"]))
    yield "joined", message(joined=pb.Joined(**job, run_number=2))
    yield "joined:forks", message(joined=pb.Joined(**job, run_number=2, forks=False))
    yield "round_completed", message(round_completed=_line())
    for cause in pb.Cause.values():
        ended = pb.RoundOver(**job, round=2, cause=cause, reason="because", broken=True)
        yield f"round_ended:{pb.Cause.Name(cause)}", message(round_ended=ended)
    yield "round_ended", message(round_ended=pb.RoundOver(**job, round=2, cause=2))
    worker = {"local_rank": 3, "rank": 11, "pid": 99, "exit_code": 1, "message": "m"}
    failure = pb.WorkerFailure(node_id="n1", address="10.0.0.5", **worker)
    for result in pb.Result.values()[1:]:
        closed = pb.Closed(
            **job, result=result, reason="why", retry_sensible=True, failures=[failure]
        )
        yield f"closed:{pb.Result.Name(result)}", message(closed=closed)
    yield "closed", message(closed=pb.Closed(**job, result=pb.RESULT_STOPPED))
    stale = pb.Closed(**job, result=pb.RESULT_FAILED, reason="no progress: why", no_progress=True)
    yield "closed:no_progress", message(closed=stale)
    refused = pb.Refused(rdzv_id="job-7", code="SettingsMismatchError", message="differs")
    yield "refused", message(refused=refused)
    yield "waiting", message(waiting=pb.Waiting(rdzv_id="job-7", reason="for n2"))
    mark = pb.SnapshotMark(lineage=2, step=40, series="2.a1b2", shards=2, world_size=4)
    watermark = pb.SnapshotWatermark(**job, mark=mark)
    yield "snapshot_watermark", message(snapshot_watermark=watermark)
    for name, fingerprint in (("keep_copies", ""), ("keep_copies:encrypted", "ab12")):
        yield name, message(keep_copies=keep_copies(mark, fingerprint))
    loads = _line()
    loads.MergeFrom(pb.Assignment(snapshot=mark, snapshot_loads=1, origin=1, lineage=2))
    yield "round_completed:loads", message(round_completed=loads)
    yield "heard", message(heard=pb.Heard(number=5))
    read_log = pb.ReadLog(
        request=5,
        rdzv_id="job-7",
        round=2,
        local_rank=3,
        rank=11,
        stdout=True,
        stderr=True,
        follow=True,
        tail_bytes=65_536,
        tail_lines=100,
        credit=262_144,
        positions=[pb.LogPosition(round=2, local_rank=3, stderr=True, offset=4_711)],
    )
    yield "read_log", message(read_log=read_log)
    everything = pb.ReadLog(request=5, rdzv_id="job-7", stdout=True, credit=4_096)
    yield "read_log:everything", message(read_log=everything)
    spec = pb.JobSpec(
        args=["--nnodes=2:4", "train.py", "--epochs=9"],
        env=[pb.EnvironmentVariable(name="TOKEN", value="a=b\n")],
        chdir="/home/ada",
        labels=[pb.Label(name="gpu", value="h100")],
        priority=-5,
        gpus_per_node=0,
        local_world_size=8,
    )
    yield "placed", message(placed=pb.Placed(**job, spec=spec))
    bare = pb.JobSpec(args=["train.py"])
    yield "placed:bare", message(placed=pb.Placed(**job, spec=bare))
    take_stacks = pb.TakeStacks(request=5, **job, round=2, timeout_ms=10_000)
    yield "take_stacks", message(take_stacks=take_stacks)
    yield "withdrawn", message(withdrawn=pb.Withdrawn(**job, reason="the job has stopped"))
    drain = pb.DrainNode(left_ms=60_000, reason="drained by ada", number=3)
    yield "drain", message(drain=drain)
    yield "undrain", message(undrain=pb.UndrainNode())
    yield "log_credit", message(log_credit=pb.LogCredit(request=5, bytes=131_072))
    yield "look_again", message(look_again=pb.LookAgain())
    yield "log_credit:cancel", message(log_credit=pb.LogCredit(request=5, cancel=True))


def record() -> None:
    """Add missing records to the files of the present protocol; existing ones are never changed."""
    version = PROTOCOL_VERSION
    messages, fields = FOLDER / f"v{version}.jsonl", FOLDER / f"v{version}.fields.json"
    lines = messages.read_text().splitlines() if messages.exists() else []
    known = {json.loads(line)["name"] for line in lines}
    for name, message in (*samples_of_nodes(), *samples_of_servers()):
        if name not in known:
            row = {
                "name": name,
                "kind": message.DESCRIPTOR.name,
                "bytes": message.SerializeToString(deterministic=True).hex(),
                "means": meaning(message),
            }
            lines.append(json.dumps(row))
    messages.write_text("".join(f"{line}\n" for line in lines))
    old = json.loads(fields.read_text()) if fields.exists() else {}
    both = sorted({**fields_of_all(), **old}.items())
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(what)}" for name, what in both)
    fields.write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    record()
