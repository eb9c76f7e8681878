"""The version of rdzv, which is the same as in pyproject.toml.

This is a constant, because looking it up in the installed metadata would slow down the start of
every program.
"""

VERSION = "0.1.0"

PROTOCOL_VERSION = 1
"""The version of the protocol between nodes and servers in this release."""
