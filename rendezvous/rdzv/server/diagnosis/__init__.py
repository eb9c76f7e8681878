"""What goes wrong inside workers: hangs, stacks, stragglers, progress, and their logs.

In: reports of nodes. Out: verdicts on hangs, stacks for operators, log lines for readers.
"""
