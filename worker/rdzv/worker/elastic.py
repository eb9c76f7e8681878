"""The decorator that turns a training function into one that is called once a round."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from .groups import Options
from .link import process_link
from .session import Session, drop_in_child
from .state import State


def elastic(
    function: Callable[..., Any] | None = None,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> Callable[..., Any]:
    """Decorate `train(state, round, ...)` so that it is called in every round.

    The script calls it as `train(state, ...)`. In each round the default process group is made,
    with torch's `backend` ("gloo" on CPUs, "cpu:gloo,cuda:nccl" with GPUs) and `timeout`, and the
    state is brought to that of the newest rank; then the function is called with the state and a
    `Round`. It makes its wrappers, groups and loaders anew, goes on from where the state is, and
    calls `state.commit()` after each step. When the round ends, because another worker or node was
    lost or came, the function is left by `RoundOver` or by the exception of a collective, and
    called again in the next round in the same process, if it was started by rdzvrun. Otherwise
    there is one round, and exceptions are raised as in any script.

    What the function returns is returned as soon as all ranks have returned. Its own exceptions are
    raised at once.
    """
    if function is None:
        return functools.partial(elastic, backend=backend, timeout=timeout)

    @functools.wraps(function)
    def run(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise TypeError(
                f"{function.__name__} was called with {type(state).__name__} in place of a State"
            )
        session = Session(state, Options(backend, timeout), process_link())
        held = weakref.ref(session)
        os.register_at_fork(after_in_child=lambda: drop_in_child(held))
        return session.run(lambda round_: function(state, round_, *args, **kwargs))

    return run
