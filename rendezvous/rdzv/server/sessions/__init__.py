"""The nodes of one server: their streams, leases and timers around the pure cores.

In: what nodes and operators send, as values. Out: messages to streams. It speaks no gRPC.
"""
