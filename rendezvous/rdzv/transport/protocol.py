"""Constants shared by the server and its clients: protocol version and default port."""

from __future__ import annotations

VERSION = 1
"""The protocol version of the servers and nodes in this release."""

DEFAULT_PORT = 29_400
"""rdzvd's default port, which is that of torchrun's own rendezvous, so firewalls need no change."""
