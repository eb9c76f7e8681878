"""One job on this node: a driver around the agent core, and its rounds.

Events come in from the server, the runner and signals; the core's decisions go out to the runner
and the server. `job_driver` holds the driver, and `round` the single task of a round. Nothing here
decides, and nothing blocks the event loop.
"""
