"""Converts protobuf messages to values (`inbound_*`) and values to messages (`outbound`).

Every incoming message is bounded and validated here; an invalid one raises `InvalidRequestError`.
Nothing here waits or makes decisions.
"""
