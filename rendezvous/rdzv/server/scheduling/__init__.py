"""The queue of submitted jobs and their placement; drains, cordons and quarantine of nodes.

In: jobs, nodes and their holdings. Out: placements as commands to the engine. The rules are pure
functions in `rdzv.core.placement` and `rdzv.core.quarantine`.
"""
