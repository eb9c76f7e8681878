"""A job's story in sentences: its rounds, first failure, lost time, and what it waits for now.

All of it comes from the job's history and status; nothing is guessed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rdzv.core.events import NodeLeft, NodeLost
from rdzv.core.model import Cause
from rdzv.core.words import counted, duration
from rdzv.ctl import as_text_report
from rdzv.ctl.as_text import snapshots, state_cell
from rdzv.ctl.layout import Cell, Page, bold
from rdzv.view.answers import ENDED, Event, JobStatus
from rdzv.view.history import read
from rdzv.view.ledger import Ledger, LedgerPhase, ledgers_of
from rdzv.view.life import Round, Run, following, name_present, runs_of
from rdzv.view.sentences import one_line, started

FIRST, LAST = 3, 5
"""How many of a long story's first and last rounds are shown in full; the rest are summarized."""
NODES_TOLD = 8
ITEMS_TOLD = 8

# Events that the sentences about rounds already cover, or that explain nothing.
_QUIET = {
    *("NodeJoined", "NodeStopped", "NodeSucceeded", "NodeWentAway", "NodeCameBack", "NodeAdopted"),
    *("LastCallBegan", "NodesPlaced", "NodeLeaving"),
    *("FirstCollectiveMade", "FirstStepMade", "LostStepsRedone", "LastStepMade"),
}


def explain(status: JobStatus, history: Sequence[Event], page: Page) -> str:
    now_ms = round(page.now_s * 1000)
    runs = runs_of(history)
    run = next((run for run in reversed(runs) if run.run == (status.run or "")), None)
    lines = [page.line(bold(status.rdzv_id), _state(status)), ""]
    if run is None:
        lines += page.sentence("The server has no history of it.")
    else:
        name_present(run, status)
        lines += [page.line(bold("What happened")), *_story(run, runs, page, now_ms)]
        if failures := _failures(run):
            first = _first_failure(run, failures, page)
            lines += ["", page.line(bold("First failure")), *first]
        spent = next(one for one in ledgers_of(history, now_ms, status.state) if one.run == run.run)
        if run.rounds:
            lines += ["", page.line(bold("What it cost"))]
            costs = [*_costs(spent), *_spent(spent)]
            lines += [line for cost in costs for line in page.sentence(cost)]
    if run is None or run.ended_ms is None:
        lines += ["", page.line(bold("Now")), *_now(status, page)]
    return "\n".join(lines)


def _state(status: JobStatus) -> Cell:
    number = f"run {status.run_number}, " if status.run_number else ""
    return Cell(f"{number}{status.state}", state_cell(status.state).style)


# ------------------------------------------------------------------ what happened


def _story(run: Run, runs: Sequence[Run], page: Page, now_ms: int) -> list[str]:
    told: list[tuple[int, str]] = []
    if len(runs) > 1 and run.number is not None and run.number > 1:
        before = next((r for r in reversed(runs) if r.run != run.run and r.result), None)
        if before is not None and before.ended_ms is not None:
            text = f"The run before it {before.result}: {_sentence(before.reason)}"
            told.append((before.ended_ms, text))
    told.append((run.began_ms, _beginning(run)))
    rounds = run.rounds
    skipped = rounds[FIRST:-LAST] if len(rounds) > FIRST + LAST else []
    for round_ in rounds:
        if round_ not in skipped:
            told += _round(run, round_, page, now_ms)
    if skipped:
        told.append((skipped[0].at_ms, _skipped(skipped)))
    from_ms, until_ms = (skipped[0].at_ms, skipped[-1].ended_ms or now_ms) if skipped else (0, 0)
    for event in run.happenings:
        at_ms = event.unix_ms
        if from_ms <= at_ms < until_ms or event.name in _QUIET or _is_said(run, event):
            continue
        told.append((at_ms, _sentence(event.text)))
    if run.ended_ms is not None:
        lasted = duration(run.ended_ms - run.began_ms)
        text = f"The run {run.result} after {lasted}: {_sentence(run.reason)}"
        told.append((run.ended_ms, text))
    told.sort(key=lambda one: one[0])
    return _told(told, page)


def _is_said(run: Run, event: Event) -> bool:
    """Return whether the end of a round or of the run already gives an event's reason."""
    gone = read(event.name, event.fields)
    if not isinstance(gone, NodeLost | NodeLeft) or (isinstance(gone, NodeLost) and gone.may_run):
        return False
    why = f"{gone.node_id}: {gone.reason}"
    return any(why in reason for reason in _reasons(run))


def _reasons(run: Run) -> Iterator[str]:
    """Yield the reasons why rounds and the run ended, except those that quote a worker."""
    cause: str = ""
    for round_ in run.rounds:
        for cause, reason in (
            (round_.cause, round_.reason),
            (round_.charge or round_.cause, round_.charge_reason),
        ):
            if cause != Cause.WORKER_FAILURE:
                yield reason
    if cause != Cause.WORKER_FAILURE:
        yield run.reason


def _told(told: Sequence[tuple[int, str]], page: Page) -> list[str]:
    clocks = [page.clock(at_ms) for at_ms, _ in told]
    width = max(map(len, clocks))
    return [
        line
        for clock, (_, text) in zip(clocks, told, strict=True)
        for line in page.fact(clock, text, width)
    ]


def _beginning(run: Run) -> str:
    if run.number is None:
        return "The recorded history begins here; earlier events are no longer known."
    return f"Run {run.number} began: {_sentence(run.began_why)}"


def _round(run: Run, round_: Round, page: Page, now_ms: int) -> list[tuple[int, str]]:
    told = []
    who = _participants(round_)
    if round_.adopted:
        told.append((round_.at_ms, f"Round {round_.number} runs already{who and f': {who}'}."))
    else:
        text = f"Round {round_.number} is complete"
        if round_ is run.rounds[0]:
            text += f", {duration(round_.at_ms - round_.since_ms)} after the first node joined"
        text += f": {counted(round_.workers, 'worker')} on {who}{round_.kept}."
        if round_.starts is not None:
            text += f" Its workers: {_sentence(one_line(started(round_.starts)))}"
        told.append((round_.at_ms, text))
    if round_.ended_ms is not None:
        told.append((round_.ended_ms, _end(run, round_)))
    return told


def _participants(round_: Round) -> str:
    if not round_.nodes:
        return counted(round_.more, "node") if round_.more else ""
    named = round_.nodes[:NODES_TOLD]
    left = len(round_.nodes) + round_.more - len(named)
    return ", ".join(named) + (f" and {left} more" if left else "")


def _end(run: Run, round_: Round) -> str:
    assert round_.ended_ms is not None
    ran = "" if round_.adopted else f" after {duration(round_.ended_ms - round_.at_ms)}"
    text = f"Round {round_.number} ended{ran} ({round_.cause}): {_sentence(round_.reason)}"
    if round_.charge and round_.charge != round_.cause:
        text += f" It was charged to {round_.charge}: {_sentence(round_.charge_reason)}"
    elif round_.charge_reason and round_.charge_reason != round_.reason:
        text += f" The root cause: {_sentence(round_.charge_reason)}"
    if round_.restarts and round_.charge == "worker failure":
        text += f" Restarts spent: {round_.restarts}."
    after = following(run, round_)
    if after is None or after.adopted:
        return text
    lost = duration(after.at_ms - round_.ended_ms)
    text += f" The next began {lost} later"
    if round_.settled_ms is not None:
        stop, form = round_.settled_ms - round_.ended_ms, after.at_ms - round_.settled_ms
        text += f": {duration(stop)} to stop, {duration(form)} to form"
    return f"{text}."


def _skipped(rounds: Sequence[Round]) -> str:
    causes = Counter(round_.charge or round_.cause for round_ in rounds if round_.cause)
    ended = ", ".join(f"{cause} {_times(number)}" for cause, number in causes.most_common())
    return (
        f"Rounds {rounds[0].number} to {rounds[-1].number} ended: {ended}. "
        "`rdzvctl events` lists them."
    )


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _sentence(text: str) -> str:
    return text if not text or text[-1] in ".!?" else f"{text}."


# ------------------------------------------------------------------ failures, costs, now


def _failures(run: Run) -> Sequence[tuple[int, str]]:
    """Return a run's worker failures, or the suspects if a failure was charged without any."""
    charged = any(round_.charge == Cause.WORKER_FAILURE for round_ in run.rounds)
    return run.failures or (run.suspects if charged else ())


def _first_failure(run: Run, failures: Sequence[tuple[int, str]], page: Page) -> list[str]:
    """Describe the first failure; if several coincided, the server's choice of root cause."""
    at_ms, text = failures[0]
    weighed = [r for r in run.rounds if r.charge == "worker failure" and r.ended_ms is not None]
    if weighed and weighed[0].ended_ms is not None and at_ms >= weighed[0].at_ms:
        at_ms, text = weighed[0].ended_ms, weighed[0].charge_reason
    where = f"round {weighed[0].number}, " if weighed else ""
    lines = _told([(at_ms, _sentence(f"{where}{text}"))], page)
    if len(failures) > 1:
        others = counted(len(failures) - 1, "other worker failure")
        lines += page.sentence(f"{others} followed in this run; `rdzvctl events` lists them.")
    return lines


def _costs(spent: Ledger) -> list[str]:
    times: Counter[str] = Counter()
    lost: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for cost in spent.costs:
        times[cost.cause] += cost.times
    for one in spent.intervals:
        if one.cause and one.phase != LedgerPhase.TRAINING:
            lost[one.cause][one.phase] += one.ms
    return [
        f"  {cause}: {_times(times[cause])}, {duration(phases.total())} without training "
        f"({_listed(phases)})."
        for cause, phases in sorted(lost.items(), key=lambda one: -one[1].total())
        if phases.total()
    ]


def _listed(phases: Mapping[str, int]) -> str:
    return ", ".join(
        f"{phase} {duration(phases[phase])}" for phase in LedgerPhase if phases.get(phase)
    )


def _spent(spent: Ledger) -> list[str]:
    if not spent.wall_ms:
        return []
    phases = dict(spent.phases)
    trained_ms = phases.pop(LedgerPhase.TRAINING)
    share = as_text_report.share(spent.goodput, steps_reported=spent.steps_reported)
    told = [f"  Training took {duration(trained_ms)} of {duration(spent.wall_ms)} ({share})."]
    if rest := _listed(phases):
        told.append(f"  Other time: {rest}; `rdzvctl report` lists causes and nodes.")
    told += [f"  {note}" for note in as_text_report.notes(spent)]
    return told


def _now(status: JobStatus, page: Page) -> list[str]:
    since = "" if status.state in ENDED else f" (for {duration(status.state_age_ms)})"
    text = f"It {_does(status.state)}{since}"
    reason = status.reason.line.removeprefix(f"{status.state}: ")
    lines = page.sentence(_sentence(f"{text}: {reason}" if reason else text))
    items = () if status.state in ENDED else status.reason.items
    for item in items[:ITEMS_TOLD]:
        lines += page.sentence(_sentence(str(item)), indent=2)
    if more := len(items) - ITEMS_TOLD if len(items) > ITEMS_TOLD else 0:
        lines += page.sentence(f"And {more} more; `rdzvctl status --all` lists them.", indent=2)
    lines += page.facts(snapshots(status))
    submission = status.submission
    if submission is not None and submission.jobs_before:
        before = counted(submission.jobs_before, "job")
        lines += page.sentence(f"  Queue: {before} ahead of it.")
    return lines


def _does(state: str) -> str:
    does = {
        "queued": "is queued",
        "joining": "is joining",
        "running": "runs",
        "stopping": "is stopping",
    }
    return does.get(state, f"has {state}")
