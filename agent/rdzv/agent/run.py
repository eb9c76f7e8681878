"""rdzvrun: one job in the foreground, in place of torchrun.

Exit codes: 0 the job succeeded; 1 it failed; 2 usage; 75 trying again is sensible (no server, or
too few nodes came in time); 128+n ended by signal n; 130 Ctrl-C.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rdzv.agent.core.machine import EXIT_FAILED, EXIT_USAGE
from rdzv.agent.core.model import NodeFailure, Outcome
from rdzv.agent.errors import describe_exit, write_error
from rdzv.agent.launch import check_startable
from rdzv.agent.options import parse_launch
from rdzv.errors import InvalidRequestError, RendezvousError

log = logging.getLogger("rdzv.agent")

EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run rdzvrun and exit as the module's docstring says."""
    try:
        _run(argv)
    except KeyboardInterrupt:
        # Ctrl-C before it listens to signals, or after: there is nothing left to end.
        sys.exit(EXIT_INTERRUPTED)


def _run(argv: Sequence[str] | None) -> NoReturn:
    set_up_logging("rdzvrun")
    try:
        launch, meeting = parse_launch(argv)
        check_startable(launch)
    except InvalidRequestError as error:
        _fail(error, EXIT_USAGE)
    set_up_logging(f"rdzvrun[{launch.job.node_id}]")
    log.info("%s: %s", launch.job.rdzv_id, meeting.why)
    # gRPC is not imported before the command line is known to be right.
    from rdzv.agent.node import take_part

    try:
        [outcome] = asyncio.run(
            take_part(launch.job.node_id, meeting.endpoints, [launch], meeting.host_at)
        )
    except (RendezvousError, OSError) as error:
        _fail(error, EXIT_FAILED)
    level = logging.INFO if outcome.exit_code == 0 else logging.ERROR
    log.log(level, "%s", summary(launch.job.rdzv_id, outcome))
    if outcome.failures and (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        try:
            write_error(Path(path), outcome.failures[0])
        except OSError as error:
            log.warning("TORCHELASTIC_ERROR_FILE can not be written: %s", error)
    sys.exit(outcome.exit_code)


def _fail(error: Exception, exit_code: int) -> NoReturn:
    print(f"rdzvrun: {error}", file=sys.stderr)  # noqa: T201
    sys.exit(exit_code)


def set_up_logging(program: str) -> None:
    """Log to stderr, as LOGLEVEL says (default INFO); stdout is the workers'.

    Of an embedded server only what is wrong is shown: the agent itself tells what happens.
    """
    level = os.environ.get("LOGLEVEL", "INFO").upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {program}: %(message)s"))
    everything = logging.getLogger("rdzv")
    everything.handlers[:] = [handler]
    everything.propagate = False
    everything.setLevel(logging.WARNING)
    logging.getLogger("rdzv.events").setLevel(logging.CRITICAL)
    log.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")


def summary(rdzv_id: str, outcome: Outcome) -> str:
    """Tell how it ended; after a failure, which worker failed first, where and why."""
    lines = [f"{rdzv_id}: {outcome.text}"]
    for index, failure in enumerate(outcome.failures):
        lines.append("Root cause, the first failure of the job:" if index == 0 else "Beside it:")
        lines += [f"  {line}" for line in _failure_lines(failure, with_traceback=index == 0)]
    return "\n".join(lines)


def _failure_lines(failure: NodeFailure, *, with_traceback: bool) -> list[str]:
    where = f"rank {failure.rank} (local_rank {failure.local_rank}) on {failure.node_id}"
    how = describe_exit(failure.exit_code, failure.signal)
    lines = [f"{where} ({failure.address}), pid {failure.pid}: {how}", failure.message]
    return lines + (failure.traceback.splitlines() if with_traceback else [])


if __name__ == "__main__":
    main()
