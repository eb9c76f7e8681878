"""Constants that the server and its clients share: protocol version and default port."""

from __future__ import annotations

VERSION = 1
"""The protocol version of this release's servers and nodes."""

DEFAULT_PORT = 29_400
"""rdzvd's default port: that of torchrun's own rendezvous, so that firewalls need not change."""
