"""The queue of submitted jobs and their placement; drains, cordons and quarantine of nodes.

In: jobs, nodes and what they hold. Out: placements as commands to the engine. The rules are pure
and stand in `rdzv.core.placement` and `rdzv.core.quarantine`.
"""
