"""Fields with the same name are copied; a source without None uses 0 or "" instead."""

from __future__ import annotations

from enum import Enum

import pytest

from rdzv.core.fleet.node_resources import FailingCheck
from rdzv.core.model import JobSpec
from rdzv.structs import struct
from rdzv.transport.same_fields import from_message, from_value, to_message
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import Budgets, JobSummary


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
    assert from_value(_Shown, source, age_ms=7) == _Shown("red", 0, None, "", *shown)


def test_a_value_that_was_given_is_not_read() -> None:
    source = _Source(_Colour.RED, None, 3, "h", None, (), ())
    made = from_value(_Shown, source, age_ms=7, round=9, part=_PartShown("b"))
    assert made == _Shown("red", 9, 3, "h", _PartShown("b"), (), {}, 7)


def test_a_number_that_is_optional_on_the_wire_may_be_zero() -> None:
    summary = from_message(JobSummary, pb.JobSummary(round=0, min_nodes=0, state="joining"))
    assert (summary.round, summary.restarts, summary.min_nodes) == (0, None, None)
    assert (summary.state, summary.run, summary.nodes) == ("joining", None, 0)
    assert from_message(Budgets, pb.Budgets(max_preemptions=0)).max_preemptions == 0


def test_a_message_is_made_of_a_value_and_read_back() -> None:
    spec = JobSpec(("train.py", "--lr=1"), (("A", "1"),), "/home", labels=(("zone", "a"),))
    message = to_message(pb.JobSpec(), spec, without={"submitter"})
    assert [(one.name, one.value) for one in (*message.env, *message.labels)] == [
        ("A", "1"),
        ("zone", "a"),
    ]
    assert not message.HasField("gpus_per_node")
    assert from_message(JobSpec, pb.JobSpec.FromString(message.SerializeToString())) == spec


def test_a_text_that_is_no_valid_text_is_sent_with_escapes() -> None:
    name = b"/data/\xff\xe4".decode(errors="surrogateescape")
    message = to_message(pb.FailingCheck(), FailingCheck(name, "straße"))
    assert (message.name, message.reason) == ("/data/\\udcff\\udce4", "straße")


def test_a_field_that_the_message_lacks_is_an_error() -> None:
    with pytest.raises(AttributeError):
        to_message(pb.Label(), FailingCheck("disk", "full"))
