"""The JSON documents that programs read.

`version` is incremented when a key is removed or changes its meaning; new keys may appear at any
time. The order of keys is stable, numbers are numbers, a key's unit is at the end of its name
(`_ms`), and unknown values are null.

`rdzvd --http` returns the same documents (`rdzv.server.http.api`). As an event in a stream, a
document is a single line without `indent`.
"""

from __future__ import annotations

import json
from typing import Any

from rdzv.core.model import JobSpec, Settings
from rdzv.structs import as_dict

VERSION = 1
"""The common version of all documents."""


def document(shown: Any, indent: int | None = 2) -> str:
    """Return the document for a struct, or for a dict that may have structs in it."""
    # Pure ASCII prevents the text from controlling a terminal.
    return json.dumps({"version": VERSION, **as_dict(shown)}, indent=indent)


def to_submit(rdzv_id: str, settings: Settings, spec: JobSpec) -> dict[str, Any]:
    """Return what is shown of a job to be submitted, without the values of its environment.

    It does not include the submitter, which the server determines.
    """
    hidden = ("env", "submitter")
    fields = {key: value for key, value in as_dict(spec).items() if key not in hidden}
    fields["labels"] = dict(spec.labels)
    fields["env_names"] = [name for name, _ in spec.env]
    return {"rdzv_id": rdzv_id, "settings": settings, "spec": fields}
