"""Where the files of a run are: by round and LOCAL_RANK; nothing is ever deleted."""

from pathlib import Path

import pytest

from rdzv.agent.core.model import Assignment
from rdzv.agent.launch.launch import NO_FILES, Output
from rdzv.agent.output.run_files import RunLogs, WorkerFiles
from rdzv.structs import replace

LINE = Assignment("r1", 0, 0, 1, 0, 2, 0, 2, "127.0.0.1", 1, True, restarts=0, max_restarts=3)


def line(round_: int, restarts: int = 0, run: str = "r1") -> Assignment:
    return replace(LINE, run=run, round=round_, restarts=restarts)


def links(folder: Path) -> dict[str, str]:
    return {entry.name: str(entry.readlink()) for entry in folder.iterdir() if entry.is_symlink()}


def test_every_worker_of_a_round_has_a_folder_of_its_own(tmp_path: Path) -> None:
    files = RunLogs(tmp_path, "job-7", "n1").open_round(line(3), 2)
    folder = tmp_path / "job-7-r1" / "n1" / "round_3"
    for local_rank, worker in enumerate(files):
        assert worker.stdout == folder / str(local_rank) / "stdout.log"
        assert worker.stderr == folder / str(local_rank) / "stderr.log"
        assert worker.error == folder / str(local_rank) / "error.json"
        assert worker.error.parent.is_dir()
    assert len(files) == 2


def test_an_attempt_points_to_its_latest_round(tmp_path: Path) -> None:
    logs, folder = RunLogs(tmp_path, "job-7", "n1"), tmp_path / "job-7-r1" / "n1"
    logs.open_round(line(0), 1)
    assert links(folder) == {"attempt_0": "round_0"}
    logs.open_round(line(1), 1)
    assert links(folder) == {"attempt_0": "round_1"}
    logs.open_round(line(2, restarts=1), 1)
    assert links(folder) == {"attempt_0": "round_1", "attempt_1": "round_2"}
    assert (folder / "attempt_1" / "0").is_dir()


def test_nothing_is_deleted_and_nothing_else_is_left(tmp_path: Path) -> None:
    logs, folder = RunLogs(tmp_path, "job-7", "n1"), tmp_path / "job-7-r1" / "n1"
    for round_ in range(3):
        (worker,) = logs.open_round(line(round_), 1)
        worker.stdout.write_text(f"round {round_}")
    names = {entry.name for entry in folder.iterdir()}
    assert names == {"round_0", "round_1", "round_2", "attempt_0"}
    assert (folder / "round_0" / "0" / "stdout.log").read_text() == "round 0"


def test_a_round_that_is_opened_again_keeps_what_is_there(tmp_path: Path) -> None:
    for _ in range(2):
        (worker,) = RunLogs(tmp_path, "job-7", "n1").open_round(line(0), 1)
        with worker.stdout.open("a") as file:
            file.write("x")
    assert worker.stdout.read_text() == "xx"


def test_an_agent_that_died_while_it_moved_a_link_is_no_obstacle(tmp_path: Path) -> None:
    logs, folder = RunLogs(tmp_path, "job-7", "n1"), tmp_path / "job-7-r1" / "n1"
    logs.open_round(line(0), 1)
    (name,) = links(folder)
    (folder / f".{name}.{_own_pid()}").symlink_to("round_0")
    logs.open_round(line(1), 1)
    assert links(folder) == {"attempt_0": "round_1"}


def _own_pid() -> int:
    return int(Path("/proc/self").readlink().name)


def test_nodes_and_runs_do_not_share_files(tmp_path: Path) -> None:
    found = [
        RunLogs(tmp_path, "job-7", node_id).open_round(line(0, run=run), 1)[0].stdout
        for node_id in ("n1", "n2")
        for run in ("r1", "r2")
    ]
    assert len(set(found)) == 4


def test_without_a_log_directory_there_is_a_new_one_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for _ in range(2):
        RunLogs(None, "job-7", "n1").open_round(line(0), 1)
    found = sorted(entry.name for entry in tmp_path.iterdir())
    assert len(found) == 2
    assert all(name.startswith("rdzv_") for name in found)


def test_a_temporary_folder_is_removed_unless_it_holds_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    caplog.set_level("INFO")
    written, empty = RunLogs(None, "job-7", "n1"), RunLogs(None, "job-8", "n1")
    (worker,) = written.open_round(line(0), 1)
    worker.error.write_text("{}")
    empty.open_round(line(0), 1)
    for logs in (written, empty, written, empty):
        logs.close()
    (kept,) = tmp_path.iterdir()
    assert worker.error.is_relative_to(kept)
    assert caplog.messages == [f"job-7: the workers' logs and error files are in {kept}"]


def test_without_any_folder_there_are_no_files_unless_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    logs = RunLogs(None, "job-7", "n1", needed=False)
    for round_ in range(2):
        assert logs.open_round(line(round_), 2) == [WorkerFiles(NO_FILES, NO_FILES, NO_FILES)] * 2
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
