"""Converts the documents of `as_json` to YAML, with the same keys in the same order."""

from __future__ import annotations

import json

import yaml


def document(text: str) -> str:
    """Convert a JSON document to YAML; multi-line strings become blocks.

    Like the JSON, the result is pure ASCII, so nothing in it can harm a terminal.
    """
    written: str = yaml.dump(json.loads(text), Dumper=_Dumper, sort_keys=False, width=100)
    return written.rstrip("\n")


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks, unless they contain characters that need escaping."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
