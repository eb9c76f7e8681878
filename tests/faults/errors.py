"""Errors of a run."""


class StuckError(Exception):
    """Something did not happen before its deadline."""
