"""Stores of memberships and their history.

All stores keep one contract (`base.Store`), which one test checks: a job's membership is written
whole, by compare-and-swap on its revision, and the history rows of the same transition are part of
the same commit. Stores raise only errors of the error table; no foreign exception leaves this
package.
"""
