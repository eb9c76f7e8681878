"""The agent's rules for one job on one node. Performs no I/O and reads no clock.

::

    joining --RoundCompleted--> running --all exited 0--> succeeded --Closed--> (exit)
       ^                          |                           |
       |                          | a worker failed,          | the round ended
       |                          | the round ended           v
       +---- workers gone ---- stopping <---------------------+

A signal to the agent, or the withdrawal of a submitted job, moves the node from any phase to
*leaving*, and then to the exit once its workers are gone. Commands to the driver return nothing;
their results arrive as events.
"""

from rdzv.agent.core.machine import Decision, begin, step

__all__ = ["Decision", "begin", "step"]
