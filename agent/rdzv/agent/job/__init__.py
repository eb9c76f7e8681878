"""One job on this node: a driver around the agent core, and its rounds.

Events come in from the server, the runner and signals; what the core decides goes out to the
runner and the server. `job_driver` is that driver, `round` a round's one task. Nothing here
decides, and nothing blocks the event loop.
"""
