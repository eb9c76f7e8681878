"""The state of a job on one node while a step computes the next one."""

from __future__ import annotations

from dataclasses import dataclass, field

from rdzv.agent.core.commands import Command
from rdzv.agent.core.model import AgentState


@dataclass(slots=True)
class Draft:
    """The state and the commands so far. Visible only within `step`."""

    state: AgentState
    now_ms: int
    commands: list[Command] = field(default_factory=list)

    def do(self, command: Command) -> None:
        """Add a command to those that the step returns."""
        self.commands.append(command)
