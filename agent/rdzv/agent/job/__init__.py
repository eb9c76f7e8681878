"""One job on this node: its rounds, and a driver around the agent core.

Events come in from the server, the runner and signals; the core's decisions go out to the runner
and the server. `job_driver` contains the driver, and `round` the single task that handles a round.
This package makes no decisions of its own, and never blocks the event loop.
"""
