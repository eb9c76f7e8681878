"""Why a worker ended, beyond its exit code: the kernel's actions and the worker's final messages.

`explain_exit` reads the worker's error file and adds what is known on this machine: whether the
kernel killed the process because memory ran out, whether /dev/shm is full, where the core dump is,
and the meaning of known messages from NCCL, CUDA or torch. It makes no decisions and stores
nothing.
"""

from __future__ import annotations

from rdzv.agent.exit_causes.exit_messages import ExitedWorker, explain_exit
from rdzv.agent.exit_causes.memory_kills import MemoryKills, count_memory_kills

__all__ = ["ExitedWorker", "MemoryKills", "count_memory_kills", "explain_exit"]
