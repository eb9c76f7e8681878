"""Imports gRPC without its fork handlers, before anything else imports it.

The handlers run in each fork of this process, and start gRPC's threads there again, with a copy of
the state that threads here were just using. While calls were made, three of 100 forks died of
SIGSEGV or SIGABRT (grpcio 1.85), and sometimes this process never got an answer. No fork of ours
uses gRPC, so none needs them: neither a program that the agent starts under another account, nor a
worker that torch forks in a process with the plug-in.
"""

from __future__ import annotations

import os
import sys

OPTION = "GRPC_ENABLE_FORK_SUPPORT"

_given = os.environ.get(OPTION)

TOO_LATE = "grpc" in sys.modules and _given not in ("0", "false")
"""Whether other code has imported gRPC with its handlers, which nothing can remove then."""

# gRPC reads the variable on import.
os.environ[OPTION] = "0"
import grpc  # noqa: E402, F401

# The variable must not reach a job's environment.
if _given is None:
    del os.environ[OPTION]
else:
    os.environ[OPTION] = _given
