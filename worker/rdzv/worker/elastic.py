"""The decorator that calls a training function once in each round."""

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

    The script calls it as `train(state, ...)`. In each round, the default process group is created
    with torch's `backend` ("gloo" on CPUs, "cpu:gloo,cuda:nccl" with GPUs) and `timeout`, and the
    furthest rank's state is loaded. Then the function is called with the state and a `Round`. It
    must create its wrappers, groups and loaders anew, continue from where the state is, and call
    `state.commit()` after each step. The round ends when another worker or node is lost or joins;
    then `RoundOver` or a collective's exception is raised in the function. If rdzvrun started the
    process, the function is called again in the next round, in the same process. Otherwise there is
    a single round, and exceptions are raised as in any script.

    The function's result is returned once it has returned on all ranks. Its own exceptions are
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
