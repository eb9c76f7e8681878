"""All nodes and all submitted jobs of one server: leases, placement, drains, and quarantine.

Input: connections, holdings, jobs and events. Output: lost nodes, and the nodes that each submitted
job gets. `rdzv.core.life` decides what this means for a job.
"""
