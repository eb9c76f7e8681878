"""Why a worker ended, beyond its exit code: the kernel's actions and the worker's last words.

It makes no decisions and stores nothing.
"""

from __future__ import annotations

from rdzv.agent.exit_causes.exit_messages import ExitedWorker, explain_exit
from rdzv.agent.exit_causes.memory_kills import MemoryKills, count_memory_kills

__all__ = ["ExitedWorker", "MemoryKills", "count_memory_kills", "explain_exit"]
