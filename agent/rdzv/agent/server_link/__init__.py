"""The node's stream to the server, and the conversion of its messages to values of the agent core.

In: reports of jobs. Out: events for them. The stream is reopened until the agent closes it.
"""
