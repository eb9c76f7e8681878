"""Observation of workers from outside: progress, hangs, stacks, snapshots, and notices to them."""
