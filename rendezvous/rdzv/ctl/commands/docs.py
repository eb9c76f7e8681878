"""The command that shows the documentation included in a release."""

from __future__ import annotations

from pathlib import Path

import click

from rdzv.errors import InvalidRequestError

SITE = Path(__file__).parents[2] / "documents"
"""Where `deploy/release.py` puts the site, which also has each page in Markdown."""


@click.command("docs")
@click.argument("page", required=False)
@click.option("--serve", is_flag=True, help="Show all pages in a browser, with search.")
@click.option(
    "--port",
    type=click.IntRange(min=0, max=65_535),
    default=0,
    metavar="PORT",
    help="With --serve: a port on loopback, such as one that ssh forwards; default: any free one.",
)
def docs_command(page: str | None, serve: bool, port: int) -> str:
    """Print PAGE of the documentation; without PAGE, list all pages.

    The pages describe this version. A reference to `docs/hangs.md` in a message is the page
    `hangs`.
    """
    return show(SITE, page, port if serve else None)


def show(site: Path, page: str | None, port: int | None) -> str:
    """Return a page from a site, or the list of its pages; with `port`, serve the site."""
    if not site.exists():
        raise InvalidRequestError(
            "this rdzvctl runs from a checkout: the documents are in its folder docs/; "
            "`make docs` builds the site in build/site"
        )
    if port is not None:
        _serve(site, port)
        return ""
    pages = {str(path.relative_to(site).with_suffix("")): path for path in site.rglob("*.md")}
    if page is None:
        return _list(pages)
    name = page.removeprefix("docs/").removesuffix(".md")
    found = pages.get(name) or next((p for n, p in pages.items() if Path(n).name == name), None)
    if found is None:
        import difflib

        near = difflib.get_close_matches(name, pages, 1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise InvalidRequestError(f"no page is called {page!r}{hint} `rdzvctl docs` lists all")
    return found.read_text().rstrip("\n")


def _list(pages: dict[str, Path]) -> str:
    width = max(map(len, pages))
    lines = [f"{name:{width}}  {_title(path)}" for name, path in sorted(pages.items())]
    return "\n".join(
        [*lines, "", "rdzvctl docs PAGE prints one; rdzvctl docs --serve has a search."]
    )


def _title(page: Path) -> str:
    return page.read_text().partition("\n")[0].lstrip("# ")


def _serve(site: Path, port: int) -> None:
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Do not log requests."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(site)))
    except OSError as error:
        raise InvalidRequestError(f"cannot listen on port {port}: {error.strerror}") from None
    with server:
        click.echo(f"the documents are at http://127.0.0.1:{server.server_port}/ until Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
