"""Facts that a server and its callers share besides messages: protocol version, default port."""

from __future__ import annotations

VERSION = 1
"""The protocol that the servers and nodes of this version speak."""

DEFAULT_PORT = 29_400
"""Where rdzvd listens: the port of torchrun's own rendezvous, so that firewalls need not change."""
