"""`rdzvctl support-bundle`: collects data for examining a job elsewhere, without secrets.

Documents from the server never contain tokens, job secrets or submitted jobs' environment. Data
from the jobs themselves (arguments, reasons, output) may; `redacted` hides likely secrets.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Callable, Iterable, Mapping
from typing import IO

from rdzv.client import ControlClient
from rdzv.ctl import as_text_story, doctor
from rdzv.ctl.layout import page_for
from rdzv.ctl.trace import trace
from rdzv.errors import RendezvousError
from rdzv.version import VERSION
from rdzv.view import as_json

HISTORY_EVENTS = 10_000
LOG_LINES = 1_000
LOG_BYTES = 1 << 20

HIDDEN = "[hidden]"

_SECRETS = (
    re.compile(r"\brdzv_[0-9a-f]{8}_[A-Za-z0-9_-]{43}\b"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL),
    re.compile(r"(?<=://)[^/\s:@\"']+:[^/\s@\"']+(?=@)"),
    re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,})"),
    re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(
        r"(?i)(?<![A-Za-z0-9])([A-Za-z0-9_-]*(?:secret|token|passw(?:or)?d|api[_-]?key|access[_-]?key)"
        r"[A-Za-z0-9_-]*\\?[\"']?\s*[=:]\s*\\?[\"']?)(?!true|false|null)[^\s\"',;&\\]{4,}"
    ),
)


def redacted(text: str) -> str:
    """Hide everything that looks like a secret, but keep the name before it.

    >>> redacted("--wandb-api-key=0123456789 https://ada:pw@host/x")
    '--wandb-api-key=[hidden] https://[hidden]@host/x'
    """
    for pattern in _SECRETS:
        text = pattern.sub(lambda found: (found[1] if found.re.groups else "") + HIDDEN, text)
    return text


def collect(
    client: ControlClient, rdzv_id: str, now_unix_ms: int, *, with_logs: bool
) -> dict[str, str]:
    """Return a bundle's files by name; NAME.missing explains why the part NAME is unavailable."""
    status, history = client.status(rdzv_id), client.events(rdzv_id, HISTORY_EVENTS)
    page = page_for(io.StringIO())
    parts: dict[str, Callable[[], str]] = {
        "status.json": lambda: as_json.document(status),
        "explain.txt": lambda: as_text_story.explain(status, history, page),
        "events.json": lambda: as_json.document({"rdzv_id": rdzv_id, "events": history}),
        "trace.json": lambda: trace(status, history, now_unix_ms),
        "nodes.json": lambda: as_json.document({"nodes": client.nodes(), "store_away": None}),
        "servers.json": lambda: as_json.document({"servers": client.servers()}),
        "doctor.txt": lambda: "\n".join(
            doctor.line(finding, page) for finding in doctor.check_server(client)
        ),
    }
    if with_logs:
        parts["logs.txt"] = lambda: _output(client, rdzv_id)
    files = {"version.txt": f"rdzvctl {VERSION}\n"}
    for name, part in parts.items():
        try:
            files[name] = redacted(part())
        except RendezvousError as error:
            files[f"{name}.missing"] = str(error)
    return files


def _output(client: ControlClient, rdzv_id: str) -> str:
    pieces: dict[tuple[str, int, bool], bytes] = {}
    for piece in client.logs(rdzv_id, tail_lines=LOG_LINES):
        worker = (piece.node_id, piece.rank, piece.stderr)
        note = f"[{piece.note}]\n".encode() if piece.note else b""
        pieces[worker] = (pieces.get(worker, b"") + note + piece.data)[-LOG_BYTES:]
    return "\n".join(
        f"== {node_id or rdzv_id} RANK {rank} {'stderr' if stderr else 'stdout'}\n"
        f"{data.decode(errors='replace')}"
        for (node_id, rank, stderr), data in sorted(pieces.items())
    )


def contents(files: Mapping[str, str]) -> Iterable[str]:
    for name, text in files.items():
        yield f"  {name:<16} {len(text.encode()):>9} bytes"


def write(files: Mapping[str, str], folder: str, to: IO[bytes], now_unix_ms: int) -> None:
    with tarfile.open(fileobj=to, mode="w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), now_unix_ms // 1000, 0o600
            archive.addfile(entry, io.BytesIO(data))
