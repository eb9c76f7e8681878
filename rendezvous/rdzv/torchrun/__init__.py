"""The plug-in for torch's own elastic agent: `torchrun --rdzv-backend=rdzv`.

torch finds `plugin` by the entry point `rdzv` of the group `torchrun.handlers`
(`torch/distributed/elastic/rendezvous/registry.py`). torch's agent starts, watches and restarts
the workers as ever; who takes part, with which GROUP_RANK, and where the workers meet comes from
rdzvd over one stream.

What torch's agent asks of a handler, and what it gets:

* `next_rendezvous()` is called at the start, and again once the workers of a round are gone. It
  joins, or joins again naming the round that was left, and returns when the next round is
  complete and all its nodes have met in the round's store.
* The *store* is new in every round. GROUP_RANK 0's agent serves it, on a port that was never
  offered before, so that nobody of an older round can meet a newer one. Workers are its clients
  (`use_agent_store`); they share nothing but the server with torch's agents, whose keys have a
  prefix of their own.
* `num_nodes_waiting()` is answered from what the server has said, without asking it. It is not 0
  from the moment that the round has ended for whatever reason: newcomers, a node that left or was
  lost. torch's agent then restarts its workers and charges nothing
  (`torch/distributed/elastic/agent/server/api.py`, `_invoke_run`).
* `shutdown()` is called at the end of everything but a signal
  (`torch/distributed/launcher/api.py`, `launch_agent`). The exception that is on its way then, or
  that there is none, tells success from failure. After a signal `get_run_id()` is the last call; a
  handler that is dropped leaves as it is collected. So a process may launch again and again.
* `set_closed()` stops the job's run, as `rdzvctl stop` does.

What torch's agent does not tell, the server does not know: that workers failed and were
restarted. It sees a node that has stopped its workers and joins again, which costs nothing;
`max_restarts` is each torchrun's own, and the job's settings leave it open. The failure that ends
a torchrun is told, and ends the job.

`part` is what a node says and hears of its job, `stream` the connection, `talk` both until the
node has left, `store` the meeting, `options` the command line, `signals` the end by a signal,
`handler` what torch sees.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

BACKEND = "rdzv"


def plugin() -> object:
    """Return the function that makes a handler, as torch's registry expects it."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler of one torchrun.

    Raises:
        ValueError: a value of the command line makes no sense; it is named, with the remedy.

    """
    # Not before: torch loads every plug-in, whichever backend is asked for.
    from rdzv.torchrun.handler import RdzvHandler
    from rdzv.torchrun.plugin_options import read_options

    _set_up_logging()
    return RdzvHandler(read_options(params))


def _set_up_logging() -> None:
    """Let the user read why there are no workers, as under rdzvrun, unless logs go elsewhere.

    The level is torch's LOGLEVEL if that is set (`torch/distributed/elastic/utils/logging.py`).
    """
    log = logging.getLogger("rdzv")
    if log.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("rdzv: %(message)s"))
    log.addHandler(handler)
    log.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
    log.propagate = False
