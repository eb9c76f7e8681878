"""--logs-specs: a user-defined class determines where each round's workers write.

torch calls it a LogsSpecs (`torch/distributed/elastic/multiprocessing/api.py`). It runs in a
process with the job's interpreter for as long as the job does, and is called once per round.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from rdzv.agent.launch.launch import NO_FILES, Launch
from rdzv.agent.output.console_tee import Stream
from rdzv.agent.output.run_files import RoundOutput, WorkerOutput
from rdzv.agent.system.side_process import Message, SideProcess
from rdzv.errors import InvalidRequestError

REIFY_TIMEOUT_S = 60.0
"""How long it may take to return the output paths for a round's workers."""

CLOSE_TIMEOUT_S = 2.0

Environs = Mapping[int, Mapping[str, str]]
"""For each LOCAL_RANK, the variables that the agent adds to its own environment for the worker."""


class LogsSpecs:
    """The agent's handle on the user's LogsSpecs."""

    def __init__(self, local_world_size: int) -> None:
        """Set up nothing until `open` is called."""
        self._local_world_size = local_world_size
        self._side: SideProcess | None = None
        self._round: int | None = None
        """The round of the pending request, or None if no response is expected."""
        self._answer: asyncio.Future[RoundOutput] | None = None

    async def open(self, launch: Launch) -> None:
        """Load and instantiate the class.

        Raises:
            InvalidRequestError: there is no such entry point, or its class cannot be instantiated.
        """
        output = launch.output
        options = {
            "role": "logs_specs",
            "name": output.logs_specs,
            "log_dir": None if output.log_dir is None else str(output.log_dir),
            "redirects": _streams(output.redirects, launch.job.local_world_size),
            "tee": _streams(output.tee, launch.job.local_world_size),
            "ranks": None if output.shown_ranks is None else sorted(output.shown_ranks),
        }
        option = f"--logs-specs={output.logs_specs}"
        try:
            self._side = await SideProcess.start(
                launch.python,
                options,
                self._hear,
                environ=launch.environ,
                chdir=launch.chdir,
                account=launch.account,
            )
        except OSError as error:
            raise InvalidRequestError(f"{option}: {launch.python}: {error}") from error
        await self._side.ready(option)

    async def reify(self, round_: int, environs: Environs) -> RoundOutput:
        """Return the output paths for a round's workers. Another call drops a pending request.

        Raises:
            OSError: the class returns no usable result.
        """
        answer: asyncio.Future[RoundOutput] = asyncio.get_running_loop().create_future()
        self._round, self._answer = round_, answer
        if self._side is None or not self._side.ask({"round": round_, "envs": environs}):
            self._fail("its process has ended")
        try:
            async with asyncio.timeout(REIFY_TIMEOUT_S):
                return await answer
        except TimeoutError:
            reason = f"it has not answered within {REIFY_TIMEOUT_S:g} s"
            raise OSError(f"--logs-specs: {reason}") from None

    async def close(self) -> None:
        """End the process. A pending request remains unanswered."""
        self._round = None
        if self._side is not None:
            side, self._side = self._side, None
            await side.close(CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------------ the answer

    def _hear(self, message: Message) -> None:
        if message.get("ended"):
            self._fail("its process has ended")
        elif self._round is not None and message.get("round") == self._round:
            if "failed" in message:
                self._fail(str(message["failed"]))
                return
            try:
                output = _round_output(message, self._local_world_size)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                # The class is the user's code, and so is everything else in its process.
                self._fail(f"its answer is invalid: {error!r}")
                return
            self._round = None
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(output)

    def _fail(self, reason: str) -> None:
        if self._round is not None and self._answer is not None and not self._answer.done():
            self._answer.set_exception(OSError(f"--logs-specs: {reason}"))
        self._round = None


def _streams(by_rank: Mapping[int, int], local_world_size: int) -> dict[int, int]:
    """Encode a value shared by all workers under key -1, and differing values by worker.

    torch's classes may depend on this distinction.
    """
    values = set(by_rank.values())
    if len(values) == 1 and by_rank.keys() == set(range(local_world_size)):
        return {-1: values.pop()}
    return dict(by_rank)


def _round_output(told: Message, local_world_size: int) -> RoundOutput:
    workers = (_worker_output(told, str(n)) for n in range(local_world_size))
    # An empty file name is not passed on.
    filtered = {
        Stream.OUT: Path(told["filtered_stdout"] or os.devnull),
        Stream.ERR: Path(told["filtered_stderr"] or os.devnull),
    }
    return RoundOutput(tuple(workers), filtered)


def _worker_output(told: Message, local_rank: str) -> WorkerOutput:
    teed = {Stream.OUT: told["tee_stdouts"], Stream.ERR: told["tee_stderrs"]}
    stdout, stderr = told["stdouts"].get(local_rank), told["stderrs"].get(local_rank)
    return WorkerOutput(
        stdout=Path(stdout) if stdout else None,
        stderr=Path(stderr) if stderr else None,
        error=Path(told["error_files"].get(local_rank) or NO_FILES),
        teed={
            stream: Path(by_rank[local_rank])
            for stream, by_rank in teed.items()
            if Path(by_rank.get(local_rank, NO_FILES)) != NO_FILES
        },
        environ=_environ(told["envs"][local_rank]),
    )


def _environ(told: Mapping[str, object]) -> dict[str, str]:
    if not all(isinstance(value, str) for value in told.values()):
        raise TypeError("a value of the environment is not a string")
    return {name: str(value) for name, value in told.items()}
