"""Imports gRPC without its fork handlers, before anything else imports it.

Starting a program under another account forks this process, and gRPC's handlers then run in the
child, with a copy of its threads' state. About one in a hundred such children died of SIGSEGV
before it ran anything. No child of the agent uses gRPC, so none of them needs the handlers.
"""

from __future__ import annotations

import os

_OPTION = "GRPC_ENABLE_FORK_SUPPORT"

_given = os.environ.get(_OPTION)
# gRPC reads the variable on import.
os.environ[_OPTION] = "0"
import grpc  # noqa: E402, F401

# The variable must not reach a job's environment.
if _given is None:
    del os.environ[_OPTION]
else:
    os.environ[_OPTION] = _given
