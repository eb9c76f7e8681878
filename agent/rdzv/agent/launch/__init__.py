"""The launch of a job on this node: what to run, checks before the start, CPU binding."""
