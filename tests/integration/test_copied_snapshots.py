"""State that outlives its node: another node has kept copies of what was on it."""

from __future__ import annotations

import json
import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cluster import FORK_ALL, Cluster, Node, cluster_without_server
from ports import ports_of
from test_daemon import Daemons
from tls_files import Files

from rdzv.demo.programs import descendants
from rdzv.view.answers import NodeLoss
from tests.support.whole_lines import json_rows

SUPPORT = Path(__file__).parents[1] / "support"
ROOT = Path(__file__).parents[2]
EVERY = 5
TOPOLOGY = {"n1": "a", "n2": "b"}
CARRIER = "rdzv.worker.copy_snapshots"
WARM = "--warm=torch,torch.distributed.fsdp"
"""Workers are forked, which takes a fraction of the time of a cold start."""
LEASE = '[lease]\ntakeover_grace = "5 s"\n'
"""By default, no node is given up within 30 s of the server's start."""


class Training:
    """A sharded model on two nodes of different topologies, one worker each."""

    def __init__(self, folder: Cluster, faults: list[dict[str, Any]], steps: int) -> None:
        self.cluster = folder
        self.args = {"steps": steps, "snapshot_every": EVERY, "faults": faults}
        self.options: dict[str, tuple[str, ...]] = {}
        """More options, by the name of the node."""
        self.nnodes = "2"
        self.nodes: dict[str, Node] = {}

    def start(self, *names: str) -> None:
        script = self.cluster.folder / "train.py"
        script.write_text(
            "import json, sys, kept_training\n"
            "kept_training.train_sharded(**json.loads(sys.argv[1]))\n"
        )
        paths = os.pathsep.join([str(SUPPORT), str(ROOT / "worker"), os.environ["PYTHONPATH"]])
        for name in names:
            options = ("--max-restarts=5", "--keep-timeout=1", f"--topology={TOPOLOGY[name]}", WARM)
            self.nodes[name] = self.cluster.start_node(
                name,
                *options,
                *self.options.get(name, ()),
                worker=str(script),
                args=(json.dumps(self.args),),
                nnodes=self.nnodes,
                environ={"PYTHONPATH": paths, **FORK_ALL},
            )

    def replace(self, name: str) -> None:
        """End a node as if its machine had died, and start another in its place."""
        self.nodes[name].kill_tree()
        self.start(name)

    def lines(self, name: str, what: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the JSON lines of a node's present worker that have these fields."""
        return json_rows(self.nodes[name].text, what, **fields)

    def begun(self, name: str, **fields: Any) -> dict[str, Any]:
        """Wait until a node's worker has begun with a round, and return what it has said."""
        (line,) = self.cluster.wait_until(
            f"{name} has begun", lambda: self.lines(name, "begin", **fields)
        )
        assert isinstance(line, dict)
        return line

    def furthest(self) -> int:
        rows = (row for name in self.nodes for row in self.lines(name, "step"))
        return max((row["step"] for row in rows), default=0)

    def node_loss(self) -> NodeLoss | None:
        snapshot = self.cluster.status().snapshot
        return None if snapshot is None else snapshot.node_loss

    def survives(self, step: int) -> None:
        """Wait until a step that is at least this would survive the loss of any one node."""
        for name in self.nodes:
            self.cluster.wait_until(f"{name} trains", lambda name=name: self.lines(name, "begin"))

        def holds() -> bool:
            loss = self.node_loss()
            return loss is not None and loss.step is not None and loss.step >= step

        self.cluster.wait_until(f"step {step} would survive the loss of a node", holds)


@pytest.fixture(name="c")
def _cluster(tmp_path: Path) -> Iterator[Cluster]:
    config = tmp_path / "rdzvd.toml"
    config.write_text(LEASE)
    with cluster_without_server(tmp_path, f"--config={config}") as made:
        try:
            yield made
        finally:
            made.kill_adopted()


def stopping(*steps: int) -> list[dict[str, Any]]:
    """Let both ranks of round 0, 1, ... wait in the middle of a step until they are killed."""
    place = {"at": "forward", "do": "sleep", "seconds": 600}
    return [
        {**place, "rank": rank, "step": step, "round": number}
        for number, step in enumerate(steps)
        for rank in range(2)
    ]


SLOWLY = [{"at": "forward", "do": "sleep", "seconds": 0.05}]


@pytest.mark.campaign
def test_the_end_of_a_node_costs_no_more_steps_than_are_between_two_saves(c: Cluster) -> None:
    """Its part of the model is nowhere but in a copy, of which the server knows where it is."""
    c.start_server()
    # One save a round: a second one would be left out if it came before the first one's copies.
    stops = [13 + EVERY * number for number in range(5)]
    training = Training(c, stopping(*stops), steps=stops[-1] + 7)
    training.start("n1", "n2")
    for number, stop in enumerate(stops):
        for name in training.nodes:
            c.wait_until(
                f"{name} has stopped",
                lambda name=name, round_=number: training.lines(name, "fault", round=round_),
            )
        saved = stop // EVERY * EVERY
        training.survives(saved)
        lost = ("n2", "n1")[number % 2]
        training.replace(lost)
        assert training.begun(lost, round=number + 1)["step"] == saved
        text = "".join(node.text for node in training.nodes.values())
        assert f"resumed from the snapshot of step {saved} in memory (copies of parts " in text
    for name, node in training.nodes.items():
        assert node.wait() == 0
        assert len(training.lines(name, "done")) == 1


def test_a_server_killed_amid_saves_forgets_no_step_that_it_has_announced(c: Cluster) -> None:
    """A node dies while there is no server; the next one learns from the others what is whole."""
    c.start_server()
    training = Training(c, SLOWLY, steps=100_000)
    training.start("n1", "n2")
    training.survives(2 * EVERY)
    loss = training.node_loss()
    assert loss is not None and loss.step is not None
    c.kill_server()
    # Saves go on: nobody is told of them, so nothing that was announced is overwritten.
    reached = training.furthest()
    c.wait_until("training goes on", lambda: training.furthest() > reached + 4 * EVERY)
    training.nodes["n2"].kill_tree()
    c.start_server()
    training.start("n2")
    begun = training.begun("n2", round=1)["step"]
    assert begun >= loss.step and begun % EVERY == 0
    training.survives(begun + EVERY)


def test_copies_are_encrypted_where_nodes_have_certificates(c: Cluster, tmp_path: Path) -> None:
    """One is all that is left of a part when its node ends, and no step before it is lost."""
    files = Files(tmp_path / "tls")
    server, c.credentials = files.server(), files.client("ops", "admin")
    tls = [f"--tls-cert={server.cert}", f"--tls-key={server.key}"]
    c.start_server(*tls, f"--tls-client-ca={server.client_ca}")
    training = Training(c, stopping(13), steps=20)
    for name in ("n1", "n2"):
        of = files.node(name)
        given = (f"--tls-ca={of.ca}", f"--tls-cert={of.cert}", f"--tls-key={of.key}")
        training.options[name] = given
    training.start("n1", "n2")
    training.survives(10)
    for node in training.nodes.values():
        (carrier,) = [
            pid for pid in node.descendants() if CARRIER in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        (port,) = ports_of(carrier)
        assert "BEGIN CERTIFICATE" in ssl.get_server_certificate(("127.0.0.1", port))
    training.replace("n2")
    assert training.begun("n2", round=1)["step"] == 10
    text = "".join(node.text for node in training.nodes.values())
    assert "resumed from the snapshot of step 10 in memory (copies of parts " in text
    for name, node in training.nodes.items():
        assert node.wait() == 0
        assert len(training.lines(name, "done")) == 1


def test_another_number_of_workers_loads_what_all_parts_have_been_copied_of(c: Cluster) -> None:
    """A node is lost and nobody replaces it: the other one has its own part, and a copy."""
    c.start_server()
    training = Training(c, stopping(13), steps=20)
    training.nnodes = "1:2"
    training.start("n1", "n2")
    training.survives(10)
    training.nodes["n2"].kill_tree()
    assert training.begun("n1", round=1)["step"] == 10
    said = "resumed from the snapshot of step 10 in memory (copies of parts 1)"
    assert said in training.nodes["n1"].text
    c.wait_for_event("SnapshotsSaved", "round 0 saved 2 snapshots, which stopped training for ")
    assert training.nodes["n1"].wait() == 0


def test_a_drained_node_leaves_its_part_to_another_and_no_step_is_redone(c: Cluster) -> None:
    """It saves with the others, and waits until its part has been copied."""
    c.start_server()
    training = Training(c, SLOWLY, steps=60)
    training.args |= {"snapshot_every": None, "leaves": True}
    training.nnodes = "1:2"
    training.start("n1", "n2")
    training.begun("n2", round=0)
    c.wait_until("they train", lambda: training.furthest() > 3)
    c.run("rdzvctl", f"--server={c.endpoint}", "drain", "n2", "--deadline=60s")
    assert training.begun("n1", round=1)["step"] == training.lines("n1", "leaves")[0]["step"]
    assert "in memory (copies of parts 1)" in training.nodes["n1"].text
    assert training.nodes["n2"].wait() == 75
    assert training.nodes["n1"].wait() == 0
    assert {row["redo"] for row in training.lines("n1", "step", round=1)} == {False}


class Daemon:
    """An agent that is replaced, and its runner, which outlives it."""

    def __init__(self, daemons: Daemons, name: str) -> None:
        self._daemons, self.name = daemons, name
        self._lines = f'gpus = "none"\ntopology = "{TOPOLOGY[name]}"\n'
        self.agent = daemons.start(name, self._lines)

    def end(self, number: int) -> None:
        self.agent.process.send_signal(number)
        self.agent.wait()

    def start(self) -> None:
        self.agent = self._daemons.launch(self.name, self._lines)

    def adopts(self) -> None:
        self._daemons.cluster.wait_for_text(self.agent, ADOPTED)

    def lose(self) -> None:
        """End all of the node's processes as if its machine had died, and start another agent."""
        runner = int(self.agent.text.partition(ADOPTED)[2].partition(":")[0])
        self.agent.kill_tree()
        for pid in (runner, *descendants(runner)):
            os.kill(pid, signal.SIGKILL)
        self.start()


ADOPTED = "job: adopted, with runner pid "


@pytest.mark.campaign
@pytest.mark.parametrize("ending", [signal.SIGUSR2, signal.SIGKILL])
def test_agents_replaced_amid_copies_do_not_stop_these(c: Cluster, ending: int) -> None:
    """Carriers finish or restart the copies that they had begun, and go on to copy more.

    So they do if the server dies at the same time.
    """
    # Within a lease, a runner waits for the next agent.
    (c.folder / "rdzvd.toml").write_text(LEASE + 'duration = "60 s"\nlongest = "60 s"\n')
    c.start_server()
    daemons = Daemons(c)
    script = c.folder / "train.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {[str(SUPPORT), str(ROOT / 'worker')]}\n"
        "import kept_training\n"
        f"kept_training.train_sharded(100_000, faults={SLOWLY}, snapshot_every={EVERY})\n"
    )
    nodes = [Daemon(daemons, name) for name in TOPOLOGY]
    options = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=5", "--keep-timeout=1")
    daemons.submit("job", *options, str(script))

    def survives() -> int:
        """Return the step that would survive the loss of any one node."""
        snapshot = c.status().snapshot
        loss = None if snapshot is None else snapshot.node_loss
        return 0 if loss is None or loss.step is None else loss.step

    def logs() -> str:
        """Return what can be read of the workers' output: not that of a lost node."""
        return c.run("rdzvctl", f"--server={c.endpoint}", "logs", "job").stdout

    def whole() -> int:
        snapshot = c.status().snapshot
        return 0 if snapshot is None else snapshot.step

    daemons.until_state("job", "running")
    c.wait_until("a step is copied", survives)
    carriers = [pid for pid in c.marked() if CARRIER in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(carriers) == 2
    for pid in carriers:
        os.kill(pid, signal.SIGSTOP)
    copied = survives()
    c.wait_until("a newer step is whole, and not copied", lambda: whole() > survives())
    for node in nodes:
        node.end(ending)
    c.kill_server()
    c.start_server()
    for node in nodes:
        node.start()
    for node in nodes:
        node.adopts()
    # One that was complete before may have been reported since.
    c.wait_until("the next server knows what was copied", lambda: survives() >= copied)
    for pid in carriers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    c.wait_until("newer steps are copied", lambda: survives() >= copied + 3 * EVERY)
    status = c.status()
    assert (status.round, status.restarts) == (0, 0)

    held = survives()
    nodes[1].lose()
    said = "resumed from the snapshot of step "
    c.wait_until("workers go on from a copy", lambda: said in logs())
    resumed = logs().partition(said)[2].partition("\n")[0]
    assert int(resumed.split()[0]) >= held
    assert "in memory (copies of parts " in resumed
    assert "is damaged" not in logs()
