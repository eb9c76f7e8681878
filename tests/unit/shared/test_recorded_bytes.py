"""What our programs write, byte for byte, and every text with which a message is refused.

`protocol/written.txt` has a line for each sample of a message: its name, and its bytes in
hexadecimal. `protocol/refused.txt` has the refusals. `pytest --rewrite` writes both: review the
diff, for a byte that changes is a change of the protocol.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from samples import bare, full

from rdzv import messages
from rdzv import messages as told
from rdzv.agent.core import commands
from rdzv.agent.server_link import encoding
from rdzv.agent.server_link.node_drain import NodeDrain
from rdzv.core import model
from rdzv.core.commands import Decline, Fail
from rdzv.core.evidence.hang_culprit import HungWorker
from rdzv.core.evidence.progress_lag import RankProgress
from rdzv.core.evidence.stacks import WorkerStack
from rdzv.core.fleet.node_resources import FailingCheck, Gpu, NodeResources
from rdzv.core.snapshots import CopyCarrier, CopySource, MissingCopies
from rdzv.errors import InvalidRequestError
from rdzv.server import wire
from rdzv.stores.base import Record
from rdzv.structs import as_dict, replace
from rdzv.transport.wire import write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import event_in
from tests.unit.agent import test_agent_encoding as agent
from tests.unit.server import test_wire as server
from tests.unit.server.test_answer_values import ANSWERS

PROTOCOL = Path(__file__).parents[1] / "protocol"
NOW_MS = agent.NOW_MS
MARK, SNAPSHOTS = agent.MARK, agent.SNAPSHOTS
TALLY = model.Tally(model.Spent(1, 2, 3, 4, 500), (-65_000, 4_000))
FAILED = model.Failure(3, 11, 99, 1, None, "boom", "trace", 4_000, node_id="n1", address="10.0.0.5")
CARRIER = CopyCarrier(40_000, "secret", "ab12")
MISSING = MissingCopies(MARK, "n2: no file caf\udce9")
STACK = replace(full(WorkerStack), no_record="caf\udce9")


def by_agents() -> Iterator[tuple[str, Message]]:
    """Yield each kind of message that a node sends."""
    state = replace(agent.REJOINING, snapshots=SNAPSHOTS, stopping_since_ms=NOW_MS - 9)
    kept = (model.KeptWorker(0, pid=99), model.KeptWorker(3, 7, True, 1, 2, 0, pid=98))
    say = commands.SayJoin(
        "r1", 5, (agent.FAILURE, agent.KILLED), True, model.Moved(7, snapshot_changed=True), kept
    )
    settings = replace(
        agent.SETTINGS,
        scale_up=model.ScaleUp.AFTER,
        max_restarts=None,
        restart_backoff_ms=0,
        restart_backoff_max_ms=5,
        max_preemptions=0,
        max_store_failures=6,
        no_progress_restarts=7,
    )
    odd = replace(state, job=replace(agent.JOB, settings=settings))
    given = {"refuse_reuse": True, "secret": "s" * 16, "preparing": True}
    yield "join", encoding.join(say, state, agent.OFFER, NOW_MS, **given)
    yield "join:settings", encoding.join(say, odd, agent.OFFER, NOW_MS, **given)
    fresh = commands.SayJoin("", None, ())
    yield "join:fresh", encoding.join(fresh, state, agent.OFFER, NOW_MS, **given)
    for name, (believed, *_) in agent.BELIEFS.items():
        yield f"belief:{name}", agent.belief_of(believed)
    for case in cases(agent.test_a_report_is_heard_as_it_was_said):
        yield f"report:{type(case).__name__}", encoding.report(case, "job-7", NOW_MS)
    suspect = replace(agent.FAILURE, message="caf\udce9", suspect=True)
    failed = Fail("n1", 0, "r1", 5, (suspect,))
    yield "report:suspect", encoding.report(failed, "job-7", NOW_MS)
    progress = (RankProgress(8, 1_204, 300, 14.25), RankProgress(9, 0, 0, None))
    yield (
        "progress",
        encoding.report(messages.Progress("job-7", "r1", 2, progress), "job-7", NOW_MS),
    )
    held = messages.SnapshotsHeld("job-7", "r1", SNAPSHOTS, CARRIER, MISSING)
    yield "snapshots_held", encoding.report(held, "job-7", NOW_MS)
    workers = (
        messages.StartedWorker(0, "kept"),
        messages.StartedWorker(1, "warm", "it did not park"),
    )
    started = messages.WorkersStarted("job-7", "r1", 2, workers, "no file", forks=True)
    yield "workers_started", encoding.report(started, "job-7", NOW_MS)
    entered = (messages.RankArrivals(8, (1_000, -5)),)
    groups = (
        messages.GroupArrivals("0", 2.5, None, (4, 5), entered),
        messages.GroupArrivals("1", 0.0, 0, (), ()),
    )
    yield "arrivals", encoding.report(messages.Arrivals("job-7", "r1", 2, groups), "job-7", NOW_MS)
    hung = (HungWorker(9, 1, 99, 61_000, "no progress", timed_out=True),)
    yield "hung", encoding.report(messages.Hung("job-7", "r1", 2, hung), "job-7", NOW_MS)
    yield "hung:none", encoding.report(messages.Hung("job-7", "r1", 2, ()), "job-7", NOW_MS)
    position = told.LogPosition("", 2, 3, True, 7, 9)
    piece = messages.LogPiece(5, 2, 3, 11, True, 4_711, b"x\xff", True, "why", (position,))
    yield "log_piece", encoding.report(piece)
    yield "metrics", encoding.report(messages.NodeMetrics(6, b"rdzv_agent_runners 1.0\n"))
    yield "stacks", encoding.report(messages.Stacks(5, (STACK,), last=False, error=""))
    yield "stacks:last", encoding.report(messages.Stacks(5, (), last=True, error="caf\udce9"))
    has = NodeResources(8, 64, (Gpu("GPU-a", "H100", 80),), (("gpu", "h100"),), 2, "rack-1")
    yield "resources", write(pb.Resources(), has)
    yield (
        "holdings",
        encoding.report(
            messages.Holdings((messages.Holding("job-7", "r1", 4), messages.Holding("j", "r", 0)))
        ).holdings,
    )
    yield "health", encoding.report(messages.Health((FailingCheck("disk", "full"),))).health
    yield "declined", encoding.report(Decline("", "r1", "no folder \udcff", passing=True), "job-7")
    drain = NodeDrain(lambda: NOW_MS, lambda _: None)
    drain.take_from_server(7, 60_000, "drained")
    yield "draining", drained(drain)
    drain.note_wish(5_000, "preempted")
    yield "draining:own", drained(drain)


def announcements() -> Iterator[told.Announcement]:
    """Yield each kind of what nodes are told."""
    spec = model.JobSpec(
        ("train.py", "--lr=1"),
        (("A", "1"),),
        "/srv",
        (("gpu", "h100"),),
        *(-3, 0, 4, True, "ada", "ada"),
    )
    source = CopySource("n2", "h2", 7_000, "secret", SNAPSHOTS, "ab12")
    position = told.LogPosition("n1", 2, 3, True, 7)
    job = ("job-7", "r1")
    feed = ("job-7", "feed", 2)
    line = (*feed, 1, 4, 8, 32, 4, 16, "10.0.0.5", 4711, True)
    assignment = model.Assignment(*line, restarts=1, max_restarts=3)
    yield told.Lease(10_000, 30_000)
    yield told.Servers(("b:1", "c:1"))
    yield told.Heard(7, 5)
    yield told.Welcome(7, 1_666, 5_000)
    yield told.Joined(*feed)
    yield assignment
    yield replace(assignment, use_agent_store=False, max_restarts=None, tally=TALLY)
    yield replace(assignment, kept=(0, 3), source=11, resume_step=70, charged_suspects=(2,))
    yield replace(assignment, snapshot=MARK, snapshot_loads=1, origin=1, lineage=2)
    yield told.RoundOver(*feed, model.RoundEnd(model.Cause.NODE_LOST, "n2 was lost", 0, True))
    restarted = model.RoundEnd(model.Cause.OPERATOR, "restart", 0, broken=False, keep=False)
    yield told.RoundOver(*feed, restarted, culprits=(0, 5))
    yield told.SnapshotWatermark(*job, MARK, 7_000, MARK)
    yield told.Closed(*job, model.Ended(model.Result.FAILED, "spent", 0, True, (FAILED,)))
    yield told.Refused("job-7", "InvalidRequestError", "no")
    yield told.Waiting("job-7", "spare")
    yield told.Joined(*job, 2, forks=False)
    yield told.KeepCopies(*job, MARK, (source,))
    yield told.ReadLog(5, "job-7", None, None, True, False, True, 9, 8, 7)
    yield told.ReadLog(5, "job-7", 0, 0, True, False, True, 9, 8, 7, 6, (position,), ("r2", "r1"))
    yield told.StopLog(5)
    yield told.ReadMetrics(6)
    yield told.Placed(*job, spec)
    yield told.Placed(*job, model.JobSpec(("train.py",)))
    yield told.Withdrawn(*job, "the job has stopped")
    yield told.LookAgain()
    yield told.TakeStacks(5, *job, 2, 10_000)
    yield told.DrainNode(60_000, "drained by ada", 3)
    yield told.UndrainNode()


@pytest.mark.parametrize("announced", list(announcements()), ids=lambda one: type(one).__name__)
def test_a_node_hears_what_it_is_told(announced: told.Announcement) -> None:
    assert as_dict(agent.told(announced)) == as_dict(announced)


def by_servers() -> Iterator[tuple[str, Message]]:
    """Yield each kind of message that a node is told, and of answers to operators."""
    for announced in announcements():
        name = type(announced).__name__
        yield f"told:{name}", wire.server_message([announced], 3, "1.2", 5_000)
    several = [told.Welcome(7, 1_666, 5_000), told.Servers(("b:1",)), told.LookAgain()]
    yield "told:several", wire.server_message(several, 3, "1.2", 5_000)
    for kind, make in itertools.product(ANSWERS, (full, bare)):
        message = write(getattr(pb, kind.__name__)(), make(kind), NOW_MS)
        yield f"answered:{kind.__name__}:{make.__name__}", message
    for data in ("n1 joined", '{"node_id":"n1","round":3,"later":["x"]}'):
        row = Record(5, "job-7", "r1", "NodeStopped", data)
        yield "answered:Event", write(pb.Event(), event_in(row))


def cases(test: Callable[..., object]) -> Iterable[Any]:
    """Return the cases of a parametrized test."""
    (mark,) = test.pytestmark  # type: ignore[attr-defined]
    return list(mark.args[1])


def drained(drain: NodeDrain) -> Message:
    said = drain.said()
    assert said is not None
    return encoding.report(said).draining


def check(path: Path, lines: Iterable[str], config: pytest.Config) -> None:
    text = "".join(f"{line}\n" for line in lines)
    if config.getoption("--rewrite"):
        path.write_text(text)
    assert path.read_text().splitlines() == text.splitlines(), "review the diff, then: --rewrite"


def test_every_message_is_written_as_before(pytestconfig: pytest.Config) -> None:
    lines = (
        f"{name} {message.SerializeToString(deterministic=True).hex()}"
        for name, message in chain(by_agents(), by_servers())
    )
    check(PROTOCOL / "written.txt", lines, pytestconfig)


def test_every_refusal_reads_as_before(pytestconfig: pytest.Config) -> None:
    texts = []
    for read, _ in cases(server.test_what_is_wrong_is_refused_with_value_reason_and_remedy):
        with pytest.raises(InvalidRequestError) as refused:
            read()
        texts.append(str(refused.value))
    check(PROTOCOL / "refused.txt", texts, pytestconfig)


def test_every_kind_of_message_is_recorded() -> None:
    """A message that nobody recorded could change unseen."""
    written = [message for _, message in chain(by_agents(), by_servers())]
    told = {
        message.WhichOneof("body") for message in written if isinstance(message, pb.ServerMessage)
    }
    said = {
        message.WhichOneof("body") for message in written if isinstance(message, pb.NodeMessage)
    }
    said |= {"hello", "heartbeat", "away", "join", "holdings", "health", "draining"}
    for kind, found in ((pb.ServerMessage, told), (pb.NodeMessage, said)):
        assert found == {field.name for field in kind.DESCRIPTOR.oneofs_by_name["body"].fields}
