"""Checks names, numbers and texts from outside against bounds, independently of protobuf.

A check returns the value, or refuses it with an error that names the value, the reason and the
remedy. Text for people (a reason, a traceback) is cut if it is too long, since a node's report must
not be refused for its length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from rdzv.errors import InvalidRequestError
from rdzv.server.settings.config import Limits

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@-]*")
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_ADDRESS = re.compile(r"[A-Za-z0-9.:%_-]+")
T = TypeVar("T")


def refusal(what: str, value: object, reason: str, remedy: str) -> InvalidRequestError:
    """Return an error that names a value, why it is refused, and the remedy."""
    shown = repr(value) if len(str(value)) <= 80 else repr(str(value)[:77] + "...")
    return InvalidRequestError(f"{what} {shown} {reason}; {remedy}")


def spelled(what: str, text: str, alphabet: re.Pattern[str], chars: int, allowed: str) -> str:
    """Check that a text is neither empty nor too long, and matches `alphabet`."""
    if not text:
        raise refusal(what, text, "is empty", f"give {allowed}")
    if len(text) > chars:
        raise refusal(what, text, f"has {len(text)} characters", f"give at most {chars}")
    if not alphabet.fullmatch(text):
        raise refusal(what, text, "has characters that are not allowed", f"use {allowed}")
    return text


def name(what: str, text: str, limits: Limits) -> str:
    """Check a name that a person has chosen; it is used as the name of a folder."""
    allowed = "letters, digits and . _ : @ -, beginning with a letter, a digit or _"
    return spelled(what, text, _NAME, limits.name_chars, allowed)


def rdzv_id_of(text: str, limits: Limits) -> str:
    """Check the name of a job."""
    return name("rdzv_id", text, limits)


def node_id_of(text: str, limits: Limits) -> str:
    """Check the name of a node."""
    return name("node_id", text, limits)


def uid(what: str, text: str, limits: Limits, *, needed: bool = True) -> str:
    """Check an id that a program has generated; it may be empty unless `needed`."""
    if not text and not needed:
        return ""
    return spelled(what, text, _UID, limits.uid_chars, "letters, digits, _ and -")


def address(what: str, text: str, limits: Limits, *, needed: bool = True) -> str:
    """Check a host name or IP address; it may be empty unless `needed`."""
    if not text and not needed:
        return ""
    return spelled(what, text, _ADDRESS, limits.address_chars, "a host name or an IP address")


def label(what: str, text: str, limits: Limits) -> str:
    """Check a printable text of bounded length; it may be empty."""
    if len(text) > limits.label_chars:
        raise refusal(
            what, text, f"has {len(text)} characters", f"give at most {limits.label_chars}"
        )
    if not text.isprintable():
        raise refusal(what, text, "has characters that cannot be printed", "leave them out")
    return text


def within(what: str, value: int, lowest: int, highest: int) -> int:
    """Check a number; a refusal shows milliseconds as seconds, as people write them."""
    if lowest <= value <= highest:
        return value
    if not what.endswith("_ms"):
        raise refusal(what, value, "is out of bounds", f"give {lowest} to {highest}")
    remedy = f"give {lowest / 1000:.15g} to {highest / 1000:.15g} s"
    raise refusal(what.removesuffix("_ms"), f"{value / 1000:.15g} s", "is out of bounds", remedy)


def one_of(what: str, value: int, known: Mapping[int, T]) -> T:
    """Return the value that a number in the protocol stands for."""
    if value not in known:
        allowed = ", ".join(str(number) for number in known)
        raise refusal(what, value, "is not known to this server", f"give one of {allowed}")
    return known[value]


def sentence(text: str, limits: Limits) -> str:
    """Return text for people as one printable line, cut to a bounded length."""
    line = "".join(char if char.isprintable() else " " for char in text).strip()
    return line if len(line) <= limits.reason_chars else line[: limits.reason_chars - 3] + "..."


def traceback(text: str, limits: Limits) -> str:
    """Return the end of a traceback, which names the cause, cut to a bounded length."""
    cut = len(text) - limits.traceback_chars
    return text if cut <= 0 else "..." + text[cut + 3 :]
