"""The version of rdzv, as pyproject.toml has it.

To ask the installation for it takes a program that starts longer than anything else it reads.
"""

VERSION = "0.1.0"
