"""Runs torch's event handlers and logs specs for the agent, in a separate process.

    python torch_side.py FD

It is run by path with the job's interpreter, so it needs torch but no part of rdzv, and supports
older Python versions than rdzv itself. It exchanges JSON lines over the socket FD. The first line
gives its role:

* `{"role": "events", "name": N, "logs_specs": ""}`: every further line is an event for torch's
  handler N.
* `{"role": "logs_specs", "name": N, "log_dir": ..., "redirects": ..., "tee": ..., "ranks": ...}`:
  every further line is `{"envs": ...}` for a round's workers; the response gives their output
  locations. This process empties their files, using the job's rights.

The first response is `{"ready": true}` or `{"refused": "why"}`. The agent kills a process that
sends anything but these responses. The process ends when the socket is closed. If the agent is
killed, the process has `LINGER_S` to finish.

Source: `torch/distributed/elastic/events`, `_construct_event` in
`torch/distributed/elastic/agent/server/api.py`, `_get_logs_specs_class` in
`torch/distributed/run.py`, `ProcessFailure` in `torch/distributed/elastic/multiprocessing/errors`
of torch 2.13.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from importlib import metadata
from typing import Any, Callable, Iterator  # noqa: UP035

PR_SET_PDEATHSIG = 1
LINGER_S = 5
NO_ERROR_DATA = {"message": "<NONE>"}
NOT_TRACEABLE = {"category": "system_terminated_error", "retryability": "False"}


def main() -> None:
    linger_after_parent()
    forget_own_folder()
    agent = socket.socket(fileno=int(sys.argv[1]))
    lines = agent.makefile("r", encoding="utf-8")
    asked = (json.loads(line) for line in lines)
    options = next(asked, None)
    if options is None:
        return
    try:
        serve = ROLES[options.pop("role")](asked, **options)
        next(serve)  # The first response: ready.
    except Exception as error:
        say(agent, {"refused": describe(error)})
        return
    say(agent, {"ready": True})
    for answer in serve:
        if answer is not None:
            say(agent, answer)


def say(agent: socket.socket, message: dict[str, Any]) -> None:
    agent.sendall(json.dumps(message).encode() + b"\n")


def describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, Refusal) else f"{type(error).__name__}: {text}"


class Refusal(Exception):  # noqa: N818
    """Raised if a request cannot be carried out; the message tells the user why."""


# ---------------------------------------------------------------------- events


def record_events(
    asked: Iterator[dict[str, Any]], name: str, logs_specs: str
) -> Iterator[dict[str, Any] | None]:
    """Record every event. If the handler fails on an event, print the error and drop the event."""
    events: Any = importlib.import_module("torch.distributed.elastic.events")
    handlers: Any = importlib.import_module("torch.distributed.elastic.events.handlers")
    # As in torchrun, this loads the entry points of `torchrun.handlers`. Their modules, and the
    # module with the logs specs, may also register event handlers.
    importlib.import_module("torch.distributed.elastic.rendezvous")
    if logs_specs:
        load_logs_specs(logs_specs)
    known = handlers._log_handlers
    if name not in known:
        raise Refusal(
            f"torch knows no event handler {name!r} there, only "
            f"{', '.join(sorted(known))}; have a module that this interpreter imports by "
            "itself (see docs/torchrun.md) add it to "
            "torch.distributed.elastic.events.handlers._log_handlers"
        )
    host_name = socket.getfqdn(socket.gethostname())
    yield None
    for event in asked:
        data = event["metadata"]
        data["hostname"] = host_name
        if event["error_file"] is not None:
            data["raw_error"] = json.dumps(read_error(event["error_file"], event["exit_code"]))
        try:
            source = events.EventSource[event["source"]]
            events.record(events.Event(event["name"], source, metadata=data), name)
        except Exception:
            traceback.print_exc()
        yield None


def read_error(path: str, exit_code: int) -> Any:
    if os.path.isfile(path):  # noqa: PTH113
        try:
            with open(path) as file:  # noqa: PTH123
                return json.load(file)
        except (OSError, ValueError):
            pass  # torchrun would exit here; the agent has informed the user.
    return NO_ERROR_DATA if exit_code < 0 else {**NO_ERROR_DATA, "errorTraits": NOT_TRACEABLE}


# ---------------------------------------------------------------------- logs specs


def reify_logs_specs(
    asked: Iterator[dict[str, Any]],
    name: str,
    log_dir: str | None,
    redirects: dict[str, int],
    tee: dict[str, int],
    ranks: list[int] | None,
) -> Iterator[dict[str, Any] | None]:
    """For each requested round, yield its workers' output locations and environment."""
    made = load_logs_specs(name)(
        log_dir=log_dir,
        redirects=to_streams(redirects),
        tee=to_streams(tee),
        local_ranks_filter=None if ranks is None else set(ranks),
    )
    yield None
    for request in asked:
        envs = {int(rank): env for rank, env in request["envs"].items()}
        try:
            files = tell(made.reify(envs))
            for path in (*files["stdouts"].values(), *files["stderrs"].values()):
                empty(path)
            yield {"round": request["round"], "envs": envs, **files}
        except Exception as error:
            traceback.print_exc()
            yield {"round": request["round"], "failed": describe(error)}


def load_logs_specs(name: str) -> Any:
    importlib.import_module("torch.distributed.elastic.multiprocessing")
    group = [point for point in every_entry_point("torchrun.logs_specs") if point.name == name]
    if not group:
        known = ", ".join(sorted(point.name for point in every_entry_point("torchrun.logs_specs")))
        raise Refusal(
            f"there is no entry point {name!r} in the group torchrun.logs_specs (known: "
            f"{known or 'none'}); install the package that provides it"
        )
    return group[0].load()


def every_entry_point(group: str) -> Any:
    """Return a group's entry points, on Python 3.9 and later."""
    found: Any = metadata.entry_points()
    return found.select(group=group) if hasattr(found, "select") else found.get(group, ())


def to_streams(by_rank: dict[str, int]) -> Any:
    """Convert --redirects or --tee from JSON to torch's form: a single value or by LOCAL_RANK."""
    module: Any = importlib.import_module("torch.distributed.elastic.multiprocessing")
    streams = {int(rank): module.Std(bits) for rank, bits in by_rank.items()}
    return streams.get(-1, streams)


def tell(made: Any) -> dict[str, Any]:
    """Resolve paths against this folder, where the workers start."""
    fields = ("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files")
    files = {
        field: {rank: absolute(path) for rank, path in getattr(made, field).items() if path}
        for field in fields
    }
    # Older versions of torch have no filtered logs.
    filtered = {
        field: absolute(getattr(made, field, ""))
        for field in ("filtered_stdout", "filtered_stderr")
    }
    return {**files, **filtered}


def absolute(path: Any) -> str:
    return os.path.abspath(os.fspath(path)) if path else ""  # noqa: PTH100


def empty(path: str) -> None:
    """Empty a file, as torchrun does. If that fails, the runner will report why."""
    try:
        if os.path.isfile(path):  # noqa: PTH113
            os.truncate(path, 0)
    except OSError:
        pass


ROLES: dict[str, Callable[..., Iterator[dict[str, Any] | None]]] = {
    "events": record_events,
    "logs_specs": reify_logs_specs,
}

# ---------------------------------------------------------------------- the process


def forget_own_folder() -> None:
    """Remove this folder from the import path, where Python puts the script's folder first."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]  # noqa: PTH100


def linger_after_parent() -> None:
    """After the agent is killed, allow a few seconds for recording the remaining events."""
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(LINGER_S))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("rdzv torch side: its parent is gone")


if __name__ == "__main__":
    main()
