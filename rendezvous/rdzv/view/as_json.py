"""The JSON documents that programs read.

`version` is incremented when a key is removed or changes its meaning; new keys may appear at any
time. The order of keys is stable, numbers are numbers, a key's unit is at the end of its name
(`_ms`), and unknown values are null.

`rdzvd --http` returns the same documents (`rdzv.server.http.api`). As an event in a stream, a
document is a single line without `indent`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rdzv.core.model import JobSpec, Settings
from rdzv.structs import as_dict
from rdzv.view.answers import (
    Event,
    JobStatus,
    JobSummary,
    Node,
    NodeEvent,
    Server,
    StackReport,
    Token,
)
from rdzv.view.ledger import Ledger
from rdzv.view.reports import Report

VERSION = 1
"""The common version of all documents."""

INDENT = 2


def status(job: JobStatus, indent: int | None = INDENT) -> str:
    return _document(as_dict(job), indent)


def jobs(
    summaries: Sequence[JobSummary], indent: int | None = INDENT, *, store_away: str | None = None
) -> str:
    """Return the document for a list of jobs; `store_away` says why changes are not stored."""
    found = [as_dict(job) for job in summaries]
    return _document({"jobs": found, "store_away": store_away}, indent)


def events(rdzv_id: str, history: Sequence[Event], indent: int | None = INDENT) -> str:
    """Return the document for a job's history, oldest first."""
    fields = {"rdzv_id": rdzv_id, "events": [as_dict(event) for event in history]}
    return _document(fields, indent)


def node_events(node_id: str, found: Sequence[NodeEvent]) -> str:
    """Return the document for a node's history, oldest first."""
    return _document({"node_id": node_id, "events": [as_dict(event) for event in found]})


def ledger(
    rdzv_id: str, run_numbers: Sequence[int], found: Ledger, indent: int | None = INDENT
) -> str:
    """Return the document for one run's ledger; `run_numbers` lists all runs that are kept."""
    fields = {"rdzv_id": rdzv_id, "run_numbers": [*run_numbers], "ledger": as_dict(found)}
    return _document(fields, indent)


def report(found: Report) -> str:
    """Return the document for a report on all jobs, with the fields of `Report` by name."""
    return _document(as_dict(found))


def stacks(report: StackReport) -> str:
    return _document(as_dict(report))


def audit(history: Sequence[Event]) -> str:
    """Return the document for the audit log, oldest first."""
    return _document({"events": [as_dict(event) for event in history]})


def tokens(found: Sequence[Token]) -> str:
    """Return the document for a list of tokens, without their secrets."""
    return _document({"tokens": [as_dict(token) for token in found]})


def token_made(token: Token, text: str) -> str:
    """Return the document for a new token, including its secret."""
    return _document({**as_dict(token), "text": text})


def servers(found: Sequence[Server], indent: int | None = INDENT) -> str:
    return _document({"servers": [as_dict(server) for server in found]}, indent)


def nodes(
    found: Sequence[Node], indent: int | None = INDENT, *, store_away: str | None = None
) -> str:
    nodes = [as_dict(node) for node in found]
    return _document({"nodes": nodes, "store_away": store_away}, indent)


def node(found: Node, indent: int | None = INDENT) -> str:
    return _document(as_dict(found), indent)


def to_submit(rdzv_id: str, settings: Settings, spec: JobSpec) -> str:
    """Return the document for a job to be submitted, without the values of its environment.

    It does not include the submitter, which the server determines.
    """
    hidden = ("env", "submitter")
    fields = {key: value for key, value in as_dict(spec).items() if key not in hidden}
    fields["labels"] = dict(spec.labels)
    fields["env_names"] = [name for name, _ in spec.env]
    return _document({"rdzv_id": rdzv_id, "settings": as_dict(settings), "spec": fields})


def one_line(document: str) -> str:
    return json.dumps(json.loads(document))


def _document(fields: Mapping[str, object], indent: int | None = INDENT) -> str:
    # Pure ASCII prevents the text from controlling a terminal.
    return json.dumps({"version": VERSION, **fields}, indent=indent)
