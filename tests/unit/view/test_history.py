"""Events are stored as data, and read back, also those of other versions."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import msgspec
import pytest
from past_events import an_event

from rdzv.core import events
from rdzv.stores.base import Record
from rdzv.transport import wire
from rdzv.transport.wire import write
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view import as_json
from rdzv.view.answers import Event, event_in
from rdzv.view.history import KINDS, fields_in, kept, read, written
from rdzv.view.sentences import sentence
from tests.unit.server.test_driver import every_event

RECORDED = Path(__file__).parents[1] / "protocol" / "history.json"
"""Rows as they were once stored, with their sentences. Rows are added; fields never change."""


def read_back(event: pb.Event) -> Event:
    return wire.read(Event, pb.Event.FromString(event.SerializeToString()))


def sent(row: Record) -> Event:
    return read_back(write(pb.Event(), event_in(row)))


def row(event: events.Event) -> Record:
    return Record(5, "job-7", "run-1", type(event).__name__, written(event))


def test_every_event_is_kept_under_its_own_name() -> None:
    assert KINDS.keys() == {kind.__name__ for kind in typing.get_args(events.Event)}


@pytest.mark.parametrize("event", every_event(), ids=lambda event: type(event).__name__)
def test_what_is_written_is_read_again(event: events.Event) -> None:
    assert read(type(event).__name__, fields_in(written(event))) == kept(event)
    shown = sent(row(event))
    assert shown == event_in(row(event)) == an_event(kept(event), "run-1", 5)
    assert shown.text == sentence(kept(event))


def test_a_row_is_small_however_large_the_job() -> None:
    names = tuple(f"n{number}" for number in range(10_000))
    placed = an_event(kept(events.NodesPlaced(names, was_queued=True)))
    assert placed.fields == {"nodes": 10_000, "node_ids": list(names[:8]), "was_queued": True}
    assert placed.text == "placed on n0, n1, n2, n3, n4, n5, n6, n7 and 9992 more"
    withdrawn = an_event(kept(events.NodesWithdrawn(names, "scaled down")))
    assert withdrawn.text.endswith("n7 and 9992 more: scaled down")


def test_what_a_later_version_adds_is_passed_on() -> None:
    fields = '{"node_id":"n1","round":3,"verses":[1,{"a":null}]}'
    for name, text in (
        ("NodeStopped", "n1 stopped its workers of round 3"),
        ("NodeSang", "NodeSang: node_id n1, round 3, verses [1, {'a': None}]"),
    ):
        event = sent(Record(5, "job-7", "run-1", name, fields))
        assert event.text == text
        (document,) = json.loads(as_json.document({"events": [event]}))["events"]
        assert document["fields"] == json.loads(fields)


def test_of_a_later_server_the_text_is_shown_where_its_fields_are_not_known() -> None:
    later = pb.Event(unix_ms=5, name="NodeSang", text="n1 sang: la la", fields='{"node_id":"n1"}')
    assert read_back(later).text == "n1 sang: la la"
    assert read_back(later).fields == {"node_id": "n1"}


@pytest.mark.parametrize(
    "fields", ["", "[1]", "{", '{"a":', "x" * 100, "[" * 100_000, '{"a":' * 9_999]
)
def test_what_an_older_server_sends_is_shown_as_it_is(fields: str) -> None:
    older = pb.Event(unix_ms=5, run="r", name="NodeLost", text="n1 was lost: x", fields=fields)
    assert (read_back(older).text, read_back(older).fields) == ("n1 was lost: x", None)


def test_a_row_without_fields_is_shown_as_it_is() -> None:
    event = event_in(Record(5, "job-7", "run-1", "NodeLost", "n1 was lost: x"))
    assert (event.text, event.fields) == ("n1 was lost: x", None)
    assert write(pb.Event(), event).fields == ""


@pytest.mark.parametrize("number", [10**400, -(10**400), [{"a": 1 << 64}]])
def test_fields_with_a_number_that_is_too_large_are_not_read(number: object) -> None:
    fields = json.dumps({"node_id": "n1", "for_ms": number})
    message = pb.Event(name="NodeWentAway", text="as it is", fields=fields)
    assert (read_back(message).text, read_back(message).fields) == ("as it is", None)


def test_what_was_once_stored_is_read() -> None:
    rows = json.loads(RECORDED.read_text())
    assert {one["name"] for one in rows} == KINDS.keys(), f"add to {RECORDED}, from {_rows()}"
    for one in rows:
        assert read(one["name"], one["fields"]) is not None, one
        data = json.dumps(one["fields"])
        assert event_in(Record(5, "j", "r", one["name"], data)).text == one["text"]


def _rows() -> list[dict[str, object]]:
    return [
        {
            "name": type(event).__name__,
            "fields": msgspec.json.decode(written(event)),
            "text": sentence(kept(event)),
        }
        for event in every_event()
    ]
