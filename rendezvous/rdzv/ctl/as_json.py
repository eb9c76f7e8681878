"""The documents that programs read.

`version` grows when a key changes its meaning or goes; new keys may come at any time. The order
of the keys is stable, numbers are numbers, a key's unit is the end of its name (`_ms`), and what
is not known is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rdzv.client import Event, JobStatus, JobSummary, Server

VERSION = 1
"""Of all documents together."""


def status(job: JobStatus) -> str:
    """Return the document of one job: the fields of `JobStatus`, by their names."""
    return _document(asdict(job))


def jobs(summaries: Sequence[JobSummary]) -> str:
    """Return the document of a list of jobs."""
    return _document({"jobs": [asdict(job) for job in summaries]})


def events(rdzv_id: str, history: Sequence[Event]) -> str:
    """Return the document of a job's history, oldest first."""
    return _document({"rdzv_id": rdzv_id, "events": [asdict(event) for event in history]})


def servers(found: Sequence[Server]) -> str:
    """Return the document of the servers that share a store."""
    return _document({"servers": [asdict(server) for server in found]})


def one_line(document: str) -> str:
    """Return a document as one line, for those that follow each other."""
    return json.dumps(json.loads(document))


def _document(fields: Mapping[str, object]) -> str:
    # Pure ASCII, so that nothing in it can harm a terminal either.
    return json.dumps({"version": VERSION, **fields}, indent=2)
