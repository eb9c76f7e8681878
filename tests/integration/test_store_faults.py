"""The SQLite store: killed at any instant, and below an rdzvd whose disk is full for a while."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from test_rdzvd import PATIENT, READY, attached, hello, status

KILLS = 48
WRITERS = 6

# One process that has imported everything; each writer is a fork of it, so a kill is cheap.
WRITER = """
import asyncio, os, sys
from pathlib import Path
from rdzv.core.model import Membership, Settings
from rdzv.stores.base import Record
from rdzv.stores.sqlite import SqliteStore

def say(text):
    os.write(1, (text + "\\n").encode())

async def write(store, name):
    stored = await store.load(name)
    revision = stored.revision if stored else 0
    while True:
        membership = Membership(name, "run", revision + 1, Settings(1, 2), 0)
        row = Record(0, name, "run", "NodeJoined", str(revision + 1))
        revision = await store.compare_and_swap(name, membership, revision, [row])
        say(f"acknowledged {name} {revision}")

async def main(directory, writers):
    store = await SqliteStore.open(Path(directory))
    say(f"leadership {await store.take_over()}")
    await asyncio.gather(*(write(store, f"w{n}") for n in range(writers)))

for line in sys.stdin:
    directory, writers = line.split()
    if (pid := os.fork()) == 0:
        asyncio.run(main(directory, int(writers)))
    say(f"forked {pid}")
    os.waitpid(pid, 0)
    say("ended")
"""


@dataclass
class Promised:
    """The writes that one data directory has confirmed, over all its writers."""

    revisions: dict[str, int] = field(default_factory=dict)
    leadership: int = 0

    def heard(self, line: str) -> None:
        match line.split():
            case ["acknowledged", name, revision]:
                self.revisions[name] = int(revision)
            case ["leadership", number]:
                assert int(number) > self.leadership
                self.leadership = int(number)


def kept(directory: Path, promised: Promised) -> None:
    """Check that all confirmed writes are there, and nothing is torn."""
    with closing(sqlite3.connect(directory / "rdzv.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("SELECT number FROM leadership").fetchone()[0] >= promised.leadership
        jobs = {
            name: (revision, json.loads(data)["membership"]["run_number"])
            for name, revision, data in db.execute("SELECT * FROM job")
        }
        for name, revision in promised.revisions.items():
            assert jobs[name][0] >= revision
        for name, (revision, number) in jobs.items():
            assert number == revision
            rows = db.execute(
                "SELECT CAST(data AS INTEGER) FROM history WHERE rdzv_id = ? ORDER BY seq", (name,)
            ).fetchall()
            # Each commit has added its row, in order, and no lost commit has left one.
            assert [row[0] for row in rows] == list(range(revision - len(rows) + 1, revision + 1))
            assert len(rows) == min(revision, len(rows))
            assert rows[-1][0] == revision


def test_killed_at_any_instant_nothing_that_was_acknowledged_is_lost(tmp_path: Path) -> None:
    dice = random.Random(os.environ.get("SEED", "4711"))
    with subprocess.Popen(
        [sys.executable, "-c", WRITER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as zygote:
        assert zygote.stdin is not None and zygote.stdout is not None
        acknowledged = 0
        for kill in range(KILLS):
            directory = tmp_path / f"data-{kill // 4}"
            if kill % 4 == 0:
                # A new directory, so that its creation is interrupted as well.
                promised = Promised()
            zygote.stdin.write(f"{directory} {WRITERS}\n")
            # By turns while the file is opened, and in the middle of commits.
            pid, commits = 0, dice.randrange(60) if kill % 2 else 0
            while not pid or commits > 0:
                line = zygote.stdout.readline()
                assert line, "the writers' parent has died"
                promised.heard(line)
                commits -= line.startswith("acknowledged")
                if line.startswith("forked"):
                    pid = int(line.split()[1])
            time.sleep(dice.uniform(0, 0.01 if kill % 2 else 0.03))
            os.kill(pid, signal.SIGKILL)
            for line in zygote.stdout:
                if line == "ended\n":
                    break
                promised.heard(line)
            # The dead process's files are opened by SQLite alone, on a copy.
            copy = tmp_path / "copy"
            shutil.copytree(directory, copy) if directory.exists() else copy.mkdir()
            if (copy / "rdzv.db").exists():
                kept(copy, promised)
            else:
                assert not promised.revisions
            shutil.rmtree(copy)
            acknowledged += sum(promised.revisions.values())
        zygote.stdin.close()
        zygote.wait(timeout=100)
    # Otherwise most were killed before they had written anything, which proves little.
    assert acknowledged > KILLS


# ---------------------------------------------------------------- a full disk


@dataclass
class Server:
    process: subprocess.Popen[str]
    address: str
    lines: list[str] = field(default_factory=list)

    def log_until(self, words: str) -> str:
        """Read the log up to a line with these words."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words!r} was not logged: {self.lines}")


@contextmanager
def rdzvd(data: Path) -> Iterator[Server]:
    """Run a server whose log is read from a pipe, since its disk can be full."""
    config = data.with_name("rdzvd.toml")
    config.write_text(PATIENT)
    command = [sys.executable, "-m", "rdzv.server", "--listen=127.0.0.1:0", f"--data-dir={data}"]
    command.append(f"--config={config}")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            found = READY.fullmatch(process.stdout.readline())
            assert found
            yield Server(process, found[1])
        finally:
            process.kill()


def set_file_limit(process: subprocess.Popen[str], number: int) -> None:
    """Make every write of a process that extends a file fail, or none."""
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (number, hard))


async def test_a_store_that_can_not_be_written_is_away_until_it_can(tmp_path: Path) -> None:
    with rdzvd(tmp_path / "data") as server:
        async with attached(server.address, hello("n1")) as n1:
            await n1.join("job-7", (1, 1))
            await n1.hear("round_completed")
            set_file_limit(server.process, 0)
            try:
                await n1.join("job-8", (1, 1))
                server.log_until("the store is away")
                # Reads succeed meanwhile, and several retries of the write fail.
                for _ in range(3):
                    assert (await status(server.address, "job-7")).state == "running"
                    # Longer than the server waits between two of them.
                    await asyncio.sleep(1.1)
            finally:
                set_file_limit(server.process, resource.RLIM_INFINITY)
            # The node's request was not forgotten.
            assert (await n1.line()).rdzv_id == "job-8"
        server.process.terminate()
        assert server.process.stderr is not None
        server.lines += server.process.stderr
        said = [line for line in server.lines if "the store is" in line]
        assert len(said) == 2, server.lines
        assert "workers continue, nothing new is decided" in said[0]
        assert "the store is back after" in said[1]
