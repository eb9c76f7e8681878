"""The nodes of one server and their streams: connections, leases, commands and reports.

In: messages from nodes, as values. Out: messages to streams, and commands to jobs. It never sees
gRPC.
"""
