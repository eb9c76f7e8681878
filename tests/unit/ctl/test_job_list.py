"""`rdzvctl list`: which jobs, in which order; ended ones are listed separately."""

from __future__ import annotations

from datetime import UTC

import click
import pytest
from fake_control import Ctl

from rdzv.core.model import JobState
from rdzv.core.reason import Reason, ReasonItem
from rdzv.ctl.__main__ import SECTIONS, rdzvctl
from rdzv.ctl.as_text_lists import ORDERS, chosen, jobs
from rdzv.ctl.commands.jobs import list_command
from rdzv.ctl.layout import Page
from rdzv.structs import replace
from rdzv.view.answers import JobSummary

PAGE = Page(width=100, colour=False, now_s=0.0, zone=UTC)

JOB = JobSummary(
    rdzv_id="a",
    run="r",
    state="running",
    state_age_ms=60_000,
    reason=Reason("round 3 runs"),
    round=3,
    nodes=2,
    min_nodes=2,
    max_nodes=4,
    world_size=16,
    restarts=1,
    max_restarts=3,
    backend="rdzv",
)

JOBS = (
    replace(JOB, rdzv_id="sweep-1", state="failed", state_age_ms=9_000, reason=Reason("boom")),
    replace(JOB, rdzv_id="gpt", nodes=8, restarts=0),
    replace(JOB, rdzv_id="sweep-2", state="succeeded", state_age_ms=1_000, nodes=0),
    replace(JOB, rdzv_id="bert", state="queued", state_age_ms=5_000, nodes=0),
    replace(JOB, rdzv_id="sweep-3", restarts=2),
)


def names(
    *, states: tuple[str, ...] = (), name: str | None = None, order: str | None = None
) -> str:
    return " ".join(job.rdzv_id for job in chosen(JOBS, states, name, order))


def test_ended_jobs_come_last_the_latest_first() -> None:
    assert names() == "bert gpt sweep-3 sweep-2 sweep-1"


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("name", "bert gpt sweep-3 sweep-1 sweep-2"),
        ("state", "bert gpt sweep-3 sweep-2 sweep-1"),
        ("age", "bert gpt sweep-3 sweep-2 sweep-1"),
        ("nodes", "gpt sweep-3 bert sweep-1 sweep-2"),
        ("restarts", "sweep-3 bert gpt sweep-1 sweep-2"),
    ],
)
def test_each_order(order: str, expected: str) -> None:
    assert names(order=order) == expected


def test_every_order_and_state_can_be_asked_for() -> None:
    options = {option.name: option.type for option in list_command.params}
    assert set(options["order"].choices) == set(ORDERS)  # type: ignore[attr-defined]
    assert set(options["states"].choices) == set(JobState)  # type: ignore[attr-defined]


def test_jobs_are_chosen_by_state_and_by_name() -> None:
    assert names(states=("running", "failed")) == "gpt sweep-3 sweep-1"
    assert names(name="sweep-*") == "sweep-3 sweep-2 sweep-1"
    assert names(states=("queued",), name="sweep-*") == ""


def test_ended_jobs_stand_apart_and_are_counted_when_left_out() -> None:
    lines = jobs("here", chosen(JOBS, (), None, None), PAGE, most_ended=1).splitlines()
    assert [line.split(" ")[0] for line in lines] == [
        *("JOB", "bert", "gpt", "sweep-3", ""),
        *("Ended:", "JOB", "sweep-2", "..."),
    ]
    assert lines[-1] == "... and 1 more have ended; --all shows them"


def test_a_wide_list_keeps_the_whole_reason() -> None:
    items = (ReasonItem("lease expired", "n7", "lost"),)
    long = replace(JOB, reason=Reason("waiting for a node " * 20, "gives up in", 9_000, items))
    for shown in (
        jobs("here", [long], PAGE, wide=True),
        jobs("here", [long], replace(PAGE, width=None)),
    ):
        whole = " ".join(shown.split())
        assert whole.count("waiting for a node") == 20
        assert whole.endswith("gives up in 9.0 s; n7 (lost): lease expired")
    cut = jobs("here", [long], PAGE)
    assert cut.count("waiting for a node") < 10 and "n7" not in cut
    assert max(map(len, cut.splitlines())) <= 100


def test_without_jobs_the_server_is_named() -> None:
    assert jobs("here", [], PAGE) == "no jobs at here"


def test_the_help_lists_every_command_once() -> None:
    listed = [name for commands in SECTIONS.values() for name in commands]
    context = click.Context(rdzvctl)
    assert sorted(listed) == rdzvctl.list_commands(context)
    for name in listed:
        command = rdzvctl.get_command(context, name)
        assert command is not None
        assert command.name == name


def test_the_help_is_by_task(ctl: Ctl) -> None:
    said = ctl("--help").out
    places = [said.index(f"{title}:") for title in SECTIONS]
    assert places == sorted(places)
    assert "Examples:" in said
