"""The agent's end of the socket to a runner: requests and their results are values.

A `RunnerLink` is the link to one runner; a `FoundRunner` is a runner left by a previous agent.
Nothing here decides what a runner does. `agent_children` keeps track of the agent's other children.
"""

from __future__ import annotations

from rdzv.agent.runner.processes import become_subreaper
from rdzv.agent.runner.requests import KeepSpec, WorkerSpec, ZygoteSpec
from rdzv.agent.runner.system import boottime_ms
from rdzv.agent.runner_link.agent_children import (
    aside,
    ask_spared,
    connected_pair,
    end_spared,
    kill_hung,
    spare,
    spare_no_more,
    start_spared,
    sweep_orphans,
    wait_for_exit,
)
from rdzv.agent.runner_link.found_runner import (
    FoundRunner,
    NotAdoptableError,
    SilentRunnerError,
)
from rdzv.agent.runner_link.runner_link import (
    RunnerHello,
    RunnerLink,
    StartedRunner,
)

__all__ = [
    "FoundRunner",
    "KeepSpec",
    "NotAdoptableError",
    "RunnerHello",
    "RunnerLink",
    "SilentRunnerError",
    "StartedRunner",
    "WorkerSpec",
    "ZygoteSpec",
    "aside",
    "ask_spared",
    "become_subreaper",
    "boottime_ms",
    "connected_pair",
    "end_spared",
    "kill_hung",
    "spare",
    "spare_no_more",
    "start_spared",
    "sweep_orphans",
    "wait_for_exit",
]
