"""The inputs that have found something: one file each, replayed before new ones are tried."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

from tests.fuzz.surface import Input

FOLDER = Path(__file__).with_name("corpus")


def load(surface: str) -> dict[str, Input]:
    """Return the inputs of a surface, by the name of their file."""
    found = {}
    for path in sorted(FOLDER.glob(f"{surface}-*.json")):
        said = json.loads(path.read_text())
        found[path.name] = tuple((kind, base64.b64decode(data)) for kind, data in said["steps"])
    return found


def save(surface: str, steps: Input, found: str) -> Path:
    """Keep an input and its finding; duplicates are kept once."""
    digest = hashlib.sha256(repr(steps).encode()).hexdigest()[:12]
    path = FOLDER / f"{surface}-{digest}.json"
    said = {
        "surface": surface,
        "found": found,
        "steps": [[kind, base64.b64encode(data).decode()] for kind, data in steps],
    }
    path.write_text(json.dumps(said, indent=1) + "\n")
    return path
