"""The launch of a job on this node: what to run, checks in advance, device counts, CPU binding."""
