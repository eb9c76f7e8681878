"""Commands for finding out whether all is well, and for trying it.

These are doctor, support-bundle, demo and docs, which shows the pages that the wheel contains.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rdzv.ctl import command_line as cli
from rdzv.errors import InvalidRequestError, did_you_mean

if TYPE_CHECKING:
    from rdzv.ctl.doctor import Finding


_HERE = Path(__file__)
PAGES = next(
    folder
    for folder in (_HERE.parents[2] / "documents", _HERE.parents[4] / "docs")
    if folder.is_dir()
)
"""The pages, in Markdown: pyproject.toml puts docs/ of a checkout into the wheel."""

WAIT_S = 300.0


@cli.command("doctor")
@click.option(
    "--nodes", "with_nodes", is_flag=True, help="Also check the nodes that the server knows."
)
@click.option("--python", metavar="PATH", help="""
    The interpreter of the workers; default: PYTHON_EXEC, else rdzvctl's own.""")  # fmt: skip
@click.option("--listen", "listen_port", type=click.IntRange(min=0, max=65_535), metavar="PORT",
    help="""
    Only wait for --reach from another machine, and connect back; 0: a free port.""")  # fmt: skip
@click.option("--reach", metavar="HOST:PORT", help="""
    Only test the connection to and from a machine that runs --listen.""")  # fmt: skip
@click.pass_context
def doctor_command(
    context: click.Context,
    with_nodes: bool,
    python: str | None,
    listen_port: int | None,
    reach: str | None,
) -> int:
    """Check this machine, the connection to the server and, with --nodes, the nodes.

    Nothing is changed. Exit code 1: there is a problem; with only warnings it is 0. To test whether
    workers on two machines reach each other, run it on both:

    \b
    on n1: rdzvctl doctor --listen 29500
    on n2: rdzvctl doctor --reach n1:29500
    """
    from rdzv.ctl import doctor

    if listen_port is not None and reach is not None:
        raise click.UsageError(
            "--listen and --reach are for two different machines; give one of them", context
        )
    if listen_port is not None:
        within_s = cli.connection(context).get("timeout_s", WAIT_S)
        return _show([doctor.wait_for_visit(listen_port, within_s, _say_port)])
    if reach is not None:
        host, _, port = reach.rpartition(":")
        if not host or not port.isdigit():
            raise click.UsageError(f"--reach {reach!r} is not HOST:PORT", context)
        return _show([doctor.visit(host.strip("[]"), int(port))])
    python = python or os.environ.get("PYTHON_EXEC") or sys.executable
    credentials = cli.credentials_of(context)
    with cli.opened_client() as client:
        return _show(doctor.examine(client, credentials, python, with_nodes=with_nodes))


def _say_port(port: int) -> None:
    click.echo(f"waiting for the other machine: rdzvctl doctor --reach THIS_HOST:{port}")


def _show(findings: Iterable[Finding]) -> int:
    """Print each finding immediately, because some take seconds; return the exit code."""
    from rdzv.ctl import doctor
    from rdzv.ctl.layout import page_for

    page, exit_code = page_for(sys.stdout), cli.OK
    for finding in findings:
        click.echo(doctor.line(finding, page))
        if finding.verdict is doctor.Verdict.PROBLEM:
            exit_code = cli.REFUSED
    return exit_code


@cli.command("support-bundle")
@cli.job_argument()
@click.option("-o", "--output", "path", type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE", help="""
    Where to write it; default: JOB-support.tar.gz.""")  # fmt: skip
@click.option(
    "--logs", "with_logs", is_flag=True, help="Also include the end of its workers' output."
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--yes", is_flag=True, help="Write it without asking.")
def support_bundle_command(
    job: str, path: Path | None, with_logs: bool, force: bool, yes: bool
) -> str:
    """Collect everything known about JOB into an archive that you can send to someone.

    It contains status, history, explanation, trace, nodes and servers. Anything that looks like a
    secret (tokens, passwords, keys) is hidden. The files are listed before they are written, so
    that you can check them.
    """
    from rdzv.ctl import support_bundle
    from rdzv.ctl.new_files import new_file

    now_unix_ms = round(time.time() * 1000)
    with cli.opened_client() as client:
        files = support_bundle.collect(client, job, now_unix_ms, with_logs=with_logs)
    folder = "".join(c if c.isalnum() or c in "-_." else "_" for c in job) + "-support"
    path = path or Path(f"{folder}.tar.gz")
    click.echo("\n".join([f"{path} will have:", *support_bundle.contents(files)]), err=True)
    if not yes:
        click.confirm("Write it?", abort=True, err=True)
    with new_file(path, replace=force) as file:
        support_bundle.write(files, folder, file, now_unix_ms)
    return f"{path} is written; only you can read it"


@click.command("demo")
@click.option("--python", metavar="PATH", help="""
    The interpreter with torch that trains; default: PYTHON_EXEC, else rdzvctl's
    own.""")  # fmt: skip
@click.option("--keep", is_flag=True, help="""
    Keep the files, and keep the server and its page running until Ctrl-C.""")  # fmt: skip
def demo_command(python: str | None, keep: bool) -> int:
    """Run a real training job on this machine that loses a worker, then a node, and continues.

    It starts a server and two nodes on free loopback ports, trains a small model on the CPU, and
    finishes by itself in about half a minute. It contacts no other server and leaves nothing
    behind.
    """
    from rdzv.demo import story

    story.play(python or os.environ.get("PYTHON_EXEC") or sys.executable, keep=keep)
    return 0


@click.command("docs")
@click.argument("page", required=False)
def docs_command(page: str | None) -> str:
    """Print PAGE of the documentation; without PAGE, list all pages.

    The pages describe this version. A reference to `docs/hangs.md` in a message is the page
    `hangs`.
    """
    pages = {str(path.relative_to(PAGES).with_suffix("")): path for path in PAGES.rglob("*.md")}
    if page is None:
        width = max(map(len, pages))
        return "\n".join(f"{name:{width}}  {_title(path)}" for name, path in sorted(pages.items()))
    name = page.removeprefix("docs/").removesuffix(".md")
    found = pages.get(name) or next((p for n, p in pages.items() if Path(n).name == name), None)
    if found is None:
        remedy = did_you_mean(name, pages, "`rdzvctl docs` lists all")
        raise InvalidRequestError(f"no page is called {page!r}; {remedy}")
    return found.read_text().rstrip("\n")


def _title(page: Path) -> str:
    return page.read_text().partition("\n")[0].lstrip("# ")
