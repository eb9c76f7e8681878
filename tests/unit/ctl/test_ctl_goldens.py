"""What rdzvctl prints of a server's state, whole; the files are in `golden/ctl`.

After an intended change, `pytest --rewrite` writes them anew: then review the diff.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from pathlib import Path

import control_samples
import pytest
from fake_control import Capture, FakeControl, serving

from rdzv.ctl import layout
from rdzv.ctl.__main__ import run
from rdzv.ctl.as_text import scaled
from rdzv.ctl.layout import Page
from rdzv.transport.wire import read
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import JobStatus

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "ctl"
PAGE = Page(width=100, colour=False, now_s=1_700_049_600.0, zone=UTC)

State = Callable[[FakeControl], None]


def job(sample: Callable[[], pb.JobStatus], **fields: object) -> State:
    """The sample is the only job, with these fields set."""

    def begin(control: FakeControl) -> None:
        made = sample()
        made.MergeFrom(pb.JobStatus(**fields))  # type: ignore[arg-type]
        control.jobs[made.rdzv_id] = made

    return begin


def past(control: FakeControl) -> None:
    control.jobs["gpt-small"] = control_samples.running()
    control.history = control_samples.history()
    control.history[-1].fields = '{"node_id":"n1","round":2,"later":[true]}'


def jobs(control: FakeControl) -> None:
    samples = (control_samples.joining, control_samples.running, control_samples.large)
    for name, sample in zip(("bert", "gpt-small", "llm-70b"), samples, strict=True):
        control.jobs[name] = sample()
        control.jobs[name].rdzv_id = name
    control.hanging["gpt-small"] = "RANK 3: no progress for 61 s"


def all_jobs(control: FakeControl) -> None:
    jobs(control)
    control.jobs["tutorial"] = control_samples.watched()


def nodes(control: FakeControl) -> None:
    control.nodes = {node.node_id: node for node in control_samples.nodes()}


def quarantined(control: FakeControl) -> None:
    nodes(control)
    node = control.nodes["gpu-10"]
    node.quarantine = "at fault 3 times within 20 s, last in llm: exit code 3"
    node.quarantine_age_ms, node.quarantine_left_ms = 3_600_000, 39_600_000


def held(**more: object) -> State:
    whole = pb.WholeSnapshot(lineage=3, step=1_200, age_ms=12_000, **more)  # type: ignore[arg-type]
    return job(control_samples.running, snapshot=whole)


SOLE = pb.SoleHolder(node_id="n1", reason="n2 is fetching a copy")
SPENT = pb.Budgets(
    preemptions=4,
    max_preemptions=3,
    store_failures=1,
    max_store_failures=2,
    no_progress_restarts=3,
    restarts_without_progress=2,
    furthest_step=0,
    restart_window_ms=60_000,
)

ROWS: dict[str, tuple[str, State]] = {
    "joining": ("status gpt-small", job(control_samples.joining)),
    "running": ("status gpt-small", job(control_samples.running)),
    "failed": ("status gpt-small", job(control_samples.failed)),
    "large": ("status llm-70b", job(control_samples.large)),
    "watched": ("status tutorial", job(control_samples.watched)),
    "submitted": ("status gpt-small", job(control_samples.submitted)),
    "owned": ("status gpt-small", job(control_samples.running, owner="ada", state="joining")),
    "spent": ("status gpt-small", job(control_samples.running, budgets=SPENT)),
    "lost-round": (
        "status gpt-small",
        held(parts=4, lost_steps=1, node_loss=pb.NodeLoss(step=1_200, lost_steps=1)),
    ),
    "held": (
        "status gpt-small",
        held(
            parts=1,
            lost_steps=3,
            node_loss=pb.NodeLoss(
                step=1_190, lost_steps=13, sole_holders=[SOLE], sole_holder_count=1
            ),
        ),
    ),
    "held-by-one": (
        "explain gpt-small",
        held(parts=1, node_loss=pb.NodeLoss(sole_holders=[SOLE], sole_holder_count=3)),
    ),
    "status.json": ("status gpt-small -o json", job(control_samples.failed)),
    "unknown.json": ("status gpt-small -o json", job(control_samples.joining)),
    "watched.json": ("status tutorial -o json", job(control_samples.watched)),
    "submitted.json": ("status gpt-small -o json", job(control_samples.submitted)),
    "failed.yaml": ("status gpt-small -o yaml", job(control_samples.failed)),
    "list": ("list", jobs),
    "list-watched": ("list", all_jobs),
    "list-wide": ("list -o wide", all_jobs),
    "list.json": ("list -o json", all_jobs),
    "events": ("events gpt-small", past),
    "events.json": ("events gpt-small -n 1 -o json", past),
    "nodes": ("nodes", nodes),
    "nodes.json": ("nodes -o json", nodes),
    "nodes-quarantined": ("nodes", quarantined),
    "node-quarantined": ("nodes gpu-10", quarantined),
    **{
        f"node-{node.node_id}": (f"nodes {node.node_id}", nodes) for node in control_samples.nodes()
    },
}
"""By golden file: the command line, and the state of the server."""


@pytest.mark.quick
@pytest.mark.parametrize("name", ROWS)
def test_what_is_printed(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words, begin = ROWS[name]
    control = FakeControl()
    begin(control)
    monkeypatch.setattr(layout, "page_for", lambda _: PAGE)
    with serving(control) as endpoint:
        assert run(["--server", endpoint, *words.split()]) == 0
    path = GOLDEN / (name if "." in name else f"{name}.txt")
    text = capsys.readouterr().out
    if request.config.getoption("--rewrite"):
        path.write_text(text)
    assert text == path.read_text(), "review the diff, then: pytest --rewrite"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ((1, 2), "min_nodes 1 and max_nodes 2 now (before: 2 and 4)\n"),
        ((5, 5), "the 2 seated continue until their round ends, and the next needs 3 more nodes\n"),
        ((1, 1), "of 2 seated, 1 stay: the group re-forms\n"),
    ],
)
def test_a_scaled_job_says_what_it_was_and_what_follows(bounds: tuple[int, int], said: str) -> None:
    seated = [pb.NodeStatus(node_id=f"n{i}", state="seated", group_rank=i) for i in (0, 1)]
    before = pb.JobStatus(rdzv_id="a", state="running", min_nodes=2, max_nodes=4, nodes=seated)
    after = pb.JobStatus(rdzv_id="a", state="running", min_nodes=bounds[0], max_nodes=bounds[1])
    text = scaled(read(JobStatus, before), read(JobStatus, after)) + "\n"
    assert text.endswith(said)
