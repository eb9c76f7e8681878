"""Diagnosis of workers: hangs, stacks, stragglers, progress, and logs.

In: reports of nodes. Out: verdicts on hangs, stacks for operators, log lines for readers.
"""
