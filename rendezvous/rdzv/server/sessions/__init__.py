"""The nodes of one server, on their streams: connections, leases, commands and reports.

In: messages of nodes, as values. Out: messages to streams, commands to jobs. It speaks no gRPC.
"""
