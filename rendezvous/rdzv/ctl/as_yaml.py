"""The documents of `as_json`, as YAML: the same keys, in the same order."""

from __future__ import annotations

import json

import yaml


def document(text: str) -> str:
    """Convert a JSON document to YAML; texts with several lines become blocks.

    The result is pure ASCII, like the JSON, so that nothing in it can harm a terminal.
    """
    written: str = yaml.dump(json.loads(text), Dumper=_Dumper, sort_keys=False, width=100)
    return written.rstrip("\n")


class _Dumper(yaml.SafeDumper):
    """Writes texts with several lines as blocks, unless something in them must be escaped."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
