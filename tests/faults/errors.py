"""What can go wrong in a run."""


class StuckError(Exception):
    """Something did not come to pass before its deadline."""
