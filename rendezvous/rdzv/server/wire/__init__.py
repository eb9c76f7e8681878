"""Protobuf to values and back: the server's only sight of messages.

All that comes in is bounded and validated here. Nothing here waits or decides.
"""
