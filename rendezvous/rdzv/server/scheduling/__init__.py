"""Places queued jobs, and tracks which nodes are drained, cordoned or quarantined.

In: jobs, nodes and their holdings. Out: placements, as commands to the engine. The rules are pure
functions in `rdzv.core.fleet.job_queue` and `rdzv.core.fleet.quarantine`.
"""
