"""Planted bugs: the simulator must catch each of them, or it is blind where that one is.

A mutant is one small change to the code, at least one for each rule of the three cores and for each
guarantee. Each is applied to a copy of the packages and run by a child process, until a history
fails; those that a single history can not show name the tests that catch them instead. A mutant
that survives is a fault that the simulator does not make, or a check that it lacks: it fails the
run. A change that matches no text, or several, fails it too, so that the list follows the code.

`make sim-mutants`, or `python -m tests.sim.mutants --only WORD` for some of them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("proto", "rendezvous", "agent")
SIMULATOR = "sim"

RENDEZVOUS = "rendezvous/rdzv/core/rendezvous.py"
NODES = "rendezvous/rdzv/core/nodes.py"
ADOPT = "rendezvous/rdzv/core/adopt.py"
RANKS = "rendezvous/rdzv/core/ranks.py"
TOLD = "rendezvous/rdzv/server/told.py"
JOBS = "rendezvous/rdzv/server/jobs.py"
DRIVER = "rendezvous/rdzv/server/driver.py"
CLOCK = "rendezvous/rdzv/server/clock.py"
MACHINE = "agent/rdzv/agent/core/machine.py"


@dataclass(frozen=True)
class Mutant:
    """A planted bug."""

    name: str
    file: str
    old: str
    new: str
    by: str = SIMULATOR
    """What catches it: the simulator, or these tests (paths and options of pytest)."""


CORE_TESTS = (
    "tests/scenarios",
    "tests/unit/test_rendezvous.py",
    "tests/unit/test_nodes.py",
    "tests/unit/test_driver.py",
)


def _unit(*words: str) -> str:
    return " ".join((*CORE_TESTS, *words))


MUTANTS = (
    # ---------------------------------------------------------- rendezvous: command rules
    Mutant(
        "an old incarnation is heard",
        RENDEZVOUS,
        "            if work.open and held == command.incarnation:",
        "            if work.open and held is not None:",
        by=_unit(),
    ),
    Mutant(
        "a superseded speaker may join",
        RENDEZVOUS,
        "    if held is not None and command.incarnation < held:",
        "    if held is not None and command.incarnation < 0:",
        by=_unit(),
    ),
    Mutant(
        "a word about another run counts",
        RENDEZVOUS,
        "        case _ if command.run != work.membership.run:\n            pass\n",
        "",
        by=_unit(),
    ),
    Mutant(
        "any join confirms that workers are gone",
        RENDEZVOUS,
        "    if number is not None and number == command.left_round:",
        "    if number is not None:",
    ),
    Mutant(
        "a join that names an older round confirms this one",
        RENDEZVOUS,
        "    if number is not None and number == command.left_round:",
        "    if number is not None and command.left_round is not None:",
        by=_unit(),
    ),
    Mutant(
        "a new instance inherits the old one's seat without its workers",
        RENDEZVOUS,
        "    elif held != command.incarnation:\n        _give_up(work, node_id,",
        "    elif held != command.incarnation:\n        _ = (work, node_id,",
    ),
    Mutant(
        "who says that it leaves may confirm by a join",
        RENDEZVOUS,
        "    return round_.number if seat and round_ and not seat.leaving else None",
        "    return round_.number if seat and round_ else None",
        by=_unit(),
    ),
    Mutant(
        "other settings are let in",
        RENDEZVOUS,
        "        if work.state.anybody or command.run:\n            raise",
        "        if False:\n            raise",
        by=_unit(),
    ),
    Mutant(
        "round numbers start anew with each run",
        RENDEZVOUS,
        "        next_round=old.next_round,",
        "        next_round=0,",
    ),
    Mutant(
        "the highest round heard is ignored",
        RENDEZVOUS,
        "    if command.left_round is not None and command.left_round >= work.membership.next",
        "    if False and command.left_round >= work.membership.next",
        by=_unit(),
    ),
    Mutant(
        "a resumed seat keeps its former incarnation",
        RENDEZVOUS,
        "        moved = replace(seat, incarnation=command.incarnation)",
        "        moved = seat",
        by=_unit(),
    ),
    Mutant(
        "failures of a live round do not end it",
        RENDEZVOUS,
        "    if round_.live:\n        _end_by_failure(work, failures)\n    else:",
        "    if False:\n        _end_by_failure(work, failures)\n    else:",
        by=_unit(),
    ),
    Mutant(
        "success of an older round counts",
        RENDEZVOUS,
        "    if round_ is None or round_.number != command.round or not round_.live or seat",
        "    if round_ is None or not round_.live or seat",
        by=_unit(),
    ),
    Mutant(
        "a node that leaves gives up its seat at once",
        RENDEZVOUS,
        "    if seat.succeeded or command.left_round == round_.number:",
        "    if True:",
    ),
    Mutant(
        "who leaves excuses nothing",
        RENDEZVOUS,
        "    if not (seat.succeeded or seat.leaving or failed):",
        "    if False:",
    ),
    Mutant(
        "a stuck node keeps its seat",
        RENDEZVOUS,
        "    _leave_seat(work, command.node_id)\n    stuck = Stuck(",
        "    stuck = Stuck(",
    ),
    Mutant(
        "a store host that fails is a worker failure",
        RENDEZVOUS,
        "        _end_round(work, Cause.STORE_HOST, reason, broken=True)\n"
        "        _charge_instead(work, Cause.STORE_HOST, reason)",
        "        _end_round(work, Cause.WORKER_FAILURE, reason, broken=True)",
    ),
    Mutant(
        "a node that is back stays away",
        RENDEZVOUS,
        "    work.put(away=_without(work.state.away, node_id))\n    work.events.append(NodeCame",
        "    work.events.append(NodeCame",
    ),
    Mutant(
        "a lost node does not end its round",
        RENDEZVOUS,
        "        _end_round(work, Cause.NODE_LOST, text, broken=True)\n",
        "",
    ),
    Mutant(
        "a lost node excuses nothing",
        RENDEZVOUS,
        "        _charge_instead(work, Cause.NODE_LOST, text)\n",
        "",
    ),
    Mutant(
        "who is lost keeps its seat",
        RENDEZVOUS,
        "    offer = _offer_of(work.state, node_id)\n    _leave_seat(work, node_id)\n",
        "    offer = _offer_of(work.state, node_id)\n",
    ),
    Mutant(
        "a round ends twice",
        RENDEZVOUS,
        "    if round_ is None or not round_.live:\n        return\n    end = RoundEnd(",
        "    if round_ is None:\n        return\n    end = RoundEnd(",
    ),
    # ---------------------------------------------------------- rendezvous: state rules
    Mutant(
        "an away node holds up an ended round",
        RENDEZVOUS,
        "    _release_away_seats,\n    ",
        "    ",
        by=_unit(),
    ),
    Mutant(
        "a node that does not stop is waited for without end",
        RENDEZVOUS,
        "    _release_unstopped_seats,\n",
        "",
        by=_unit(),
    ),
    Mutant(
        "who was promised time to return loses its seat at the deadline",
        RENDEZVOUS,
        "        if node_id not in state.away or not state.away[node_id].firm:\n"
        "            yield node_id",
        "        yield node_id",
        by=_unit(),
    ),
    Mutant(
        "a run succeeds with the first success",
        RENDEZVOUS,
        "    if not all(seat.succeeded for seat in work.state.seats.values()):",
        "    if not any(seat.succeeded for seat in work.state.seats.values()):",
    ),
    Mutant(
        "a run never succeeds",
        RENDEZVOUS,
        "    _succeed_run,\n",
        "",
    ),
    Mutant(
        "a charge is settled before everyone has stopped",
        RENDEZVOUS,
        "    if work.state.seats:\n        return False\n    end = replace(",
        "    end = replace(",
    ),
    Mutant(
        "every end of a round spends a restart",
        RENDEZVOUS,
        "    if end.cause is Cause.WORKER_FAILURE:\n        failures = root_cause",
        "    if True:\n        failures = root_cause",
    ),
    Mutant(
        "the budget of restarts has one more",
        RENDEZVOUS,
        "counted < max_restarts\n",
        "counted <= max_restarts\n",
    ),
    Mutant(
        "restarts are not counted",
        RENDEZVOUS,
        "        spent = (*spent, work.now_ms) if budget_left else spent",
        "        spent = spent",
        by=_unit(),
    ),
    Mutant(
        "all have left and the run goes on",
        RENDEZVOUS,
        "    _close_when_all_left,\n",
        "",
        by=_unit(),
    ),
    Mutant(
        "a round completes with too few",
        RENDEZVOUS,
        "    enough = ready >= work.membership.min_nodes\n",
        "    enough = ready >= work.membership.min_nodes - 1 and ready > 0\n",
    ),
    Mutant(
        "a round completes beside seats that are held",
        RENDEZVOUS,
        "    if state.seats or enough_ms is None or _awaits_survivor(state):",
        "    if enough_ms is None or _awaits_survivor(state):",
    ),
    Mutant(
        "a survivor that is away for a moment is not waited for",
        RENDEZVOUS,
        "    if state.seats or enough_ms is None or _awaits_survivor(state):",
        "    if state.seats or enough_ms is None:",
        by=_unit(),
    ),
    Mutant(
        "nodes that are away are seated",
        RENDEZVOUS,
        "    ready = {n: w for n, w in state.waiting.items() if n not in state.away}",
        "    ready = dict(state.waiting)",
        by=_unit(),
    ),
    Mutant(
        "last call is skipped",
        RENDEZVOUS,
        "max(enough_ms + settings.last_call_timeout_ms, earliest_ms)",
        "max(enough_ms, earliest_ms)",
        by=_unit(),
    ),
    Mutant(
        "the next round has the number of the last",
        RENDEZVOUS,
        "round=round_, next_round=round_.number + 1))",
        "round=round_, next_round=round_.number))",
    ),
    Mutant(
        "newcomers end a round for no free seat",
        RENDEZVOUS,
        "    return state.membership.max_nodes - len(state.seats)\n",
        "    return state.membership.max_nodes - len(state.seats) + 1\n",
    ),
    Mutant(
        "newcomers end a round after the first success",
        RENDEZVOUS,
        "    if not state.waiting or some_succeeded(state) or some_seat_away(state):",
        "    if not state.waiting or some_seat_away(state):",
        by=_unit(),
    ),
    Mutant(
        "newcomers end a round under on-restart",
        RENDEZVOUS,
        "or settings.scale_up is not ScaleUp.EAGER:\n        return 0",
        "or False:\n        return 0",
        by=_unit(),
    ),
    Mutant(
        "a flapping node is not held",
        RENDEZVOUS,
        "        if recent >= 2:",
        "        if recent >= 2_000:",
        by=_unit(),
    ),
    Mutant(
        "newcomers are never let in",
        RENDEZVOUS,
        "    _admit_newcomers,\n",
        "",
        by=_unit(),
    ),
    Mutant(
        "joining never times out",
        RENDEZVOUS,
        "    _time_out_joining,\n",
        "",
        by=_unit(),
    ),
    Mutant(
        "a state rule is due and nobody is woken for it",
        RENDEZVOUS,
        "        due.append(state.stop_deadline_ms)",
        "        pass",
        by=_unit(),
    ),
    Mutant(
        "a completion is due and nobody is woken for it",
        RENDEZVOUS,
        "        due.append(completion_due_ms(state))",
        "        pass",
    ),
    # ---------------------------------------------------------- rendezvous: durable, or not
    Mutant(
        "seats are forgotten by a restart of the server",
        RENDEZVOUS,
        "        seats={p.node_id: Seat(p.incarnation, now_ms) for p in held},",
        "        seats={},",
    ),
    Mutant(
        "after a restart nobody is waited for",
        RENDEZVOUS,
        "        away={p.node_id: Away(now_ms, until_ms, firm=True) for p in held},",
        "        away={p.node_id: Away(now_ms, now_ms, firm=False) for p in held},",
        by=_unit(),
    ),
    Mutant(
        "an ended run may be resumed",
        RENDEZVOUS,
        "    if run == membership.run:\n        return membership.ended\n",
        "    if run == membership.run:\n        return None\n",
        by=_unit(),
    ),
    Mutant(
        "RANKs overlap",
        RANKS,
        "        rank_first += ",
        "        rank_first += 0 * ",
    ),
    # ---------------------------------------------------------- adoption
    Mutant(
        "a lower round is adopted",
        ADOPT,
        "    if round_ is None or number > round_.number:\n        return True",
        "    if round_ is None or number != round_.number:\n        return True",
    ),
    Mutant(
        "nobody is adopted",
        ADOPT,
        "    membership = state.membership\n    if not membership.run:\n        return True\n",
        "    return False\n",
    ),
    Mutant(
        "a place that nobody claims is held for ever",
        RENDEZVOUS,
        "    _release_unclaimed_seats,\n",
        "",
    ),
    # ---------------------------------------------------------- nodes
    Mutant(
        "two instances of a node take turns",
        NODES,
        "    if old.stream is not None and now_ms < old.heard_ms + old.lease_ms:",
        "    if False:",
        by=_unit(),
    ),
    Mutant(
        "a superseded instance comes back",
        NODES,
        "    if 0 < command.incarnation < old.incarnation:",
        "    if False:",
        by=_unit(),
    ),
    Mutant(
        "another instance takes an expected node's place",
        NODES,
        "    if not old.instance and now_ms < old.until_ms:",
        "    if False:",
        by=_unit(),
    ),
    Mutant(
        "incarnations start anew with each server",
        NODES,
        "    incarnation = (nodes.leadership << _COUNTER_BITS) + counter",
        "    incarnation = counter",
    ),
    Mutant(
        "every instance has the same incarnation",
        NODES,
        "    counter = nodes.counter + (0 if same else 1)",
        "    counter = nodes.counter",
    ),
    Mutant(
        "the end of a stale stream counts",
        NODES,
        "def _disconnect(nodes: Nodes, command: Disconnect, now_ms: int) -> NodesTransition:\n"
        "    old = nodes.records.get(command.node_id)\n"
        "    if old is None or old.stream != command.stream:",
        "def _disconnect(nodes: Nodes, command: Disconnect, now_ms: int) -> NodesTransition:\n"
        "    old = nodes.records.get(command.node_id)\n"
        "    if old is None:",
        by=_unit(),
    ),
    Mutant(
        "heartbeats are not heard",
        NODES,
        "        node_id: replace(record, heard_ms=now_ms)\n",
        "        node_id: record\n",
    ),
    Mutant(
        "a planned absence is given a lease only",
        NODES,
        "    announced = old.firm and old.until_ms > now_ms",
        "    announced = False",
        by=_unit(),
    ),
    Mutant(
        "after a take-over there is no grace",
        NODES,
        "        until_ms=now_ms + nodes.tuning.takeover_grace_ms,\n        firm=True,",
        "        until_ms=now_ms + 1_000,\n        firm=True,",
    ),
    Mutant(
        "a pause renews no lease",
        NODES,
        "            records[record.node_id] = replace(record, heard_ms=now_ms)",
        "            records[record.node_id] = record",
        by=_unit(),
    ),
    Mutant(
        "nobody is lost",
        NODES,
        "if record.expires_at_ms <= now_ms]",
        "if record.expires_at_ms < 0]",
    ),
    Mutant(
        "the nodes core sleeps through an expiry",
        NODES,
        "else min(nodes.wake_at_ms, due_ms)",
        "else max(nodes.wake_at_ms, due_ms)",
    ),
    # ---------------------------------------------------------- told
    Mutant(
        "who comes back hears nothing of the end of its round",
        TOLD,
        "    if round_.end is not None:\n        return RoundOver(",
        "    if round_.end is not None and False:\n        return RoundOver(",
    ),
    Mutant(
        "who comes back hears nothing of its seat",
        TOLD,
        "        return (_about_its_seat(state.membership, node_id),)",
        "        return ()",
    ),
    Mutant(
        "who comes back is not told that its seat was given up",
        TOLD,
        "    if belief.has_workers and belief.round is not None:",
        "    if False:",
    ),
    Mutant(
        "who comes back is not told that its run is over",
        TOLD,
        "    if ended is not None:\n        return (Closed(",
        "    if ended is not None and False:\n        return (Closed(",
        by=_unit(),
    ),
    Mutant(
        "only half hear of the end of a round",
        TOLD,
        "                for node_id in {**before.seats, **after.seats}:",
        "                for node_id in list(after.seats)[::2]:",
    ),
    Mutant(
        "nobody hears that the run is closed",
        TOLD,
        "                for node_id in present:\n                    yield node_id, closed",
        "                for node_id in ():\n                    yield node_id, closed",
    ),
    Mutant(
        "lines have the ranks of another",
        TOLD,
        "        rank_first=participant.rank_first,",
        "        rank_first=last.rank_first,",
    ),
    # ---------------------------------------------------------- jobs and driver
    Mutant(
        "published before it is stored",
        JOBS,
        "            await self._persist(job, command, transition)\n"
        "        self._publish(job, command, transition)",
        "            self._publish(job, command, transition)\n"
        "            await self._persist(job, command, transition)",
    ),
    Mutant(
        "a doubtful commit is taken for none",
        JOBS,
        "            if not error.definite:\n                job.doubt = (command, transition)",
        "            pass",
    ),
    Mutant(
        "a doubtful commit is taken for done",
        JOBS,
        "        if revision == job.revision:\n            job.doubt = None\n        elif",
        "        if revision == job.revision:\n            job.doubt = None\n"
        "            self._publish(job, command, transition)\n        elif",
    ),
    Mutant(
        "a job's timer is not armed anew",
        JOBS,
        "        job.timer.arm(transition.wake_at_ms)\n        rows",
        "        rows",
    ),
    Mutant(
        "steps of one job overlap",
        JOBS,
        "            async with job.lock:\n",
        "            if True:\n",
    ),
    Mutant(
        "a node's word is dropped while the store is away",
        DRIVER,
        "            await sleep_ms(self._clock, self._timings.store_retry_ms)\n\n"
        "    async def _refuse(",
        "            return self._jobs.peek(rdzv_id)\n\n    async def _refuse(",
    ),
    Mutant(
        "jobs are not told who is away",
        DRIVER,
        "            case nodes.NodeAway():\n                self._mark_soon(event.node_id)",
        "            case nodes.NodeAway():\n                pass",
        by=_unit(),
    ),
    Mutant(
        "jobs are not told who is lost",
        DRIVER,
        "                self._mark_soon(event.node_id, reason=event.reason)",
        "                pass",
    ),
    Mutant(
        "a former instance is lost before the next has spoken",
        DRIVER,
        "        if stream is not None and stream.greeted and stream.number == record.stream:",
        "        if True:",
        by=_unit(),
    ),
    Mutant(
        "what came in during a pause is not read before deadlines count",
        CLOCK,
        "        return now_ms < self.settled_ms",
        "        return False",
        by=_unit(),
    ),
    # ---------------------------------------------------------- the agent
    Mutant(
        "an old line starts workers",
        MACHINE,
        "    if state.phase is not Phase.JOINING or stale or",
        "    if state.phase is not Phase.JOINING or",
    ),
    Mutant(
        "a line starts workers beside those that run",
        MACHINE,
        "    if state.phase is not Phase.JOINING or stale or",
        "    if stale or",
    ),
    Mutant(
        "a node joins again before its workers are gone",
        MACHINE,
        "    work.do(StopWorkers(state.assignment.round, grace_ms, signum))",
        "    work.do(StopWorkers(state.assignment.round, grace_ms, signum))\n"
        "    if phase is Phase.STOPPING:\n"
        "        _conclude(work)",
    ),
    Mutant(
        "the end of another round stops workers",
        MACHINE,
        "    elif not _is_current(work.state, event.round):\n        return\n",
        "",
    ),
    Mutant(
        "the end of another run stops workers",
        MACHINE,
        "def _close(work: _Step, event: RunClosed) -> None:\n    if event.run != work.state.run:",
        "def _close(work: _Step, event: RunClosed) -> None:\n    if False:",
        by="tests/unit/test_agent_machine.py",
    ),
    Mutant(
        "a seat of which the node has not heard is kept",
        MACHINE,
        "left_round=round_, failures=(), fenced=False)\n        work.do(rejoin(work.state))",
        "left_round=round_, failures=(), fenced=False)",
        by="tests/unit/test_agent_machine.py",
    ),
    Mutant(
        "losing the server stops workers",
        MACHINE,
        "    since_ms = work.state.disconnected_since_ms\n    work.state = replace(",
        "    since_ms = work.state.disconnected_since_ms\n"
        "    if work.state.phase is Phase.RUNNING:\n"
        "        _stop(work, 0)\n"
        "    work.state = replace(",
    ),
    Mutant(
        "workers that were stopped count as failed",
        MACHINE,
        "    if state.stopping_since_ms is not None and failed_at_ms >= state.stopping_since_ms:",
        "    if False:",
        by="tests/unit/test_agent_machine.py",
    ),
    Mutant(
        "a node succeeds with its first worker",
        MACHINE,
        "    elif state.phase is Phase.RUNNING and not work.state.alive:",
        "    elif state.phase is Phase.RUNNING:",
    ),
    Mutant(
        "a failure is not reported",
        MACHINE,
        "        work.do(SayFailed(state.run, event.round, work.state.failures))\n",
        "        work.state = replace(work.state, failures=())\n",
        by="tests/unit/test_agent_machine.py",
    ),
    Mutant(
        "who has left does not say so",
        MACHINE,
        "        work.do(SayLeave(state.run, state.leaving, round_))\n",
        "",
        by="tests/unit/test_agent_machine.py",
    ),
    Mutant(
        "a stuck node does not say so",
        MACHINE,
        "            work.do(SayStuck(work.state.run, event.round, event.pids))",
        "            pass",
        by="tests/unit/test_agent_machine.py",
    ),
    Mutant(
        "a node exits beside its workers",
        MACHINE,
        "    if work.state.workers_gone:\n        _conclude(work)\n    elif",
        "    if True:\n        _conclude(work)\n    elif",
    ),
    Mutant(
        "a success of the job is an error for who hears it",
        MACHINE,
        "        exit_code = EXIT_SUCCESS\n    else:",
        "        exit_code = EXIT_FAILED\n    else:",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    caught: bool
    how: str
    took_s: float


def apply(mutant: Mutant, folder: Path) -> None:
    """Plant a bug in the packages below a folder.

    Raises:
        ValueError: the text that it changes is not there exactly once.

    """
    path = folder / mutant.file
    text = path.read_text()
    if (times := text.count(mutant.old)) != 1:
        raise ValueError(
            f"{mutant.name!r} changes a text of {mutant.file} that is there {times} times; make "
            f"it follow the code: {mutant.old!r}"
        )
    path.write_text(text.replace(mutant.old, mutant.new))


def copy_packages(origin: Path, folder: Path) -> None:
    """Copy the packages, compiled code too."""
    for source in SOURCES:
        shutil.copytree(origin / source, folder / source)


NONE = Mutant("no planted bug", RENDEZVOUS, "", "")
"""The code as it is: where a history of it fails, nothing is learned from one that was changed."""


def run(mutant: Mutant, origin: Path, seeds: int) -> Verdict:
    """Plant a bug and see whether it is caught."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rdzv-mutant-") as name:
        folder = Path(name)
        copy_packages(origin, folder)
        if mutant is not NONE:
            apply(mutant, folder)
        command = _command(mutant, seeds)
        paths = os.pathsep.join(str(folder / source) for source in SOURCES)
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    return Verdict(mutant, *_judge(mutant, done), time.monotonic() - began_s)


def _command(mutant: Mutant, seeds: int) -> list[str]:
    if mutant.by == SIMULATOR:
        options = ["--seeds", f"0:{seeds}", "--processes", "1", "--first", "--brief"]
        return [sys.executable, "-m", "tests.sim", *options]
    options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "-W", "ignore"]
    return [sys.executable, "-m", "pytest", *options, *mutant.by.split()]


def _judge(mutant: Mutant, done: subprocess.CompletedProcess[str]) -> tuple[bool, str]:
    if mutant.by == SIMULATOR:
        found = re.search(r"^seed (\d+) \((\d)\): (.*)$", done.stdout, re.MULTILINE)
        if found is None:
            return False, done.stderr.strip()[-200:]
        return True, f"seed {found[1]}: {found[3][:90]}"
    found = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    return done.returncode == 1, found[1] if found else done.stdout.strip()[-200:]


def main() -> int:
    """Run the planted bugs that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants with this word in name or file")
    parser.add_argument("--seeds", type=int, default=2_000, help="histories until one survives")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="only see that each can be planted")
    parser.add_argument("--by-sim", action="store_true", help="try the simulator on all of them")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if options.only in f"{m.name} {m.file}"]
    stale = _check(mutants)
    if stale or options.check:
        return stale
    if options.by_sim:
        mutants = [Mutant(m.name, m.file, m.old, m.new) for m in mutants]
    with tempfile.TemporaryDirectory(prefix="rdzv-mutants-") as name:
        # The code as it is now: it may be worked on while this runs.
        copy_packages(ROOT, Path(name))
        return _run_all(mutants, Path(name), options.seeds, options.processes)


def _run_all(mutants: list[Mutant], origin: Path, seeds: int, processes: int) -> int:
    healthy = run(NONE, origin, seeds)
    if healthy.caught:
        print(f"a history fails without any planted bug: {healthy.how}")
        return 1
    with ThreadPoolExecutor(processes) as pool:
        survivors = 0
        for verdict in pool.map(lambda mutant: run(mutant, origin, seeds), mutants):
            survivors += not verdict.caught
            word = "caught  " if verdict.caught else "SURVIVED"
            name = f"{Path(verdict.mutant.file).stem}: {verdict.mutant.name}"
            print(f"{word} {verdict.took_s:5.1f} s  {name}  [{verdict.how}]", flush=True)
    print(f"{len(mutants)} mutants, {survivors} survived")
    return 1 if survivors else 0


def _check(mutants: list[Mutant]) -> int:
    stale = 0
    for mutant in mutants:
        times = (ROOT / mutant.file).read_text().count(mutant.old)
        if times != 1:
            stale += 1
            print(f"{mutant.name!r}: its text is {times} times in {mutant.file}")
    print(f"{len(mutants)} mutants, {stale} do not fit the code")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
