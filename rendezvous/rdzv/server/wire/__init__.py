"""Converts protobuf messages to values (`inbound_*`) and back (`outbound`).

All incoming messages are bounded and validated here. Nothing here waits or decides.
"""
