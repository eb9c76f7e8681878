"""All messages of three nodes, to a small depth: no order of commands breaks an invariant.

From each of a few starting states, breadth-first over every command that any node could send,
honest or not, every loss, every crash, and the passing of time up to the next deadline. States are
values, so a state that was met before is not explored again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import pytest

from rdzv.core import commands
from rdzv.core.model import KeptWorker, LeaveCause, Moved, Settings, State
from rdzv.core.rendezvous import step
from rdzv.errors import RendezvousError
from rdzv.structs import replace
from tests.support.builders import Job, check_calm, check_step, join, report, running

pytestmark = pytest.mark.slow

NODES = ("n1", "n2", "n3")
STEPS = 1_500
"""How many steps are tried from each starting state."""
SETTINGS = Settings(2, 3, max_restarts=1, last_call_timeout_ms=5_000, join_timeout_ms=60_000)
BUDGETED = replace(
    SETTINGS, max_restarts=9, max_preemptions=1, max_store_failures=1, no_progress_restarts=2
)


def everything_said(state: State) -> Iterator[commands.Command]:
    """Yield every command that could come now, from the present instances and from new ones."""
    run = state.membership.run
    settings = state.membership.settings if run else SETTINGS
    round_ = state.membership.round
    number = round_.number if round_ else 0
    new_run = f"run-{state.membership.run_number + 1}"
    for node_id in NODES:
        now = state.incarnation(node_id) or 1
        for incarnation in (now, now + 1):
            yield join(node_id, incarnation, settings=settings, new_run=new_run)
        if run:
            for left_round in {number, max(number - 1, 0)}:
                yield join(node_id, now, run=run, settings=settings, left_round=left_round)
            moved = Moved(furthest_step=number, snapshot_changed=node_id == "n3")
            yield join(node_id, now, run=run, settings=settings, left_round=number, moved=moved)
            kept = (KeptWorker(0, number or None, torn=node_id == "n2"),)
            yield join(node_id, now, run=run, settings=settings, left_round=number, kept=kept)
            yield join(node_id, now + 1, run=run, settings=settings, left_round=number)
            yield commands.Resume(node_id, now + 1, run, number)
        if state.present(node_id):
            yield from everything_present(node_id, now, run, number)
    yield commands.Tick()


def everything_present(node_id: str, now: int, run: str, number: int) -> Iterator[commands.Command]:
    yield commands.Fail(node_id, now, run, number, (report(message=node_id),))
    yield commands.Fail(node_id, now, run, number, (report(exit_code=None, suspect=True),))
    yield commands.Succeed(node_id, now, run, number)
    yield commands.Leave(node_id, now, run, LeaveCause.SIGNAL, "SIGTERM")
    yield commands.Leave(node_id, now, run, LeaveCause.SIGNAL, "SIGTERM", left_round=number)
    yield commands.ReportStuck(node_id, now, run, number, (4711,))
    yield commands.ReportStoreHost(node_id, now, run, number, "it exited 1")
    yield commands.MarkAway(node_id, now, 5_000, firm=False)
    yield commands.MarkAway(node_id, now, 30_000, firm=True)
    yield commands.MarkBack(node_id, now)
    yield commands.MarkLost(node_id, now, "lease expired")


def explore(job: Job, steps: int) -> int:
    """Try every command in every state met, nearest first; return the number of states."""
    beginning = (job.state, job.now_ms, job.wake_at_ms)
    met, queue = {repr(job.state)}, deque([beginning])
    while queue and steps > 0:
        before, then_ms, wake_at_ms = queue.popleft()
        for command in everything_said(before):
            now_ms = then_ms
            if isinstance(command, commands.Tick):
                now_ms = then_ms + 100 if wake_at_ms is None else wake_at_ms
            try:
                transition = step(before, command, now_ms)
            except RendezvousError:
                continue
            steps -= 1
            check_step(before, command, transition, now_ms)
            if (key := repr(transition.state)) not in met:
                # If the end of its run waits for this join only, the join would begin the next run.
                ended = isinstance(command, commands.Join) and transition.state.membership.ended
                check_calm(commands.Tick() if ended else command, transition, now_ms)
                met.add(key)
                queue.append((transition.state, now_ms, transition.wake_at_ms))
    return len(met)


def vacant() -> Job:
    return Job(SETTINGS)


def at_last_call() -> Job:
    job = Job(SETTINGS)
    job.join("n1", "n2")
    return job


def two_run() -> Job:
    return running("n1", "n2", settings=SETTINGS)


def three_run() -> Job:
    return running(*NODES, settings=SETTINGS)


def failing() -> Job:
    job = three_run()
    job.fail("n2")
    job.stopped("n1")
    return job


def with_a_spare() -> Job:
    job = running("n1", "n2", settings=replace(SETTINGS, max_nodes=2))
    job.join("n3")
    return job


def backing_off() -> Job:
    """One restart and one preemption are spent, and the second restart in a row waits."""
    job = running("n1", "n2", settings=replace(BUDGETED, max_nodes=2))
    for _ in range(2):
        job.fail("n1")
        job.stopped("n1", "n2")
    assert "backing off" in job.reason
    return job


def with_budgets() -> Job:
    job = running(*NODES, settings=BUDGETED)
    job.fail("n1")
    job.stopped(*NODES)
    job.lost("n3")
    job.stopped("n1", "n2")
    return job


def half_done() -> Job:
    job = three_run()
    job.succeed("n1")
    return job


def taken_over() -> Job:
    job = failing()
    job.crash()
    return job


@pytest.mark.parametrize(
    "beginning",
    [
        *(vacant, at_last_call, two_run, three_run, failing, with_a_spare, half_done, taken_over),
        *(backing_off, with_budgets),
    ],
    ids=lambda beginning: beginning.__name__,
)
def test_no_order_of_commands_breaks_a_promise(beginning: Callable[[], Job]) -> None:
    assert explore(beginning(), STEPS) > 100
