"""The parts of a round: ranks, addresses, budgets, and the reports from which it is rebuilt.

Input: values of a job. Output: parts of a round, and the cost of its end. `rdzv.core.life` decides
when a round forms and when it ends.
"""
