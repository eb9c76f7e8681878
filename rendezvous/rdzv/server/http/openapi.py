"""The OpenAPI document of the HTTP API, which `docs/openapi.json` is, too.

It is made of the table of operations, and of the values that their functions return, whose schemas
msgspec derives; so it always matches the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

import msgspec

from rdzv.core.model import JobState, NodeState
from rdzv.errors import ERRORS
from rdzv.server.operations.table import OPERATIONS, PREFIX, Http
from rdzv.view import as_json

Schema = dict[str, Any]

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


@cache
def document() -> Schema:
    schemas = _values()
    # A standalone document has a version; one that is part of another document does not.
    schemas["NodeRow"] = schemas["Node"]
    schemas["NodeList"]["properties"]["nodes"]["items"]["$ref"] = _REF.format(name="NodeRow")
    for kind in _ANSWERS.values():
        schemas[kind.__name__] = _document(schemas[kind.__name__]["properties"])
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
        "paths": _paths(),
        "components": {"schemas": dict(sorted(schemas.items()))},
    }


def _paths() -> dict[str, Schema]:
    paths: dict[str, Schema] = {}
    for one in OPERATIONS:
        if one.http is not None:
            paths.setdefault(one.http.path, {})[one.http.method.lower()] = _operation(one.http)
    return paths


def _operation(one: Http) -> Schema:
    schema = {"type": "string"}
    if one.media_type == "application/json":
        kind = _ANSWERS.get(one.name)
        schema = {"$ref": _REF.format(name=kind.__name__ if kind is not None else "OpenApi")}
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
        named: Schema = {"name": one.of, "in": "path", "required": True}
        about = f"The {_KINDS[one.of]}'s name, percent-encoded."
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


_KINDS = {"rdzv_id": "job", "node_id": "node"}


def _refusals(one: Http) -> Mapping[int, str]:
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


_REF = "#/components/schemas/{name}"

_ANSWERS: dict[str, type] = {
    one.http.name: get_type_hints(one.answer)["return"]
    for one in OPERATIONS
    if one.http is not None and one.answer is not None
    if one.http.media_type == "application/json"
}
"""What each operation answers that answers JSON."""

_STATES: Mapping[str, tuple[str, ...]] = {
    "JobStatus": tuple(map(str, JobState)),
    "JobSummary": tuple(map(str, JobState)),
    "NodeStatus": tuple(map(str, NodeState)),
    "Node": ("connected", "away", "gone"),
}


def _values() -> dict[str, Schema]:
    _, schemas = msgspec.json.schema_components(_ANSWERS.values(), ref_template=_REF)
    for name, schema in schemas.items():
        if "enum" in schema:
            continue
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
