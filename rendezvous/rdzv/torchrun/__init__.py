"""The plug-in for torch's own elastic agent: `torchrun --rdzv-backend=rdzv`.

torch finds `plugin` through the entry point `rdzv` in the group `torchrun.handlers`
(`torch/distributed/elastic/rendezvous/registry.py`). torch's agent starts, watches and restarts the
workers as usual; rdzvd sends the participants, their GROUP_RANKs and the store's address over a
single stream.

torch's agent calls a handler as follows:

* `next_rendezvous()` is called at the start, and again once the workers of a round are gone. It
  joins, or joins again naming the round that it left, and returns when the next round is
  complete and all its nodes have met in the round's store.
* Every round has a new *store*. GROUP_RANK 0's agent serves it, on a port that was never offered
  before, so that no node from an older round can meet a newer one. Workers are its clients
  (`use_agent_store`); they share only the server with torch's agents, whose keys have their own
  prefix.
* `num_nodes_waiting()` is answered from the messages received so far, without asking the server.
  It is nonzero once the round has ended for any reason: a node has joined, left or been lost.
  torch's agent then restarts its workers, which does not count as a restart
  (`torch/distributed/elastic/agent/server/api.py`, `_invoke_run`).
* `shutdown()` is called at the end of a launch, unless a signal ends it
  (`torch/distributed/launcher/api.py`, `launch_agent`). Whether an exception is being raised
  distinguishes failure from success. After a signal, `get_run_id()` is the last call; a handler
  that is dropped leaves when it is garbage-collected. So a process may launch repeatedly.
* `set_closed()` stops the job's run, as `rdzvctl stop` does.

torch's agent does not report workers that failed and were restarted. The server sees a node that
has stopped its workers and joins again, which does not count as a restart. Each torchrun counts its
own `max_restarts`, and the job's settings leave it open. The failure that ends a torchrun is
reported, and ends the job.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def plugin() -> object:
    """Return the function that creates a handler, as torch's registry expects."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Create a torchrun's handler.

    Raises:
        ValueError: an option is not valid; the message names it and the remedy.
    """
    # These are imported late, because torch loads every plug-in, whichever backend is requested.
    from rdzv.torchrun.handler import RdzvHandler
    from rdzv.torchrun.plugin_options import read_options

    _set_up_logging()
    return RdzvHandler(read_options(params))


def _set_up_logging() -> None:
    """Make rdzv log to stderr, as rdzvrun does, unless logging is already set up.

    The level is torch's LOGLEVEL if that is set (`torch/distributed/elastic/utils/logging.py`).
    """
    log = logging.getLogger("rdzv")
    if log.handlers or logging.getLogger().handlers:
        return
    from rdzv.runtime.log_format import PlainFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("rdzv"))
    log.addHandler(handler)
    log.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
    log.propagate = False
