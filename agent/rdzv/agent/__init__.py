"""The agent: joins jobs, starts their workers on this node, watches them, re-forms the group.

`core` decides. `job` carries its decisions out with a `runner_link` (the process that owns the
workers) and a `server_link` (the stream to rdzvd), whose `encoding` alone sees the messages. `run`
is rdzvrun, one job in the foreground.
"""
