"""Structs and messages convert by the names of fields, within the bounds of the structs' fields."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any

import pytest
from google.protobuf.message import Message

from rdzv import bounds, messages
from rdzv.bounds import Age, Else, Flat, Rate, Unsent, Within
from rdzv.core import commands, model
from rdzv.core.evidence.hang_culprit import HungWorker
from rdzv.core.evidence.stacks import WorkerStack
from rdzv.core.fleet.node_resources import FailingCheck, NodeResources
from rdzv.core.snapshots import CopyCarrier, CopySource, MissingCopies
from rdzv.errors import InvalidRequestError
from rdzv.structs import struct
from rdzv.transport import wire
from rdzv.transport.wire import bodies, convert, read, write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import Budgets, JobSummary

NOW_MS = 1_000_000_000_000

REPORTS: list[tuple[type, type[Message]]] = [
    (model.Settings, pb.Settings),
    (model.Offer, pb.Offer),
    (model.KeptWorker, pb.KeptWorker),
    (model.SnapshotMark, pb.SnapshotMark),
    (model.Snapshot, pb.Snapshot),
    (model.JobSpec, pb.JobSpec),
    (model.Tally, pb.Tally),
    (CopyCarrier, pb.CopyCarrier),
    (CopySource, pb.CopySource),
    (MissingCopies, pb.MissingCopies),
    (HungWorker, pb.HungWorker),
    (WorkerStack, pb.WorkerStack),
    (NodeResources, pb.Resources),
    (FailingCheck, pb.FailingCheck),
    (model.Failure, pb.WorkerFailure),
    (commands.Stop, pb.StopJobRequest),
    (commands.Restart, pb.RestartJobRequest),
    (commands.Scale, pb.ScaleJobRequest),
    (commands.Submit, pb.SubmitJobRequest),
    (messages.Hello, pb.Hello),
    (messages.Draining, pb.Draining),
    (messages.Holdings, pb.Holdings),
    (messages.Health, pb.Health),
    (messages.Progress, pb.Progress),
    (messages.WorkersStarted, pb.WorkersStarted),
    (messages.SnapshotsHeld, pb.SnapshotsHeld),
    (messages.Hung, pb.Hung),
    (messages.Stacks, pb.Stacks),
    (messages.LogPiece, pb.LogPiece),
    (messages.LogPosition, pb.LogPosition),
    (messages.LogsWanted, pb.ReadLogsRequest),
]
"""The structs that are read from outside, and their messages."""

BODIES = bodies(pb.ServerMessage, messages.Announcement)
TOLD = [
    (kind, type(getattr(pb.ServerMessage(), body)))
    for kind, body in BODIES.items()
    if kind not in (messages.RoundOver, messages.Closed)
]
"""The structs that nodes are told, but for those of which this server sends only a part."""


def value_of(shape: wire.FieldType, chance: random.Random) -> Any:
    """Return a random value that a field may hold."""
    if shape.optional and chance.random() < 0.3:
        return None
    marks = shape.marks
    if shape.item is not None:
        few = chance.randrange(1, 3)
        if shape.item.kind is tuple:
            return tuple((f"name{n}", chance.choice("abc")) for n in range(few))
        if shape.item.kind is str:
            return ("a", "b")[:few]
        items = tuple(value_of(shape.item, chance) for _ in range(few))
        return tuple(NOW_MS - one for one in items) if Age in marks else items
    if shape.is_struct:
        return struct_of(shape.kind, chance)
    if shape.is_enum:
        return chance.choice(list(shape.kind))
    if Within in marks:
        return chance.choice((marks[Within].low or 1, marks[Within].high, marks[Within].high - 1))
    if Age in marks:
        return NOW_MS - chance.randrange(bounds.TIMEOUT_MS)
    small = {int: chance.randrange(1, 99), float: chance.random() * 99, bool: chance.random() < 0.5}
    return {**small, str: chance.choice("ab"), bytes: b"x\xff"}[shape.kind]


def struct_of(kind: type, chance: random.Random) -> Any:
    shapes = wire.shapes_of(kind).items()
    return kind(**{n: value_of(one, chance) for n, one in shapes if Unsent not in one.marks})


@pytest.mark.parametrize(("kind", "message"), [*REPORTS, *TOLD], ids=lambda kind: kind.__name__)
def test_a_struct_is_read_back_as_it_was_written(kind: type, message: type[Message]) -> None:
    chance = random.Random(4711)
    for _ in range(5):
        value = struct_of(kind, chance)
        sent = message.FromString(write(message(), value, NOW_MS).SerializeToString())
        for checked in (True, False):
            assert read(kind, sent, checked=checked, now_ms=NOW_MS) == value


def bounded(kind: type, message: Any, path: str = "") -> Iterator[tuple[Any, str, wire.FieldType]]:
    """Yield each bounded number of a struct: the message that has it, its path, and its type."""
    for name, shape in wire.shapes_of(kind).items():
        inner = shape if shape.item is None else shape.item
        if Flat in inner.marks:
            yield from bounded(inner.kind, message, path)
        elif Within in inner.marks:
            yield message, f"{path}{name}", inner
        elif inner.is_struct:
            part = getattr(message, name)
            part = part if shape.item is None else part[0]
            yield from bounded(inner.kind, part, f"{path}{name}.")


@pytest.mark.parametrize(("kind", "message"), REPORTS, ids=lambda kind: kind.__name__)
def test_every_bound_holds_on_both_sides(kind: type, message: type[Message]) -> None:
    sample = write(message(), struct_of(kind, random.Random(11)), NOW_MS)
    for part, path, shape in bounded(kind, sample):
        name, mark = path.rpartition(".")[2], shape.marks[Within]
        good = getattr(part, name)
        for value in (mark.low, mark.high):
            setattr(part, name, value)
            read(kind, sample, checked=True)
        for value in (mark.low - 1, mark.high + 1):
            if value < 0 <= mark.low or (value == 0 and shape.unset):
                continue  # The message has no negative numbers there, or 0 stands for another.
            setattr(part, name, value)
            read(kind, sample)
            with pytest.raises(InvalidRequestError) as refused:
                read(kind, sample, checked=True)
            shown = f"{mark.flag}: {name}" if mark.flag else path
            assert str(refused.value).startswith(shown.removesuffix("_ms"))
            assert " is out of bounds; give " in str(refused.value)
        setattr(part, name, good)


@struct(frozen=True)
class _Worn:
    rank: Annotated[int, Unsent] = 7
    at_ms: Annotated[int, Age("age_ms")] = 0


@struct(frozen=True)
class _Whole:
    worn: Annotated[_Worn, Flat]
    step: int


@struct(frozen=True)
class _Rated:
    rate: Rate


@struct(frozen=True)
class _Scaled:
    scale_up: model.ScaleUp
    min_nodes: Annotated[int, Else(3)]


def test_a_time_is_sent_as_an_age_and_a_flat_struct_with_its_fields() -> None:
    sent = write(pb.RankProgress(), _Whole(_Worn(5, at_ms=900), 40), now_ms=1_000)
    assert sent == pb.RankProgress(step=40, age_ms=100)
    assert read(_Whole, sent, now_ms=5_000) == _Whole(_Worn(7, at_ms=4_900), 40)
    # What lies ahead by the sender's clock has just been.
    assert write(pb.RankProgress(), _Worn(at_ms=2_000), now_ms=1_000).age_ms == 0
    ancient = pb.RankProgress(age_ms=2**64 - 1)
    assert read(_Worn, ancient, now_ms=5).at_ms == 5 - bounds.TIMEOUT_MS


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_what_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(InvalidRequestError, match="is no rate; give one from 0 on"):
        read(_Rated, pb.RankProgress(rate=rate), checked=True)


def test_an_enum_is_known_by_name_and_an_unset_field_by_what_it_stands_for() -> None:
    assert write(pb.Settings(), _Scaled(model.ScaleUp.AFTER, 1)).scale_up == pb.SCALE_UP_AFTER
    after = pb.Settings(scale_up=pb.SCALE_UP_AFTER)
    assert read(_Scaled, after, checked=True) == _Scaled(model.ScaleUp.AFTER, 3)
    for number in (0, 9):
        odd = pb.Settings(scale_up=number)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match=f"scale_up {number} is not known to this se"):
            read(_Scaled, odd, checked=True)
        # Settings say what an unset one stands for, and who does not check reads all others so.
        assert read(model.Settings, odd).scale_up is model.ScaleUp.EAGER


def test_lists_that_are_too_long_are_refused_or_cut() -> None:
    held = pb.Holdings(holdings=[pb.Holding(rdzv_id="j", run="r")] * 257)
    with pytest.raises(InvalidRequestError, match="holdings 257 are too many; give at most 256"):
        read(messages.Holdings, held, checked=True)
    failing = pb.Health(failing=[pb.FailingCheck(name="disk", reason="x" * 2_000)] * 20)
    (first, *others) = read(messages.Health, failing, checked=True).failing
    assert (len(first.reason), len(others)) == (1_000, 15)
    assert len(read(messages.Health, failing).failing[0].reason) == 2_000


class _Colour(Enum):
    RED = "red"


@struct(frozen=True)
class _Part:
    name: str = ""


@struct(frozen=True)
class _Source:
    colour: _Colour
    round: int | None
    nodes: int
    address: str
    part: _Part | None
    parts: tuple[_Part, ...]
    labels: tuple[tuple[str, str], ...]


@struct(frozen=True)
class _PartShown:
    name: str | None


@struct(frozen=True)
class _Shown:
    colour: str
    round: int | None
    nodes: int | None
    address: str
    part: _PartShown | None
    parts: tuple[_PartShown, ...]
    labels: dict[str, str]
    age_ms: int


def test_a_value_is_made_of_another() -> None:
    source = _Source(_Colour.RED, 0, 0, "", _Part(), (_Part("a"), _Part()), (("zone", "a"),))
    shown = (_PartShown(None), (_PartShown("a"), _PartShown(None)), {"zone": "a"}, 7)
    assert convert(_Shown, source, age_ms=7) == _Shown("red", 0, None, "", *shown)


def test_a_value_that_was_given_is_not_read() -> None:
    source = _Source(_Colour.RED, None, 3, "h", None, (), ())
    made = convert(_Shown, source, age_ms=7, round=9, part=_PartShown("b"))
    assert made == _Shown("red", 9, 3, "h", _PartShown("b"), (), {}, 7)


def test_a_number_that_is_optional_on_the_wire_may_be_zero() -> None:
    summary = read(JobSummary, pb.JobSummary(round=0, min_nodes=0, state="joining"))
    assert (summary.round, summary.restarts, summary.min_nodes) == (0, None, None)
    assert (summary.state, summary.run, summary.nodes) == ("joining", None, 0)
    assert read(Budgets, pb.Budgets(max_preemptions=0)).max_preemptions == 0


def test_a_message_is_made_of_a_value_and_read_back() -> None:
    spec = model.JobSpec(("train.py", "--lr=1"), (("A", "1"),), "/home", labels=(("zone", "a"),))
    message = write(pb.JobSpec(), spec)
    assert [(one.name, one.value) for one in (*message.env, *message.labels)] == [
        ("A", "1"),
        ("zone", "a"),
    ]
    assert not message.HasField("gpus_per_node")
    assert read(model.JobSpec, pb.JobSpec.FromString(message.SerializeToString())) == spec


def test_a_text_that_is_no_valid_text_is_sent_with_escapes() -> None:
    name = b"/data/\xff\xe4".decode(errors="surrogateescape")
    message = write(pb.FailingCheck(), FailingCheck(name, "straße"))
    assert (message.name, message.reason) == ("/data/\\udcff\\udce4", "straße")


def test_a_field_that_the_message_lacks_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"FailingCheck\.reason is no field of Label"):
        write(pb.Label(), FailingCheck("disk", "full"))
