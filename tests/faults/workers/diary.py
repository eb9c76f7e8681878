"""A worker's diary: its start, its progress ten times a second, and its end.

A worker that stays begins each round with such a start, and parks between two: then it writes
nothing. Each worker has its own file below `RDZV_FAULTS_HISTORY`; times are CLOCK_MONOTONIC, which
all processes of a machine share, whatever their network namespace.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

EVERY_S = 0.1


class Diary:
    """Writes for one worker; a thread reports that the worker is alive, even if it hangs."""

    def __init__(self) -> None:
        self._file = (Path(os.environ["RDZV_FAULTS_HISTORY"]) / f"{os.getpid()}.jsonl").open("a")
        self._lock = threading.Lock()
        self._parked = True
        self.begin_round()
        threading.Thread(target=self._beat, daemon=True).start()

    def begin_round(self) -> None:
        """Record that the worker takes part in its environment's round, unless recorded."""
        if not self._parked:
            return
        self.step = -1
        self._parked = False
        self._about = {
            "host": os.environ["RDZV_FAULTS_HOST"],
            "pid": os.getpid(),
            "round": int(os.environ["RDZV_ROUND"]),
            "rank": int(os.environ["RANK"]),
        }
        self._write(
            "Started",
            node_id=os.environ["RDZV_FAULTS_NODE"],
            rdzv_id=os.environ["TORCHELASTIC_RUN_ID"],
            group_rank=int(os.environ["GROUP_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            group_world_size=int(os.environ["GROUP_WORLD_SIZE"]),
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            master=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        )

    def park(self) -> None:
        """Record that the worker no longer takes part in its round, and waits for the next."""
        with self._lock:
            self._put("Parked")
            self._parked = True

    def met_stranger(self, text: str) -> None:
        """Record that a peer of another round, or of none, came to this round's meeting place."""
        self._write("MetStranger", text=text)

    def end(self, reason: str) -> None:
        """Record that the worker ends by itself."""
        self._write("Exited", reason=reason)

    def _beat(self) -> None:
        while True:
            with self._lock:
                if not self._parked:
                    self._put("Stepped", step=self.step)
            time.sleep(EVERY_S)

    def _write(self, kind: str, **more: object) -> None:
        with self._lock:
            self._put(kind, **more)

    def _put(self, kind: str, **more: object) -> None:
        line = {"kind": kind, "at_s": time.monotonic(), **self._about, **more}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def load_step() -> int:
    """Return the last saved step."""
    snapshot = Path(os.environ["RDZV_FAULTS_SNAPSHOT"])
    return int(snapshot.read_text()) if snapshot.exists() else 0


def save_step(step: int) -> None:
    """Save a step, whole or not at all."""
    snapshot = Path(os.environ["RDZV_FAULTS_SNAPSHOT"])
    temporary = snapshot.with_name(f"{snapshot.name}.{os.getpid()}")
    temporary.write_text(str(step))
    temporary.rename(snapshot)
