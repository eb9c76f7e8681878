"""The parts of a round: ranks, addresses, budgets, and the reports it is rebuilt from.

In: values of a job. Out: parts of a round, and what its end costs. `rdzv.core.life` decides when a
round forms and when it ends.
"""
