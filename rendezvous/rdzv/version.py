"""The version of rdzv, as pyproject.toml has it.

Looking it up in the installed metadata takes longer than everything else a starting program reads.
"""

VERSION = "0.1.0"
