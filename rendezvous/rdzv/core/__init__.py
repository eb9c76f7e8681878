"""The rules of the rendezvous, and nothing else.

This package is pure: no I/O, no clock, no asyncio, no randomness. A driver hands it a state, a
command and the time; it returns the next state, what has happened, and when to ask again.
The driver persists the durable half, and only then publishes: *decide, persist, publish*.

Two cores live here. `nodes` knows the streams, instances and leases of every node, for all jobs;
`rendezvous` knows one job. `nodes` emits `NodeAway`, `NodeConnected` and `NodeLost`, which become
the commands `MarkAway`, `MarkBack` and `MarkLost` of `rendezvous`. Heartbeats concern `nodes`
alone.

A job's life, run by run::

    (vacant) --Join--> joining --enough nodes--> running --every node succeeded--> succeeded
                        ^  |                      |
                        |  | join_timeout         | a worker fails, a node is lost or leaves,
                        |  v                      v newcomers are admitted, the store host fails
                        | failed               stopping --budget spent--> failed
                        |                         |
                        +---- everyone stopped ---+      everyone left --> stopped

* A round is *live* from its completion until it ends; it is *settled* once every participant has
  stopped, and only then is its end charged to a cause, because a dying node's peers fail before
  the death itself is known.
* A participant keeps its *seat* until it confirms, by a `Join` or `Leave` that names the round,
  that none of its workers is left. No round completes while any seat of the previous one is held;
  exclusivity rests on this alone.
* Every node without workers *waits*: newcomers, spares and survivors alike. One rule seats them.

`step` first applies the command, then state rules until none applies, so that each consequence is
written once, whichever command leads to it. A command takes effect, is *refused* with an error, or
is *ignored* for the reason in `Transition.ignored`; docs/protocol.md has the table.
"""

from rdzv.core.life.restoring import restore
from rdzv.core.life.runs import ended_run, vacant
from rdzv.core.rendezvous import Transition, step

__all__ = ["Transition", "ended_run", "restore", "step", "vacant"]
