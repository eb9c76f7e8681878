"""Workers as seen from outside: progress, hangs, stacks, snapshots, and their notice."""
