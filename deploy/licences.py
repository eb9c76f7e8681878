"""Writes docs/licences.md: the licences of the packages that rdzv needs.

    deploy/licences.py dist/rdzv.cdx.json >docs/licences.md

It is read from the list that `make sbom` has made, in CycloneDX's JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = """# Licences

rdzv is under Apache-2.0. Here is what it needs to run, with the extra `oidc`, and the licence
that each has declared. `make sbom` writes this, and `dist/rdzv.cdx.json`, a CycloneDX list
with versions; `make audit` asks PyPI for known vulnerabilities of the same. torch is the jobs'
own, and no part of it.

| package | licence |
|---|---|
"""

CLASSIFIER = "License :: OSI Approved :: "


def licence(component: dict[str, Any]) -> str:
    """Return a component's declared licence: an SPDX expression, or else the name it gives.

    >>> licence({"licenses": [{"license": {"name": "License :: OSI Approved :: BSD License"}}]})
    'BSD License'
    """
    declared = component.get("licenses", ())
    expressions = [one["expression"] for one in declared if "expression" in one]
    ids = [one["license"]["id"] for one in declared if "id" in one.get("license", {})]
    names = [one["license"]["name"] for one in declared if "name" in one.get("license", {})]
    # Packages with an identifier repeat it as a classifier, which is less precise.
    found = expressions or ids or [name.removeprefix(CLASSIFIER) for name in names]
    return ", ".join(found) or "see the package"


def main() -> None:
    """Write the document to stdout."""
    components = json.loads(Path(sys.argv[1]).read_text())["components"]
    rows = [f"| {one['name']} | {licence(one)} |\n" for one in components]
    sys.stdout.write(HEAD + "".join(sorted(rows, key=str.lower)))


if __name__ == "__main__":
    main()
