"""The agent, which joins jobs, starts and watches their workers on this node, and rejoins rounds.

`core` makes the decisions. `job` carries them out through `runner_link`, the connection to the
process that owns the workers, and `server_link`, the stream to rdzvd. Only `server_link.encoding`
handles the messages themselves. `run` is rdzvrun, which runs one job in the foreground.
"""
