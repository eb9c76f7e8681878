"""Elastic training in which a script's processes survive failures of other workers.

A surviving process keeps its memory. A script puts everything it trains into a `State`, and its
training loop into a function decorated with `@elastic`:

    state = State(model=model, optimizer=optimizer, sampler=ElasticBatchSampler(data, 32))

    @elastic
    def train(state, round):
        model = DistributedDataParallel(state.model, init_sync=False)
        while state.sampler.epoch < 10:
            for batch in DataLoader(data, batch_sampler=state.sampler):
                ...
                state.commit()

    train(state)

The runner notifies a worker, over a socket that the worker inherits (`link`), when the round is
over and when the next one begins. The worker reports that it has *parked*: nothing in it takes part
in the round any more. `session` leads from round to round. `cutting` interrupts collectives,
`groups` creates and destroys process groups, `healing` brings all ranks to the state of the
furthest one, and `sealing` tracks which step a state is at. `shards` holds the parts of sharded
models between rounds, and restores them; `resharding` divides them anew. `snapshots` saves the
state in the runner's memory, and `resuming` loads it in new processes. `rounds` distinguishes
exceptions that a lost peer may have caused from the script's own.

Without that socket (under torchrun or plain Python) there is a single round, and the same script
runs unchanged.

Any script, without a `State` too, may use `should_stop` and `exit_if_leaving`: all ranks save the
same step before some of them leave.

The package needs only the standard library and torch. It needs no
other part of rdzv, so it can be installed on its own for the job's interpreter. It never decides
whether a worker is kept: the server does, and the runner kills workers that do not park in time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .notice import exit_if_leaving, should_stop
from .rounds import (
    CannotBroadcastError,
    MismatchError,
    NoRoundError,
    NoSourceError,
    OddReplicaError,
    ReplicasDifferError,
    Round,
    RoundOver,
    StaleGroupError,
    UnsupportedError,
    WorkerError,
)
from .sampler import ElasticBatchSampler

if TYPE_CHECKING:
    from .session import elastic, reconfigure
    from .state import State

__all__ = [
    "CannotBroadcastError",
    "ElasticBatchSampler",
    "MismatchError",
    "NoRoundError",
    "NoSourceError",
    "OddReplicaError",
    "ReplicasDifferError",
    "Round",
    "RoundOver",
    "StaleGroupError",
    "State",
    "UnsupportedError",
    "WorkerError",
    "elastic",
    "exit_if_leaving",
    "reconfigure",
    "should_stop",
]

_NEED_TORCH = {"State": "state", "elastic": "session", "reconfigure": "session"}


def __getattr__(name: str) -> Any:
    # The programs in this package start without torch.
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(f".{_NEED_TORCH[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
