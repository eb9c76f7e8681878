"""The node's stream to the server, and the conversion of its messages to values of the agent core.

Jobs' reports go out, and events for the jobs come in. The stream is reopened until the agent closes
it.
"""
