"""The folders of submitted jobs: found again by the next agent, removed when too old."""

import os
import time
from pathlib import Path

import pytest

from rdzv.agent.launch.launch import NO_FILES, Output
from rdzv.agent.output.run_files import RoundOutput, RunLogs, WorkerOutput, Written, usual_output
from rdzv.agent.output.run_folders import MAX_INDEX_BYTES, RunFolders, folder_name
from rdzv.core.model import Assignment

DAY = 86_400.0
NOW = time.time()
PLENTY = 1 << 40


def line(number: int, rank_first: int = 0) -> Assignment:
    return Assignment("job-7", "r1", number, 0, 1, rank_first, 2, 0, 2, "h", 1, True, 0, 0)


def write_round(folders: RunFolders, run: str, number: int, *, rdzv_id: str = "job") -> Path:
    """Write a round of two workers, as a driver does; return the run's folder."""
    folder, written = folders.open(rdzv_id, run), Written()
    written.listeners.add(lambda: folder.note(written))
    logs = RunLogs(None, rdzv_id, "n1", folder.path)
    output = usual_output(logs.open_round(line(number, 4), 2), Output(redirects={0: 3, 1: 3}), 2)
    for worker in output.workers:
        assert worker.stdout is not None
        worker.stdout.write_text(f"{run} round {number}\n")
    written.begin(line(number, 4), output)
    written.end_round()
    folders.release(folder)
    return folder.path


def age(path: Path, days: float) -> None:
    """Make everything in a folder older."""
    then = NOW - days * DAY
    for found in [*path.rglob("*"), path]:
        os.utime(found, (then, then), follow_symlinks=False)


@pytest.mark.parametrize("name", ["job-7", "..", ".", "../../etc/passwd", "a b", ".removed-x", ""])
def test_every_name_is_one_folder(name: str) -> None:
    spelled = folder_name(name)
    assert "/" not in spelled
    assert not spelled.startswith(".")
    assert spelled


def test_different_names_are_different_folders() -> None:
    names = ["a", "A", "a/b", "a%2Fb", ".a", "%2Ea", "", "%"]
    assert len({folder_name(name) for name in names}) == len(names)


# ------------------------------------------------------------------ what was written


def test_what_was_written_is_found_by_the_next_agent(tmp_path: Path) -> None:
    path = write_round(RunFolders(tmp_path), "r1", 3)
    assert path == tmp_path / "runs" / "job" / "r1"
    written = RunFolders(tmp_path).written("job", ["r1"])
    assert written is not None
    assert (written.last, written.ended) == (3, True)
    found = written.at(3)
    assert found is not None
    assert found.rank_first == 4
    assert [worker.stdout for worker in found.workers] == [
        path / "round_3" / str(n) / "stdout.log" for n in (0, 1)
    ]


@pytest.mark.slow
def test_the_runs_that_are_named_are_found_and_no_others(tmp_path: Path) -> None:
    """Another job of the same name, of another owner, has other runs."""
    folders = RunFolders(tmp_path)
    age(write_round(folders, "r1", 0), 1)
    write_round(folders, "r2", 1)
    write_round(folders, "r3", 0)
    written = folders.written("job", ["r2", "r1", "r0"])
    assert written is not None
    assert [found.run for n in (0, 1) if (found := written.at(n))] == ["r1", "r2"]
    only = folders.written("job", ["r2"])
    assert only is not None
    assert only.at(0) is None
    assert folders.written("job", []) is None


@pytest.mark.parametrize("runs", [["r1", "r2"], ["r2", "r1"]])
def test_of_two_rounds_the_newer_runs_is_found(tmp_path: Path, runs: list[str]) -> None:
    """Whatever the time at which a job says that its files were changed."""
    folders = RunFolders(tmp_path)
    write_round(folders, "r2", 0)
    age(write_round(folders, "r1", 0), 1)
    written = folders.written("job", runs)
    assert written is not None
    found = written.at(0)
    assert found is not None
    assert found.workers[0].stdout == tmp_path / f"runs/job/{runs[0]}/round_0/0/stdout.log"


def test_a_job_that_was_never_here_has_written_nothing(tmp_path: Path) -> None:
    assert RunFolders(tmp_path).written("job", ["r1"]) is None


def test_a_line_that_was_cut_short_costs_no_other(tmp_path: Path) -> None:
    folders = RunFolders(tmp_path)
    write_round(folders, "r1", 0)
    with folders.folder("job", "r1").index.open("ab") as file:
        file.write(b'{"round": 1, "rank_fi\n"no object"\n{"round": 2}\n')
        for number in (1e999, -1, 1 << 70, '"4"', "[[[", "null"):
            file.write(f'{{"round": {number}, "rank_first": 0, "workers": []}}\n'.encode())
        file.write(b'{"round": 5, "rank_first": 0, "workers": [[7, null]]}\n' + b"[" * 100_000)
    written = folders.written("job", ["r1"])
    assert written is not None
    assert written.last == 0


def test_what_goes_to_no_file_is_known_as_that(tmp_path: Path) -> None:
    folders, written = RunFolders(tmp_path), Written()
    folder = folders.open("job", "r1")
    written.begin(line(0), RoundOutput((WorkerOutput(NO_FILES, None, NO_FILES),), {}))
    folder.note(written)
    found = folders.written("job", ["r1"])
    assert found is not None
    round_ = found.at(0)
    assert round_ is not None
    assert (round_.workers[0].stdout, round_.workers[0].stderr) == (NO_FILES, None)


def test_a_run_whose_logs_are_elsewhere_is_found_as_well(tmp_path: Path) -> None:
    """As with --log-dir and --logs-specs, which leave the run's own folder empty."""
    folders, written = RunFolders(tmp_path), Written()
    folder = folders.open("job", "r1")
    elsewhere = tmp_path / "elsewhere"
    written.begin(line(0), RoundOutput((WorkerOutput(elsewhere, elsewhere, NO_FILES),), {}))
    folder.note(written)
    folders.release(folder)
    found = RunFolders(tmp_path).written("job", ["r1"])
    assert found is not None
    round_ = found.at(0)
    assert round_ is not None
    assert round_.workers[0].stdout == elsewhere
    assert folders.sweep(0, 0, NOW + DAY) == [folder.path]
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_full_folder_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders, written = RunFolders(tmp_path), Written()
    folder = folders.open("job", "r1")
    folder.index.mkdir()
    written.begin(line(0), RoundOutput((), {}))
    folder.note(written)
    assert "logs of round 0 will not be available after the job" in caplog.text


@pytest.mark.slow
def test_an_index_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders, written = RunFolders(tmp_path), Written()
    folder = folders.open("job", "r1")
    long = WorkerOutput(Path("/" + "x" * 100_000), None, NO_FILES)
    for number in range(100):
        written.begin(line(number), RoundOutput((long, long), {}))
        folder.note(written)
    assert folder.index.stat().st_size <= MAX_INDEX_BYTES
    found = folders.written("job", ["r1"])
    assert found is not None
    assert found.last == 99
    assert found.at(90) is not None
    assert found.at(0) is None
    assert not caplog.text
    written.begin(line(100), RoundOutput((long, long, long), {}))
    folder.note(written)
    assert "logs of round 100 will not be available after the job" in caplog.text
    again = folders.written("job", ["r1"])
    assert again is not None
    assert again.last == 99
    assert sorted(path.name for path in folder.index.parent.iterdir()) == ["r1", "r1.rounds.jsonl"]


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path: Path) -> None:
    folders = RunFolders(tmp_path)
    folders.release(folders.open("job", "r1"))
    assert list((tmp_path / "runs").iterdir()) == []


# ------------------------------------------------------------------ retention


def test_what_is_too_old_is_removed(tmp_path: Path) -> None:
    folders = RunFolders(tmp_path)
    old, young = write_round(folders, "r1", 0), write_round(folders, "r2", 1)
    age(old, 15)
    assert folders.sweep(14 * DAY, PLENTY, NOW) == [old]
    assert not old.exists()
    assert young.exists()


@pytest.mark.slow
def test_the_oldest_goes_first_where_there_is_too_much(tmp_path: Path) -> None:
    folders = RunFolders(tmp_path)
    paths = [write_round(folders, f"r{n}", n, rdzv_id=f"job-{n}") for n in range(3)]
    for number, path in enumerate(paths):
        (path / "big").write_bytes(b"x" * 200_000)
        age(path, 3 - number)
    assert folders.sweep(14 * DAY, 500_000, NOW) == paths[:1]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["job-1", "job-2"]


@pytest.mark.slow
def test_a_run_that_is_here_is_never_removed(tmp_path: Path) -> None:
    folders = RunFolders(tmp_path)
    path = write_round(folders, "r1", 0)
    folder = folders.open("job", "r1")
    age(path, 99)
    assert folders.sweep(0, 0, NOW) == []
    folders.release(folder)
    assert folders.sweep(0, 0, NOW) == [path]
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_removal_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    folders = RunFolders(tmp_path)
    path = write_round(folders, "r1", 0)
    path.rename(tmp_path / "runs" / ".removed-1")
    folders.sweep(14 * DAY, PLENTY, NOW)
    assert not (tmp_path / "runs" / ".removed-1").exists()


def test_nothing_beside_the_runs_is_touched(tmp_path: Path) -> None:
    folders = RunFolders(tmp_path)
    path = write_round(folders, "r1", 0)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (path / "link").symlink_to(outside)
    (path.parent / "link").symlink_to(outside)
    age(path, 99)
    folders.sweep(0, 0, NOW)
    assert (outside / "kept").exists()
    assert not path.exists()


def test_an_agent_that_never_ran_a_job_has_nothing_to_remove(tmp_path: Path) -> None:
    assert RunFolders(tmp_path).sweep(0, 0, NOW) == []
