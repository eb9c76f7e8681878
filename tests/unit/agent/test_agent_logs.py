"""Where the files of a run are: by round and LOCAL_RANK; nothing is ever deleted."""

import os
from pathlib import Path

import pytest

from rdzv.agent.launch.launch import NO_FILES, Output
from rdzv.agent.output.console_tee import OutputStream
from rdzv.agent.output.run_files import RunLogs, WorkerOutput, usual_output
from rdzv.core.model import Assignment
from rdzv.structs import replace

LINE = Assignment(
    "job-7", "r1", 0, 0, 1, 0, 2, 0, 2, "127.0.0.1", 1, True, restarts=0, max_restarts=3
)


def line(round_: int, restarts: int = 0, run: str = "r1") -> Assignment:
    return replace(LINE, run=run, round=round_, restarts=restarts)


def links(folder: Path) -> dict[str, str]:
    return {entry.name: str(entry.readlink()) for entry in folder.iterdir() if entry.is_symlink()}


@pytest.mark.parametrize(
    ("redirect", "tee", "shown", "log", "teed"),
    [
        (3, 0, True, "stdout.log", False),
        (0, 3, True, "stdout.log", True),
        (0, 3, False, "stdout.log", False),
        (0, 0, True, None, False),
        (0, 0, False, "/dev/null", False),
    ],
)
def test_where_a_stream_goes(
    redirect: int, tee: int, shown: bool, log: str | None, teed: bool
) -> None:
    ranks = None if shown else frozenset({7})
    output = Output(redirects={1: redirect}, tee={1: tee}, shown_ranks=ranks)
    found = usual_output(Path("/r"), output, 2)
    path = None if log is None else Path("/r/1") / log
    assert (found.workers[1].stdout, found.workers[1].error) == (path, Path("/r/1/error.json"))
    assert found.workers[1].teed.get(OutputStream.OUT) == (path if teed else None)
    assert found.filtered[OutputStream.ERR] == Path("/r/filtered_stderr.log")


def test_an_attempt_points_to_its_latest_round_and_nothing_is_deleted(tmp_path: Path) -> None:
    logs, folder = RunLogs(tmp_path, "job-7", "n1"), tmp_path / "job-7-r1" / "n1"
    for round_, restarts in ((0, 0), (1, 0), (2, 1), (2, 1)):
        made = logs.open_round(line(round_, restarts), 2)
        assert made == folder / f"round_{round_}"
        with (made / "1" / "stdout.log").open("a") as file:
            file.write("x")
        # An agent may have died while it moved the link.
        (folder / f".attempt_{restarts}.{os.getpid()}").symlink_to("round_0")
    logs.open_round(line(2, 1), 2)
    assert links(folder) == {
        "attempt_0": "round_1",
        "attempt_1": "round_2",
        f".attempt_0.{os.getpid()}": "round_0",
    }
    texts = [(folder / f"round_{n}" / "1" / "stdout.log").read_text() for n in range(3)]
    assert texts == ["x", "x", "xx"]


def test_nodes_and_runs_do_not_share_files(tmp_path: Path) -> None:
    found = [
        RunLogs(tmp_path, "job-7", node_id).open_round(line(0, run=run), 1)
        for node_id in ("n1", "n2")
        for run in ("r1", "r2")
    ]
    assert len(set(found)) == 4


def test_a_log_directory_is_new_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    both = [RunLogs(None, "job-7", "n1") for _ in range(2)]
    for logs in both:
        logs.open_round(line(0), 1)
    found = sorted(entry.name for entry in tmp_path.iterdir())
    for logs in both:
        logs.close()
    assert len(found) == 2
    assert all(name.startswith("rdzv_") for name in found)


def test_a_temporary_folder_is_removed_unless_it_holds_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    caplog.set_level("INFO")
    written, empty = RunLogs(None, "job-7", "n1"), RunLogs(None, "job-8", "n1")
    folder = written.open_round(line(0), 1)
    (folder / "0" / "error.json").write_text("{}")
    empty.open_round(line(0), 1)
    for logs in (written, empty, written, empty):
        logs.close()
    (kept,) = tmp_path.iterdir()
    assert folder.is_relative_to(kept)
    assert caplog.messages == [f"job-7: the workers' logs and error files are in {kept}"]


def test_without_any_folder_there_are_no_files_unless_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    logs = RunLogs(None, "job-7", "n1", needed=False)
    for round_ in range(2):
        folder = logs.open_round(line(round_), 2)
        nowhere = WorkerOutput(None, None, NO_FILES)
        assert usual_output(folder, Output(), 2).workers == (nowhere, nowhere)
    assert "TMPDIR" in caplog.messages[0]
    assert len(caplog.messages) == 1, "it is said once"
    with pytest.raises(FileNotFoundError):
        RunLogs(None, "job-7", "n1").open_round(line(0), 1)


@pytest.mark.parametrize(
    ("output", "asks"),
    [
        (Output(), False),
        (Output(redirects={0: 0, 1: 0}, tee={0: 0}), False),
        (Output(redirects={0: 0, 1: 2}), True),
        (Output(tee={1: 1}), True),
        (Output(stdout_filters=("loss",)), True),
        (Output(stderr_filters=("loss",)), True),
    ],
)
def test_which_output_asks_for_files(output: Output, asks: bool) -> None:
    assert output.asks_for_files is asks


def test_a_folder_that_can_not_be_made_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        RunLogs(tmp_path / "file", "job-7", "n1").open_round(line(0), 1)
