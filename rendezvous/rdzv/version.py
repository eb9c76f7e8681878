"""The version of rdzv, the same as in pyproject.toml.

A constant, because looking it up in the installed metadata would slow the start of every program.
"""

VERSION = "0.1.0"
