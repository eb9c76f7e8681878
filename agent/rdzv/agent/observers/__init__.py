"""What is seen of workers from outside: progress, hangs, stacks, snapshots, and their notice."""
