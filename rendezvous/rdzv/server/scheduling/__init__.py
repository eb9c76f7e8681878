"""The queue of submitted jobs and their placement, and drains, cordons and quarantines of nodes.

In: jobs, nodes and their holdings. Out: placements, as commands to the engine. The rules are pure
functions in `rdzv.core.fleet.job_queue` and `rdzv.core.fleet.quarantine`.
"""
