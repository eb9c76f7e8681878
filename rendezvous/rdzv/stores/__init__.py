"""Stores of memberships and their history.

All stores fulfill one contract (`base.Store`), which is checked by one test suite. A job's
membership is written as a whole, by compare-and-swap on its revision, and the history rows of the
same transition are part of the same commit. Stores raise only errors from the error table; no
foreign exception leaves this package.
"""
