"""The rules of the rendezvous, and nothing else.

This package is pure: no I/O, no clock, no asyncio, no randomness. A driver passes in a state, a
command and the time; the package returns the next state, the events, and when to call it again. The
driver persists the durable half and only then publishes: *decide, persist, publish*.

There are two cores. `nodes` tracks the streams, instances and leases of every node, for all jobs;
`rendezvous` handles one job. `nodes` emits `NodeAway`, `NodeConnected` and `NodeLost`, which become
the commands `MarkAway`, `MarkBack` and `MarkLost` of `rendezvous`. Heartbeats concern only `nodes`.

A job's life, run by run::

    (vacant) --Join--> joining --enough nodes--> running --every node succeeded--> succeeded
                         ^  |                      |
                         |  | join_timeout         | a worker fails, a node is lost or leaves,
                         |  v                      v new nodes are admitted, the store host fails
                         | failed               stopping --budget spent--> failed
                         |                         |
                         +--- all nodes stopped ---+      all nodes left --> stopped

* A round is *live* from its completion until it ends; it is *settled* once every participant has
  stopped. Only then is its end charged to a cause, because a dying node's peers fail before the
  death itself is known.
* A participant keeps its *seat* until it confirms, by a `Join` or `Leave` that names the round,
  that it has no remaining workers. No round completes while any seat of the previous one is held;
  this alone ensures exclusivity.
* Every node without workers *waits*, whether it is new, a spare, or a survivor. One rule seats them
  all.

`step` first applies the command, and then state rules until none applies, so each consequence is
implemented only once, whichever command leads to it. A command takes effect, is *refused* with an
error, or is *ignored* for the reason in `Transition.ignored`; docs/protocol.md has the table.
"""

from rdzv.core.life.restoring import restore
from rdzv.core.life.runs import ended_run, vacant
from rdzv.core.rendezvous import Transition, step

__all__ = ["Transition", "ended_run", "restore", "step", "vacant"]
