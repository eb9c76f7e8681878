"""One node: its jobs and their GPUs, its metrics page, and the server that it may host."""
