"""rdzvrun: one job in the foreground, as a replacement for torchrun.

Exit codes: 0 the job succeeded; 1 it failed; 2 usage; 75 a retry may help (no server, too few nodes
in time, or this node's runner was killed); 77 the caller lacks the permission; 93 it failed
repeatedly without progress and should not be queued again; 128+n ended by signal n; 130 Ctrl-C.
With --exit-code=root-cause, a failed job's code is that of the worker whose failure ended it.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc

gc.disable()  # Imported objects are never garbage, so collecting would waste time.

import asyncio
import contextlib
import errno
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from rdzv.agent.cli.backends import Meeting
from rdzv.agent.cli.options import parse_launch
from rdzv.agent.core.model import EXIT_FAILED, EXIT_TRY_AGAIN, EXIT_USAGE
from rdzv.agent.launch.launch import Launch, check_startable
from rdzv.agent.runner.spawn import reason_of
from rdzv.agent.runner_link.runner_link import StartedRunner
from rdzv.agent.system import temporary_folders
from rdzv.agent.system.error_files import write_error
from rdzv.agent.workers.fates import NodeOutcome, root_cause_exit_code, summary
from rdzv.errors import InvalidRequestError, RendezvousConnectionError, RendezvousError
from rdzv.runtime.log_format import PlainFormatter, complain
from rdzv.structs import replace
from rdzv.transport.job_secret import read_secret

gc.freeze()
gc.enable()

log = logging.getLogger("rdzv.agent")

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None, *, legacy: bool = False) -> NoReturn:
    """Run rdzvrun; `legacy` accepts the command line of torch.distributed.launch."""
    try:
        _run(argv, legacy=legacy)
    except KeyboardInterrupt:
        # Ctrl-C arrived while no signal handler was installed, so no workers are running.
        sys.exit(EXIT_INTERRUPTED)


def _run(argv: Sequence[str] | None, *, legacy: bool) -> NoReturn:
    set_up_logging("rdzvrun")
    try:
        launch, meeting = parse_launch(argv, legacy=legacy)
        launch = replace(launch, secret=read_secret(os.environ))
        check_startable(launch)
    except InvalidRequestError as error:
        _fail(error, EXIT_USAGE)
    set_up_logging(f"rdzvrun[{launch.job.node_id}]")
    log.info("%s: %s", launch.job.rdzv_id, meeting.why)
    try:
        outcome = _take_part(launch, meeting)
    except RendezvousConnectionError as error:
        _fail(error, EXIT_TRY_AGAIN)
    except (RendezvousError, OSError) as error:
        _fail(error, EXIT_USAGE if isinstance(error, InvalidRequestError) else EXIT_FAILED)
    level = logging.INFO if outcome.exit_code == 0 else logging.ERROR
    log.log(level, "%s", summary(launch.job.rdzv_id, outcome))
    if outcome.failures and (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        try:
            write_error(Path(path), outcome.failures[0])
        except OSError as error:
            log.warning("cannot write TORCHELASTIC_ERROR_FILE: %s", error)
    exit_code = outcome.exit_code
    if launch.root_cause_exit:
        exit_code, why = root_cause_exit_code(outcome)
        if why:
            log.error("%s", why)
    sys.exit(exit_code)


def _take_part(launch: Launch, meeting: Meeting) -> NodeOutcome:
    # The errors that we report are clearer than gRPC's own log.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    credentials = meeting.credentials(os.environ)
    # The runner starts up while this process imports the client for the server.
    runner = StartedRunner()
    threading.Thread(target=temporary_folders.sweep, daemon=True).start()
    try:
        with _without_garbage():
            # Imported only once the command line is known to be valid.
            from rdzv.agent.node.node import take_part
        [outcome] = asyncio.run(
            take_part(meeting, [launch], credentials, started=runner),
        )
    finally:
        runner.close()
    return outcome


@contextlib.contextmanager
def _without_garbage() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _fail(error: Exception, exit_code: int) -> NoReturn:
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        complain(f"rdzvrun: {reason_of(error)}")
    else:
        complain(f"rdzvrun: {error}")
    sys.exit(exit_code)


def set_up_logging(program: str) -> None:
    """Log to stderr at LOGLEVEL. An embedded server logs only problems: the agent logs events."""
    level = os.environ.get("LOGLEVEL", "INFO").upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter(program))
    everything = logging.getLogger("rdzv")
    everything.handlers[:] = [handler]
    logging.getLogger().handlers[:] = [handler]  # asyncio's lines may quote a job, too.
    everything.propagate = False
    everything.setLevel(logging.WARNING)
    logging.getLogger("rdzv.events").setLevel(logging.CRITICAL)
    log.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")


if __name__ == "__main__":
    main()
