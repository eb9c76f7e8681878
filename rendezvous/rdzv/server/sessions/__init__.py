"""One server's nodes and their streams: connections, leases, commands and reports.

In: messages from nodes, as values. Out: messages to streams, and commands to jobs. This package
never deals with gRPC.
"""
