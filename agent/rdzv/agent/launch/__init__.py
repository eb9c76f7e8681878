"""The launch that a user asked for, and this node's offer for it: ports, CPUs, GPUs."""
