"""The node's one stream to the server: kept open, and its messages as values of the agent core.

In: reports of jobs. Out: events for them. It never gives up on the server by itself.
"""
