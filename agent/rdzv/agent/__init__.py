"""The agent joins jobs, starts and watches their workers on this node, and re-forms the group.

`core` decides. `job` carries out its decisions through `runner_link`, the connection to the process
that owns the workers, and `server_link`, the stream to rdzvd. Only `server_link.encoding` handles
the messages themselves. `run` is rdzvrun: one job in the foreground.
"""
