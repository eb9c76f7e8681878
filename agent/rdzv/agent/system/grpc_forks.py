"""Imports gRPC without what it does when this process forks; before anything else imports it.

A program that is started as another account is forked, and gRPC's handlers then run in the child,
beside a copy of its threads' state: one in some hundred such children died of SIGSEGV before it ran
anything. No child of the agent's uses gRPC, so none needs them.
"""

from __future__ import annotations

import os

_OPTION = "GRPC_ENABLE_FORK_SUPPORT"

_given = os.environ.get(_OPTION)
# It is read on import.
os.environ[_OPTION] = "0"
import grpc  # noqa: E402, F401

# It is none of a job's.
if _given is None:
    del os.environ[_OPTION]
else:
    os.environ[_OPTION] = _given
