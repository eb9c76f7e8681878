"""Why a worker ended, beyond its exit code: what the kernel did, and the worker's final messages.

`explain_exit` reads the worker's error file and adds what is known on this machine: whether the
kernel killed the process for lack of memory, whether /dev/shm is full, where the core dump is, and
what a known message of NCCL, CUDA or torch means. It decides nothing and stores nothing.
"""

from __future__ import annotations

from rdzv.agent.exit_causes.exit_messages import ExitedWorker, explain_exit
from rdzv.agent.exit_causes.memory_kills import MemoryKills, count_memory_kills

__all__ = ["ExitedWorker", "MemoryKills", "count_memory_kills", "explain_exit"]
