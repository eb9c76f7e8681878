"""How many nodes one server holds, and how long it takes to tell them all.

N simulated nodes of one job, in processes of their own, speak the real protocol over N connections
to one rdzvd with its default store, SQLite:

* gather: N - 1 nodes connect and join, as fast as those processes can; until all are admitted;
* form: the last node joins; until every node was told the round;
* fail: a worker fails; until all have stopped, joined again and were told the next round;
* fail-all: the same, but a worker of every node fails, as in a broken collective;
* lose: the same, but the stream of one node ends without a word. It has the 0.25 s that the server
  waits for the node to come back;
* steady: nothing but heartbeats: CPU of the server, in % of one core, and its memory per node;
* start, return: rdzvd gets SIGKILL and is started again, until it is ready; and until every stream
  was welcomed again. `given up` are the nodes that were lost over it, and `disturbed` those whose
  workers have stopped: all of them, if one is given up. `tries` are the streams that a node opened.
  `slowest answer` is the longest that a node that was back already waited for the answer to a
  heartbeat: one node in fifty sends one a second that the server must answer.

On a shared machine seconds say little: the CPU time of the server for each act, per node, says what
the server costs, and is told apart from the CPU time of the crowd. `--tls` measures the same with
mutual TLS, `--profile` shows where the time of the server goes (bench/profiling.py), and
bench/floor.py what gRPC alone costs. With more nodes than 10,000, the server gets the settings that
docs/scale.md names for them.

`core` is 10,000 joins through the rendezvous core alone, and with the invariants that the driver
asks before each commit.

The peer, in the same run: torch's c10d rendezvous, at the sizes that it can do; its nodes are
threads of two processes, which do nothing else.

Each size begins with a server and a store of its own. The nodes' processes compete with the server
for the same CPUs, so all seconds here are an upper bound.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crowd_processes import TRAFFIC, Crowd, most_files
from measure import (
    Json,
    Spread,
    emit,
    emitting_to,
    end_on_sigterm,
    figure,
    load,
    say_conditions,
    say_progress,
)
from processes import Asked, Rdzvd, certified, cpu_s, resident_bytes
from profiling import profiled

from rdzv.core.commands import Join
from rdzv.core.fleet.nodes import LeaseRules
from rdzv.core.invariants import violations
from rdzv.core.life.runs import vacant
from rdzv.core.model import Offer, Settings, State, Tuning
from rdzv.core.rendezvous import step

NODES = (16, 100, 256, 1_000, 3_000, 10_000)
QUICK_NODES = (16, 100, 1_000)
PEER_NODES = (16, 100, 256)
"""At 512 it does not complete in three minutes here."""
REPEATED_UP_TO = 1_000
CORE_NODES = 10_000
DEFAULT_NODES = 10_000
"""The most nodes of a job without settings."""
MOST_NODES = 99_999
"""The most for which the names of nodes are in order."""
STEADY_S = 10.0
CALM_S = 6.0
"""Longer than a lease: any node to be given up is."""
TIMEOUT_S = 120.0
PEER_TIMEOUT_S = 90.0
PEER_PROCESSES = 2
ACTS = ("gather", "form", "fail", "fail-all", "lose", "start", "return")
LOST = " was lost: "
"""What the log of the server says of each node that is given up."""

HERE = Path(__file__).parent


@dataclass
class Samples:
    """The results for one number of nodes."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By act: until all had received it."""
    server_cpu_s: dict[str, list[float]] = field(default_factory=dict)
    crowd_cpu_s: dict[str, list[float]] = field(default_factory=dict)
    traffic: dict[str, dict[str, float]] = field(default_factory=dict)
    """By act: messages and bytes, per node; of the last repetition, since they hardly vary."""
    steady_cpu: list[float] = field(default_factory=list)
    """As a fraction of one core."""
    bytes_per_node: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)
    """The longest that a node that was back waited for the answer to a heartbeat."""
    disturbed: int = 0
    given_up: int = 0
    failed: list[str] = field(default_factory=list)

    def note(self, act: str, seconds: float, server_s: float, crowd_s: float) -> None:
        """Add one sample."""
        self.seconds.setdefault(act, []).append(seconds)
        self.server_cpu_s.setdefault(act, []).append(server_s)
        self.crowd_cpu_s.setdefault(act, []).append(crowd_s)


During = Callable[[str, int], AbstractContextManager[None]]
"""Called during an act, with its name and the pid of the server."""


def plainly(act: str, pid: int) -> AbstractContextManager[None]:
    """Do nothing during an act."""
    return contextlib.nullcontext()


class Trial:
    """One server and one crowd."""

    def __init__(self, nodes: int, server: Rdzvd, crowd: Crowd, samples: Samples) -> None:
        self._nodes = nodes
        self._server = server
        self._crowd = crowd
        self._samples = samples

    def run(self, tls: str, during: During, *, only_return: bool) -> None:
        """Do everything once, or no more than a return needs; each act runs within `during`.

        Raises:
            TimeoutError: something has taken too long.

        """
        empty_bytes = resident_bytes(self._server.pid)
        crowd = self._crowd
        self._during = during
        self._act("gather", lambda: crowd.gather([str(self._server.endpoint)], tls))
        self._act("form", lambda: crowd.ask("form"))
        if not only_return:
            self._act("fail", lambda: crowd.ask("fail", each=False))
            self._act("fail-all", lambda: crowd.ask("fail", each=True))
            self._act("lose", lambda: crowd.ask("lose"))
            self._hold()
        held_bytes = resident_bytes(self._server.pid) - empty_bytes
        self._samples.bytes_per_node.append(held_bytes / self._nodes)
        self._return()

    def _act(self, act: str, do: Callable[[], dict[str, Any]]) -> None:
        before_s = cpu_s(self._server.pid)
        with self._during(act, self._server.pid):
            answer = do()
        used_s = cpu_s(self._server.pid) - before_s
        self._samples.note(act, answer["took_s"], used_s, answer["cpu_s"])
        self._samples.traffic[act] = {k: answer["traffic"][k] / self._nodes for k in TRAFFIC}
        say_progress(
            f"{self._nodes} nodes: {act} {answer['took_s']:.2f} s, server "
            f"{1e3 * used_s / self._nodes:.3f} ms of CPU a node, "
            f"{answer['traffic']['tries'] / self._nodes:.2f} tries"
        )

    def _hold(self) -> None:
        """Wait until everything is over, and then measure heartbeats alone."""
        self._crowd.ask("hold", seconds=1.0)
        before_s, began_s = cpu_s(self._server.pid), time.monotonic()
        self._crowd.ask("hold", seconds=STEADY_S)
        passed_s = time.monotonic() - began_s
        self._samples.steady_cpu.append((cpu_s(self._server.pid) - before_s) / passed_s)

    def _return(self) -> None:
        lost_before = self._server.wrote(LOST)
        died_s = time.monotonic()
        self._server.kill()
        self._server.start()
        ready_s = cpu_s(self._server.pid)
        self._samples.note("start", time.monotonic() - died_s, ready_s, 0)
        try:
            self._act("return", lambda: self._crowd.ask("await", since_s=died_s))
            self._crowd.ask("hold", seconds=CALM_S)
            answer = self._crowd.ask("await", since_s=died_s)
            self._samples.disturbed += answer["disturbed"]
            self._samples.answer_s.append(answer["answer_s"])
        finally:
            self._samples.given_up += self._server.wrote(LOST) - lost_before


def measure(
    nodes: int,
    repetitions: int,
    directory: Path,
    *,
    tls: bool,
    timeout_s: float = TIMEOUT_S,
    during: During = plainly,
    only_return: bool = False,
) -> Samples:
    """Measure one number of nodes."""
    from ports import free_port

    samples = Samples()
    for number in range(repetitions):
        below = directory / f"{nodes}-{'tls' if tls else 'plain'}-{number}"
        below.mkdir()
        settings = below / "rdzvd.toml"
        settings.write_text(settings_for(nodes))
        options = [f"--config={settings}", f"--data-dir={below / 'data'}"]
        if tls:
            options += certified(below)
        host = "localhost" if tls else "127.0.0.1"
        server = Rdzvd(f"{host}:{free_port()}", options, below / "rdzvd.log")
        try:
            server.start()
            with Crowd.running(nodes, timeout_s) as crowd:
                trial = Trial(nodes, server, crowd, samples)
                trial.run(str(below) if tls else "", during, only_return=only_return)
        except (TimeoutError, RuntimeError) as error:
            samples.failed.append(str(error))
        finally:
            server.kill()
    return samples


def settings_for(nodes: int) -> str:
    """Return what docs/scale.md says to set for this number of nodes; nothing up to the default."""
    if nodes <= DEFAULT_NODES:
        return ""
    lease_s = math.ceil(LeaseRules().longest_ms * nodes / DEFAULT_NODES / 1000)
    return f"[limits]\nnodes = {2 * nodes}\n[lease]\nlongest = {lease_s}\nlongest_nodes = {nodes}\n"


def say(nodes: int, samples: Samples, *, tls: bool) -> None:
    """Print one number of nodes."""
    spreads = {act: Spread.of(s) for act, s in samples.seconds.items()}
    told = "  ".join(f"{act} {figure(spread.median)} s" for act, spread in spreads.items())
    cpu = Spread.of(samples.steady_cpu).median if samples.steady_cpu else None
    memory = Spread.of(samples.bytes_per_node).median if samples.bytes_per_node else None
    name = "rdzvd-tls" if tls else "rdzvd"
    emit(
        f"scale {name:<6}  nodes={nodes:<6} {told}  steady "
        f"{figure(None if cpu is None else 100 * cpu)} % of a core, "
        f"{figure(None if memory is None else memory / 1e3)} kB a node  "
        f"given up {samples.given_up}  disturbed {samples.disturbed}  "
        f"slowest answer {figure(max(samples.answer_s, default=None))} s  load {load():.0f}"
        + "".join(f"  FAILED: {why}" for why in samples.failed)
        + f"\n             CPU of the server, ms a node: {_per_node(samples.server_cpu_s, nodes)}"
        + f"\n             CPU of the crowd, ms a node:  {_per_node(samples.crowd_cpu_s, nodes)}",
        bench="scale",
        case=name,
        nodes=nodes,
        seconds={act: spread.as_json() for act, spread in spreads.items()},
        server_cpu_s=_medians(samples.server_cpu_s),
        crowd_cpu_s=_medians(samples.crowd_cpu_s),
        traffic={a: {k: round(v, 2) for k, v in t.items()} for a, t in samples.traffic.items()},
        steady_cpu=None if cpu is None else round(cpu, 4),
        bytes_per_node=None if memory is None else round(memory),
        given_up=samples.given_up,
        disturbed=samples.disturbed,
        slowest_answer_s=max(samples.answer_s, default=None),
        failed=list(samples.failed),
        load=load(),
    )


def _per_node(cpu_s: dict[str, list[float]], nodes: int) -> str:
    told = ((act, 1e3 * Spread.of(each).median / nodes) for act, each in cpu_s.items())
    return "  ".join(f"{act} {ms:.3f}" for act, ms in told)


def _medians(samples: dict[str, list[float]]) -> dict[str, Json]:
    return {act: round(Spread.of(each).median, 4) for act, each in samples.items()}


# ------------------------------------------------------------------------------------ the core


def joins(count: int) -> list[Join]:
    """Return the joins of a job that needs this many nodes."""
    settings = Settings(count, count)
    return [
        Join(
            f"node-{number:05d}",
            number + 1,
            "",
            settings,
            Offer(
                f"10.0.{number >> 8}.{number & 255}",
                8,
                store_port=20_000,
                machine=f"{number:x}",
                can_host_store=True,
            ),
            new_run="run",
        )
        for number in range(count)
    ]


def through_core(commands: Sequence[Join], *, checked: bool) -> float:
    """Return how long the core takes for these commands; if `checked`, including its invariants."""
    state: State = vacant("core", Tuning())
    began_s = time.process_time()
    for number, command in enumerate(commands):
        before, transition = state, step(state, command, number)
        state = transition.state
        if checked and (broken := violations(before, state)):
            raise RuntimeError("; ".join(broken))
    took_s = time.process_time() - began_s
    assert state.membership.round is not None, "the last join completes the round"
    return took_s


def say_core(count: int) -> None:
    """Print the core's part."""
    commands = joins(count)
    alone_s = through_core(commands, checked=False)
    checked_s = through_core(commands, checked=True)
    emit(
        f"scale core   {count} joins: {figure(alone_s)} s alone, "
        f"{figure(checked_s)} s with the invariants",
        bench="scale",
        case="core",
        nodes=count,
        alone_s=round(alone_s, 4),
        checked_s=round(checked_s, 4),
        load=load(),
    )


# ------------------------------------------------------------------------------------ the peer


def measure_peer(nodes: int) -> tuple[float, float]:
    """Return how long torch's c10d rendezvous takes to gather, and to form.

    Raises:
        TimeoutError: it does not within `PEER_TIMEOUT_S`.

    """
    with contextlib.ExitStack() as stack:
        program = HERE / "c10d_crowd.py"
        each = nodes // PEER_PROCESSES
        shares = [nodes - each * (PEER_PROCESSES - 1), *[each] * (PEER_PROCESSES - 1)]
        host = stack.enter_context(Asked.running(program, "0", str(shares[0]), str(nodes), "0"))
        port = host.ask(PEER_TIMEOUT_S, act="port")["port"]
        others = [
            stack.enter_context(
                Asked.running(program, str(port), str(share), str(nodes), str(number))
            )
            for number, share in enumerate(shares[1:], start=1)
        ]
        for other in others:
            other.ask(PEER_TIMEOUT_S, act="port")
        began_s = time.monotonic()
        for other in others:
            other.ask(PEER_TIMEOUT_S, act="gather")
        host.ask(PEER_TIMEOUT_S, act="gather")
        gather_s = time.monotonic() - began_s
        for one in (*others, host):
            one.tell(act="form")
        answer = host.answer(PEER_TIMEOUT_S)
        told_s = max(answer["told_s"], *(o.answer(PEER_TIMEOUT_S)["told_s"] for o in others))
        return gather_s, told_s - answer["began_s"]


def say_peer(nodes: int, repetitions: int) -> None:
    """Print the peer's times with one number of nodes."""
    gathered: list[float] = []
    formed: list[float] = []
    failed: list[str] = []
    for _ in range(repetitions):
        try:
            gather_s, form_s = measure_peer(nodes)
        except (TimeoutError, RuntimeError) as error:
            failed.append(str(error))
            continue
        say_progress(f"c10d, {nodes} nodes: gather {gather_s:.2f} s, form {form_s:.2f} s")
        gathered.append(gather_s)
        formed.append(form_s)
    seconds: dict[str, Json] = {}
    if formed:
        seconds = {"gather": Spread.of(gathered).as_json(), "form": Spread.of(formed).as_json()}
    told = "  ".join(
        f"{act} {figure(Spread.of(s).median if s else None)} s"
        for act, s in (("gather", gathered), ("form", formed))
    )
    emit(
        f"scale c10d   nodes={nodes:<6} {told}  load {load():.0f}"
        + "".join(f"  FAILED: {why}" for why in failed),
        bench="scale",
        case="c10d",
        nodes=nodes,
        seconds=seconds,
        failed=list(failed),
        load=load(),
    )


# ------------------------------------------------------------------------------------ all of it


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="up to 1,000 nodes, once each: two minutes")
    add("--nodes", default="", help=f"sizes, with commas (default: {NODES})")
    add("--peer-nodes", default="", help=f"sizes for c10d, with commas (default: {PEER_NODES})")
    add("--tls", action="store_true", help="with mutual TLS")
    add("--timeout", type=float, default=TIMEOUT_S, help="seconds for an act (default: 120)")
    add("--only-return", action="store_true", help="nothing but gather, form, start and return")
    add("--profile", action="store_true", help="show where the server's time goes; needs perf")
    add("--no-peer", action="store_true", help="without c10d")
    add("--repetitions", type=int, default=0, help="up to 1,000 nodes (default 3; --quick 1)")
    add("--out", type=Path, help="where the JSON lines are written as well")
    add("--directory", type=Path, help="where data is written, and removed again (default: /tmp)")
    chosen = parser.parse_args()
    chosen.nodes = _sizes(parser, chosen.nodes) or (QUICK_NODES if chosen.quick else NODES)
    chosen.peer_nodes = _sizes(parser, chosen.peer_nodes) or PEER_NODES
    if chosen.timeout <= 0:
        parser.error(f"--timeout {chosen.timeout:g}: give more than 0 seconds")
    if chosen.repetitions < 0:
        parser.error(f"--repetitions {chosen.repetitions}: give at least 1")
    chosen.repetitions = chosen.repetitions or (1 if chosen.quick or chosen.profile else 3)
    if max(chosen.nodes) > (most := most_files()):
        parser.error(
            f"{max(chosen.nodes)} nodes need as many open files in the server, and {most} are "
            "allowed; raise the hard limit (ulimit -Hn), or give fewer --nodes"
        )
    return chosen


def _sizes(parser: argparse.ArgumentParser, given: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in given.split(",") if part)
    except ValueError:
        parser.error(f"{given} are no numbers; give, for example, 100,1000")
    if any(not 3 <= size <= MOST_NODES for size in sizes):
        parser.error(f"{given}: a job has 3 to {MOST_NODES} nodes here")
    return sizes


def main() -> None:
    """Measure, and leave nothing behind."""
    chosen = arguments()
    end_on_sigterm()
    # Otherwise each of the peer's connections logs that it knows no name of this machine.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with (
        tempfile.TemporaryDirectory(prefix="rdzv-bench-", dir=chosen.directory) as temporary,
        emitting_to(chosen.out),
    ):
        directory = Path(temporary)

        @contextlib.contextmanager
        def sampled(act: str, pid: int) -> Iterator[None]:
            with profiled(pid, directory) as found:
                yield
            print(f"profile of rdzvd, {act}:\n{found[0]}", flush=True)

        say_conditions("scale", directory)
        say_core(CORE_NODES)
        for nodes in chosen.nodes:
            repetitions = chosen.repetitions if nodes <= REPEATED_UP_TO else 1
            during = sampled if chosen.profile else plainly
            samples = measure(
                *(nodes, repetitions, directory),
                tls=chosen.tls,
                timeout_s=chosen.timeout,
                during=during,
                only_return=chosen.only_return,
            )
            say(nodes, samples, tls=chosen.tls)
        if not chosen.no_peer:
            for nodes in chosen.peer_nodes:
                say_peer(nodes, chosen.repetitions)


if __name__ == "__main__":
    main()
