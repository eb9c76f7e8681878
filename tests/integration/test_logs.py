"""Workers' output can be read from afar, through the one address of the server."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from cluster import BIN, JOB, Cluster, Node, fork


class Reading:
    """A running `rdzvctl logs`, and its output."""

    def __init__(self, c: Cluster, *args: str) -> None:
        self._c = c
        self.output = c.folder / f"logs-{'-'.join(args)}.out"
        self.errors = self.output.with_suffix(".err")
        with self.output.open("w") as out, self.errors.open("w") as err:
            words = ("--server", c.endpoint, "logs", JOB, *args)
            streams = (0, out.fileno(), err.fileno())
            self.process = fork("rdzvctl", words, c.environ(), streams)

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def wait_for(self, *lines: str) -> None:
        """Wait until it has printed these lines, among others."""
        self._c.wait_until(
            f"{lines} are read, not only {self.text!r}; {self.errors.read_text()}",
            lambda: set(lines) <= set(self.lines),
        )


@contextlib.contextmanager
def reading(c: Cluster, *args: str) -> Iterator[Reading]:
    made = Reading(c, *args)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def ctl(c: Cluster, *args: str) -> tuple[int, str, str]:
    done = c.run("rdzvctl", *args, environ={"RDZV_SERVER": c.endpoint})
    return done.returncode, done.stdout, done.stderr


def start(
    c: Cluster, *names: str, nnodes: str, nproc: int = 1, args: tuple[str, ...] = ()
) -> list[Node]:
    return [
        c.start_node(name, "--redirects=3", nnodes=nnodes, nproc=nproc, worker="talk.py", args=args)
        for name in names
    ]


def test_one_rank_is_followed_over_a_restart_of_the_worker_group(c: Cluster) -> None:
    nodes = start(c, "n1", "n2", nnodes="2")
    c.wait_for_round(0, workers=2)
    with reading(c, "-f", "--rank=1", "--stdout") as followed:
        followed.wait_for("out of 1 in 0")
        (c.folder / "say").write_text("again")
        followed.wait_for("again of 1 in 0")
        assert ctl(c, "restart", JOB)[0] == 0
        c.wait_for_round(1, workers=2)
        followed.wait_for("out of 1 in 1", "again of 1 in 1")
        c.finish()
        assert followed.process.wait(100) == 0, followed.errors.read_text()
    # All of it, in order, nothing twice, nothing of other workers.
    expected = [f"{text} of 1 in {n}" for n in (0, 1) for text in ("out", "again")]
    assert followed.lines == [*expected, "bye of 1 in 1"]
    assert [node.wait() for node in nodes] == [0, 0]


def test_of_nodes_that_have_gone_it_says_where_their_logs_are(c: Cluster) -> None:
    n1, n2 = start(c, "n1", "n2", nnodes="1:2")
    c.wait_for_round(0, workers=2)
    n2.kill_tree()
    c.wait_for_round(1, workers=1)
    code, out, err = ctl(c, "logs", JOB)
    assert (code, sorted(out.splitlines())) == (
        0,
        ["[rank 0] err of 0 in 1", "[rank 0] out of 0 in 1"],
    )
    c.finish()
    assert n1.wait() == 0
    run = c.status().run
    code, out, err = ctl(c, "logs", JOB)
    assert (code, out) == (1, "")
    assert err.startswith("rdzvctl: n1: its agent is not connected")
    folder = f"{JOB}-{run}/n1/round_1"
    assert folder in err
    assert (c.folder / "logs" / folder).is_dir()
    # The same for a worker that is gone while the others' output arrives.
    code, out, err = ctl(c, "logs", JOB, "-f")
    assert (code, out) == (1, "")


def test_what_goes_to_the_console_alone_is_said_to_be_there(c: Cluster) -> None:
    c.start_node("n1", nnodes="1", worker="talk.py")
    c.wait_for_round(0, workers=1)
    code, out, err = ctl(c, "logs", JOB, "-f")
    assert (code, out) == (1, "")
    assert "goes to the console of its rdzvrun and to no file" in err
    assert "--redirects=3" in err


def test_following_goes_on_over_a_restart_of_the_server_and_misses_nothing(c: Cluster) -> None:
    (node,) = start(c, "n1", nnodes="1", args=("count",))
    c.wait_for_round(0, workers=1)
    with reading(c, "-f", "--rank=0", "--stdout") as followed:
        followed.wait_for("3")
        c.kill_server()
        c.start_server()
        last = len(followed.lines)
        followed.wait_for(str(last + 50))
        c.finish()
        assert followed.process.wait(100) == 0, followed.errors.read_text()
    assert followed.lines[0] == "out of 0 in 0"
    assert followed.lines[1:-1] == [str(n) for n in range(len(followed.lines) - 2)]
    assert node.wait() == 0


def test_a_slow_reader_fills_no_memory_and_delays_no_heartbeat(c: Cluster) -> None:
    """It reads 100 bytes of 192 MiB, and no node is away for a moment."""
    (node,) = start(c, "n1", nnodes="1", args=("flood=192",))
    c.wait_for_round(0, workers=1)
    c.wait_until("all is written", (c.folder / "flooded").exists)
    assert c.server is not None
    pids = {"rdzvd": c.server.pid, "rdzvrun": node.process.pid}
    before = {name: memory(pid) for name, pid in pids.items()}
    slow = subprocess.Popen(
        [BIN / "rdzvctl", "--server", c.endpoint, "logs", JOB, "-f", "--rank=0", "--stdout"],
        stdout=subprocess.PIPE,
        env=c.environ(),
    )
    try:
        assert slow.stdout is not None
        assert slow.stdout.read(100)
        # Its pipe is full, for as many heartbeats as a lease needs.
        code, out, _ = ctl(c, "wait", JOB, "--for=8")
        assert code == 4, out
        grown = {name: memory(pid) - before[name] for name, pid in pids.items()}
        assert max(grown.values()) < 48 << 20, grown
        history = ctl(c, "events", JOB)[1]
        assert "NodeWentAway" not in history
        assert "NodeLost" not in history
        # Another reader is not delayed by it.
        code, out, err = ctl(c, "logs", JOB, "--rank=0", "--stdout", "--tail=2")
        assert (code, err) == (0, "")
        assert out.splitlines()[-1] == "flooded"
    finally:
        slow.kill()
        slow.wait()
        slow.stdout.close()
    c.finish()
    assert node.wait() == 0


def memory(pid: int) -> int:
    """Return the size of a process's private memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(pid)
