"""Observes workers from outside: progress, hangs, stacks, snapshots; and gives them notices."""
