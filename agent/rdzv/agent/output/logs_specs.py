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
from rdzv.agent.output.console_tee import OutputStream
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
        self._local_world_size = local_world_size
        self._side: SideProcess | None = None

    async def open(self, launch: Launch) -> None:
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
                environ=launch.environ,
                chdir=launch.chdir,
                account=launch.account,
            )
        except OSError as error:
            raise InvalidRequestError(f"{option}: {launch.python}: {error}") from error
        await self._side.ready(option)

    async def reify(self, round_: int, environs: Environs) -> RoundOutput:
        try:
            async with asyncio.timeout(REIFY_TIMEOUT_S):
                answer = await self._ask(round_, environs)
        except TimeoutError:
            reason = f"it has not answered within {REIFY_TIMEOUT_S:g} s"
            raise OSError(f"--logs-specs: {reason}") from None
        if answer is None or "failed" in answer:
            reason = "its process has ended" if answer is None else answer["failed"]
            raise OSError(f"--logs-specs: {reason}")
        try:
            return _round_output(answer, self._local_world_size)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            # The class is the user's code, and so is everything else in its process.
            raise OSError(f"--logs-specs: its answer is invalid: {error!r}") from error

    async def _ask(self, round_: int, environs: Environs) -> Message | None:
        if (side := self._side) is None:
            return None
        answer = await side.ask({"round": round_, "envs": environs})
        while answer is not None and answer.get("round") != round_:
            answer = await side.answer()  # That was for a request that was given up.
        return answer

    async def close(self) -> None:
        if self._side is not None:
            side, self._side = self._side, None
            await side.close(CLOSE_TIMEOUT_S)


def _streams(by_rank: Mapping[int, int], local_world_size: int) -> dict[int, int]:
    """Give a value shared by all under key -1, as torch's classes may depend on that."""
    values = set(by_rank.values())
    if len(values) == 1 and by_rank.keys() == set(range(local_world_size)):
        return {-1: values.pop()}
    return dict(by_rank)


def _round_output(answer: Message, local_world_size: int) -> RoundOutput:
    workers = (_worker_output(answer, str(n)) for n in range(local_world_size))
    # An empty file name is not passed on.
    filtered = {
        OutputStream.OUT: Path(answer["filtered_stdout"] or os.devnull),
        OutputStream.ERR: Path(answer["filtered_stderr"] or os.devnull),
    }
    return RoundOutput(tuple(workers), filtered)


def _worker_output(answer: Message, local_rank: str) -> WorkerOutput:
    teed = {OutputStream.OUT: answer["tee_stdouts"], OutputStream.ERR: answer["tee_stderrs"]}
    stdout, stderr = answer["stdouts"].get(local_rank), answer["stderrs"].get(local_rank)
    return WorkerOutput(
        stdout=Path(stdout) if stdout else None,
        stderr=Path(stderr) if stderr else None,
        error=Path(answer["error_files"].get(local_rank) or NO_FILES),
        teed={
            stream: Path(by_rank[local_rank])
            for stream, by_rank in teed.items()
            if Path(by_rank.get(local_rank, NO_FILES)) != NO_FILES
        },
        environ=_environ(answer["envs"][local_rank]),
    )


def _environ(variables: Mapping[str, object]) -> dict[str, str]:
    if not all(isinstance(value, str) for value in variables.values()):
        raise TypeError("a value of the environment is not a string")
    return {name: str(value) for name, value in variables.items()}
