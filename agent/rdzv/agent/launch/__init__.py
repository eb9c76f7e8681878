"""A job's launch on this node: what to run, checks before the start, CPU binding."""
