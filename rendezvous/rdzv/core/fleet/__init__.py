"""All nodes and all submitted jobs of one server: leases, placement, drains and quarantine.

In: connections, holdings, jobs and events. Out: lost nodes, and the nodes that each submitted job
gets. `rdzv.core.life` decides what that means for one job.
"""
