"""The machine under this node: its resources, its health, its GPUs, and its preemption."""
