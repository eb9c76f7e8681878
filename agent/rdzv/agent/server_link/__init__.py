"""The node's stream to the server: kept open, its messages converted to values of the agent core.

In: reports of jobs. Out: events for them. It never gives up on the server by itself.
"""
