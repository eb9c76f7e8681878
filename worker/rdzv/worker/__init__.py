"""Workers that stay: a script's processes go on when others fail, with all they have in memory.

The script gives what it trains to a `State`, and its loop to a function under `@elastic`:

    state = State(model=model, optimizer=optimizer, sampler=ElasticBatchSampler(data, 32))

    @elastic
    def train(state, round):
        model = DistributedDataParallel(state.model)
        while state.sampler.epoch < 10:
            for batch in DataLoader(data, batch_sampler=state.sampler):
                ...
                state.commit()

    train(state)

In comes the word of this worker's runner, over a socket that it inherits (`link`): the round is
over, or the next one begins. Out goes that this worker has *parked*: nothing of it takes part in
the round any more. In between, `session` leads from round to round: `cutting` breaks off
collectives, `groups` makes and destroys process groups, `healing` brings all ranks to the state of
the one that has come furthest, `sealing` knows which step that is. `shards` holds the parts of
sharded models between rounds, and `shard_healing` puts them back. `snapshots` saves the state in
memory of the runner, and `resuming` loads it in new processes. `suspicion` tells an exception that
a lost peer may have caused from the script's own.

Without such a socket (torchrun, plain python) there is one round, and the same script runs.

It needs the standard library and torch, which is imported when it is first used; nothing else of
rdzv, so that the job's interpreter can have it alone. It never decides whether a worker is kept:
the server does, and the runner ends what has not parked in time.
"""

from .elastic import elastic
from .errors import (
    CannotBroadcastError,
    MismatchError,
    NoRoundError,
    NoSourceError,
    RoundOver,
    StaleGroupError,
    UnsupportedError,
    WorkerError,
)
from .rounds import Round
from .sampler import ElasticBatchSampler
from .state import State

__all__ = [
    "CannotBroadcastError",
    "ElasticBatchSampler",
    "MismatchError",
    "NoRoundError",
    "NoSourceError",
    "Round",
    "RoundOver",
    "StaleGroupError",
    "State",
    "UnsupportedError",
    "WorkerError",
    "elastic",
]
