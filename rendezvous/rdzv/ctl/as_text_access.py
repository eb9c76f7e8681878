"""Formats tokens and the audit log as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from rdzv.core.words import duration
from rdzv.ctl.layout import Cell, Columns, Page, Text
from rdzv.view.answers import Event, Token


def tokens(found: Sequence[Token], page: Page) -> str:
    """Format the tokens, one per line."""
    if not found:
        return "\n".join(page.sentence("there are no tokens; `rdzvctl tokens create` creates one"))
    columns: Columns[Token] = {
        "ID": lambda token: token.id,
        "NAME": lambda token: token.name,
        "ROLES": lambda token: ", ".join(token.roles),
        "AGE": lambda token: duration(token.age_ms),
        "USED": _used,
        "EXPIRES": _expires,
    }
    return "\n".join(page.table(found, columns))


def _used(token: Token) -> str:
    # The server does not record the time any more precisely.
    if token.used_age_ms is None:
        return "never"
    within_the_hour = token.used_age_ms < 3_600_000
    return "lately" if within_the_hour else f"{duration(token.used_age_ms)} ago"


def _expires(token: Token) -> Text:
    if token.expires_in_ms is None:
        return "never"
    if token.expires_in_ms == 0:
        return Cell("has expired", "red")
    return f"in {duration(token.expires_in_ms)}"


def made(token: Token) -> str:
    """Describe a new token, for stderr; only the token's text goes to stdout."""
    until = "does not expire"
    if token.expires_in_ms is not None:
        until = f"expires in {duration(token.expires_in_ms)}"
    return (
        f"token {token.id} of {token.name} ({', '.join(token.roles)}) {until}. Its text "
        "is shown only once; store it in a file that only its owner can read, for "
        "--token-file"
    )


def revoked(found: Sequence[Token]) -> str:
    """List the tokens that were revoked, one per line."""
    return "\n".join(f"token {token.id} of {token.name} is revoked" for token in found)


def audit(history: Sequence[Event], page: Page) -> str:
    """Format the audit log, oldest entry first."""
    if not history:
        return "\n".join(page.sentence("no changes are recorded"))
    columns: Columns[Event] = {
        "TIME": lambda event: page.at(event.unix_ms),
        "CALL": lambda event: event.name,
        "TEXT": lambda event: event.text,
    }
    return "\n".join(page.table(history, columns))
