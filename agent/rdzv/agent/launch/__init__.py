"""The launch that a user asked for, and what this node offers for it: ports, CPUs, GPUs."""
