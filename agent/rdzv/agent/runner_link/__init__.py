"""The agent's end of the socket to a runner: requests and their results are values.

A `RunnerLink` is the link to one runner; a `FoundRunner` is a runner left by a previous agent.
Nothing here decides what a runner does. `agent_children` keeps track of the agent's other children.
"""
