"""The HTTP API's operations, their parameters, and its OpenAPI document.

`api` parses requests with the same parameters, and msgspec derives the schemas from the values that
rdzvctl prints, so the document always matches the code. `docs/openapi.json` is this document.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rdzv.core.model import JobState, NodeState
from rdzv.errors import ERRORS, InvalidRequestError
from rdzv.stores.base import HISTORY_ROWS
from rdzv.structs import struct
from rdzv.view import answers, as_json
from rdzv.view.ledger import Ledger
from rdzv.view.reports import Report

PREFIX = "/api/v1"

Schema = dict[str, Any]


@struct(frozen=True)
class Number:
    """An integer parameter. If it has no default, it is read as None when not given."""

    name: str
    text: str
    least: int
    most: int
    default: int | None = None

    def read(self, given: str | None) -> int | None:
        """Return the number, or the default if the parameter is not given.

        Raises:
            InvalidRequestError: the text is not a number or is out of bounds.

        """
        if given is None:
            return self.default
        if not given.isascii() or not given.isdigit() or len(given) > 10:
            raise self._refusal(given, "is not a whole number")
        if not self.least <= int(given) <= self.most:
            raise self._refusal(given, "is out of bounds")
        return int(given)

    def _refusal(self, given: str, why: str) -> InvalidRequestError:
        shown = given if len(given) <= 40 else f"{given[:40]}..."
        return InvalidRequestError(
            f"{self.name}={shown!r} {why}; give a number from {self.least} to {self.most}"
        )

    @property
    def schema(self) -> Schema:
        """The parameter's type in OpenAPI."""
        default = {} if self.default is None else {"default": self.default}
        return {"type": "integer", "minimum": self.least, "maximum": self.most, **default}


@struct(frozen=True)
class Flag:
    """A Boolean parameter."""

    name: str
    text: str

    def read(self, given: str | None) -> bool:
        """Return the value, or False if the parameter is not given.

        Raises:
            InvalidRequestError: the text is neither true nor false.

        """
        if given not in (None, "true", "false"):
            shown = given if len(given) <= 40 else f"{given[:40]}..."
            raise InvalidRequestError(f"{self.name}={shown!r} is not valid; give true or false")
        return given == "true"

    @property
    def schema(self) -> Schema:
        """The parameter's type in OpenAPI."""
        return {"type": "boolean", "default": False}


@struct(frozen=True)
class Name:
    """A parameter that names a job. It may contain any characters, percent-encoded."""

    name: str
    text: str

    def read(self, given: str | None) -> str | None:
        """Return the name, or None if the parameter is not given."""
        return given

    @property
    def schema(self) -> Schema:
        """The parameter's type in OpenAPI."""
        return {"type": "string"}


Parameter = Number | Flag | Name


@struct(frozen=True)
class Operation:
    """An operation of the API. `schema` is None if the answer is not JSON."""

    name: str
    path: str
    summary: str
    about: str = ""
    query: tuple[Parameter, ...] = ()
    schema: str | None = None
    media_type: str = "application/json"
    of: str = ""
    """The kind of object that the path names, such as job or node."""
    refuses: tuple[int, ...] = ()
    """The error statuses in addition to those that every operation may return."""
    method: str = "GET"


_ALWAYS = {
    400: "The request is not valid; the message says what is.",
    429: "The server has reached a limit: try again later.",
    503: "This server stands by for another, which `leader` names, or it is stopping: ask the "
    "leader, or try again.",
}
_MORE = {
    404: "There is no object of this name.",
    403: "The caller may not do this.",
    409: "The run has ended.",
}

U32 = 2**32 - 1

LOG_BYTES = 1024 * 1024
"""The size of the logs in one answer, over all RANKs, unless the logs are followed."""

LOG_LINES = 10_000
"""The maximum number of lines from each file that can be requested in one answer."""


def operations() -> tuple[Operation, ...]:
    limit = Number("limit", "At most this number of events, the newest.", 1, HISTORY_ROWS)
    rank = Number("rank", "The worker with this RANK; all workers if not given.", 0, U32)
    round_ = Number("round", "The round; the last if not given.", 0, U32)
    tail = Number("tail", "The number of lines from the end of each file.", 1, LOG_LINES, 200)
    follow = Flag("follow", "Continue with new lines until the run ends.")
    job = Name("job", "The job to follow; the whole fleet if not given.")
    contains = Name("contains", "Only lines that contain this text, in upper or lower case.")
    return (
        Operation("listJobs", "/jobs", "Every job, one line each", schema="Jobs"),
        Operation(
            "getJob",
            "/jobs/{rdzv_id}",
            "The state of a job, with the reason",
            schema="JobStatus",
            of="job",
        ),
        Operation(
            "listEvents",
            "/jobs/{rdzv_id}/events",
            "The events of a job, oldest first",
            query=(limit,),
            schema="Events",
            of="job",
        ),
        Operation(
            "getLedger",
            "/jobs/{rdzv_id}/ledger",
            "What each moment of a run was spent on, and what its failures cost",
            "Every moment from the beginning of the run to its end, or to now, lies in one "
            "interval. Without progress (`steps_reported` is false) training counts from the "
            "first collective or, where none is recorded, from the start of the workers, so "
            "`goodput` is an upper bound.",
            query=(Number("run", "The run of this number; the last one if not given.", 1, U32),),
            schema="LedgerOfRun",
            of="job",
        ),
        Operation(
            "readLogs",
            "/jobs/{rdzv_id}/logs",
            "The output of a job's workers, from the nodes that have it",
            "Whole lines; without `rank`, each begins with the RANK of its worker. If the logs of "
            "a node cannot be read, a line that begins with `rdzv: ` says why. At most "
            f"{LOG_BYTES} bytes, unless `follow` is true.",
            query=(rank, round_, tail, contains, follow),
            media_type="text/plain",
            of="job",
            refuses=(409,),
        ),
        Operation(
            "readStacks",
            "/jobs/{rdzv_id}/stacks",
            "The stacks of a job's workers when a round hung",
            "The server keeps those of the latest hangs. This request takes no new ones.",
            query=(Number("round", "The round that hung; the last one if not given.", 0, U32),),
            schema="StackReport",
            of="job",
        ),
        Operation(
            "takeStacks",
            "/jobs/{rdzv_id}/stacks",
            "The stacks of a job's workers now, with torch's record of their collectives",
            "Each worker is stopped for a few milliseconds. The audit log records who asked. A "
            "browser may ask only from the server's own page.",
            schema="StackReport",
            of="job",
            refuses=(403, 409),
            method="POST",
        ),
        Operation(
            "getReport",
            "/report",
            "What all jobs have spent, and which causes and nodes have cost most",
            "It reads the histories of all jobs, so in a large fleet it takes its time.",
            query=(Number("hours", "The number of hours to look back.", 1, 8784, 168),),
            schema="Report",
        ),
        Operation("listNodes", "/nodes", "Every node, across its jobs", schema="Nodes"),
        Operation("getNode", "/nodes/{node_id}", "One node", schema="Node", of="node"),
        Operation(
            "listNodeEvents",
            "/nodes/{node_id}/events",
            "What has happened on a node in all jobs, oldest first",
            "It reads the histories of all jobs, so in a large fleet it takes its time.",
            query=(Number("limit", "At most this number of events, the newest.", 1, 1000, 200),),
            schema="NodeEvents",
            of="node",
        ),
        Operation(
            "listServers",
            "/servers",
            "The servers that share a store; a standby answers, too",
            schema="Servers",
        ),
        Operation(
            "stream",
            "/stream",
            "Changes as they happen: server-sent events",
            _STREAM,
            query=(job,),
            media_type="text/event-stream",
            refuses=(404,),
        ),
        Operation("getOpenApi", "/openapi.json", "This document", schema="OpenApi"),
    )


_STREAM = (
    "It begins with `begin`, then the whole state, then `ready`, and continues with changes. Of "
    "the fleet: `jobs` and `nodes`, documents like those of listJobs and listNodes with some of "
    "the rows, each of which replaces the row of its name; `gone`, the names of `jobs` and "
    "`nodes` that no longer exist. Of one job: `job` (getJob) and `events` (listEvents), always "
    "complete. `beat` comes, with a comment, when nothing else does. `end` says with a code and a "
    "message why the server ends the stream: it no longer leads, it stops, or the reader was too "
    "slow. After `end` or a lost connection, connect again: the stream starts from the beginning."
)

# ------------------------------------------------------------------------------------ the document

_LEDGER: Mapping[str, Schema] = {
    "rdzv_id": {"type": "string"},
    "run_numbers": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "The numbers of all runs whose beginning is in the history.",
    },
    "ledger": {"$ref": "#/components/schemas/Ledger"},
}

_STORE_AWAY: Schema = {
    "type": ["string", "null"],
    "description": "Why the server cannot store changes, since when, and what waits; null: it can.",
}


def document() -> Schema:
    schemas = _values()
    # A standalone document has a version; one that is part of another document does not.
    schemas["NodeRow"] = schemas["Node"]
    for name in ("JobStatus", "Node", "StackReport", "Report"):
        schemas[name] = _document(schemas[name]["properties"])
    for name, fields in (
        ("Jobs", {"jobs": _array("JobSummary"), "store_away": _STORE_AWAY}),
        ("Events", {"rdzv_id": {"type": "string"}, "events": _array("Event")}),
        ("LedgerOfRun", _LEDGER),
        ("NodeEvents", {"node_id": {"type": "string"}, "events": _array("NodeEvent")}),
        ("Nodes", {"nodes": _array("NodeRow"), "store_away": _STORE_AWAY}),
        ("Servers", {"servers": _array("Server")}),
    ):
        schemas[name] = _document(fields)
    schemas["Error"] = _error()
    schemas["OpenApi"] = {"type": "object", "required": ["openapi", "info", "paths"]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rdzvd",
            "version": "1",
            "summary": "The state of jobs, nodes and servers, with reasons. Nothing is changed.",
            "description": "The documents are those of `rdzvctl -o json`. `version` grows when a "
            "key changes its meaning or is removed; new keys may be added at any time. The unit of "
            "a key is the end of its name (`_ms`), and an unknown value is null.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": PREFIX}],
        "paths": _paths(operations()),
        "components": {"schemas": dict(sorted(schemas.items()))},
    }


def _paths(found: Iterable[Operation]) -> dict[str, Schema]:
    paths: dict[str, Schema] = {}
    for one in found:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    return paths


def _operation(one: Operation) -> Schema:
    schema = {"type": "string"}
    if one.schema is not None:
        schema = {"$ref": f"#/components/schemas/{one.schema}"}
    parameters = [
        {
            "name": parameter.name,
            "in": "query",
            "description": parameter.text,
            "schema": parameter.schema,
        }
        for parameter in one.query
    ]
    if one.of:
        named: Schema = {"name": _named_in(one.path), "in": "path", "required": True}
        about = f"The {one.of}'s name, percent-encoded."
        schema_of_name = {"type": "string", "minLength": 1}
        parameters.insert(0, {**named, "description": about, "schema": schema_of_name})
    return {
        "operationId": one.name,
        "summary": one.summary,
        **({"description": one.about} if one.about else {}),
        **({"parameters": parameters} if parameters else {}),
        "responses": {
            "200": {"description": one.summary, "content": {one.media_type: {"schema": schema}}},
            **{str(status): _refusal(text) for status, text in _refusals(one).items()},
        },
    }


def _named_in(path: str) -> str:
    return path.partition("{")[2].partition("}")[0]


def _refusals(one: Operation) -> Mapping[int, str]:
    more = (*one.refuses, 404) if one.of else one.refuses
    return dict(sorted({**_ALWAYS, **{status: _MORE[status] for status in more}}.items()))


def _refusal(text: str) -> Schema:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": text, "content": {"application/json": {"schema": schema}}}


def _error() -> Schema:
    return _document(
        {
            "code": {
                "type": "string",
                "description": f"The name of an error, stable: {', '.join(sorted(ERRORS))}, or "
                "HttpError for a request that is not valid HTTP.",
            },
            "message": {"type": "string"},
            "leader": {
                "type": ["string", "null"],
                "description": "HOST:PORT at which the leader serves nodes and rdzvctl.",
            },
        }
    )


def _document(properties: Mapping[str, Schema]) -> Schema:
    version = {"type": "integer", "const": as_json.VERSION}
    known = {name: schema for name, schema in properties.items() if name != "version"}
    return {
        "type": "object",
        "required": ["version", *known],
        "properties": {"version": version, **known},
    }


def _array(name: str) -> Schema:
    return {"type": "array", "items": {"$ref": _REF.format(name=name)}}


_REF = "#/components/schemas/{name}"

_VALUES = (
    *(answers.Event, answers.JobStatus, answers.JobSummary, answers.Node, answers.Server),
    *(answers.StackReport, answers.NodeEvent, Ledger, Report),
)

_STATES: Mapping[str, tuple[str, ...]] = {
    "JobStatus": tuple(map(str, JobState)),
    "JobSummary": tuple(map(str, JobState)),
    "NodeStatus": tuple(map(str, NodeState)),
    "Node": ("connected", "away", "gone"),
}


def _values() -> dict[str, Schema]:
    _, schemas = msgspec.json.schema_components(_VALUES, ref_template=_REF)
    for name, schema in schemas.items():
        properties = {key: _plain(one) for key, one in schema["properties"].items()}
        if name in _STATES:
            properties["state"]["enum"] = [*_STATES[name]]
        schemas[name] = {
            "type": "object",
            "description": schema["description"].splitlines()[0],
            "required": [*properties],
            "properties": properties,
        }
    return schemas


def _plain(schema: Schema) -> Schema:
    """Return a schema without defaults, and with "a type or null" as a list of two types."""
    match {key: value for key, value in schema.items() if key != "default"}:
        case {"anyOf": [{"type": kind, **more}, {"type": "null"}]} if not more:
            return {"type": [kind, "null"]}
        case plain:
            return plain
