"""What the HTTP API has: its operations, their parameters, and the OpenAPI document of them.

`api` reads requests by the same parameters, and the schemas are made from the values that rdzvctl
prints: so the document can not say anything else than the code. `docs/openapi.json` is this
document at the default limits.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from rdzv.core.model import JobState, NodeState
from rdzv.errors import ERRORS, InvalidRequestError
from rdzv.server.settings.config import Limits
from rdzv.structs import field_names, struct
from rdzv.view import answers, as_json

PREFIX = "/api/v1"

Schema = dict[str, Any]


@struct(frozen=True)
class Number:
    """A parameter that is a whole number. Without a default it need not be given."""

    name: str
    text: str
    least: int
    most: int
    default: int | None = None

    def read(self, given: str | None) -> int | None:
        """Return the number.

        Raises:
            InvalidRequestError: it is none, or out of bounds.

        """
        if given is None:
            return self.default
        if not given.isascii() or not given.isdigit() or len(given) > 10:
            raise self._refusal(given, "is no whole number")
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
        """Its name in OpenAPI."""
        default = {} if self.default is None else {"default": self.default}
        return {"type": "integer", "minimum": self.least, "maximum": self.most, **default}


@struct(frozen=True)
class Flag:
    """A parameter that is true or false."""

    name: str
    text: str

    def read(self, given: str | None) -> bool:
        """Return what it says; raises InvalidRequestError if that is neither."""
        if given not in (None, "true", "false"):
            shown = given if len(given) <= 40 else f"{given[:40]}..."
            raise InvalidRequestError(f"{self.name}={shown!r} is neither; give true or false")
        return given == "true"

    @property
    def schema(self) -> Schema:
        """Its name in OpenAPI."""
        return {"type": "boolean", "default": False}


@struct(frozen=True)
class Name:
    """A parameter that names a job. It may have any characters, percent-encoded."""

    name: str
    text: str

    def read(self, given: str | None) -> str | None:
        """Return the name; None if none was given."""
        return given

    @property
    def schema(self) -> Schema:
        """Its name in OpenAPI."""
        return {"type": "string"}


Parameter = Number | Flag | Name


@struct(frozen=True)
class Operation:
    """One thing that can be asked for. `schema` is None where the answer is no JSON."""

    name: str
    path: str
    summary: str
    about: str = ""
    query: tuple[Parameter, ...] = ()
    schema: str | None = None
    media_type: str = "application/json"
    of: str = ""
    """The kind of thing that a name in the path stands for: job, node."""
    refuses: tuple[int, ...] = ()
    """Statuses beside those that all have."""


_ALWAYS = {
    400: "The request makes no sense; the message says what to give instead.",
    429: "A limit of the server is reached: try again later.",
    503: "This server stands by for another, which `leader` names, or is stopping: ask that one, "
    "or again.",
}
_MORE = {
    404: "There is none of this name.",
    409: "The run that is meant is over.",
}

U32 = 2**32 - 1


def operations(limits: Limits) -> tuple[Operation, ...]:
    """Return all that can be asked for."""
    limit = Number("limit", "Only the newest so many.", 1, limits.history_rows)
    rank = Number("rank", "Only the worker with this RANK; all if not given.", 0, U32)
    round_ = Number("round", "This round; the last if not given.", 0, U32)
    most = limits.http_log_lines
    tail = Number("tail", "So many lines of the end of each file.", 1, most, min(200, most))
    follow = Flag("follow", "Go on with what is written, until the run ends.")
    job = Name("job", "Follow this job; the whole fleet if not given.")
    return (
        Operation("listJobs", "/jobs", "Every job, one line each", schema="Jobs"),
        Operation(
            "getJob", "/jobs/{rdzv_id}", "What a job does, and why", schema="JobStatus", of="job"
        ),
        Operation(
            "listEvents",
            "/jobs/{rdzv_id}/events",
            "What has happened to a job, oldest first",
            query=(limit,),
            schema="Events",
            of="job",
        ),
        Operation(
            "readLogs",
            "/jobs/{rdzv_id}/logs",
            "What a job's workers have written, from the nodes that have it",
            "Whole lines; where all RANKs are asked for, each begins with its worker's. Of a node "
            "that can not be read a line that begins with `rdzv: ` says why. At most "
            f"{limits.http_log_bytes} bytes, unless `follow` is true.",
            query=(rank, round_, tail, follow),
            media_type="text/plain",
            of="job",
            refuses=(409,),
        ),
        Operation(
            "readStacks",
            "/jobs/{rdzv_id}/stacks",
            "What a job's workers were doing when a round of it hung",
            "They are kept, of the latest hangs. No worker is looked at for this: `rdzvctl stacks` "
            "does that.",
            query=(Number("round", "When this round hung; the last if not given.", 0, U32),),
            schema="StackReport",
            of="job",
        ),
        Operation("listNodes", "/nodes", "Every node, across its jobs", schema="Nodes"),
        Operation("getNode", "/nodes/{node_id}", "One node", schema="Node", of="node"),
        Operation(
            "listServers",
            "/servers",
            "The servers that share a store; one that stands by answers too",
            schema="Servers",
        ),
        Operation(
            "stream",
            "/stream",
            "What changes, as it changes: server-sent events",
            _STREAM,
            query=(job,),
            media_type="text/event-stream",
            refuses=(404,),
        ),
        Operation("getOpenApi", "/openapi.json", "This document", schema="OpenApi"),
    )


_STREAM = (
    "It begins with `begin`, then everything, then `ready`, and goes on with what has changed. "
    "Of the fleet: `jobs` and `nodes`, documents as of the operations listJobs and listNodes with "
    "some of their rows, each of which takes the place of the one with its name; `gone`, the names "
    "of `jobs` and `nodes` that are not there any more. Of one job: `job` (getJob) and `events` "
    "(listEvents), whole each time. `beat` comes, with a comment, while nothing else does. `end` "
    "says with a code and a message why the server ends the stream: it leads no more, it stops, or "
    "the reader was too slow. After it, or a break, connect again: it begins anew."
)

# ------------------------------------------------------------------------------------ the document

_STORE_AWAY: Schema = {
    "type": ["string", "null"],
    "description": "Why the server stores nothing new, since when, and what waits; null: it does.",
}


def document(limits: Limits) -> Schema:
    """Return the OpenAPI document."""
    schemas: dict[str, Schema] = {}
    for name, fields in (
        ("Jobs", {"jobs": _array(_ref(answers.JobSummary, schemas)), "store_away": _STORE_AWAY}),
        (
            "Events",
            {"rdzv_id": {"type": "string"}, "events": _array(_ref(answers.Event, schemas))},
        ),
        ("Nodes", {"nodes": _array(_ref(answers.Node, schemas))}),
        ("Servers", {"servers": _array(_ref(answers.Server, schemas))}),
    ):
        schemas[name] = _document(fields)
    _ref(answers.JobStatus, schemas)
    _ref(answers.StackReport, schemas)
    for name in ("JobStatus", "Node", "StackReport"):
        # A document stands alone; within another it has no version of its own.
        if name == "Node":
            schemas["NodeRow"] = schemas[name]
        schemas[name] = _document(schemas[name]["properties"])
    rows = _array({"$ref": "#/components/schemas/NodeRow"})
    schemas["Nodes"] = _document({"nodes": rows, "store_away": _STORE_AWAY})
    schemas["Error"] = _error()
    schemas["OpenApi"] = {"type": "object", "required": ["openapi", "info", "paths"]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rdzvd",
            "version": "1",
            "summary": "What jobs, nodes and servers do, and why. Read-only.",
            "description": "The documents are those of `rdzvctl -o json`. `version` grows when a "
            "key changes its meaning or goes; new keys may come at any time. A key's unit is the "
            "end of its name (`_ms`), and what is not known is null.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": PREFIX}],
        "paths": {one.path: {"get": _operation(one)} for one in operations(limits)},
        "components": {"schemas": dict(sorted(schemas.items()))},
    }


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
                "HttpError for what HTTP itself refuses.",
            },
            "message": {"type": "string"},
            "leader": {
                "type": ["string", "null"],
                "description": "HOST:PORT at which the one that leads serves nodes and rdzvctl.",
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


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_KNOWN_STATES = {
    (answers.JobStatus, "state"): tuple(str(state) for state in JobState),
    (answers.JobSummary, "state"): tuple(str(state) for state in JobState),
    (answers.NodeStatus, "state"): tuple(str(state) for state in NodeState),
    (answers.Node, "state"): ("connected", "away", "gone"),
}


def _ref(kind: type, schemas: dict[str, Schema]) -> Schema:
    """Refer to the schema of a value, and write it down with all that it refers to."""
    if kind.__name__ not in schemas:
        hints = typing.get_type_hints(kind)
        properties = {}
        schemas[kind.__name__] = {}
        for name in field_names(kind):
            properties[name] = _schema(hints[name], schemas)
            if (states := _KNOWN_STATES.get((kind, name))) is not None:
                properties[name] = {"type": "string", "enum": list(states)}
        schemas[kind.__name__] = {
            "type": "object",
            "description": (kind.__doc__ or "").strip().splitlines()[0],
            "required": list(properties),
            "properties": properties,
        }
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


_PLAIN = {int: "integer", str: "string", bool: "boolean", float: "number"}


def _schema(hint: Any, schemas: dict[str, Schema]) -> Schema:
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (kind,) = (one for one in inner if one is not type(None))
        known = _schema(kind, schemas)
        if "type" in known and isinstance(known["type"], str) and len(known) == 1:
            return {"type": [known["type"], "null"]}
        return {"anyOf": [known, {"type": "null"}]}
    if origin is tuple:
        return _array(_schema(inner[0], schemas))
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner[1], schemas)}
    return _ref(hint, schemas)
