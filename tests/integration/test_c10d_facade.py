"""torch's own rendezvous with a store served by rdzvd: torchruns, hostile clients, deaths."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cluster import JOB, WORKERS, Cluster, Node, alive, cluster_without_server
from ports import free_port
from ready_torchrun import Start
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from rdzv.ctl import as_text_lists
from rdzv.structs import as_dict

SERVED = re.compile(r"serving (?:torch's|a new, empty) store on (\S+) \(pid (\d+)\)")
PATIENCE_S = 120.0


@pytest.fixture(name="c")
def _cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_without_server(tmp_path) as made:
        # Its store returns to the port, which nothing else may take meanwhile.
        made.start_server("--c10d", f"127.0.0.1:{free_port()}")
        yield made


def served(c: Cluster) -> tuple[str, int, int]:
    """Return host and port of torch's store, and the pid of the process that serves it now."""
    address, pid = SERVED.findall(c.server_log)[-1]
    host, _, port = address.rpartition(":")
    return host, int(port), int(pid)


def client(c: Cluster) -> TCPStore:
    host, port, _ = served(c)
    return TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


Torchrun = Callable[..., Node]


@pytest.fixture(name="torchrun")
def _torchrun(c: Cluster, ready: Start) -> Torchrun:
    """Start one unmodified torchrun, as a user would."""

    def start(name: str, *, nnodes: str = "2:3") -> Node:
        host, port, _ = served(c)
        return c.start_torchrun(
            ready,
            name,
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={host}:{port}",
            f"--rdzv-id={JOB}",
            f"--nnodes={nnodes}",
            "--max-restarts=3",
            "--rdzv-conf=last_call_timeout=3",
            str(WORKERS / "all_reduce_c10d.py"),
            # Otherwise the workers of all attempts share one store, and read each other's keys.
            environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )

    return start


def training(c: Cluster, world_size: int) -> list[dict[str, Any]]:
    """Return the reports of the workers that train now, once this many train together."""
    found = [r for r in c.all_reports() if alive(r["pid"])]
    complete = {r["RANK"] for r in found} == {str(rank) for rank in range(world_size)}
    sizes = {r["WORLD_SIZE"] for r in found} == {str(world_size)}
    return found if complete and sizes and len(found) == world_size else []


def wait_for_training(c: Cluster, world_size: int) -> list[dict[str, Any]]:
    what = f"{world_size} workers train"
    found = c.wait_until(what, lambda: training(c, world_size), PATIENCE_S)
    assert isinstance(found, list)
    return found


def listed(c: Cluster) -> list[dict[str, Any]]:
    """Return the output of `rdzvctl list -o json`, without a process per call."""
    with c.client() as client:
        return [as_dict(job) for job in as_text_lists.chosen(client.jobs(), (), None, None)]


def names(c: Cluster) -> list[tuple[str, str]]:
    return [(job["rdzv_id"], job["backend"]) for job in listed(c)]


def wait_for_seats(c: Cluster, seats: int, after: int = -1) -> dict[str, Any]:
    """Wait until the job is shown with this many seats in a later round, and return its entry.

    The data shown is as old as the last read of the store.
    """

    def there() -> list[dict[str, Any]]:
        shown = [job for job in listed(c) if (job["state"], job["nodes"]) == ("running", seats)]
        return [job for job in shown if job["round"] > after]

    (job,) = c.wait_until(f"{seats} nodes are shown as seated", there, PATIENCE_S)
    assert isinstance(job, dict)
    return job


def state_of(*nodes: _NodeDesc) -> _RendezvousState:
    state = _RendezvousState()
    state.complete = True
    state.participants = {node: rank for rank, node in enumerate(nodes)}
    state.last_heartbeats = dict.fromkeys(nodes, datetime.now(UTC))
    return state


def put(store: TCPStore, rdzv_id: str, state: object) -> None:
    store.set(f"torch.rendezvous.{rdzv_id}", base64.b64encode(pickle.dumps(state)).decode())


# ------------------------------------------------------------------------------------ stock nodes


def test_unmodified_torchruns_form_restart_grow_and_end(c: Cluster, torchrun: Torchrun) -> None:
    """They run on the server's machine and leave `is_host` to torch, which finds the port taken."""
    nodes = [torchrun(f"n{i}") for i in (1, 2)]
    first = wait_for_training(c, 2)
    job = wait_for_seats(c, 2)
    assert (job["rdzv_id"], job["backend"], job["round"]) == (JOB, "c10d", 0)
    status = c.status()
    assert [(n.group_rank, n.state) for n in status.nodes] == [(0, "seated"), (1, "seated")]
    assert {n.node_id.split("_")[1] for n in status.nodes} == {str(n.process.pid) for n in nodes}

    # A worker dies: one torchrun spends a restart, the other joins it.
    os.kill(first[0]["pid"], signal.SIGKILL)
    c.wait_until("the others are gone", lambda: not any(alive(r["pid"]) for r in first), PATIENCE_S)
    wait_for_training(c, 2)
    second = wait_for_seats(c, 2, after=0)["round"]

    nodes.append(torchrun("n3"))
    wait_for_training(c, 3)
    wait_for_seats(c, 3, after=second)
    shown = c.run("rdzvctl", "--server", c.endpoint, "status", JOB).stdout
    assert "c10d, read-only" in shown
    assert "3 nodes run round" in shown

    c.finish()
    assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0, 0]
    ended = c.wait_for_state("stopped", PATIENCE_S)
    assert ended.reason.headline == "closed by its nodes; c10d does not report how it ended"
    events = c.run("rdzvctl", "--server", c.endpoint, "events", JOB)
    assert (events.returncode, events.stdout) == (0, f"no events of {JOB} are kept\n")

    # The effect of a store that outlives its jobs: closed means closed forever.
    again = torchrun("n4")
    assert again.wait(PATIENCE_S) == 1
    assert "RendezvousClosedError" in again.text
    assert not re.search("ERROR|Traceback|Exception", c.server_log), c.server_log


# ------------------------------------------------------------------------------------ its process


def test_rdzvd_has_no_torch_in_memory_and_takes_its_child_along(c: Cluster) -> None:
    assert c.server is not None
    _, _, pid = served(c)
    assert "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{c.server.pid}/maps").read_text()
    # A terminal or systemd signals all processes; only rdzvd may act on it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    put(client(c), "a", state_of(_NodeDesc("h1", 1, 0)))
    c.wait_until("the job is shown", lambda: names(c) == [("a", "c10d")])
    assert served(c)[2] == pid
    c.server.send_signal(signal.SIGTERM)
    assert c.server.wait(60) == 0
    assert not alive(pid)
    assert "ERROR" not in c.server_log


def test_a_child_never_outlives_a_killed_rdzvd(c: Cluster) -> None:
    _, _, pid = served(c)
    c.kill_server()
    c.wait_until("its child is gone", lambda: not alive(pid))


def test_a_child_that_dies_is_replaced_by_an_empty_store_at_the_same_address(
    c: Cluster, torchrun: Torchrun
) -> None:
    host, port, pid = served(c)
    node = torchrun("n1", nnodes="1")
    wait_for_seats(c, 1)
    os.kill(pid, signal.SIGKILL)
    # It does not connect again: such a job ends with its store.
    assert node.wait(PATIENCE_S) == 1
    assert "RendezvousConnectionError" in node.text
    c.wait_until("another one serves", lambda: served(c)[2] != pid, PATIENCE_S)
    assert served(c)[:2] == (host, port)
    log = " ".join(c.server_log.split())
    assert "was ended by signal 9 (SIGKILL)" in log
    assert "its jobs will end without their store; launch them again: job" in log
    c.wait_until("its job is not shown any more", lambda: listed(c) == [])
    put(client(c), "new-job", state_of(_NodeDesc("h1", 1, 0)))
    c.wait_until("the new job is shown", lambda: names(c) == [("new-job", "c10d")])


def test_a_child_that_is_stopped_is_waited_for(c: Cluster) -> None:
    _, _, pid = served(c)
    put(client(c), "a", state_of(_NodeDesc("h1", 1, 0)))
    c.wait_until("the job is shown", lambda: names(c) == [("a", "c10d")])
    os.kill(pid, signal.SIGSTOP)
    c.wait_until("the view is old", lambda: "last seen" in listed(c)[0]["reason"]["headline"])
    os.kill(pid, signal.SIGCONT)
    c.wait_until("it is new again", lambda: "last seen" not in listed(c)[0]["reason"]["headline"])
    assert served(c)[2] == pid


# ------------------------------------------------------------------------------------ the store


class Harm:
    """Leaves a file behind if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_hostile_clients_disturb_nobody(c: Cluster) -> None:
    store = client(c)
    harmful = state_of(_NodeDesc("h1", 1, 0))
    harmful.round = Harm(c.folder / "harm")  # type: ignore[assignment]
    put(store, "system", Harm(c.folder / "harm"))
    put(store, "system-inside", harmful)
    put(store, "deep", b"(" * 1_000_000)
    store.set("torch.rendezvous.text", "\x00\u202e no base64 \x1b[2J")
    store.set("torch.rendezvous.large", "A" * 5_000_000)
    store.set("torch.rendezvous.", "nameless")
    store.set("torch.rendezvous." + "n" * 5_000, "long")
    store.add("torch.rendezvous.counter", 1)
    put(store, "a\x1b[2J/b c", state_of(_NodeDesc("h1", 1, 0)))
    put(store, "good", state_of(_NodeDesc("h\x1b[2J", 1, 0)))
    expected = [("a\x1b[2J/b c", "c10d"), ("good", "c10d")]
    c.wait_until("the jobs that can be read are shown", lambda: names(c) == expected)
    for rdzv_id in ("system", "system-inside", "deep", "text", "large", "counter"):
        c.wait_until(
            f"{rdzv_id} is logged", lambda r=rdzv_id: f"state of job '{r}':" in c.server_log
        )
    odd = c.run("rdzvctl", "--server", c.endpoint, "status", "a\x1b[2J/b c")
    assert odd.returncode == 0
    assert "\x1b" not in odd.stdout + c.server_log

    # It changes each second, and is logged once.
    for number in range(3):
        store.set("torch.rendezvous.text", f"still none: {number}")
        put(store, f"good{number}", state_of(_NodeDesc("h1", 1, 0)))
        c.wait_until("a look has come by", lambda n=number: (f"good{n}", "c10d") in names(c))
    assert c.server_log.count("'text'") == 1

    # A job that can no longer be read is no longer shown; a repaired one is.
    store.set("torch.rendezvous.good", "broken")
    put(store, "text", state_of(_NodeDesc("h1", 1, 0)))
    c.wait_until("they are swapped", lambda: ("good", "c10d") not in names(c))
    c.wait_until("they are swapped", lambda: ("text", "c10d") in names(c))
    store.delete_key("torch.rendezvous.text")
    c.wait_until("it is gone", lambda: ("text", "c10d") not in names(c))

    # A name that Python cannot even list.
    store.set(b"\xff\xfe", "x")
    c.wait_until("it is complained about", lambda: "cannot be listed" in c.server_log)
    assert ("good0", "c10d") in names(c)
    assert not (c.folder / "harm").exists()
    assert "Traceback" not in c.server_log


def test_of_two_jobs_of_one_name_the_servers_own_is_shown(c: Cluster) -> None:
    put(client(c), JOB, state_of(_NodeDesc("h1", 1, 0)))
    c.wait_until("it is shown", lambda: names(c) == [(JOB, "c10d")])
    assert c.status().backend == "c10d"
    c.start_node("n1", nnodes="1")
    c.wait_until("both are listed", lambda: sorted(names(c)) == [(JOB, "c10d"), (JOB, "rdzv")])
    assert c.status().backend == "rdzv"
    document = c.run("rdzvctl", "--server", c.endpoint, "list", "-o", "json").stdout
    assert {job["backend"] for job in json.loads(document)["jobs"]} == {"c10d", "rdzv"}
    table = c.run("rdzvctl", "--server", c.endpoint, "list").stdout
    assert re.search(rf"^{JOB} +c10d +running", table, re.MULTILINE), table
    assert re.search(rf"^{JOB} +rdzv ", table, re.MULTILINE), table


# ------------------------------------------------------------------------------------ refusals


def refused(c: Cluster, *options: str) -> tuple[int, str]:
    done = c.run("rdzvd", "--data-dir", str(c.folder / "data"), "--listen=127.0.0.1:0", *options)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (["--c10d=0.0.0.0:0"], 2, "can be reached from other machines"),
        (["--c10d=29400"], 2, "it has no port; write HOST:PORT"),
        (["--c10d=127.0.0.1:4711", "--listen=127.0.0.1:4711"], 2, "give one of them another port"),
        (["--c10d=no-such-host.invalid:0", "--insecure"], 1, "host no-such-host.invalid"),
        (["--c10d=127.0.0.1:0", "--c10d-python=/no/such"], 1, "/no/such cannot be run"),
        (["--c10d=127.0.0.1:0", "--c10d-python=/bin/false"], 1, "ended with exit code 1"),
    ],
)
def test_what_can_not_be_served_is_refused(
    options: list[str], code: int, why: str, alone: Cluster
) -> None:
    found, said = refused(alone, *options)
    assert why in said
    assert found == code


def test_a_port_that_is_taken_is_refused(alone: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = refused(alone, f"--c10d=127.0.0.1:{port}")
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}: another program does already" in said


def test_an_interpreter_without_torch_is_refused_with_the_remedy(alone: Cluster) -> None:
    python = alone.folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    code, said = refused(alone, "--c10d=127.0.0.1:0", f"--c10d-python={python}")
    assert code == 1
    assert "No module named 'torch'" in said
    assert "install rdzv[torch]" in said
