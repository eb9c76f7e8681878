"""status --watch: a screen that fits, shows what a job waits for, and restores the terminal.

Golden files as in test_ctl_goldens.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC
from pathlib import Path
from typing import Any

import control_samples
import grpc
import pytest
import yaml
from control_samples import give_reason
from fake_control import Capture, Ctl, FakeControl, serving
from watch_control import HISTORY, NOON_S, WatchControl, event

import rdzv.client
from rdzv.client import ControlClient, parse_endpoint
from rdzv.core.reason import LAST_CALL
from rdzv.ctl import live
from rdzv.ctl.__main__ import run
from rdzv.ctl.layout import Page
from rdzv.ctl.watch import StateReports
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.view.answers import JobStatus

pytestmark = pytest.mark.slow

HAVE = "have 3 of 3:4 nodes"
GOLDEN = Path(__file__).parents[1] / "golden" / "ctl"


def of(status: pb.JobStatus) -> JobStatus:
    """Convert a message as the client does."""
    control = FakeControl()
    control.jobs[status.rdzv_id] = status
    with serving(control) as endpoint, ControlClient(parse_endpoint(endpoint)) as client:
        return client.status(status.rdzv_id)


def page(width: int = 80) -> Page:
    return Page(width=width, colour=False, now_s=NOON_S, zone=UTC)


def screen(job: JobStatus, width: int = 80, height: int = 24, **more: object) -> list[str]:
    history = more.pop("history", HISTORY)
    whole_ms = live.whole_wait_ms(job, None, None)
    return live.screen(job, history, whole_ms, page(width), height, **more)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ the screen


def declined() -> pb.JobStatus:
    job = control_samples.joining()
    job.submission.placed.extend(["n1", "n8"])
    job.submission.declined.add(node_id="n9", reason="no such folder")
    return job


def last_call() -> pb.JobStatus:
    job = control_samples.joining()
    give_reason(job, HAVE, LAST_CALL, 15_000)
    return job


def hostile() -> pb.JobStatus:
    bad = "\x1b]0;evil\x07\x1b[2J"
    job = control_samples.failed()
    give_reason(job, bad, bad)
    job.reason.items.add(cause=bad, who=job.nodes[0].node_id)
    job.last_failure.root_cause.message = bad
    job.submission.declined.add(node_id="n9", reason=bad)
    return job


HALF_GONE = (*HISTORY[:4], event(15, "LastCallBegan", "last call: 3 nodes ready"))
SCREENS: dict[str, tuple[Callable[[], pb.JobStatus], dict[str, Any]]] = {
    "joining": (control_samples.joining, {}),
    "running": (control_samples.running, {}),
    "failed": (control_samples.failed, {}),
    "large": (control_samples.large, {}),
    "watched": (control_samples.watched, {}),
    "declined": (declined, {}),
    "ascii": (control_samples.running, {"blocks": False, "height": 40}),
    "gaps": (control_samples.running, {"height": 40}),
    "half-gone": (last_call, {"history": HALF_GONE}),
    "clock-ahead": (last_call, {"history": (event(-60, "LastCallBegan", "by a clock ahead"),)}),
    "hostile": (hostile, {"history": (event(10, "RoundEnded", "\x1b[2J"),)}),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", SCREENS)
def test_golden_screen(name: str, request: pytest.FixtureRequest) -> None:
    sample, more = SCREENS[name]
    file = GOLDEN / f"screen-{name}.txt"
    text = "\n".join(screen(of(sample()), **more)) + "\n"
    if request.config.getoption("--rewrite"):
        file.write_text(text)
    assert text == file.read_text(), "review the diff, then: pytest --rewrite"


@pytest.mark.parametrize("sample", ["joining", "running", "failed", "large", "watched"])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60), (20, 4), (80, 1)])
def test_a_screen_fits(sample: str, width: int, height: int) -> None:
    lines = screen(of(getattr(control_samples, sample)()), width, height)
    assert len(lines) <= height
    assert live.FOOTER in lines[-1]
    if width >= 80:
        assert max(map(len, lines)) <= width


# ------------------------------------------------------------------------------ bars and times


def bar(lines: list[str], label: str) -> str:
    (line,) = (line for line in lines if line.startswith(f"  {label}"))
    return line


def test_the_bar_of_the_last_call_shrinks() -> None:
    job = control_samples.joining()
    give_reason(job, HAVE, LAST_CALL, 30_000)
    status = of(job)
    whole_ms = live.whole_wait_ms(status, None, None)
    assert whole_ms == 30_000
    bars = []
    for passed_ms in (0, 15_000, 29_000, 40_000):
        later = live.later(status, passed_ms)
        bars.append(bar(live.screen(later, (), whole_ms, page(), 24), "time left"))
    assert [text.count("█") for text in bars] == [24, 12, 1, 0]
    assert bars[1].endswith(" 15 s")
    assert bars[3].endswith(" 0.0 s")


def test_a_wait_is_as_long_as_it_was_first_seen_until_it_is_another() -> None:
    job = control_samples.joining()
    give_reason(job, HAVE, LAST_CALL, 30_000)
    first = of(job)
    give_reason(job, HAVE, LAST_CALL, 12_000)
    second = of(job)
    give_reason(job, "waiting for n3", "gives up in", 588_000)
    third = of(job)
    give_reason(job, "3 nodes and 24 workers run round 2")
    fourth = of(job)
    assert live.whole_wait_ms(second, first, 30_000) == 30_000
    assert live.whole_wait_ms(third, second, 30_000) == 588_000
    assert live.whole_wait_ms(fourth, third, 588_000) is None


def test_times_in_a_reason_go_on() -> None:
    job = control_samples.large()
    job.reason.then, job.reason.left_ms = "newcomers are admitted within", 9_000
    headline = job.reason.headline
    status = live.later(of(job), 2_000)
    assert status.reason.line == f"{headline}; newcomers are admitted within 7.0 s"
    assert status.reason.items[0].why == "its stream ended; its seat is kept for 1.2 s"
    assert live.later(status, 586_500).reason.line.endswith("within 0.0 s")
    assert live.later(of(job), 0) == of(job)


# ------------------------------------------------------------------------------ a pipe


@pytest.fixture
def control() -> WatchControl:
    return WatchControl()


@pytest.fixture
def server(server: str, control: WatchControl) -> Iterator[str]:
    yield server
    control.go_on.set()


def test_into_a_pipe_every_change_is_a_text_or_a_document(
    control: WatchControl, server: str, ctl: Ctl
) -> None:
    control.pushed = [control_samples.joining(), control_samples.failed()]
    control.go_on.set()
    text = ctl("status", "gpt-small", "-w").out
    assert "gpt-small  failed" in text
    assert "\x1b" not in text
    documents = list(yaml.safe_load_all(ctl("status", "gpt-small", "-w", "-o", "yaml").out))
    assert documents[-1]["state"] == "failed"
    assert all(document["version"] == 1 for document in documents)


def test_a_server_that_is_not_there_is_not_watched(capsys: Capture) -> None:
    """In a thread, so that it ends if it waits for the server."""
    codes: list[int] = []
    words = ["--server=127.0.0.1:1", "status", "-w", "gpt-small"]
    looker = threading.Thread(target=lambda: codes.append(run(words)), daemon=True)
    looker.start()
    looker.join(100)
    assert codes == [75]
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "rdzvctl: cannot reach rdzvd at 127.0.0.1:1: connection refused; "
    )
    assert captured.out == ""


class CutControl(WatchControl):
    """Cuts a stream after its first message, several times."""

    cuts = 0
    refusals = 0

    def WatchJob(  # noqa: N802
        self, request: pb.GetStatusRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.JobStatus]:
        if self.refusals:
            self.refusals -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if self.cuts:
            self.cuts -= 1
            self.refusals = 2
            yield self.pushed[0]
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        yield self.pushed[-1]


def test_a_job_without_progress_is_told_apart_by_who_waits_for_it(capsys: Capture) -> None:
    control = CutControl()
    stale = control_samples.failed()
    give_reason(stale, "no progress: none of 2 restarts moved it on")
    stale.no_progress = True
    control.pushed = [control_samples.running(), stale]
    with serving(control) as endpoint:
        assert run([f"--server={endpoint}", "wait", "gpt-small"]) == 93
    assert "has failed: no progress: none of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "exited", "by_failure", "code", "said"),
    [
        ([], 5, True, 1, ""),
        (["--exit-code=root-cause"], 5, True, 5, ""),
        # These have meanings of their own here.
        (["--exit-code=root-cause"], 4, True, 1, "own exit code 4 would mean something else"),
        # It failed before, and a restart followed.
        (["--exit-code=root-cause"], 5, False, 1, "no exit of a worker is known"),
    ],
)
def test_a_wait_may_exit_as_the_root_cause_did(
    capsys: Capture, flags: list[str], exited: int, by_failure: bool, code: int, said: str
) -> None:
    control, failed = CutControl(), control_samples.failed()
    failed.ended_by_failure = by_failure
    failed.last_failure.root_cause.exit_code = exited
    control.pushed = [failed]
    with serving(control) as endpoint:
        assert run([f"--server={endpoint}", "wait", "gpt-small", *flags]) == code
    told = capsys.readouterr().err
    assert said in told
    assert bool(told) == bool(said)


@pytest.mark.parametrize(
    ("last", "words", "code", "said"),
    [
        (control_samples.running, ["--for=running"], 0, "gpt-small is running\n"),
        (control_samples.running, ["--for=running", "--for=60"], 0, "gpt-small is running\n"),
        (control_samples.running, ["--for=0.1"], 4, "gpt-small is running after 0.1 s\n"),
        (control_samples.failed, ["--for=running"], 1, "gpt-small has failed: "),
        (
            control_samples.joining,
            ["--for=running", "--for=0.1"],
            4,
            "gpt-small is joining after 0.1 s\n",
        ),
    ],
)
def test_a_wait_ends_when_the_job_runs_or_the_time_is_over(
    last: Callable[[], pb.JobStatus], words: list[str], code: int, said: str, capsys: Capture
) -> None:
    control = WatchControl()
    control.pushed = [last(), last()]
    with serving(control) as endpoint:
        assert run([f"--server={endpoint}", "wait", "gpt-small", *words]) == code
        control.go_on.set()
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize(
    ("value", "remedy"),
    [("runing", "did you mean `running`?"), ("0", "give one of them"), ("nan", "give one of them")],
)
def test_what_a_wait_cannot_be_for(value: str, remedy: str, ctl: Ctl) -> None:
    said = ctl("wait", "gpt-small", f"--for={value}", code=2).err
    assert said.startswith(f"rdzvctl: --for={value} is neither `running` nor a number of seconds")
    assert said.endswith(f"; {remedy}\n")


def test_a_wait_reports_state_and_reason_once_for_each_change(capsys: Capture) -> None:
    """A wait that has only become shorter is no change."""
    reports = StateReports("gpt-small")
    for seconds in (20, 10):
        joining = control_samples.joining()
        give_reason(joining, f"joining: {HAVE}", LAST_CALL, seconds * 1000)
        reports.report(of(joining))
    reports.report(of(control_samples.running()))
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"rdzvctl: gpt-small is joining: {HAVE}; last call ends in 20 s"
    assert second.startswith("rdzvctl: gpt-small is running: ")


@pytest.mark.parametrize("words", [["status", "-w", "gpt-small"], ["wait", "gpt-small"]])
def test_a_server_that_goes_away_is_told_once_each_time(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, words: list[str]
) -> None:
    monkeypatch.setattr(rdzv.client, "WATCH_RETRY_S", 0.01)
    control = CutControl()
    control.pushed = [control_samples.joining(), control_samples.failed()]
    control.cuts = 2
    with serving(control) as endpoint:
        assert run([f"--server={endpoint}", *words]) == (1 if words[0] == "wait" else 0)
    lines = [line for line in capsys.readouterr().err.splitlines() if " is joining: " not in line]
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(
            f"rdzvctl: warning: cannot reach rdzvd at {endpoint}: the other side closed"
        )
        assert line.endswith("; trying again")


class GrowingControl(WatchControl):
    """Sends one more event with each answer, as a job would."""

    def ListEvents(  # noqa: N802
        self, request: pb.ListEventsRequest, context: grpc.ServicerContext
    ) -> pb.ListEventsResponse:
        whole = control_samples.history()
        self.history = whole[: len(self.history) + 1]
        return super().ListEvents(request, context)


@pytest.mark.parametrize("output", ["text", "json"])
def test_events_are_followed_until_the_job_has_ended(output: str, capsys: Capture) -> None:
    control = GrowingControl()
    control.jobs["gpt-small"] = control_samples.running()
    control.pushed = [control_samples.running(), control_samples.failed()]
    control.go_on.set()
    with serving(control) as endpoint:
        command = ["--server", endpoint, "events", "gpt-small", "-f", "-n", "1", "-o", output]
        assert run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = [event.name for event in control.history]
    assert len(expected) >= 2, "some were known before the job changed, some were not"
    if output == "text":
        assert [line.split()[2] for line in lines] == expected
    else:
        documents = map(json.loads, lines)
        assert [e["name"] for document in documents for e in document["events"]] == expected
