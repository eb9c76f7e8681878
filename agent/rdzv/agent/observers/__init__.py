"""Observes workers from outside: progress, hangs, stacks, snapshots, GPUs."""
