"""The protocol as a table: every command is tried in every phase of a job.

The outcomes are written to docs/protocol.md by `pytest tests/unit/core/test_protocol.py --rewrite`,
and compared with it otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import get_args

import pytest

from rdzv.core import commands
from rdzv.core.model import JobSpec, LeaveCause, State
from rdzv.core.rendezvous import COMMAND_RULES, step
from rdzv.errors import ERRORS, RendezvousError
from rdzv.structs import replace
from tests.support.builders import RUN, SETTINGS, Job, join, report

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
SUBMISSION = commands.Submit(RUN, SETTINGS, JobSpec(("train.py",)), "ada")
RUNNING = ("n1", "n2", "n3")
SIGNAL = LeaveCause.SIGNAL


def joining(*, submitted: bool) -> Job:
    job = Job()
    if submitted:
        job.do(SUBMISSION)
        job.do(commands.Place(RUN, RUNNING))
    job.join("n1")
    return job


def running(*, submitted: bool) -> Job:
    job = joining(submitted=submitted)
    job.join("n2", "n3")
    return job


def ending(*, submitted: bool) -> Job:
    job = running(submitted=submitted)
    job.fail("n3")
    return job


def being_stopped(*, submitted: bool) -> Job:
    job = running(submitted=submitted)
    job.do(commands.Stop(RUN, "an operator said so"))
    return job


def ended(*, submitted: bool) -> Job:
    job = running(submitted=submitted)
    job.succeed(*RUNNING)
    return job


def queued() -> Job:
    job = Job()
    job.do(SUBMISSION)
    return job


PHASES: Mapping[str, Callable[[], Job]] = {
    "no run": Job,
    "joining": lambda: joining(submitted=False),
    "running": lambda: running(submitted=False),
    "round ended": lambda: ending(submitted=False),
    "being stopped": lambda: being_stopped(submitted=False),
    "ended": lambda: ended(submitted=False),
}
SUBMITTED: Mapping[str, Callable[[], Job]] = {
    "not submitted": lambda: running(submitted=False),
    "queued": queued,
    "joining": lambda: joining(submitted=True),
    "running": lambda: running(submitted=True),
    "round ended": lambda: ending(submitted=True),
    "being stopped": lambda: being_stopped(submitted=True),
    "ended": lambda: ended(submitted=True),
}

OTHER = replace(SETTINGS, max_restarts=7)
FAILED = (report(),)
CASES: tuple[tuple[str, commands.Command], ...] = (
    ("a node that is not in the job", join("n9")),
    ("n9, with other settings", join("n9", settings=OTHER)),
    ("n9, with a job secret that is not the job's", join("n9", secret="aa")),
    ("n9, of a run that is not known", join("n9", run="run-0")),
    ("n1, again", join("n1")),
    ("n1, its workers of the round are gone", join("n1", run=RUN, left_round=0)),
    ("a new instance of n1", join("n1", 2)),
    ("a former instance of n1", join("n1", 0)),
    ("n1", commands.Resume("n1", 1, RUN, 0)),
    ("a new instance of n1", commands.Resume("n1", 2, RUN, 0)),
    ("a former instance of n1", commands.Resume("n1", 0, RUN, 0)),
    ("n1, of a round before", commands.Resume("n1", 1, RUN, -1)),
    ("a node that is not in the job", commands.Resume("n9", 1, RUN, 0)),
    ("n1", commands.Fail("n1", 1, RUN, 0, FAILED)),
    ("n1, of a round before", commands.Fail("n1", 1, RUN, -1, FAILED)),
    ("n1, of another run", commands.Fail("n1", 1, "run-0", 0, FAILED)),
    ("a former instance of n1", commands.Fail("n1", 0, RUN, 0, FAILED)),
    ("a node that is not in the job", commands.Fail("n9", 1, RUN, 0, FAILED)),
    ("n1", commands.Succeed("n1", 1, RUN, 0)),
    ("n1, of a round before", commands.Succeed("n1", 1, RUN, -1)),
    ("a former instance of n1", commands.Succeed("n1", 0, RUN, 0)),
    ("a node that is not in the job", commands.Succeed("n9", 1, RUN, 0)),
    ("n1, whose workers still run", commands.Leave("n1", 1, RUN, SIGNAL, "SIGTERM")),
    ("n1, its workers of the round are gone", commands.Leave("n1", 1, RUN, SIGNAL, "SIGTERM", 0)),
    ("n1, of another run", commands.Leave("n1", 1, "run-0", SIGNAL, "SIGTERM")),
    ("a former instance of n1", commands.Leave("n1", 0, RUN, SIGNAL, "SIGTERM")),
    ("a node that is not in the job", commands.Leave("n9", 1, RUN, SIGNAL, "SIGTERM")),
    ("n1", commands.ReportStuck("n1", 1, RUN, 0, (4711,))),
    ("n1, of a round before", commands.ReportStuck("n1", 1, RUN, -1, (4711,))),
    ("n1, which hosts the store", commands.ReportStoreHost("n1", 1, RUN, 0, "it exited 1")),
    ("n2, which does not", commands.ReportStoreHost("n2", 1, RUN, 0, "it exited 1")),
    ("n1", commands.MarkAway("n1", 1, 5_000, firm=False)),
    ("a former instance of n1", commands.MarkAway("n1", 0, 5_000, firm=False)),
    ("n1, which is not away", commands.MarkBack("n1", 1)),
    ("n1", commands.MarkLost("n1", 1, "lease expired")),
    ("a former instance of n1", commands.MarkLost("n1", 0, "lease expired")),
    ("n1, which was not given up", commands.MarkHeard("n1")),
    ("this run", commands.Stop(RUN, "an operator said so")),
    ("another run", commands.Stop("run-0", "an operator said so")),
    ("the latest round", commands.Restart(RUN, 0, "an operator said so")),
    ("a later round", commands.Restart(RUN, 1, "an operator said so")),
    ("other bounds", commands.Scale(RUN, 1, 2, "an operator said so")),
    ("the same bounds", commands.Scale(RUN, 2, 3, "an operator said so")),
    ("another run", replace(SUBMISSION, run="run-9")),
    ("", commands.Tick()),
)
SUBMITTED_CASES: tuple[tuple[str, commands.Command], ...] = (
    ("the same run", SUBMISSION),
    ("n4", commands.Place(RUN, ("n4",))),
    ("n1 again", commands.Place(RUN, ("n1",))),
    ("n1", commands.Withdraw(RUN, ("n1",), "it is drained")),
    ("n1, for this run", commands.Decline("n1", RUN, "no such account")),
    ("n1, for now", commands.Decline("n1", RUN, "it is not well", passing=True)),
    ("n9, which was not chosen", commands.Decline("n9", RUN, "no such account")),
    ("", commands.GiveUp(RUN, "no node can run it")),
    ("n1", commands.Bar((("n1", "it is quarantined"),))),
    ("no node", commands.Bar(())),
)

HEAD = """\
# The protocol of a job

What a job does with each command, in each of its phases. A cell shows one of these:

* **Events** (bold): the command takes effect. *noted*: it takes effect without an event.
* *ignored*: the command is late, repeated, or from a former instance. It changes nothing, and
  nobody gets an error.
* *refused*: it changes nothing. The node or operator gets the error:

| error | means | the caller |
|---|---|---|
{errors}

The example job needs two to three nodes. It has n1, n2 and n3; n1 has GROUP_RANK 0.

| phase | of the example job |
|---|---|
| no run | nobody has joined yet |
| joining | n1 waits for the others |
| running | a round is live |
| round ended | a worker of n3 has failed, no restart is left, the workers are stopping |
| being stopped | an operator has stopped the job |
| ended | all workers have exited with 0 |

`core/rendezvous.py` has the rule of each command (`COMMAND_RULES`), `core/life` the refusals. A
test writes this page: `pytest tests/unit/core/test_protocol.py --rewrite`.
"""
HEAD_OF_SUBMITTED = """
# Submitted runs

The server chooses their nodes. *queued*: no node is chosen yet. *joining*: n1, n2 and n3 are
chosen, and n1 has joined.
"""


def outcome(state: State, command: commands.Command, now_ms: int) -> str:
    """Try a command; return its outcome."""
    try:
        transition = step(state, command, now_ms)
    except RendezvousError as error:
        return f"refused: {type(error).__name__}"
    if transition.ignored is not None:
        # As if only time had passed.
        tick = step(state, commands.Tick(), now_ms)
        assert (transition.state, transition.events) == (tick.state, tick.events), command
        return f"ignored: {transition.ignored}"
    changed = transition.state != state
    assert changed or isinstance(command, commands.Tick), (
        f"{command} changed nothing without a word"
    )
    if not transition.events:
        return "noted" if changed else "nothing is due"
    return ", ".join(f"**{type(event).__name__}**" for event in transition.events)


def table(
    phases: Mapping[str, Callable[[], Job]], cases: tuple[tuple[str, commands.Command], ...]
) -> Iterator[str]:
    jobs = {phase: make() for phase, make in phases.items()}
    for kind in dict.fromkeys(type(command) for _, command in cases):
        doc = (kind.__doc__ or "").strip().split("\n\n")[0].split("\n")
        yield f"\n## {kind.__name__}\n\n{' '.join(line.strip() for line in doc)}\n"
        yield f"| | {' | '.join(jobs)} |"
        yield "|---" * (len(jobs) + 1) + "|"
        for words, command in cases:
            if isinstance(command, kind):
                cells = [outcome(job.state, command, job.now_ms) for job in jobs.values()]
                yield f"| {words or 'any'} | {' | '.join(cells)} |"


def meanings(tables: str) -> str:
    """Write a row for each error of the tables, from its docstring."""
    rows = []
    for name in dict.fromkeys(re.findall(r"refused: (\w+)", tables)):
        means, _, caller = (ERRORS[name].__doc__ or "").strip().partition(" The caller ")
        rows.append(f"| `{name}` | {means.removesuffix('.')} | {caller.removesuffix('.')} |")
    return "\n".join(sorted(rows))


def test_the_page_shows_the_protocol_as_it_is(request: pytest.FixtureRequest) -> None:
    tables = [*table(PHASES, CASES), HEAD_OF_SUBMITTED, *table(SUBMITTED, SUBMITTED_CASES)]
    lines = [HEAD.format(errors=meanings("\n".join(tables))), *tables]
    text = "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"
    if request.config.getoption("--rewrite"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "run: pytest tests/unit/core/test_protocol.py --rewrite"


def test_every_command_has_a_rule_and_is_shown() -> None:
    kinds = set(get_args(commands.Command))
    assert set(COMMAND_RULES) == kinds
    assert {type(command) for _, command in (*CASES, *SUBMITTED_CASES)} == kinds
