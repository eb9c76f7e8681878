"""docs/rdzvctl.md names every command, every flag that submit adds, and every key of a document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rdzv.core.model import JobSpec, Settings
from rdzv.core.timed_text import TimeInText
from rdzv.ctl import job_request
from rdzv.ctl.__main__ import rdzvctl
from rdzv.structs import field_names
from rdzv.view import answers, history, ledger, reports

TEXT = (Path(__file__).parents[3] / "docs" / "rdzvctl.md").read_text()


@pytest.mark.parametrize("name", sorted(rdzvctl.commands))
def test_every_command_is_there(name: str) -> None:
    assert re.search(rf"^\| \[?`{name}\b", TEXT, re.MULTILINE)


@pytest.mark.parametrize(
    "option", [*job_request._of_job(), *job_request._of_command()], ids=lambda o: o[0][-1]
)
def test_every_flag_of_submit_is_there(option: job_request.Option) -> None:
    assert option[0][-1] in TEXT or option[0][-1] == "--help"


@pytest.mark.parametrize("dest", sorted(job_request.REFUSED))
def test_every_flag_that_is_refused_is_there(dest: str) -> None:
    assert f"`--{dest.replace('_', '-')}`" in TEXT


@pytest.mark.parametrize(
    ("title", "kinds"),
    [
        (
            "A job",
            (
                *(
                    answers.JobStatus,
                    answers.NodeStatus,
                    answers.LastFailure,
                    answers.WorkerFailure,
                ),
                *(
                    answers.RankProgress,
                    answers.Straggler,
                    answers.Submission,
                    answers.DeclinedNode,
                    answers.Budgets,
                    TimeInText,
                ),
            ),
        ),
        ("A job's line", (answers.JobSummary,)),
        ("An event", (answers.Event,)),
        ("A node", (answers.Node, answers.Resources, answers.Gpu, answers.NodeJob)),
        (
            "Stacks",
            (
                *(
                    answers.StackReport,
                    answers.StackGroup,
                    answers.WorkerStack,
                    answers.ThreadStack,
                ),
                *(answers.StackFrame, answers.SilentNode),
            ),
        ),
        ("A ledger", (ledger.Ledger, ledger.Cost, ledger.Interval)),
        ("A report", (reports.Report, reports.JobLine, reports.Loss)),
        ("What would be submitted", (Settings, JobSpec)),
    ],
)
def test_every_key_is_there(title: str, kinds: tuple[type, ...]) -> None:
    (part,) = re.findall(rf"^\*\*{title}\*\*.*?(?=^\*\*|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    hidden = {"env"} | ({"submitter"} if JobSpec in kinds else set())
    names = {name for kind in kinds for name in field_names(kind)} - hidden
    missing = {name for name in names if f"`{name}`" not in part}
    assert not missing


@pytest.mark.parametrize(("name", "kind"), history.KINDS.items())
def test_every_event_is_there_with_its_fields(name: str, kind: type) -> None:
    (row,) = re.findall(rf"^\| `{name}` \| .*$", TEXT, re.MULTILINE)
    assert not {field for field in field_names(kind) if f"`{field}`" not in row}
