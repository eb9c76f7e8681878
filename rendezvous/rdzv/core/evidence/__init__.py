"""Compares evidence about workers: stacks, collectives, progress, and hangs.

Input: reports from nodes. Output: the workers that the others are waiting for. Nothing here ends a
round.
"""
