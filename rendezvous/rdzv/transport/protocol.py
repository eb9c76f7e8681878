"""What a server and those who call it must agree on, beside the messages."""

from __future__ import annotations

VERSION = 1
"""The protocol that the servers and nodes of this version speak."""

DEFAULT_PORT = 29_400
"""Where rdzvd listens: the port of torchrun's own rendezvous, so that firewalls need not change."""
