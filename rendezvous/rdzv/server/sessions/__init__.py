"""The nodes of one server, on their streams: connections, leases, commands and reports.

In: messages from nodes, as values. Out: messages to streams, commands to jobs. It knows no gRPC.
"""
