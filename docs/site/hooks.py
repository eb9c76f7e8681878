"""The pages of the site that are not in docs/: from elsewhere in the tree, and generated ones.

Links of a page to other files of the tree lead to the page of that file, if there is one; else they
become plain text, since the site is read without a checkout.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import os
import posixpath
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

ELSEWHERE = {
    "GLOSSARY.md": "GLOSSARY.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "bench/RESULTS.md": "bench-results.md",
    "deploy/slurm/README.md": "start/slurm.md",
    "deploy/kubernetes/README.md": "start/kubernetes.md",
}
"""Pages that stand elsewhere in the tree, by their place on the site."""

GENERATED = {
    "rendezvous/rdzv/view/answers.py": "reference/documents.md",
    "rendezvous/rdzv/view/history.py": "reference/events.md",
}
"""The pages of the site that show what links to these files are about."""

ASIDE = ("CHANGELOG.md", "bench-results.md", "protocol.md", "licences.md")
"""Pages that a search shows after all others: they name everything, and explain little."""

_WIDTH = {"COLUMNS": "100", "TERMINAL_WIDTH": "100"}

PROGRAMS = ("rdzvrun", "rdzvctl", "rdzvd", "rdzv-agent")

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for source, place in ELSEWHERE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    for picture in (ROOT / "bench").glob("*.svg"):
        files.append(File.generated(config, picture.name, content=picture.read_text()))
    for place, content in (
        ("reference/commands.md", _commands()),
        ("reference/events.md", _events()),
        ("reference/documents.md", _documents()),
        ("reference/http-api.md", _http_api()),
        ("reference/worker.md", _worker()),
    ):
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files of the tree lead to their pages."""
    places = {place: source for source, place in ELSEWHERE.items()}
    source = places.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path, _, anchor = target.partition("#")
        if "://" in target or not path or path.startswith("mailto:"):
            return found[0]
        in_tree = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not (ROOT / in_tree).exists():
            return found[0]  # A dead link: mkdocs says so.
        place = ELSEWHERE.get(in_tree) or GENERATED.get(in_tree)
        if place is None and in_tree.startswith("docs/"):
            place = in_tree.removeprefix("docs/")
        if place is None or (ROOT / in_tree).is_dir():
            return text if text == in_tree else f"{text} (`{in_tree}`)"
        return f"[{text}]({posixpath.relpath(place, here or '.')}{'#' + anchor if anchor else ''})"

    if page.file.src_uri in ASIDE:
        page.meta["search"] = {"boost": 0.1}
    return _LINK.sub(link, markdown)


# ---------------------------------------------------------------------- generated pages


def _commands() -> str:
    """Return the --help of every program, and of every command of rdzvctl."""
    lines = ["# Commands", "", "What each program says with `--help`.", ""]
    for program in PROGRAMS:
        done = subprocess.run(
            [str(Path(sys.executable).parent / program), "--help"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={**os.environ, **_WIDTH},
        )
        lines += [f"## {program}", "", *_text(done.stdout)]
        if program == "rdzvctl":
            lines += _commands_of_rdzvctl()
    return "\n".join(lines)


def _commands_of_rdzvctl() -> Iterator[str]:
    """Ask all of them in this process: each start of another takes longer than the whole site."""
    import click
    from click.testing import CliRunner

    from rdzv.ctl.__main__ import rdzvctl

    for name in rdzvctl.list_commands(click.Context(rdzvctl)):
        asked = [name, "--help"]
        said = CliRunner().invoke(rdzvctl, asked, prog_name="rdzvctl", env=_WIDTH)
        yield from (f"### rdzvctl {name}", "", *_text(said.stdout))


def _text(said: str) -> list[str]:
    return ["```text", said.rstrip(), "```", ""]


def _events() -> str:
    """Return a table of the fields of every event."""
    from rdzv.core.events import NewWorker
    from rdzv.view.history import KINDS, NotKept, Place, Worker

    lines = [
        "# Events",
        "",
        "`rdzvctl events JOB -o json` and `/api/v1/jobs/JOB/events` have them. An event has",
        "`unix_ms`, `run`, `name`, `text` (a sentence for people) and `fields`. Later versions may",
        "add fields; none is renamed or removed. A `reason` may quote a user or a worker. Lists",
        "have at most eight entries.",
        "",
    ]
    for _, kind in sorted(KINDS.items()):
        lines += _kind(kind)
    for kind in (NewWorker, NotKept, Place, Worker):
        lines += _kind(kind)
    return "\n".join(lines)


def _documents() -> str:
    """Return a table of the keys of every document that programs read."""
    from rdzv.core.model import JobSpec, Settings
    from rdzv.view import answers, ledger, reports

    lines = [
        "# JSON documents",
        "",
        "The keys of what `rdzvctl ... -o json` and [the HTTP API](http-api.md) return;",
        "[which command has which](../rdzvctl.md#documents). `None` is `null`. The time of a key",
        "ends with its unit; `age` is how long ago.",
        "",
    ]
    roots = (
        *(answers.JobStatus, answers.JobSummary, answers.Event, answers.Node, answers.Server),
        *(answers.Token, answers.StackReport, ledger.Ledger, reports.Report, Settings, JobSpec),
    )
    found: list[type] = []
    for root in roots:
        _collect(root, found)
    for kind in found:
        lines += _kind(kind)
    return "\n".join(lines)


def _collect(kind: type, found: list[type]) -> None:
    """Add a kind of document, and those that its keys have."""
    if kind in found:
        return
    found.append(kind)
    for hint in typing.get_type_hints(kind).values():
        for inner in (hint, *typing.get_args(hint)):
            if hasattr(inner, "__struct_fields__"):
                _collect(inner, found)


def _kind(kind: type) -> Iterator[str]:
    """Document the fields of a struct by its docstring and theirs."""
    yield from (f"## {kind.__name__}", "", inspect.getdoc(kind) or "", "")
    if hints := typing.get_type_hints(kind):
        told = _told(kind)
        yield from ("| key | type | |", "|---|---|---|")
        for name, hint in hints.items():
            yield f"| `{name}` | {_type(hint)} | {told.get(name, '')} |"
        yield ""


def _told(kind: type) -> dict[str, str]:
    """Return the docstrings of a struct's fields."""
    source = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(source, ast.ClassDef)
    found = {}
    for one, after in itertools.pairwise(source.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant):
                found[one.target.id] = " ".join(str(text.value).split())
    return found


def _type(hint: object) -> str:
    text = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(hint))
    return re.sub(r"<(?:class|enum) '(\w+)'>", r"\1", text).replace("|", "or")


def _http_api() -> str:
    """Return a table of the operations in docs/openapi.json."""
    document = json.loads((ROOT / "docs/openapi.json").read_text())
    lines = [
        "# HTTP API",
        "",
        "`rdzvd --http HOST:PORT` serves it below `/api/v1`; the machine-readable description is",
        "[openapi.json](../openapi.json), also at `/api/v1/openapi.json`.",
        "",
        "| call | what it does |",
        "|---|---|",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if isinstance(operation, dict) and "summary" in operation:
                call = f"{method.upper()} {path}{_query(operation)}"
                lines.append(f"| `{call}` | {operation['summary']} |")
    return "\n".join([*lines, ""])


def _query(operation: dict[str, typing.Any]) -> str:
    """Return the query parameters of an operation, as they stand in its URL."""
    parameters = operation.get("parameters", ())
    names = [one["name"] for one in parameters if one["in"] == "query"]
    return f"?{'=&'.join(names)}=" if names else ""


def _worker() -> str:
    """Return the docstrings of what `rdzv.worker` exports, without importing torch."""
    folder = ROOT / "worker/rdzv/worker"
    package = ast.parse((folder / "__init__.py").read_text())
    found = {
        node.name: node
        for path in folder.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    exported = next(
        ast.literal_eval(node.value)
        for node in package.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    lines = ["# rdzv.worker", "", ast.get_docstring(package) or "", ""]
    for name in exported:
        lines += _documented(found[name])
    return "\n".join(lines)


def _is_public(node: ast.stmt) -> bool:
    return isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_")


def _documented(node: ast.stmt, owner: str = "") -> Iterator[str]:
    assert isinstance(node, (ast.ClassDef, ast.FunctionDef))
    depth = "###" if owner else "##"
    arguments = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
    yield from (f"{depth} {owner}{node.name}", "", f"`{node.name}{arguments}`", "")
    yield from (ast.get_docstring(node) or "", "")
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if _is_public(member) and ast.get_docstring(member):
                yield from _documented(member, f"{node.name}.")
