"""One node: its stream, its jobs, their GPUs, and the server that it may host."""
