"""A user's additions to torchrun by entry points: logs specs, and a handler of events."""

import logging
from pathlib import Path

from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs


class Handler(logging.StreamHandler):
    """Shows events as the console does, under its own name."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg = f"mine {record.msg}"
        super().emit(record)


handlers._log_handlers["mine"] = Handler()


class FlatLogs(LogsSpecs):
    """One folder for each attempt, one file for each worker's stdout, some of them teed."""

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)

    def reify(self, envs: dict) -> LogsDest:
        attempt = envs[0]["TORCHELASTIC_RESTART_COUNT"]
        folder = Path(self._root_log_dir) / f"attempt_{attempt}"
        folder.mkdir(parents=True)
        found = LogsDest(filtered_stdout=str(folder / "some.out"))
        for local_rank, env in envs.items():
            stem = f"rank-{env['RANK']}-of-{env['WORLD_SIZE']}"
            env["TORCHELASTIC_ERROR_FILE"] = str(folder / f"{stem}.json")
            env["NAMED_BY"] = repr((self._redirects, self._tee, self._local_ranks_filter))
            found.stdouts[local_rank] = str(folder / f"{stem}.out")
            found.stderrs[local_rank] = ""
            if local_rank in self._local_ranks_filter:
                found.tee_stdouts[local_rank] = found.stdouts[local_rank]
            found.error_files[local_rank] = env["TORCHELASTIC_ERROR_FILE"]
        return found


def handler_of_rendezvous() -> object:
    """Stand for a back-end; because it is named, every torchrun imports this module."""
    return lambda params: None
