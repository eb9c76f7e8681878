"""The table of operations: one row for each call of the gRPC service Control and of the HTTP API.

The gRPC service, the HTTP API, its OpenAPI document (`docs/openapi.json`), the check of roles and
the audit log are loops over it. A row's `rpc` is a method of Control, its `http` a request of the
API, and it has at least one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rdzv.errors import InvalidRequestError
from rdzv.server.operations import handlers as do
from rdzv.server.security.roles import ADMIN, ADMIN_CHANGES, CHANGE_JOB, LOOK_INSIDE, READ, Row
from rdzv.stores.base import HISTORY_ROWS
from rdzv.structs import struct

PREFIX = "/api/v1"

U32 = 2**32 - 1

LOG_BYTES = 1024 * 1024
"""The size of the logs in one answer, over all RANKs, unless the logs are followed."""

LOG_LINES = 10_000
"""The maximum number of lines from each file that can be requested in one answer."""


@struct(frozen=True)
class Parameter:
    """A query parameter, and its type in OpenAPI."""

    name: str
    text: str
    schema: dict[str, Any]

    def read(self, given: str | None) -> Any:
        if given is None or self.schema["type"] == "string":
            return self.schema.get("default") if given is None else given
        if self.schema["type"] == "boolean":
            if given not in ("true", "false"):
                raise self._refusal(given, "is not valid", "true or false")
            return given == "true"
        least, most = self.schema["minimum"], self.schema["maximum"]
        remedy = f"a number from {least} to {most}"
        if not given.isascii() or not given.isdigit() or len(given) > 10:
            raise self._refusal(given, "is not a whole number", remedy)
        if not least <= int(given) <= most:
            raise self._refusal(given, "is out of bounds", remedy)
        return int(given)

    def _refusal(self, given: str, why: str, remedy: str) -> InvalidRequestError:
        shown = given if len(given) <= 40 else f"{given[:40]}..."
        return InvalidRequestError(f"{self.name}={shown!r} {why}; give {remedy}")


def _number(name: str, text: str, least: int, most: int, default: int | None = None) -> Parameter:
    schema: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": most}
    return Parameter(name, text, schema | ({} if default is None else {"default": default}))


def _name(name: str, text: str) -> Parameter:
    return Parameter(name, text, {"type": "string"})


@struct(frozen=True)
class Http:
    """An operation as a request of the HTTP API."""

    name: str
    path: str
    summary: str
    about: str = ""
    query: tuple[Parameter, ...] = ()
    refuses: tuple[int, ...] = ()
    """The error statuses in addition to those that every operation may return."""
    method: str = "GET"
    media_type: str = "application/json"

    @property
    def of(self) -> str:
        """The name in the path, such as `rdzv_id`; empty if there is none."""
        return self.path.partition("{")[2].partition("}")[0]


@struct(frozen=True)
class Operation:
    """Something that operators can ask of a server."""

    rpc: str
    row: Row
    answer: Callable[[do.Server, Any], Any] | None
    """Returns or yields values for a request; None if the HTTP API answers it by itself."""
    http: Http | None = None


_SPENT = "It reads the histories of all jobs, so in a large fleet it takes its time."

_STREAM = (
    "It begins with `begin`, then the whole state, then `ready`, and continues with changes. Of "
    "the fleet: `jobs` and `nodes`, documents like those of listJobs and listNodes with some of "
    "the rows, each of which replaces the row of its name; `gone`, the names of `jobs` and "
    "`nodes` that no longer exist. Of one job: `job` (getJob) and `events` (listEvents), always "
    "complete. `beat` comes, with a comment, when nothing else does. `end` says with a code and a "
    "message why the server ends the stream: it no longer leads, it stops, or the reader was too "
    "slow. After `end` or a lost connection, connect again: the stream starts from the beginning."
)

OPERATIONS = (
    Operation(
        "ListJobs", READ, do.list_jobs, Http("listJobs", "/jobs", "Every job, one line each")
    ),
    Operation(
        "GetStatus",
        READ,
        do.get_status,
        Http("getJob", "/jobs/{rdzv_id}", "The state of a job, with the reason"),
    ),
    Operation("WatchJob", READ, do.watch_job),
    Operation(
        "ListEvents",
        READ,
        do.list_events,
        Http(
            "listEvents",
            "/jobs/{rdzv_id}/events",
            "The events of a job, oldest first",
            query=(
                _number("limit", "At most this number of events, the newest.", 1, HISTORY_ROWS),
            ),
        ),
    ),
    Operation(
        "",
        READ,
        do.get_ledger,
        Http(
            "getLedger",
            "/jobs/{rdzv_id}/ledger",
            "What each moment of a run was spent on, and what its failures cost",
            "Every moment from the beginning of the run to its end, or to now, lies in one "
            "interval. Without progress (`steps_reported` is false) training counts from the "
            "first collective or, where none is recorded, from the start of the workers, so "
            "`goodput` is an upper bound.",
            query=(_number("run", "The run of this number; the last one if not given.", 1, U32),),
        ),
    ),
    Operation(
        "",
        READ,
        do.get_restarts,
        Http(
            "getRestarts",
            "/jobs/{rdzv_id}/restarts",
            "A picture of the last restarts: who failed, was kept, is new, or was late",
            "Nodes down, time across, for the last run. It says the same in words, in `desc`.",
            media_type="image/svg+xml",
        ),
    ),
    # Workers' output and stacks belong to their user: they may contain data, paths and passwords.
    Operation(
        "ReadLogs",
        LOOK_INSIDE,
        do.read_logs,
        Http(
            "readLogs",
            "/jobs/{rdzv_id}/logs",
            "The output of a job's workers, from the nodes that have it",
            "Whole lines; without `rank`, each begins with the RANK of its worker. If the logs of "
            "a node cannot be read, a line that begins with `rdzv: ` says why. At most "
            f"{LOG_BYTES} bytes, unless `follow` is true.",
            query=(
                _number("rank", "The worker with this RANK; all workers if not given.", 0, U32),
                _number("round", "The round; the last if not given.", 0, U32),
                _number(
                    "tail", "The number of lines from the end of each file.", 1, LOG_LINES, 200
                ),
                _name("contains", "Only lines that contain this text, in upper or lower case."),
                Parameter(
                    "follow",
                    "Continue with new lines until the run ends.",
                    {"type": "boolean", "default": False},
                ),
            ),
            refuses=(409,),
            media_type="text/plain",
        ),
    ),
    Operation(
        "",
        LOOK_INSIDE,
        do.read_stacks,
        Http(
            "readStacks",
            "/jobs/{rdzv_id}/stacks",
            "The stacks of a job's workers when a round hung",
            "The server keeps those of the latest hangs. This request takes no new ones.",
            query=(_number("round", "The round that hung; the last one if not given.", 0, U32),),
        ),
    ),
    Operation(
        "TakeStacks",
        CHANGE_JOB,
        do.take_stacks,
        Http(
            "takeStacks",
            "/jobs/{rdzv_id}/stacks",
            "The stacks of a job's workers now, with torch's record of their collectives",
            "Each worker is stopped for a few milliseconds. The audit log records who asked. A "
            "browser may ask only from the server's own page.",
            refuses=(403, 409),
            method="POST",
        ),
    ),
    Operation("SubmitJob", CHANGE_JOB, do.submit_job),
    Operation("StopJob", CHANGE_JOB, do.stop_job),
    Operation("RestartJob", CHANGE_JOB, do.restart_job),
    Operation("ScaleJob", CHANGE_JOB, do.scale_job),
    Operation("ForgetJob", CHANGE_JOB, do.forget_job),
    Operation(
        "",
        READ,
        do.get_report,
        Http(
            "getReport",
            "/report",
            "What all jobs have spent, and which causes and nodes have cost most",
            _SPENT,
            query=(_number("hours", "The number of hours to look back.", 1, 8784, 168),),
        ),
    ),
    Operation(
        "ListNodes", READ, do.list_nodes, Http("listNodes", "/nodes", "Every node, across its jobs")
    ),
    Operation("", READ, do.get_node, Http("getNode", "/nodes/{node_id}", "One node")),
    Operation(
        "",
        READ,
        do.list_node_events,
        Http(
            "listNodeEvents",
            "/nodes/{node_id}/events",
            "What has happened on a node in all jobs, oldest first",
            _SPENT,
            query=(_number("limit", "At most this number of events, the newest.", 1, 1000, 200),),
        ),
    ),
    Operation("CordonNode", ADMIN_CHANGES, do.cordon_node),
    Operation("UncordonNode", ADMIN_CHANGES, do.uncordon_node),
    Operation("DrainNode", ADMIN_CHANGES, do.drain_node),
    Operation("UndrainNode", ADMIN_CHANGES, do.undrain_node),
    Operation(
        "ListServers",
        READ,
        do.list_servers,
        Http("listServers", "/servers", "The servers that share a store; a standby answers, too"),
    ),
    Operation("Backup", ADMIN, do.backup),
    Operation("CreateToken", ADMIN_CHANGES, do.create_token),
    Operation("ListTokens", ADMIN, do.list_tokens),
    Operation("RevokeTokens", ADMIN_CHANGES, do.revoke_tokens),
    Operation("ListAudit", ADMIN, do.list_audit),
    Operation(
        "",
        READ,
        None,
        Http(
            "stream",
            "/stream",
            "Changes as they happen: server-sent events",
            _STREAM,
            query=(_name("job", "The job to follow; the whole fleet if not given."),),
            refuses=(404,),
            media_type="text/event-stream",
        ),
    ),
    Operation("", READ, None, Http("getOpenApi", "/openapi.json", "This document")),
)
