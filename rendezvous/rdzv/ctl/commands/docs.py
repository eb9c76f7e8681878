"""The command that shows the documentation included in the wheel."""

from __future__ import annotations

from pathlib import Path

import click

from rdzv.errors import InvalidRequestError, did_you_mean

_HERE = Path(__file__)
PAGES = next(
    folder
    for folder in (_HERE.parents[2] / "documents", _HERE.parents[4] / "docs")
    if folder.is_dir()
)
"""The pages, in Markdown: pyproject.toml puts docs/ of a checkout into the wheel."""


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
