"""The agent's rules for one job on one node, without I/O and without a clock.

::

    joining --RoundCompleted--> running --all exited 0--> succeeded --Closed--> (exit)
       ^                          |                           |
       |                          | a worker failed,          | the round ended
       |                          | the round ended           v
       +---- workers gone ---- stopping <---------------------+

A signal to the agent, or the withdrawal of a submitted job, leads from any phase to *leaving*, and
from there to the exit once the workers are gone. Commands to the driver need no answer: all their
results are events.
"""

from rdzv.agent.core.machine import Transition, begin, step

__all__ = ["Transition", "begin", "step"]
