"""Where memberships and their history live.

All stores keep one contract (`base.Store`), held by one contract test: a job's membership is
written whole, by compare-and-swap on its revision, and the history rows of the same transition
ride on the same commit. What a store raises is from the error table; no foreign exception leaves
this package.
"""
