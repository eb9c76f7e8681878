"""What workers show of themselves: stacks, collectives, progress and hangs, compared.

In: reports of nodes. Out: the workers that the others wait for. Nothing here ends a round.
"""
