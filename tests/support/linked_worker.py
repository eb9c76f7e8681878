"""A worker that can be kept, written by hand: it speaks its link to the runner without a library.

It runs by path, with the standard library alone. Arguments are what it does beside parking:

    deaf             it never parks
    deaf:N           it never parks if its LOCAL_RANK is N
    stuck:N          likewise, and it says so
    connected        it parks with a connection to the round's store
    suspect:FILE     it reports a suspect, and parks, once FILE exists
    fails:FILE       it raises an exception once FILE exists
    exits:FILE       it exits with 0 once FILE exists
    children         it starts a child, and a daemon in a session of its own
    dies             it dies as soon as it has parked
    unlinked         it does not use its link
    elastic          it says so as if it had entered a function under @elastic; without a rank, it
                     parks before its first round
    unready:FILE     without a rank, it fails while that file exists
    slow:FILE        without a rank, it parks once that file is gone
    stays            it ignores SIGTERM
    saves:BYTES      it asks for slots of that size, prints what is in them, writes its pid into the
                     first, and says that it has saved a snapshot; it reports its step as progress
    holds:PORT       it connects to that port, and has the runner hold the connection
    floods           it says so a thousand times

It prints a line for each thing that happens to it, so that its log tells where it was written.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

SLEEPER = "import time; time.sleep(3600)"


class Link:
    """This worker's end of its link."""

    def __init__(self) -> None:
        fd = int(os.environ["RDZV_WORKER_LINK"])
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._received = b""
        self.fds: list[int] = []

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._socket.fileno()

    def say(self, **message: object) -> None:
        """Send a frame."""
        payload = json.dumps(message).encode()
        self._socket.sendall(struct.pack(">I", len(payload)) + payload)

    def hear(self) -> list[dict]:  # type: ignore[type-arg]
        """Return the frames that have come; `EOFError` at the end."""
        data, ancillary, _, _ = self._socket.recvmsg(1 << 18, socket.CMSG_SPACE(64))
        if not data:
            raise EOFError
        for level, kind, packed in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(packed)
                self.fds += fds
        self._received += data
        frames = []
        while len(self._received) >= 4:
            (length,) = struct.unpack_from(">I", self._received)
            if len(self._received) < 4 + length:
                break
            frames.append(json.loads(self._received[4 : 4 + length]))
            self._received = self._received[4 + length :]
        return frames


def report(round_: int) -> None:
    """Write a file that says which process has which place in a round, if there is a folder."""
    folder = os.environ.get("RDZV_TEST_REPORTS")
    if folder:
        name = f"{round_}-{os.environ['RANK']}-{os.getpid()}.json"
        temporary = Path(folder, f"{os.getpid()}.tmp")
        temporary.write_text(json.dumps({**os.environ, "pid": os.getpid()}))
        temporary.rename(Path(folder, name))


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def option(name: str) -> str | None:
    """Return the part after `name:` in the arguments; None if it is missing."""
    for argument in sys.argv[1:]:
        found, _, value = argument.partition(":")
        if found == name:
            return value
    return None


class Worker:
    """The actions of this process."""

    def __init__(self) -> None:
        standby = "elastic" in sys.argv and os.environ["RANK"] == "standby"
        self.round = -1 if standby else int(os.environ["RDZV_ROUND"])
        self.step: int | None = None if standby else 0
        """As in a training in lock-step: all workers of a round seal the same steps."""
        self.parked = False
        self.suspected = False
        self.store: socket.socket | None = None
        self.link = None if "unlinked" in sys.argv else Link()
        if self.link is not None:
            holds = option("holds") is not None
            self.link.say(type="hello", protocol=1, version="by hand", wants_queue=holds)
            if size := option("saves"):
                self.link.say(type="reserve", bytes=int(size))

    def run(self) -> None:
        """Train until told otherwise."""
        if "children" in sys.argv:
            start_children()
        if self.round == -1:
            file = option("unready")
            if file and Path(file).exists():
                raise ValueError("no standby today")
            while (slow := option("slow")) and Path(slow).exists():
                time.sleep(0.01)
            self.park()
        else:
            self.begin()
            if "elastic" in sys.argv:
                self.resumed(None)
        while True:
            readable = select.select([self.link] if self.link else [], [], [], 0.01)[0]
            if readable:
                self.listen()
            elif not self.parked:
                self.look_at_files()

    def begin(self) -> None:
        self.step = 10 + 10 * self.round
        say(f"round {self.round} pid {os.getpid()} rank {os.environ.get('RANK')}")
        report(self.round)
        if "connected" in sys.argv:
            where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            self.store = socket.create_connection(where)

    def look_at_files(self) -> None:
        file = option("exits") or os.environ.get("RDZV_TEST_FINISH")
        if file and Path(file).exists():
            say("done")
            sys.exit(0)
        file = option("fails")
        if file and Path(file).exists():
            try:
                Path(file).unlink()
            except FileNotFoundError:
                return  # Another worker was first, and fails.
            raise ValueError("the script's own")
        file = option("suspect")
        if file and Path(file).exists() and not self.suspected:
            self.suspected = True
            assert self.link is not None
            text = "Connection reset by peer"
            self.link.say(type="suspect", round=self.round, message=text, traceback="T")
            self.park()

    def listen(self) -> None:
        assert self.link is not None
        try:
            frames = self.link.hear()
        except (EOFError, ConnectionError):
            say("the link is closed")
            if self.parked:
                os._exit(0)
            self.link = None
            return
        for frame in frames:
            if frame["type"] == "round_over" and frame["round"] == self.round:
                if option("stuck") == os.environ["LOCAL_RANK"]:
                    self.link.say(type="stuck", round=self.round, place="graph.py:979")
                elif not self.parked and option("deaf") not in ("", os.environ["LOCAL_RANK"]):
                    self.park()
            elif frame["type"] == "go":
                self.go(frame)
            elif frame["type"] == "queue":
                self.hold()
            elif frame["type"] == "slots":
                self.save(frame)
            elif frame["type"] in ("no_slots", "watermark", "pinned"):
                say(json.dumps(frame))
            elif frame["type"] == "release":
                self.parked = False
                raise ConnectionResetError("Connection reset by peer")

    def park(self) -> None:
        assert self.link is not None
        self.parked = True
        say(f"parked after round {self.round}")
        self.link.say(type="parked", round=self.round, step=self.step, torn=False, connections=[])
        if "dies" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)

    def save(self, frame: dict) -> None:  # type: ignore[type-arg]
        assert self.link is not None
        first, _ = self.link.fds
        found = os.pread(first, 20, 0).decode().strip(" \0")
        say(f"slots {frame['bytes']} {os.fstat(first).st_size} {found or 'empty'}")
        os.pwrite(first, f"{os.getpid():<20}".encode(), 0)
        self.link.fds = []
        if file := os.environ.get("RDZV_PROGRESS_FILE"):
            Path(file).write_text(str(self.step))
        mark = {"lineage": 0, "step": self.step, "series": "abc", "shards": 1}
        saved = {"slot": 0, "mark": mark, "shard": 0, "bytes": frame["bytes"], "digest": "d"}
        with suppress(ConnectionError):
            for _ in range(1000 if "floods" in sys.argv else 1):
                self.link.say(type="saved", **saved)

    def hold(self) -> None:
        assert self.link is not None
        (queue,), self.link.fds = self.link.fds, []
        with (
            socket.socket(fileno=queue) as runner,
            socket.create_connection(("127.0.0.1", int(option("holds") or 0))) as connection,
        ):
            socket.send_fds(runner, [b"0"], [connection.fileno()])
        say("the runner holds it")

    def go(self, frame: dict) -> None:  # type: ignore[type-arg]
        assert self.link is not None
        self.parked, self.round = False, frame["round"]
        os.environ.update(frame["env"])
        sys.stdout.flush()
        for path, stream in ((frame["stdout"], 1), (frame["stderr"], 2)):
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                os.dup2(log, stream)
                os.close(log)
        self.begin()
        self.resumed(frame["source"])

    def resumed(self, source: int | None) -> None:
        assert self.link is not None
        self.link.say(
            type="resumed",
            round=self.round,
            step=self.step,
            source=source,
            healed=False,
            init_ms=1,
            heal_ms=2,
        )


def start_children() -> None:
    """Start a child, and a daemon in a session of its own whose parent is gone."""
    child = subprocess.Popen([sys.executable, "-S", "-c", SLEEPER], close_fds=True)
    daemon = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', {SLEEPER!r}],"
        " start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    )
    pid = subprocess.check_output([sys.executable, "-S", "-c", daemon], text=True).strip()
    say(f"children {child.pid} {pid}")


def main() -> None:
    """Run, and exit as an interpreter does."""
    if "stays" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        Worker().run()
    except Exception:
        traceback.print_exc()
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file:
            text = traceback.format_exc()
            at = str(int(time.time()))
            said = {"message": text.splitlines()[-1], "extraInfo": {"py_callstack": text}}
            said["extraInfo"]["timestamp"] = at  # type: ignore[index]
            with suppress(OSError):
                Path(file).write_text(json.dumps({"message": said}))
        sys.exit(1)


if __name__ == "__main__":
    main()
