"""Drained nodes, as an operator and a training see them: real daemons with a real rdzvd.

The workers count steps. A worker whose node leaves saves the step, and its replacement continues
from there: so a training that was notified in time differs from one that was only killed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import WORKERS, alive, cluster
from test_daemon import Daemons

from rdzv.view.answers import JobStatus, NodeStatus
from rdzv.view.answers import Node as SeenNode

SAVING = str(WORKERS / "saving.py")

DOCUMENT = (Path(__file__).parents[2] / "docs" / "drain.md").read_text()
EXAMPLE = DOCUMENT.partition("whichever node is to leave:\n\n")[2].partition("\nRun it with")[0]


class Floor(Daemons):
    """Three daemons and an operator."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.snapshot, self.go = self.folder / "snapshot", self.folder / "go"

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.cluster.run("rdzvctl", f"--server={self.cluster.endpoint}", *words)

    def says(self, *words: str) -> str:
        ended = self.ctl(*words)
        assert ended.returncode == 0, ended
        return ended.stdout

    def train(self, *options: str, nnodes: str = "2", flags: tuple[str, ...] = ()) -> list[Any]:
        """Submit a training, and wait until it runs on two nodes."""
        worker = (SAVING, f"snapshot={self.snapshot}", *options)
        self.submit("job", f"--nnodes={nnodes}", "--nproc-per-node=1", *flags, *worker)
        return self.reports("job", 2)

    def rounds(self, number: int) -> list[dict[str, Any]]:
        """Wait until both workers of a round have reported."""

        def there() -> list[dict[str, Any]]:
            found = [r for r in self.cluster.all_reports() if r["RDZV_ROUND"] == str(number)]
            return found if len(found) >= 2 else []

        found = self.until(f"round {number} runs", there)
        assert isinstance(found, list)
        return found

    def seen(self, name: str) -> SeenNode:
        node = self.node(name)["node"]
        assert isinstance(node, SeenNode)
        return node

    def until_drained(self, name: str) -> SeenNode:
        self.until(f"{name} is drained", lambda: self.seen(name).drain == "drained")
        return self.seen(name)

    def of_job(self) -> dict[str, NodeStatus]:
        return {node.node_id: node for node in self.status("job").nodes}

    def succeed(self) -> JobStatus:
        self.cluster.finish()
        return self.until_state("job", "succeeded")


@pytest.fixture(name="f")
def _floor(tmp_path: Path) -> Iterator[Floor]:
    with cluster(tmp_path) as made:
        yield Floor(made)


def test_a_spare_takes_the_seat_with_what_was_saved_at_the_notice(f: Floor) -> None:
    agents = [f.start(name) for name in ("n1", "n2", "n3")]
    first = f.train("by=signal", flags=("--notice-signal=SIGUSR1",))
    assert {(r["step"], r["notified"]) for r in first} == {(0, False)}
    text = f.says("drain", "n1", "--deadline=10m", "--reason=new kernel", "--wait")
    assert text == "n1 is drained\n"
    later = f.rounds(1)
    # It was notified, saved, and left by itself; it was not killed.
    assert all(r["step"] > 0 for r in later)
    status = f.status("job")
    assert (status.state, status.restarts, status.round) == ("running", 0, 1)
    nodes = f.of_job()
    assert (nodes["n3"].state, nodes["n3"].group_rank) == ("seated", 0)
    assert nodes["n1"].state == "left"
    assert "new kernel" in status.reason.by_node["n1"]
    events = f.says("events", "job")
    assert "NodeDrained" in events
    assert "n1 leaves within 10 min 0 s: drained by" in events
    assert agents[0].process.poll() is None
    notice = json.loads((f.folder / "told").read_text())
    assert notice["reason"].endswith(": new kernel")
    assert 0 < notice["deadline_unix"] - time.time() < 600
    # Nothing more is placed there until it is undrained.
    f.submit("other", "--nproc-per-node=1", SAVING, f"snapshot={f.folder / 'other'}")
    f.until("other waits", lambda: "n1 (drained): by" in str(f.status("other").reason))
    assert f.says("undrain", "n1").startswith("the drain of n1 is lifted: ")
    f.until("other runs", lambda: f.status("other").state == "running")
    f.succeed()


def test_all_ranks_save_the_same_step_by_the_script_of_the_documents(f: Floor) -> None:
    for name in ("n1", "n2", "n3"):
        f.start(name)
    script, saved = f.folder / "train.py", f.folder / "saved"
    script.write_text(textwrap.dedent(EXAMPLE))
    f.submit("job", "--nnodes=2", "--nproc-per-node=1", str(script), str(saved), "1000000")
    f.until("both wait for SIGTERM", lambda: len(waiting_for_sigterm(script)) == 2)
    f.says("drain", "n1", "--deadline=1m", "--reason=new kernel", "--wait")
    steps = [torch.load(f"{saved}.{rank}") for rank in (0, 1)]
    assert steps[0] == steps[1] > 0
    f.until("the spare runs", lambda: f.status("job").round == 1)
    assert f.status("job").restarts == 0
    f.says("stop", "job", "--reason=enough")


def waiting_for_sigterm(script: Path) -> list[Path]:
    """Return the processes that run a script and handle SIGTERM."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(script).encode() in (process / "cmdline").read_bytes().split(b"\0"):
                status = dict(
                    line.split(":\t", 1) for line in (process / "status").read_text().splitlines()
                )
                if int(status["SigCgt"], 16) & 1 << signal.SIGTERM - 1:
                    found.append(process)
    return found


def test_at_the_deadline_workers_that_heed_nothing_are_killed(f: Floor) -> None:
    for name in ("n1", "n2", "n3"):
        f.start(name)
    first = f.train("deaf", flags=("--shutdown-timeout=1",))
    (deaf,) = [r["pid"] for r in first if r["GROUP_RANK"] == "0"]
    f.says("drain", "n1", "--deadline=500ms")
    f.until_drained("n1")
    assert not alive(deaf)
    assert {r["step"] for r in f.rounds(1)} == {0}
    assert "had not exited by the deadline" in f.status("job").reason.by_node["n1"]
    assert f.succeed().restarts == 0


def test_a_server_that_is_killed_in_the_midst_still_knows_of_it(f: Floor) -> None:
    for name in ("n1", "n2", "n3"):
        f.start(name)
    f.train("by=file", f"go={f.go}", flags=("--notice-signal=none",))
    f.says("drain", "n1", "--deadline=10m")
    f.until("n3 is a spare", lambda: f.of_job().get("n3") and f.of_job()["n3"].state == "spare")
    f.cluster.kill_server()
    f.cluster.start_server()
    f.until("n1 is back", lambda: f.node("n1").get("state") == "connected")
    # Its workers keep all their time, and it gets no jobs.
    seen = f.seen("n1")
    assert (seen.drain, seen.drained_by_operator) == ("draining", True)
    assert seen.drain_left_ms is not None
    assert seen.drain_left_ms > 60_000
    assert f.of_job()["n1"].state in ("seated", "away")
    f.go.touch()
    f.until_drained("n1")
    assert all(r["step"] > 0 for r in f.rounds(1))
    assert f.succeed().restarts == 0


def test_who_is_undrained_in_time_trains_on(f: Floor) -> None:
    for name in ("n1", "n2"):
        f.start(name)
    (one, two) = f.train("deaf", flags=("--notice-signal=none",))
    notice = Path(next(r for r in (one, two) if r["GROUP_RANK"] == "0")["RDZV_NOTICE_FILE"])
    f.says("drain", "n1", "--deadline=1h", "--force")
    f.until("the notice is there", notice.exists)
    status = json.loads(f.says("nodes", "n1", "-o", "json"))
    assert (status["drain"], status["cordoned"]) == ("draining", True)
    assert "once n1 has left, none is free" in str(f.status("job").reason)
    f.says("undrain", "n1")
    f.until("the notice is gone", lambda: not notice.exists())
    f.until("nothing is waited for", lambda: "n1" not in str(f.status("job").reason))
    assert f.succeed().round == 0
    assert alive(one["pid"]) is False


def test_an_rdzvrun_that_is_preempted_lets_its_workers_save_and_leaves(f: Floor) -> None:
    c, word = f.cluster, f.folder / "preempted"
    nodes = [
        c.start_node(
            name,
            "--notice-signal=none",
            *options,
            worker="saving.py",
            nnodes="1:2",
            args=(f"snapshot={f.snapshot}", "by=file"),
        )
        for name, options in (("a", (f"--preemption-file={word}",)), ("b", ()))
    ]
    f.until("both run", lambda: len(c.all_reports()) >= 2)
    new = f.folder / "new"
    new.write_text("60\n")
    new.rename(word)
    assert nodes[0].wait() == 75
    assert f"preempted ({word}): this node will leave all its jobs within 1 min" in nodes[0].text
    # It was notified in time, and the other continues from its saved state.
    f.until("the other goes on alone", lambda: len(c.all_reports()) >= 3)
    (alone,) = [r for r in c.all_reports() if r["WORLD_SIZE"] == "1"]
    assert alone["step"] > 0
    assert c.status().restarts == 0
    c.finish()
    assert nodes[1].wait() == 0


# ------------------------------------------------------------------ what the node itself knows


def test_an_agent_that_is_told_to_end_lets_its_workers_save(f: Floor) -> None:
    agents = [f.start(name) for name in ("n1", "n2", "n3")]
    f.train("by=file", f"go={f.go}", flags=("--notice-signal=none",))
    agents[0].process.send_signal(signal.SIGTERM)
    f.until("n3 is a spare", lambda: f.of_job().get("n3") and f.of_job()["n3"].state == "spare")
    assert "n1 (about to leave): its agent received SIGTERM" in str(f.status("job").reason)
    assert f.of_job()["n1"].state == "seated"
    f.go.touch()
    assert agents[0].wait() == 0
    assert all(r["step"] > 0 for r in f.rounds(1))
    assert f.succeed().restarts == 0


def test_a_second_signal_ends_the_wait(f: Floor) -> None:
    agents = [f.start("n1", 'gpus = "none"\ndrain_deadline = "1h"\n'), f.start("n2"), f.start("n3")]
    f.train("by=file", f"go={f.go}", flags=("--notice-signal=none",))
    agents[0].process.send_signal(signal.SIGTERM)
    f.until("notified the workers", lambda: "notified the workers" in agents[0].text)
    agents[0].process.send_signal(signal.SIGTERM)
    assert agents[0].wait() == 0
    assert {r["step"] for r in f.rounds(1)} == {0}
    assert f.succeed().restarts == 0


# ------------------------------------------------------------------ one after another


def test_a_roll_goes_through_all_nodes_and_the_job_never_falls_short(f: Floor) -> None:
    for name in ("n1", "n2", "n3"):
        f.start(name, 'gpus = "none"\n[labels]\nrack = "a1"\n')
    f.train("by=file", flags=("--notice-signal=none",))
    text = f.says("drain", "--all-of=rack=a1", "--deadline=10m", "--undrain-after=echo $RDZV_NODE")
    assert [line for line in text.splitlines() if line in ("n1", "n2", "n3")] == ["n1", "n2", "n3"]
    assert text.splitlines()[0] == "3 with rack=a1: n1, n2, n3"
    assert all(f.seen(name).drain is None for name in ("n1", "n2", "n3"))
    status = f.succeed()
    assert status.restarts == 0
    events = f.says("events", "job")
    # Whichever node was drained, another took the seat: no round had fewer.
    assert "waiting for" not in events
    assert events.count("RoundCompleted") == 1 + events.count("NodeLeft")
