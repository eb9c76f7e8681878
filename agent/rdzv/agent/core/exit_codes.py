"""The exit codes of `rdzvrun` and of the agent's jobs."""

EXIT_SUCCESS = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TRY_AGAIN = 75
"""The exit code if a retry may succeed: there was no server, the join timed out, the job was placed
elsewhere, the node was drained, or its runner was lost.
"""
EXIT_DENIED = 77
"""The exit code if the caller lacks the permission, so a retry is useless: EX_NOPERM of sysexits.
"""
EXIT_NO_PROGRESS = 93
"""The exit code if a retry is useless because the job kept failing without progress."""
