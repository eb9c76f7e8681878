"""Log lines of both daemons: for people, for machines, and for the journal, which adds the rest."""

from __future__ import annotations

import json
import logging
import os

import pytest

from rdzv.runtime import log_format


def record(
    level: int, text: str = "job-7: n1 joined", *, trouble: bool = False
) -> logging.LogRecord:
    about = None
    if trouble:
        try:
            raise ValueError("of a test")
        except ValueError as error:
            about = (ValueError, error, error.__traceback__)
    return logging.LogRecord("rdzv", level, "x.py", 1, text, (), about)


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> None:
    _be_in_the_journal(monkeypatch)


def _be_in_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")


@pytest.mark.usefixtures("journal")
@pytest.mark.parametrize(
    ("level", "priority"),
    [
        (logging.DEBUG, 7),
        (logging.INFO, 6),
        (logging.WARNING, 4),
        (logging.ERROR, 3),
        (logging.CRITICAL, 2),
        (logging.INFO + 1, 6),
    ],
)
def test_a_line_in_the_journal_has_its_priority_and_no_second_time(
    level: int, priority: int
) -> None:
    assert (
        log_format.formatter_for("human").format(record(level)) == f"<{priority}>job-7: n1 joined"
    )


@pytest.mark.usefixtures("journal")
def test_every_line_of_a_traceback_has_the_priority() -> None:
    lines = (
        log_format.formatter_for("human").format(record(logging.ERROR, trouble=True)).split("\n")
    )
    assert len(lines) > 2
    assert {line[:3] for line in lines} == {"<3>"}
    assert lines[-1] == "<3>  ValueError: of a test"


@pytest.mark.usefixtures("journal")
def test_json_in_the_journal_is_what_follows_the_priority() -> None:
    line = log_format.formatter_for("json").format(record(logging.WARNING))
    assert line.startswith("<4>{")
    assert json.loads(line[3:])["level"] == "warning"


def test_why_a_program_ends_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Not in a fixture: during a test, stderr is captured in another file than during its setup.
    _be_in_the_journal(monkeypatch)
    log_format.complain("rdzvd: no\nroom")
    assert capfd.readouterr().err == "<3>rdzvd: no\n<3>  room\n"


@pytest.mark.parametrize("stream", ["", "1:2", "x"])
def test_elsewhere_a_line_has_the_time(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stream: str
) -> None:
    """Also if a service redirects what the journal would have received."""
    monkeypatch.setenv("JOURNAL_STREAM", stream)
    assert isinstance(log_format.formatter_for("human"), log_format.HumanFormatter)
    assert isinstance(log_format.formatter_for("json"), log_format.JsonFormatter)
    said = record(logging.INFO)
    said.created, said.msecs = 1_795_262_401.25, 250.0
    assert log_format.formatter_for("human").format(said) == f"{NOON} INFO    job-7: n1 joined"
    assert json.loads(log_format.formatter_for("json").format(said))["time"] == NOON
    log_format.complain("rdzvd: no")
    assert capfd.readouterr().err == "rdzvd: no\n"


NOON = "2026-11-21T12:00:01.250Z"


@pytest.mark.parametrize(
    ("level", "prefix"), [(logging.INFO, ""), (logging.WARNING, "warning: "), (logging.ERROR, "")]
)
def test_at_a_terminal_a_warning_is_named(level: int, prefix: str) -> None:
    said = record(level)
    said.created, said.msecs = 1_795_262_401.25, 250.0
    line = log_format.PlainFormatter("rdzvrun[n1]").format(said)
    assert line == f"{NOON} rdzvrun[n1]: {prefix}job-7: n1 joined"


FORGED = "\x1b[2J\x9b2J\u202e\n2026-11-21T17:59:59.000Z INFO    job-8: forged\r<3>so\tis\udc80this"


@pytest.mark.parametrize(
    "formatter",
    [
        log_format.HumanFormatter(),
        log_format.JsonFormatter(),
        log_format.JournalFormatter(),
        log_format.JournalFormatter(log_format.JsonFormatter()),
        log_format.PlainFormatter("rdzvrun"),
    ],
)
@pytest.mark.parametrize("in_traceback", [False, True])
def test_what_a_job_says_neither_controls_a_terminal_nor_looks_like_a_record(
    formatter: logging.Formatter, in_traceback: bool
) -> None:
    said = record(logging.WARNING, "job-7: it says %s")
    said.args = ("nothing" if in_traceback else FORGED,)
    if in_traceback:
        error = ValueError(FORGED)
        said.exc_info = (ValueError, error, None)
    first, *others = formatter.format(said).split("\n")
    assert "job-7: it says" in first
    indent = "" if isinstance(formatter, log_format.PlainFormatter) else "  "
    assert all(line.removeprefix("<4>").startswith(indent) for line in others)
    assert all(line.isprintable() for line in (first, *others))
    if "{" in first:
        told = json.loads(first.removeprefix("<4>"))
        assert FORGED in (told["traceback"] if in_traceback else told["message"])
    else:
        whole = "".join((first, *others))
        for shown in (r"\x1b[2J\x9b2J\u202e", "job-8: forged\\r<3>so", r"is\udc80this"):
            assert shown in whole


def test_a_repeated_warning_is_counted_until_it_pauses() -> None:
    repeated = log_format.RepeatedWarnings()

    def logged(text: str, times: int, created: float, level: int = logging.WARNING) -> list[str]:
        shown = []
        for _ in range(times):
            said = record(level, text)
            said.created = created
            if repeated.filter(said):
                shown.append(said.getMessage())
        return shown

    assert logged("no room", 1000, 0.0) == [
        *["no room"] * 5,
        *(f"no room (for the {count}th time)" for count in ("10", "100", "1,000")),
    ]
    assert logged("no time", 2, 0.0) == ["no time"] * 2
    assert logged("no room", 1, 59.0) == []
    # Each repetition begins the minute anew, and a pause ends the count: the next is the first.
    assert logged("no room", 1, 118.0) == []
    assert logged("no room", 6, 178.0) == ["no room"] * 5
    assert len(logged("joined", 10, 0.0, logging.INFO)) == 10
    for number in range(1_000):
        assert logged(f"other {number}", 1, 178.0)
    assert logged("no room", 1, 178.0) == ["no room"]
