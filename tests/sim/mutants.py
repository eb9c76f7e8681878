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
from pathlib import Path

from rdzv.structs import struct

ROOT = Path(__file__).parents[2]
SOURCES = ("proto", "rendezvous", "agent")
SIMULATOR = "sim"

RENDEZVOUS = "rendezvous/rdzv/core/rendezvous.py"
BUDGETS = "rendezvous/rdzv/core/budgets.py"
NODES = "rendezvous/rdzv/core/nodes.py"
ADOPT = "rendezvous/rdzv/core/adopt.py"
RANKS = "rendezvous/rdzv/core/ranks.py"
TOLD = "rendezvous/rdzv/server/engine/announcements.py"
JOBS = "rendezvous/rdzv/server/engine/jobs.py"
DRIVER = "rendezvous/rdzv/server/driver.py"
CONNECTIONS = "rendezvous/rdzv/server/sessions/connections.py"
NODE_COMMANDS = "rendezvous/rdzv/server/sessions/node_commands.py"
PRESENCE = "rendezvous/rdzv/server/sessions/presence.py"
RECOVERY = "rendezvous/rdzv/server/sessions/recovery.py"
REPORTS = "rendezvous/rdzv/server/sessions/reports.py"
CLOCK = "rendezvous/rdzv/runtime/clock.py"
MACHINE = "agent/rdzv/agent/core/machine.py"
MODEL = "rendezvous/rdzv/core/model.py"
PLACEMENT = "rendezvous/rdzv/core/placement.py"
SUBMITTED = "rendezvous/rdzv/core/submissions.py"
PLACER = "rendezvous/rdzv/server/scheduling/placer.py"
HANGS = "rendezvous/rdzv/server/diagnosis/hang_investigation.py"
STACKS = "rendezvous/rdzv/server/diagnosis/stack_collection.py"
VIGIL = "agent/rdzv/agent/core/hang_timeout.py"
QUARANTINE = "rendezvous/rdzv/core/quarantine.py"
ROLES = "rendezvous/rdzv/server/security/roles.py"
DRAINING = "agent/rdzv/agent/server_link/draining.py"
HEALTH = "agent/rdzv/agent/inventory/health.py"
QUARANTINE_TESTS = "tests/unit/core/test_quarantine.py tests/unit/server/test_quarantine_of_jobs.py"
NOTICE_TESTS = "tests/unit/agent/test_agent_notice.py"
PLACER_TESTS = "tests/unit/server/test_placer.py"
ROLE_TESTS = "tests/unit/server/test_roles.py"
ADOPT_TESTS = "tests/unit/core/test_adopt.py"


@struct(frozen=True)
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
    "tests/unit/core/test_rendezvous.py",
    "tests/unit/core/test_nodes.py",
    "tests/unit/server/test_driver.py",
)


def _unit(*words: str) -> str:
    return " ".join((*CORE_TESTS, *words))


MUTANTS = (
    # ---------------------------------------------------------- drains
    Mutant(
        "who exits because it was told to has failed",
        MACHINE,
        "    if state.phase is Phase.RUNNING and _follows_notice(work, event):",
        "    if False and _follows_notice(work, event):",
    ),
    Mutant(
        "a drained node takes part in the next round",
        MACHINE,
        "    if notice is not None and notice.due_ms is not None and not ends:",
        "    if False and notice is not None and not ends:",
        by="tests/unit/agent/test_agent_notice.py",
    ),
    Mutant(
        "a drained node is placed on",
        PLACER,
        '            return what + (f" ({drain.reason})" if drain.reason else "")',
        '            return ""',
    ),
    Mutant(
        "a repeated drain has the deadline of another server's clock",
        "agent/rdzv/agent/server_link/draining.py",
        "        if self.told is None or self.told.number != number:",
        "        if True:",
        by="tests/unit/agent/test_agent_notice.py",
    ),
    Mutant(
        "who leaves is counted among those that a job has",
        PLACEMENT,
        "        return len(self.here) - len(self.going)",
        "        return len(self.here)",
        by="tests/unit/core/test_placement.py tests/unit/server/test_placer.py",
    ),
    Mutant(
        "a lifted drain is not told to who was away",
        PLACER,
        "        return UndrainNode() if lifted else None",
        "        return None",
        by="tests/unit/server/test_placer.py",
    ),
    # ---------------------------------------------------------- notice, and who leaves by it
    Mutant(
        "who has failed before its notice leaves by it",
        MACHINE,
        "    return notice is not None and work.now_ms - event.age_ms >= notice.since_ms",
        "    return notice is not None",
        by=NOTICE_TESTS,
    ),
    Mutant(
        "workers outlive the deadline of their notice",
        MACHINE,
        "    return max(min(grace_ms, notice.due_ms - work.now_ms), 0)",
        "    return grace_ms",
        by=NOTICE_TESTS,
    ),
    Mutant(
        "a lifted drain ends workers all the same",
        MACHINE,
        "replace(notice, due_ms=None, forget_ms=forget_ms)",
        "replace(notice, forget_ms=forget_ms)",
        by=NOTICE_TESTS,
    ),
    Mutant(
        "who serves the store of those that still train leaves when it is done",
        MACHINE,
        "        if work.now_ms >= notice.due_ms or not stays:",
        "        if True:",
        by=NOTICE_TESTS,
    ),
    Mutant(
        "who exits 0 as it leaves has succeeded, although nobody else has",
        RENDEZVOUS,
        "round_.live and not seat.succeeded and some_succeeded(work.state):",
        "round_.live and not seat.succeeded:",
    ),
    Mutant(
        "who exits 0 as it leaves has not succeeded, although others have",
        RENDEZVOUS,
        "    if command.exited_zero and round_.live and",
        "    if False and round_.live and",
        by=_unit("tests/unit/core/test_budgets.py"),
    ),
    Mutant(
        "a later wish puts off an earlier one",
        DRAINING,
        "        if self.wished is not None and self.wished.due_ms <= wished.due_ms:",
        "        if False:",
        by=NOTICE_TESTS,
    ),
    Mutant(
        "of a drain and a wish the later deadline counts",
        DRAINING,
        "        return min(both, key=lambda notice: notice.due_ms, default=None)",
        "        return max(both, key=lambda notice: notice.due_ms, default=None)",
        by=NOTICE_TESTS,
    ),
    Mutant(
        "of a drain and a wish the server takes the later deadline",
        PLACER,
        "        return min((one for one in both if one), key=",
        "        return max((one for one in both if one), key=",
        by=PLACER_TESTS,
    ),
    Mutant(
        "who has not taken it up yet keeps its placement on a drained node",
        PLACER,
        "        return [*_withdrawn_from(going, states), *_commands(decided, runs, lost)]",
        "        return [*_commands(decided, runs, lost)]",
        by=PLACER_TESTS,
    ),
    Mutant(
        "a cordon lifts a drain",
        PLACER,
        "            if node_id in cordons and cordons[node_id].due_ms is not None:",
        "            if False:",
        by=PLACER_TESTS,
    ),
    Mutant(
        "a node is drained below what its jobs need",
        PLACER,
        "            if keep_min and (short := self.short_without(node_id)):",
        "            if (short := self.short_without(node_id)) and not short:",
        by=PLACER_TESTS,
    ),
    Mutant(
        "nobody is placed beside who leaves a job that may not grow",
        PLACEMENT,
        "            wanted = min(wanted, job.unreplaced - new)",
        "            wanted = 0",
        by="tests/unit/core/test_placement.py " + PLACER_TESTS,
    ),
    # ---------------------------------------------------------- health
    Mutant(
        "an unhealthy node is given",
        PLACER,
        "if known is not None and known.failing else",
        "if False else",
        by=PLACER_TESTS,
    ),
    Mutant(
        "an unhealthy node is kept for jobs that wait",
        PLACER,
        "            unfit = node_id in quarantined or bool(known.failing)",
        "            unfit = node_id in quarantined",
        by=PLACER_TESTS,
    ),
    Mutant(
        "that it was not well for a moment is held against a node",
        RENDEZVOUS,
        "        case Decline(passing=True):\n",
        "        case Decline(passing=True) if False:\n",
        by=_unit("tests/unit/server/test_placer.py"),
    ),
    Mutant(
        "a check that hangs is asked again and again",
        HEALTH,
        "            if not hung.task.done():",
        "            if False:",
        by="tests/unit/agent/test_agent_health.py",
    ),
    Mutant(
        "a GPU that was in use when it was looked at counts as looked at",
        HEALTH,
        " or not unused <= self._looked_at:",
        ":",
        by="tests/unit/agent/test_agent_health.py",
    ),
    # ---------------------------------------------------------- whose a job is, and who may join it
    Mutant(
        "strangers join a job that has a secret",
        RENDEZVOUS,
        "    _check_secret(work, command)\n    node_id = command.node_id\n",
        "    node_id = command.node_id\n",
        by="tests/unit/shared/test_job_secret.py",
    ),
    Mutant(
        "strangers resume a seat of a job that has a secret",
        RENDEZVOUS,
        "    _check_secret(work, command)\n    if command.claim is not None:",
        "    if command.claim is not None:",
        by="tests/unit/shared/test_job_secret.py",
    ),
    Mutant(
        "who comes back late does not hear that its run is over, for the next has another secret",
        RENDEZVOUS,
        "    if any(earlier.run == command.run for earlier in membership.earlier):",
        "    if False:",
        by="tests/unit/shared/test_job_secret.py",
    ),
    Mutant(
        "a server without memory forgets the secret of a run",
        RENDEZVOUS,
        "    membership = replace(membership, secret=command.secret)\n    work.state = replace(",
        "    work.state = replace(",
        by=ADOPT_TESTS,
    ),
    Mutant(
        "whoever begins the next run of a job owns it",
        RENDEZVOUS,
        "        owner=old.owner or owner,",
        "        owner=owner,",
        by=ROLE_TESTS,
    ),
    Mutant(
        "anybody changes a job of somebody else",
        ROLES,
        "    if caller.admin or free or (owner and owner == caller.name):",
        "    if True:",
        by=ROLE_TESTS,
    ),
    Mutant(
        "a node joins jobs that it was not placed in",
        ROLES,
        "    if caller.admin or (own and (node_id in state.placed or state.present(node_id))):",
        "    if caller.admin or own:",
        by=ROLE_TESTS,
    ),
    Mutant(
        "a node speaks for others",
        ROLES,
        "    if caller.admin or (own and Role.NODE in caller.roles):",
        "    if caller.admin or Role.NODE in caller.roles:",
        by=ROLE_TESTS,
    ),
    Mutant(
        "who may submit brings an rdzv-agent",
        ROLES,
        "    if not foreground:\n",
        "    if False:\n",
        by=ROLE_TESTS,
    ),
    Mutant(
        "who may submit speaks for a node of somebody else",
        ROLES,
        "    if bound_to not in (None, caller.name):",
        "    if False:",
        by=ROLE_TESTS,
    ),
    Mutant(
        "what nodes begin by themselves belongs to them",
        ROLES,
        '    return caller.name if Role.SUBMIT in caller.roles else ""',
        "    return caller.name",
        by=ROLE_TESTS,
    ),
    Mutant(
        "nobody is asked who joins",
        NODE_COMMANDS,
        "                roles.refuse_stranger(stream.caller, state, stream.node_id)",
        "                pass",
        by=ROLE_TESTS,
    ),
    # ---------------------------------------------------------- what a claim tells
    Mutant(
        "what a run has spent is not claimed back",
        ADOPT,
        "    known = membership.spent\n    if tally is None:\n        return known\n",
        "    return membership.spent\n",
        by=ADOPT_TESTS,
    ),
    Mutant(
        "a claim makes less of what was spent",
        ADOPT,
        "        preemptions=max(known.preemptions, told.preemptions),",
        "        preemptions=told.preemptions,",
        by=ADOPT_TESTS,
    ),
    Mutant(
        "restarts that a claim tells of are not spent",
        ADOPT,
        "    missing = max(restarts - len(membership.restarts), 0)",
        "    missing = 0",
        by=ADOPT_TESTS,
    ),
    Mutant(
        "restarts that a claim tells of are all of this moment",
        ADOPT,
        "    if tally is None or not missing:",
        "    if True:",
        by=ADOPT_TESTS,
    ),
    Mutant(
        "nodes do not hear what a run has spent",
        ADOPT,
        "    return Tally(membership.spent, tuple(counted[-MAX_RESTART_AGES:]))",
        "    return None",
        by=ADOPT_TESTS,
    ),
    Mutant(
        "a node claims two places",
        RENDEZVOUS,
        " or node_id in work.state.seats or node_id in known.gone:",
        ":",
        by=ADOPT_TESTS,
    ),
    Mutant(
        "a run is adopted beside one that lives",
        ADOPT,
        "        return not known and not alive and number >= membership.next_round",
        "        return not known and number >= membership.next_round",
        by=ADOPT_TESTS,
    ),
    Mutant(
        "places are given up while claims come in",
        RENDEZVOUS,
        "max(first[1].until_ms, state.claimed_ms + state.tuning.claims_quiet_ms)",
        "first[1].until_ms",
        by=ADOPT_TESTS,
    ),
    Mutant(
        "bounds that a claim shows to be scaled are forgotten",
        RENDEZVOUS,
        "            scaled=membership.scaled if bounds == membership.bounds else bounds,\n",
        "",
        by=ADOPT_TESTS,
    ),
    Mutant(
        "who runs a round that a later one has followed elsewhere is not told",
        TOLD,
        "                yield from _superseded(before, event.round)",
        "                pass",
        by="tests/unit/server/test_announcements.py",
    ),
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
        '_give_up(work, node_id, "a new instance of the node took its place", heard=True)',
        "pass",
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
        "command.run or work.membership.submission:\n            raise _settings",
        "False:\n            raise _settings",
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
        "    if round_ is None or round_.number != command.round:\n        return\n    seat = work",
        "    if round_ is None:\n        return\n    seat = work",
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
    # ---------------------------------------------------------- budgets
    Mutant(
        "a crash loop does not back off",
        RENDEZVOUS,
        "    earliest_ms = max(earliest_ms, restart_due_ms(state))\n",
        "",
    ),
    Mutant(
        "a backoff is as long each time",
        BUDGETS,
        "settings.restart_backoff_ms << doublings,",
        "settings.restart_backoff_ms,",
        by=_unit("tests/unit/core/test_budgets.py"),
    ),
    Mutant(
        "the first restart backs off, too",
        BUDGETS,
        "    if membership.spent.soon < 2:",
        "    if membership.spent.soon < 1:",
        by=_unit("tests/unit/core/test_budgets.py"),
    ),
    Mutant(
        "a round that ran for long does not end the row",
        BUDGETS,
        "    if has_moved or end.at_ms - round_.at_ms >= tuning.soon_ms:",
        "    if has_moved:",
        by=_unit("tests/unit/core/test_budgets.py"),
    ),
    Mutant(
        "a lost node backs off as a failure does",
        BUDGETS,
        "round_.end is None or round_.end.cause is not Cause.WORKER_FAILURE:",
        "round_.end is None:",
        by=_unit("tests/unit/core/test_budgets.py"),
    ),
    Mutant(
        "a node that leaves is no preemption",
        BUDGETS,
        "PREEMPTIONS = frozenset({Cause.NODE_LOST, Cause.NODE_LEFT})",
        "PREEMPTIONS = frozenset({Cause.NODE_LOST})",
    ),
    Mutant(
        "the budget of preemptions has one more",
        BUDGETS,
        "given is not None and spent.preemptions > given:",
        "given is not None and spent.preemptions > given + 1:",
    ),
    Mutant(
        "the budget of store failures is never spent",
        BUDGETS,
        "    if end.cause is Cause.STORE_HOST and given is not None and",
        "    if False and given is not None and",
    ),
    Mutant(
        "what was spent is forgotten",
        RENDEZVOUS,
        "            spent=others,\n",
        "",
    ),
    Mutant(
        "the first round is a restart in vain",
        BUDGETS,
        "    elif failed and membership.restarts:",
        "    elif failed:",
    ),
    Mutant(
        "a job without progress goes on",
        BUDGETS,
        "most and spent.in_vain >= most:",
        "most and spent.in_vain > most:",
    ),
    Mutant(
        "a step that was reached before is progress",
        BUDGETS,
        "(than is None or step > than)",
        "(than is None or step >= than)",
        by=_unit("tests/unit/core/test_budgets.py"),
    ),
    Mutant(
        "only the last to stop says how far a round has come",
        RENDEZVOUS,
        "moved=further(work.state.moved, command.moved))",
        "moved=command.moved)",
    ),
    Mutant(
        "how far one round has come counts for the next",
        RENDEZVOUS,
        "    work.state = replace(work.state, stop_deadline_ms=None, moved=UNMOVED)\n",
        "    work.state = replace(work.state, stop_deadline_ms=None)\n",
        by=_unit("tests/unit/core/test_budgets.py"),
    ),
    Mutant(
        "restarts count for ever",
        RENDEZVOUS,
        "    return sum(1 for at_ms in membership.restarts if now_ms - at_ms < window_ms)",
        "    return len(membership.restarts)",
        by=_unit("tests/unit/core/test_budgets.py"),
    ),
    Mutant(
        "who restarts its own workers is preempted by that",
        BUDGETS,
        "    if settings.max_restarts is None and end.cause is Cause.NODE_LEFT:",
        "    if False:",
        by=_unit("tests/unit/core/test_budgets.py"),
    ),
    Mutant(
        "a backoff grows without bound",
        BUDGETS,
        "    return min(settings.restart_backoff_ms << doublings, settings.restart_backoff_max_ms)",
        "    return settings.restart_backoff_ms << doublings",
        by=_unit("tests/unit/core/test_budgets.py"),
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
        "        return all(seat.succeeded for seat in state.seats.values())",
        "        return any(seat.succeeded for seat in state.seats.values())",
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
        "    if end.cause is Cause.WORKER_FAILURE and budget_left:",
        "    if budget_left:",
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
        "or settings.scale_up is ScaleUp.ON_RESTART:\n        return 0",
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
        "        seats={p.node_id: Seat(p.incarnation, now_ms, p.node_id in done) for p in held},",
        "        seats={},",
    ),
    Mutant(
        "after a restart nobody is waited for",
        RENDEZVOUS,
        "Away(now_ms, until_ms, firm=True, may_run=not p.instance.fence_after_ms)",
        "Away(now_ms, now_ms, firm=False)",
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
        "    if now_ms < until_ms:",
        "    if False:",
        by=_unit(),
    ),
    Mutant(
        "who was not told its incarnation before its server was killed is locked out",
        NODES,
        "    if command.instance == (old.instance or old.expected_instance):",
        "    if command.instance == old.instance:",
    ),
    Mutant(
        "nobody stores which instance holds a seat",
        NODE_COMMANDS,
        "            command = replace(command, owner=owner, instance=stream.instance)",
        "            command = replace(command, owner=owner)",
        by="tests/unit/server/test_driver.py",
    ),
    Mutant(
        "the successor of a fenced agent waits for the whole grace of a take-over",
        NODES,
        "    if old.fence_after_ms:\n        # Since then",
        "    if False:\n        # Since then",
        by="tests/unit/core/test_nodes.py",
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
        "replace(record, heard_ms=now_ms, lease_ms=lease_ms)",
        "replace(record, lease_ms=lease_ms)",
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
        "told.append(_about_its_seat(state.membership, node_id, now_ms, _claimed_rank(belief)))",
        "pass",
    ),
    Mutant(
        "who comes back is not told that its seat was given up",
        TOLD,
        "    if belief.has_workers and belief.round is not None and not current:",
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
        "        if stored:\n            await self._persist(job, steps)\n"
        "        self._publish(job, steps, stored=stored)",
        "        self._publish(job, steps, stored=stored)\n"
        "        if stored:\n            await self._persist(job, steps)",
    ),
    Mutant(
        "a doubtful commit is taken for none",
        JOBS,
        "            if not error.definite:\n                job.doubt = tuple(steps)",
        "            pass",
    ),
    Mutant(
        "a doubtful commit is taken for done",
        JOBS,
        "        if revision == job.revision:\n            job.doubt = ()\n        elif",
        "        if revision == job.revision:\n            job.doubt = ()\n"
        "            self._publish(job, steps, stored=True)\n        elif",
    ),
    Mutant(
        "a job's timer is not armed anew",
        JOBS,
        "            job.timer.arm(transition.wake_at_ms)\n            rows",
        "            rows",
    ),
    Mutant(
        "steps of one job overlap",
        JOBS,
        "            async with job.lock:\n",
        "            if True:\n",
    ),
    Mutant(
        "a node's word is dropped while the store is away",
        NODE_COMMANDS,
        "            await sleep_ms(self._clock, self._retry_ms)\n\n    async def insist_or_log(",
        "            return self._jobs.peek(rdzv_id)\n\n    async def insist_or_log(",
    ),
    Mutant(
        "jobs are not told who is away",
        CONNECTIONS,
        "NodeAway():\n                self._presence.mark_soon(event.node_id)",
        "NodeAway():\n                pass",
        by=_unit(),
    ),
    Mutant(
        "nobody is told that its lease has grown",
        CONNECTIONS,
        "                self._streams.send(event.node_id, Lease(interval_ms, event.lease_ms))",
        "                pass",
        by=_unit(),
    ),
    Mutant(
        "jobs are not told who is lost",
        CONNECTIONS,
        "                self._presence.mark_soon(event.node_id, reason=event.reason)",
        "                pass",
    ),
    Mutant(
        "a former instance is lost before the next has spoken",
        PRESENCE,
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
        by="tests/unit/agent/test_agent_machine.py",
    ),
    Mutant(
        "a seat of which the node has not heard is kept",
        MACHINE,
        "moved=UNMOVED, fenced=False)\n        work.do(rejoin(work.state))",
        "moved=UNMOVED, fenced=False)",
        by="tests/unit/agent/test_agent_machine.py",
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
        by="tests/unit/agent/test_agent_machine.py",
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
        by="tests/unit/agent/test_agent_machine.py",
    ),
    Mutant(
        "who has left does not say so",
        MACHINE,
        "        work.do(SayLeave(state.run, state.leaving, round_))\n",
        "",
        by="tests/unit/agent/test_agent_machine.py",
    ),
    Mutant(
        "a stuck node does not say so",
        MACHINE,
        "            work.do(SayStuck(work.state.run, event.round, event.pids))",
        "            pass",
        by="tests/unit/agent/test_agent_machine.py",
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
    # ---------------------------------------------------------- operators
    Mutant(
        "other bounds are forgotten",
        RENDEZVOUS,
        "    work.store(replace(membership, scaled=bounds))\n",
        "",
    ),
    Mutant(
        "a round above its bounds goes on",
        RENDEZVOUS,
        "    if round_ is not None and len(work.state.seats) > command.max_nodes:\n",
        "    if False:\n",
    ),
    Mutant(
        "other bounds have no effect",
        MODEL,
        "        return self.scaled or (self.settings.min_nodes, self.settings.max_nodes)",
        "        return (self.settings.min_nodes, self.settings.max_nodes)",
    ),
    # ---------------------------------------------------------- submitted jobs
    Mutant(
        "a job gets fewer nodes than it needs",
        PLACEMENT,
        "        if len(ready) >= job.missing:\n            self._give(job, ready, job.missing)",
        "        if ready:\n            self._give(job, ready, job.missing)",
    ),
    Mutant(
        "nothing is kept for who waits first",
        PLACEMENT,
        "                self._kept_for.setdefault(host.node_id, job.rdzv_id)",
        "                pass",
    ),
    Mutant(
        "whoever is later comes first",
        PLACEMENT,
        "key=lambda job: (-job.spec.priority, job.at_ms, job.rdzv_id))",
        "key=lambda job: (-job.spec.priority, -job.at_ms, job.rdzv_id))",
    ),
    Mutant(
        "priorities count for nothing",
        PLACEMENT,
        "key=lambda job: (-job.spec.priority, job.at_ms, job.rdzv_id))",
        "key=lambda job: (job.at_ms, job.rdzv_id))",
    ),
    Mutant(
        "nodes that are away or cordoned are given",
        PLACEMENT,
        "            and not host.unusable\n",
        "",
    ),
    Mutant(
        "a place is given twice",
        PLACEMENT,
        "            self._places_free[host.node_id] -= 1\n",
        "",
    ),
    Mutant(
        "a GPU is given twice",
        PLACEMENT,
        "            self._gpus_free[host.node_id] -= gpus_needed(job.spec, host.resources)",
        "            pass",
    ),
    Mutant(
        "a job gets more nodes than it wants",
        PLACEMENT,
        "        self._give(job, ready, min(wanted, len(ready)))",
        "        self._give(job, ready, len(ready))",
    ),
    Mutant(
        "who has declined is chosen again",
        SUBMITTED,
        "    return replace(withdraw(submission, (node_id,)), declined=declined)",
        "    return withdraw(submission, (node_id,))",
    ),
    Mutant(
        "nodes are given while a placement is in doubt",
        PLACER,
        "while not self._stopping and await self._resolved() and (",
        "while not self._stopping and (",
        by="tests/unit/server/test_placer.py",
    ),
    Mutant(
        "cordons are forgotten by the next server",
        PLACER,
        "        await self._document.load()\n        self._settled_at_ms",
        "        self._settled_at_ms",
    ),
    Mutant(
        "quarantined nodes are given",
        PLACER,
        '            return f"quarantined ({held.reason})"',
        "            pass",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "a quarantine is forgotten by the next server",
        DRIVER,
        "        await self.quarantine.load()\n",
        "",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "a job keeps a quarantined node",
        RENDEZVOUS,
        "    _withdraw_barred,\n",
        "",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "a quarantined node is let go of after the next round",
        JOBS,
        "                transition = self._decide(state, command)\n            except",
        "                pass\n            except",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "one broken job has node after node quarantined",
        QUARANTINE,
        "if one.run not in blamed) < tuning.failures",
        "if True) < tuning.failures",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "a strike counts twice when its step is taken again",
        QUARANTINE,
        " or _known(record, strike):",
        ":",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "a failed connection is held against its node",
        QUARANTINE,
        "            if is_connection_error(failure):",
        "            if False:",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "strikes are never forgotten",
        QUARANTINE,
        "        tuple(strike for strike in record.strikes if strike.at_ms > since_ms),",
        "        record.strikes,",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "node after node is quarantined",
        QUARANTINE,
        "    if len(held) < most:",
        "    if True:",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "the only node is quarantined",
        QUARANTINE,
        "    if len(daemons) < 2:",
        "    if False:",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "nodes of rdzvrun are judged",
        QUARANTINE,
        "    if not tuning.failures or node_id not in daemons or",
        "    if not tuning.failures or",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "what a node did before an operator lifted its quarantine counts on",
        QUARANTINE,
        "strikes=tuple(strike for strike in record.strikes if strike.node_id != node_id),",
        "strikes=record.strikes,",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "who was barred since it was chosen is placed",
        RENDEZVOUS,
        "        chosen = [n for n in command.node_ids if n not in work.state.barred]",
        "        chosen = list(command.node_ids)",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "who was let go of is let in by the echo of its join",
        RENDEZVOUS,
        "    if work.open and work.membership.submission and command.node_id in work.state.barred:",
        "    if False:",
        by=QUARANTINE_TESTS,
    ),
    Mutant(
        "a placement is not taken back from who is not heard of again",
        PLACER,
        "        lost = self._vanished(states) if settled else {}",
        "        lost: dict[str, tuple[str, ...]] = {}",
    ),
    Mutant(
        "who is placed is not told",
        TOLD,
        "                    yield node_id, placed(membership)",
        "                    continue",
    ),
    Mutant(
        "who comes back is not told where it is placed",
        TOLD,
        "    if chosen and membership.run not in held:\n        yield placed(membership)",
        "    pass",
    ),
    Mutant(
        "who is withdrawn is not told",
        TOLD,
        "                    yield node_id, withdrawn",
        "                    continue",
        by="tests/unit/server/test_placer.py",
    ),
    Mutant(
        "a job that left a node unheard keeps it",
        RECOVERY,
        "        await self._note_left(stream, believed)\n",
        "",
    ),
    Mutant(
        "a later round is adopted beside workers of an earlier one",
        RENDEZVOUS,
        " and not _others_run_on(work.state, command):",
        ":",
        by="tests/unit/core/test_adopt.py",
    ),
    Mutant(
        "the round after one that was adopted begins beside workers of the one in its place",
        RENDEZVOUS,
        "    earliest_ms = max(earliest_ms, superseded_until_ms(state))\n",
        "",
        by="tests/unit/core/test_adopt.py",
    ),
    Mutant(
        "any join says that nothing is left of a round that was superseded",
        RENDEZVOUS,
        "command.left_round is not None and command.left_round >= former.round",
        "True",
        by="tests/unit/core/test_adopt.py",
    ),
    Mutant(
        "who has a seat is withdrawn",
        SUBMITTED,
        "        if node_id not in state.seats and (node_id in state.placed or",
        "        if (node_id in state.placed or",
        by=_unit(),
    ),
    Mutant(
        "who loses its placement as it leaves is not told",
        TOLD,
        "                gone = event.node_id in before.placed and event",
        "                gone = False and event",
        by="tests/unit/server/test_placer.py",
    ),
    Mutant(
        "who joins from an old round does not hear that its seat is of one that has ended",
        TOLD,
        "    if round_.live and command.left_round is None:\n",
        "    if not round_.live or command.left_round is None:\n",
        by="tests/unit/server/test_driver.py",
    ),
    Mutant(
        "who lets go of a job keeps its place in it",
        REPORTS,
        "                await self._note_let_go(stream, rdzv_id, run)\n",
        "                pass\n",
        by="tests/unit/server/test_placer.py",
    ),
    Mutant(
        "who believes in another run keeps its seat in this one",
        RECOVERY,
        "            if not self._is_of_another_run(belief):\n",
        "            if True:\n",
        by="tests/unit/server/test_placer.py",
    ),
    Mutant(
        "who joins as another run is adopted has no place in that one",
        RECOVERY,
        "            belief = replace(belief, run=state.membership.run)\n",
        "            pass\n",
        by="tests/unit/server/test_driver.py",
    ),
    Mutant(
        "who comes back to a run that goes on as another is not heard",
        RECOVERY,
        "                or went_along(state, node_id, incarnation, belief.run)\n",
        "",
        by="tests/unit/server/test_driver.py",
    ),
    Mutant(
        "who waits in an adopted run can not join it again by the name of its own",
        RENDEZVOUS,
        "    if command.run and not _went_along(work, command):\n",
        "    if command.run:\n",
        by=ADOPT_TESTS,
    ),
    Mutant(
        "who waits in an adopted run can not leave it by the name of its own",
        RENDEZVOUS,
        "        case Leave() if _went_along(work, command):\n            _leave(work, command)\n",
        "",
        by=ADOPT_TESTS,
    ),
    Mutant(
        "what a node believes is held against a job as it was before the same commit",
        NODE_COMMANDS,
        "        return self._jobs.peek(rdzv_id) or state\n",
        "        return state\n",
        by="tests/unit/server/test_driver.py",
    ),
    Mutant(
        "who has become another before its join is stored is never lost",
        PRESENCE,
        "        if stream is None or stream.incarnation != command.incarnation:\n",
        "        if stream is None:\n",
        by="tests/unit/server/test_driver.py",
    ),
    Mutant(
        "a run that was not known when it was refused stays refused once it is adopted",
        NODE_COMMANDS,
        "            error = UnknownNodeError(text)\n",
        "",
        by="tests/unit/server/test_driver.py",
    ),
    Mutant(
        "what was told before its node knew the run counts as heard",
        "rendezvous/rdzv/server/sessions/streams.py",
        "            self.forget(told.rdzv_id)\n",
        "            pass\n",
        by="tests/unit/shared/test_streams.py",
    ),
    # ---------------------------------------------------------- workers of dead agents
    Mutant(
        "a run is stopped while the workers of a dead agent run",
        RENDEZVOUS,
        "    if work.now_ms < unheard_until_ms(work.state):",
        "    if False:",
    ),
    Mutant(
        "a node that is heard again is waited for all the same",
        RENDEZVOUS,
        "    if any(d.may_run and d.node_id == node_id for d in departures):",
        "    if False:",
        by="tests/unit/core/test_rendezvous.py tests/unit/server/test_driver.py",
    ),
    # ---------------------------------------------------------- success
    Mutant(
        "a success that was reported is not stored",
        RENDEZVOUS,
        "    work.store_round(replace(round_, succeeded=(*round_.succeeded, node_id)))",
        "    pass",
        by="tests/scenarios",
    ),
    Mutant(
        "a success is forgotten by a take-over",
        RENDEZVOUS,
        "Seat(p.incarnation, now_ms, p.node_id in done)",
        "Seat(p.incarnation, now_ms)",
        by="tests/scenarios",
    ),
    Mutant(
        "the success of all but one is enough",
        RENDEZVOUS,
        "return len(round_.succeeded) == len(round_.participants)",
        "return len(round_.succeeded) >= len(round_.participants) - 1",
    ),
    Mutant(
        "an instance before the participant's own reports its success",
        RENDEZVOUS,
        "if p.node_id == node_id and p.incarnation <= command.incarnation",
        "if p.node_id == node_id",
        by="tests/unit/core/test_rendezvous.py",
    ),
    # ---------------------------------------------------------- hangs
    Mutant(
        "what rode on a doubtful commit that has happened is written again",
        JOBS,
        "job.revision, job.doubt, job.pending = revision, (), ()",
        "job.revision, job.doubt = revision, ()",
    ),
    Mutant(
        "a hang ends no round",
        HANGS,
        "                await self._submit(episode.rdzv_id, command)\n",
        "                pass\n",
        by="tests/unit/server/test_hangs_of_jobs.py",
    ),
    Mutant(
        "a node that takes no stacks is waited for without end",
        STACKS,
        "        timer.arm(self._clock.now_ms() + self._answer_ms)\n",
        "",
        by="tests/unit/server/test_stacks_of_jobs.py",
    ),
    Mutant(
        "who hangs no more is stopped all the same",
        HANGS,
        "            if not episode.hung:\n",
        "            if not episode:\n",
        by="tests/unit/server/test_hangs_of_jobs.py",
    ),
    Mutant(
        "time in which nobody watched is silence",
        "agent/rdzv/agent/observers/hang_watch.py",
        "min(now_ms - self._looked_ms, 2 * self._look_every_ms)",
        "now_ms - self._looked_ms",
        by="tests/unit/agent/test_agent_hangs.py",
    ),
    Mutant(
        "every D state is one long sleep",
        VIGIL,
        "look.switches == self.switches is not None",
        "True",
        by="tests/unit/agent/test_agent_hangs.py",
    ),
    Mutant(
        "who hangs is blamed although the stacks show for whom it waits",
        "rendezvous/rdzv/core/hangs.py",
        "    if odd is not None and odd in stacks:",
        "    if False:",
        by="tests/unit/server/test_hangs_of_jobs.py",
    ),
    Mutant(
        "who is held by a debugger hangs",
        VIGIL,
        "        return replace(seen, silent_ms=self.silent_ms) if look.state == TRACED else seen",
        "        return seen",
        by="tests/unit/agent/test_agent_hangs.py",
    ),
    Mutant(
        "a worker that has never said anything hangs",
        VIGIL,
        "        if self.word is None or self.silent_ms < timeout_ms:",
        "        if self.silent_ms < timeout_ms:",
        by="tests/unit/agent/test_agent_hangs.py",
    ),
    Mutant(
        "one long silence blinds a node to the next",
        VIGIL,
        "        min(AUTO_LONGEST_FACTOR * longest_ms, AUTO_LONGEST_MS),",
        "        AUTO_LONGEST_FACTOR * longest_ms,",
        by="tests/unit/agent/test_agent_hangs.py",
    ),
)


@struct(frozen=True)
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
