"""Diagnosis of workers: hangs, stacks, stragglers, progress and logs.

In: reports from nodes. Out: verdicts on hangs, stacks for operators, log lines for readers.
"""
