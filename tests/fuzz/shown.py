"""Texts from others on their way to a terminal: the commands' output, and log lines.

A step is a message that a server might send, whatever is in it: `JobStatus` and similar, or
`LogLines`. It is formatted by the commands and by the server, as `rdzvctl` would on a terminal.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from rdzv.ctl import (
    as_text,
    as_text_lists,
    as_text_nodes,
    as_text_stacks,
    as_text_story,
    live,
    trace,
)
from rdzv.ctl.layout import Page
from rdzv.structs import field_names
from rdzv.transport.wire import read
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import (
    Event,
    JobStatus,
    JobSummary,
    LogLines,
    Node,
    Server,
    StackReport,
)
from rdzv.view.history import KINDS
from rdzv.view.log_lines import Printer
from tests.fuzz import messages, surface
from tests.fuzz.surface import Input, Step, Surface, Take, check_text

_NARROW = Page(width=60, colour=False, now_s=1_000.0)
_WIDE = Page(width=None, colour=False, now_s=1_000.0)


def _status(message: Any) -> Iterator[str]:
    job = read(JobStatus, message)
    for page in (_NARROW, _WIDE):
        yield as_text.status(job, page)
        yield as_text.status(job, page, everything=True)
        yield as_text_story.explain(job, (), page)
        yield as_text.submitted(job, None, page)
    yield trace.trace(live.later(job, 500), (), 1_000)


def _jobs(message: Any) -> Iterator[str]:
    yield as_text_lists.jobs("h:1", [read(JobSummary, one) for one in message.jobs], _NARROW)


def _events(message: Any) -> Iterator[str]:
    found = [read(Event, one) for one in message.events]
    yield as_text_lists.events(found, _NARROW, "none")
    job = read(JobStatus, pb.JobStatus(run=found[0].run or "") if found else pb.JobStatus())
    yield as_text_story.explain(job, found, _NARROW)
    yield trace.trace(job, found, 1_000)
    yield as_text_lists.events(found, _NARROW, "none", "CALL")


def _nodes(message: Any) -> Iterator[str]:
    found = [read(Node, one) for one in message.nodes]
    yield as_text_nodes.nodes("h:1", found, _NARROW)
    yield from (as_text_nodes.node(one, _NARROW) for one in found)


def _stacks(message: Any) -> Iterator[str]:
    for raw in (False, True):
        yield as_text_stacks.text(read(StackReport, message), _NARROW, raw=raw)


def _servers(message: Any) -> Iterator[str]:
    yield as_text_lists.servers([read(Server, one) for one in message.servers], _NARROW)


_SHOWN: Mapping[str, Callable[[Any], Iterator[str]]] = {
    "JobStatus": _status,
    "ListJobsResponse": _jobs,
    "ListEventsResponse": _events,
    "ListNodesResponse": _nodes,
    "StackReport": _stacks,
    "ListServersResponse": _servers,
}
_LINE = "LogLines"
_TEXTS = frozenset({"node_id", "reason", "run", "address", "message", "summary", "fault"})
_STATES = ("joining", "running", "stopping", "succeeded", "failed", "stopped", "queued")


def _inputs(dice: random.Random) -> Input:
    if dice.random() < 0.4:
        return tuple(_line(dice) for _ in range(dice.randint(1, 6)))
    kind = dice.choice((*_SHOWN, "JobStatus", "JobStatus"))
    message = messages.make(dice, pb.DESCRIPTOR.message_types_by_name[kind])
    if kind == "JobStatus":
        message.state = surface.text(dice, _STATES)
    if kind == "ListEventsResponse":
        for event in message.events:
            event.name = surface.text(dice, tuple(KINDS))
            event.fields = _fields(dice, event.name)
    return ((kind, message.SerializeToString()),)


def _fields(dice: random.Random, name: str) -> str:
    """Make the fields of an event: with its own names if it is known, with values of all kinds."""
    if (kind := KINDS.get(name)) is None or dice.random() < 0.1:
        return surface.text(dice)
    values = (0, -1, 1 << 63, 10**40, 0.5, None, True, surface.text(dice), [], ["n1"], {"a": 1})
    likely = {"cause": "node lost", "result": "failed", "participants": [], "root_cause": None}
    fields = {
        field: likely.get(field, surface.text(dice) if field in _TEXTS else dice.randint(0, 3))
        if dice.random() < 0.9
        else dice.choice(values)
        for field in field_names(kind)
    }
    return json.dumps(fields)


def _line(dice: random.Random) -> Step:
    said = dice.choice((surface.text(dice), f"{surface.text(dice)}\r{surface.text(dice)}\n"))
    data = said.encode(errors="surrogatepass") + dice.choice(
        (b"", b"\xff\xfe", b"\r", b"\n", b"\t")
    )
    lines = pb.LogLines(node_id="n1", rank=dice.choice((0, 7)), round=dice.randint(0, 1), data=data)
    return _LINE, lines.SerializeToString()


def _take(steps: Input) -> None:
    out = io.BytesIO()
    printer = Printer(out, prefixed=True, escaped=True, as_it_comes=False)
    for kind, data in steps:
        message = GetMessageClass(pb.DESCRIPTOR.message_types_by_name[kind])()
        try:
            message.ParseFromString(data)
        except DecodeError:
            continue
        if kind == _LINE:
            printer.take(read(LogLines, message))
            continue
        for text in _SHOWN[kind](message):
            check_text(f"what is shown of {kind}", text)
    printer.end()
    check_text("a line of a log", out.getvalue().decode().replace("\t", " "))


@contextmanager
def _open(_: Path) -> Iterator[Take]:
    yield _take


SHOWN = Surface(
    name="text",
    promise="nothing that a terminal would obey reaches it, and nothing that is shown crashes",
    make=_inputs,
    open=_open,
)
