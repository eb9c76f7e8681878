"""The JSON documents that programs read.

`version` is incremented when a key is removed or changes its meaning; new keys may appear at any
time. The order of keys is stable, numbers are numbers, a key's unit is at the end of its name
(`_ms`), and unknown values are null.

`rdzvd --http` returns the same documents (`rdzv.server.http.api`). As an event in a stream, a
document is a single line without `indent`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rdzv.core.model import JobSpec, Settings
from rdzv.structs import as_dict
from rdzv.view.answers import Event, JobSummary, Node, NodeEvent, Server, Token
from rdzv.view.ledger import Ledger

VERSION = 1
"""The common version of all documents."""

INDENT = 2


def document(shown: Any, indent: int | None = INDENT) -> str:
    """Return the document for a struct, or for a dict that may have structs in it."""
    # Pure ASCII prevents the text from controlling a terminal.
    return json.dumps({"version": VERSION, **as_dict(shown)}, indent=indent)


def jobs(
    found: Sequence[JobSummary], indent: int | None = INDENT, *, store_away: str | None = None
) -> str:
    """Return the document for a list of jobs; `store_away` says why changes are not stored."""
    return document({"jobs": found, "store_away": store_away}, indent)


def events(rdzv_id: str, history: Sequence[Event], indent: int | None = INDENT) -> str:
    """Return the document for a job's history, oldest first."""
    return document({"rdzv_id": rdzv_id, "events": history}, indent)


def node_events(node_id: str, found: Sequence[NodeEvent]) -> str:
    """Return the document for a node's history, oldest first."""
    return document({"node_id": node_id, "events": found})


def ledger(
    rdzv_id: str, run_numbers: Sequence[int], found: Ledger, indent: int | None = INDENT
) -> str:
    """Return the document for one run's ledger; `run_numbers` lists all runs that are kept."""
    return document({"rdzv_id": rdzv_id, "run_numbers": run_numbers, "ledger": found}, indent)


def audit(history: Sequence[Event]) -> str:
    """Return the document for the audit log, oldest first."""
    return document({"events": history})


def tokens(found: Sequence[Token]) -> str:
    """Return the document for a list of tokens, without their secrets."""
    return document({"tokens": found})


def token_made(token: Token, text: str) -> str:
    """Return the document for a new token, including its secret."""
    return document({**as_dict(token), "text": text})


def servers(found: Sequence[Server], indent: int | None = INDENT) -> str:
    return document({"servers": found}, indent)


def nodes(
    found: Sequence[Node], indent: int | None = INDENT, *, store_away: str | None = None
) -> str:
    return document({"nodes": found, "store_away": store_away}, indent)


def to_submit(rdzv_id: str, settings: Settings, spec: JobSpec) -> str:
    """Return the document for a job to be submitted, without the values of its environment.

    It does not include the submitter, which the server determines.
    """
    hidden = ("env", "submitter")
    fields = {key: value for key, value in as_dict(spec).items() if key not in hidden}
    fields["labels"] = dict(spec.labels)
    fields["env_names"] = [name for name, _ in spec.env]
    return document({"rdzv_id": rdzv_id, "settings": settings, "spec": fields})


def one_line(document: str) -> str:
    return json.dumps(json.loads(document))
