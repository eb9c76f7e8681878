"""Settings and options that were removed, and what to do in place of each."""

from __future__ import annotations

REMOVED = {
    "relay": "nodes connect to the servers themselves, each of which holds 10,000; leave it out, "
    "and give agents the addresses of the servers",
    "upstream": "it was for `relay`, which was removed as well; leave it out",
}
"""What to do in place of each removed setting, by its key or that of its table."""


def instead_of(key: str) -> str:
    """Return what to do in place of a removed setting, or "" if `key` does not name one."""
    return REMOVED.get(key) or REMOVED.get(key.partition(".")[0], "")


def instead_of_option(option: str) -> str:
    """Return what to do in place of a removed option, or "" if `option` is not one."""
    key = option.removeprefix("--").replace("-", "_")
    return instead_of(key) or instead_of(key.replace("_", ".", 1))
