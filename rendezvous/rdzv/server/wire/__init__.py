"""Protobuf messages to values (`inbound_*`) and back (`outbound`).

All that comes in is bounded and validated here. Nothing here waits or decides.
"""
