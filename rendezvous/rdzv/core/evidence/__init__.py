"""Compares evidence about workers: stacks, collectives, progress and hangs.

In: reports of nodes. Out: the workers that the others wait for. Nothing here ends a round.
"""
