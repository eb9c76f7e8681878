"""Which account a submitted job runs as; no trick of the job makes root open files it must not."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pwd
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rdzv.agent.core.model import JobTerms
from rdzv.agent.handover.handover_state import KeptPlacement, decode_placement, encode
from rdzv.agent.job.worker_observers import NoticeFile
from rdzv.agent.launch.launch import Launch, check_chdir, check_startable, has_torch
from rdzv.agent.node.submitted_launch import Share, Surroundings, job_environ, working_directory
from rdzv.agent.observers.progress_files import ProgressFiles
from rdzv.agent.observers.snapshot_file_watch import SnapshotFileWatch
from rdzv.agent.output.run_files import RoundOutput, RunLogs, WorkerOutput, Written
from rdzv.agent.output.run_folders import RunFolders
from rdzv.agent.output.worker_log_reader import WorkerLogReader
from rdzv.agent.runner import system
from rdzv.agent.system.accounts import (
    EVERYONE,
    Accounts,
    Identity,
    User,
    acting_as,
    identity_of_owner,
    open_untrusted,
    own_account,
    parse_limits,
    parse_umask,
    started_as,
    write_anew,
)
from rdzv.agent.system.error_files import read_error
from rdzv.client import Endpoint
from rdzv.core.model import Assignment, JobSpec, Settings
from rdzv.errors import InvalidRequestError
from rdzv.messages import LogPiece, Placed, ReadLog
from rdzv.structs import replace
from tests.support.accounts import (
    ADA,
    SECRET,
    account,
    needs_root,
    own_folder,
    passable_folder,
    roots_secret,
    slow_as_root,
)

LINE = Assignment("job-7", "r1", 3, 0, 1, 0, 1, 0, 1, "127.0.0.1", 1, True, 0, 0)
JOB = JobTerms("job-7", "n1", Settings(1, 1), 1)


@pytest.fixture
def shared() -> Iterator[Path]:
    with passable_folder() as folder:
        yield folder


# ---------------------------------------------------------------------- who is who

PASSWD = {
    "ada": (2001, "/home/ada"),
    "team": (2002, "/home/team"),
    "daemon": (1, "/"),
    "root": (0, "/root"),
    "toor": (0, "/root"),
}


def find(name: str) -> pwd.struct_passwd:
    uid, home = PASSWD[name]
    return pwd.struct_passwd((name, "x", uid, uid, "", home, ""))


def accounts(*rules: User, own_uid: int = 0) -> Accounts:
    return Accounts(rules, find, own_uid)


@pytest.mark.parametrize(
    ("rules", "submitter", "wanted", "expected"),
    [
        ([User("ada")], "ada", "", "ada"),
        ([User(EVERYONE)], "ada", "", "ada"),
        ([User("bob", ("team", "ada"))], "bob", "", "team"),
        ([User("bob", ("team", "ada"))], "bob", "ada", "ada"),
        ([User(EVERYONE, ("team",)), User("ada")], "ada", "", "ada"),
        ([User(EVERYONE, ("team",)), User("ada")], "bob", "", "team"),
        ([User("ops", ("root",))], "ops", "", "root"),
        ([User("svc", ("daemon",))], "svc", "", "daemon"),
        ([User(EVERYONE, ("daemon",))], "bob", "", "daemon"),
    ],
)
def test_a_submitter_has_the_account_that_is_mapped(
    rules: list[User], submitter: str, wanted: str, expected: str
) -> None:
    found = accounts(*rules).account_for(submitter, wanted)
    assert found is not None
    uid, home = PASSWD[expected]
    assert (found.name, found.home, found.identity.uid) == (expected, home, uid)
    assert found.environ == {
        "USER": expected,
        "LOGNAME": expected,
        "HOME": home,
        "SHELL": "/bin/sh",
    }


@pytest.mark.parametrize(
    ("rules", "submitter", "wanted", "why"),
    [
        ([User("ada")], "bob", "", "no account is mapped to its submitter 'bob'"),
        ([User(EVERYONE)], "", "", "its submitter is unknown"),
        ([User(EVERYONE)], "nobody7", "", "this node has no account 'nobody7'"),
        ([User("ada")], "ada", "team", "may not run jobs as 'team' on this node, only as"),
        ([User("ada")], "ada", "root", "may not run jobs as 'root'"),
        ([User(EVERYONE)], "root", "", "it would run as root"),
        ([User(EVERYONE)], "toor", "", "it would run as root, because 'toor' is root"),
        ([User("toor")], "toor", "", "it would run as root"),
        ([User(EVERYONE, ("toor",))], "ada", "", "it would run as root"),
        ([User(EVERYONE)], "daemon", "", "'daemon' is a service account here"),
        ([], "ada", "team", "it asks for the account 'team', but jobs run here as"),
    ],
)
def test_nobody_has_an_account_that_is_not_mapped(
    rules: list[User], submitter: str, wanted: str, why: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        accounts(*rules).account_for(submitter, wanted)
    assert why in str(refused.value)


def test_without_a_mapping_jobs_run_as_the_agent() -> None:
    assert accounts().account_for("") is None
    assert accounts().account_for("ada", own_account()) is None


def test_an_agent_that_is_not_root_has_its_own_account_alone() -> None:
    mine = accounts(User(EVERYONE), own_uid=2001)
    assert mine.account_for("ada") is None
    with pytest.raises(InvalidRequestError, match="only root can start jobs under other accounts"):
        mine.account_for("team")


def test_limits_and_umask_go_with_the_account() -> None:
    rule = User("ada", umask="0077", limits={"nofile": "9:10"})
    found = accounts(rule).account_for("ada")
    assert found is not None
    assert (found.identity.umask, found.identity.limits) == (0o077, (("nofile", 9, 10),))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("files", "1", "'files' cannot be limited; give one of "),
        ("nofile", "many", "nofile = 'many' is not a limit"),
        ("nofile", "-1", "is not a limit"),
        ("nofile", "", "is not a limit"),
        ("nofile", "9:8", "has a soft limit above the hard one"),
        ("nofile", "unlimited:8", "has a soft limit above the hard one"),
        ("core", str(1 << 63), "is not a limit"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(name: str, text: str, why: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_limits({name: text})
    assert why in str(refused.value)


@pytest.mark.parametrize("text", ["", "8", "u=rwx", "1000", "-1"])
def test_a_umask_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not a umask"):
        parse_umask(text)


# ---------------------------------------------------------------------- what a job is given


def test_who_the_job_is_comes_from_its_account_and_not_from_the_agent(tmp_path: Path) -> None:
    agents = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/x", "PATH": "/bin"}
    around = Surroundings("n1", (Endpoint("head", 1),), agents)
    placed = Placed("job-7", "r1", JobSpec(("t",), env=(("MINE", "1"),)))
    ada = account(tmp_path)
    assert job_environ(placed, around, Share(None, tmp_path, ada)) == {
        **ada.environ,
        "PATH": "/bin",
        "MINE": "1",
    }
    assert working_directory(placed, around, ada) == tmp_path
    assert working_directory(placed, around) == Path("/root")


def test_the_account_of_a_job_is_kept_for_the_next_agent(tmp_path: Path) -> None:
    kept = KeptPlacement("n1", "i1", "job-7", "r1", JobSpec(("t",)), 0, (), {}, account(tmp_path))
    assert decode_placement(encode(kept)) == kept


# ---------------------------------------------------------------------- acting as somebody


@slow_as_root
def test_files_are_made_and_read_with_the_rights_of_an_account(shared: Path) -> None:
    home, secret = own_folder(shared, "home"), roots_secret(shared)
    with acting_as(ADA):
        (home / "mine").write_text("x")
        with pytest.raises(PermissionError):
            secret.read_text()
        with pytest.raises(PermissionError):
            (shared / "new").touch()
    with pytest.raises(ZeroDivisionError), acting_as(ADA):
        _ = 1 / 0
    found = (home / "mine").stat()
    assert (found.st_uid, found.st_gid) == (ADA.uid, ADA.gid)
    assert secret.read_text() == SECRET


@needs_root
def test_the_groups_of_an_account_count_and_those_of_root_do_not(shared: Path) -> None:
    for name, group in (("theirs", 64_323), ("roots", 0)):
        path = shared / name
        path.write_text("x")
        path.chmod(0o040)
        os.chown(path, 0, group)
    before = os.getgroups()
    with acting_as(ADA):
        assert (shared / "theirs").read_text() == "x"
        with pytest.raises(PermissionError):
            (shared / "roots").read_text()
    assert os.getgroups() == before


@needs_root
def test_other_threads_keep_their_rights(shared: Path) -> None:
    secret = roots_secret(shared)
    read: list[str] = []
    began, go, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go.wait(100)
        read.append(secret.read_text())
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(100)
    with acting_as(ADA):
        go.set()
        assert done.wait(100)
    thread.join()
    assert read == [SECRET]


def in_a_thread_with_groups(groups: tuple[int, ...], work: Callable[[], None]) -> None:
    """Run a function in a thread that has its own groups, which no other thread shares."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            system.set_thread_groups(groups)
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for failure in failures:
        raise failure


@needs_root
def test_the_own_groups_come_back_whatever_they_are() -> None:
    def work() -> None:
        for _ in range(2):
            with acting_as(ADA):
                assert sorted(os.getgroups()) == sorted(ADA.groups)
            assert sorted(os.getgroups()) == [7, 11]
        with suppress(ZeroDivisionError), acting_as(ADA):
            _ = 1 / 0
        assert sorted(os.getgroups()) == [7, 11]

    in_a_thread_with_groups((7, 11), work)


@slow_as_root
def test_who_acts_as_one_account_inside_of_another_is_that_other_after(shared: Path) -> None:
    home, secret = own_folder(shared, "home"), roots_secret(shared)
    other = Identity(uid=64_331, gid=64_332, groups=(64_333,))
    his = own_folder(shared, "his", other)
    with acting_as(ADA):
        with acting_as(other):
            (his / "file").touch()
            with pytest.raises(PermissionError):
                (home / "file").touch()
        assert sorted(os.getgroups()) == sorted(ADA.groups)
        with acting_as(None), pytest.raises(PermissionError):
            secret.read_text()
        with pytest.raises(PermissionError):
            secret.read_text()
        (home / "file").touch()
    found = (home / "file").stat()
    assert (found.st_uid, found.st_gid) == (ADA.uid, ADA.gid)
    assert secret.read_text() == SECRET


def test_nobody_acts_as_another_where_it_is_unknown_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "SYS_SETGROUPS", {})
    with (
        pytest.raises(PermissionError, match="another user is not supported"),
        acting_as(ADA),
    ):
        pass


def test_no_pipe_and_no_link_is_opened_and_nobody_waits_for_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "else")
    (tmp_path / "else").write_text("kept")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=r"regular|symbolic|device or address"):
            open_untrusted(tmp_path / name, os.O_RDONLY)
        with pytest.raises(OSError, match=r"regular|symbolic|device or address"):
            write_anew(tmp_path / name, b"new")
    write_anew(tmp_path / "else", b"new")
    assert (tmp_path / "else").read_text() == "new"


@slow_as_root
async def test_what_is_asked_of_a_jobs_interpreter_runs_as_its_account(shared: Path) -> None:
    home = own_folder(shared, "home")
    python = shared / "python"
    python.write_text(f"#!/bin/sh\n(id -u; id -g; id -G; pwd; umask) > {home}/said\necho True\n")
    python.chmod(0o755)
    assert await has_torch(str(python), {"PATH": "/usr/bin:/bin"}, account(home))
    said = (home / "said").read_text().split("\n")
    assert said[:5] == ["64321", "64322", "64322 64323", "/", "0027"]


@slow_as_root
def test_a_process_starts_only_where_its_account_may_go(shared: Path) -> None:
    home, private = own_folder(shared, "home"), shared / "private"
    private.mkdir(mode=0o700)
    (private / "open").mkdir(mode=0o755)
    ada = account(home)
    with started_as(ada, home) as how:
        assert (how["user"], how["group"]) == (ADA.uid, ADA.gid)
    (home / "link").symlink_to(private / "open")
    for folder in (private, private / "open", home / "link"):
        with pytest.raises(PermissionError), started_as(ada, folder):
            pass


# ---------------------------------------------------------------------- what is asked beforehand


@slow_as_root
def test_a_job_is_declined_whose_folder_its_account_can_not_enter(shared: Path) -> None:
    home, private = own_folder(shared, "home"), shared / "private"
    private.mkdir(mode=0o700)
    check_chdir(home, ADA)
    check_chdir(private)
    with pytest.raises(InvalidRequestError, match="the account that jobs run as cannot enter"):
        check_chdir(private, ADA)


@slow_as_root
def test_a_job_is_declined_whose_program_its_account_can_not_run(shared: Path) -> None:
    home = own_folder(shared, "home")
    program = shared / "run"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    launch = Launch(JOB, str(program), no_python=True, chdir=home)
    check_startable(launch)
    with pytest.raises(InvalidRequestError, match="is not a program on this node"):
        check_startable(replace(launch, account=account(home)))
    program.chmod(0o755)
    check_startable(replace(launch, account=account(home)))


# ---------------------------------------------------------------------- tricks with files


@slow_as_root
def test_an_error_file_that_leads_elsewhere_shows_nothing_of_it(shared: Path) -> None:
    home, secret = own_folder(shared, "home"), roots_secret(shared)
    (home / "error.json").symlink_to(secret)
    found = read_error(home / "error.json", None, 7, ADA)
    assert "cannot read the error file" in found.message
    assert SECRET not in found.message + found.traceback
    assert SECRET in read_error(home / "error.json", None, 7).message, "as root it would be shown"


def round_of(folder: Path, written: Written) -> Path:
    """Begin a round whose one worker writes into a folder; return its log."""
    log = folder / "stdout.log"
    output = WorkerOutput(stdout=log, stderr=None, error=folder / "error.json")
    written.begin(LINE, RoundOutput((output,), {}))
    return log


async def read_log(written: Written) -> list[LogPiece]:
    """Read the output that `rdzvctl logs` would be sent, to its end."""
    pieces: list[LogPiece] = []
    over = asyncio.Event()

    async def say(piece: LogPiece) -> None:
        pieces.append(piece)
        if piece.last:
            over.set()
        else:
            asked = replace(wanted, round=piece.round, positions=piece.positions)
            asyncio.get_running_loop().call_soon(reading.read, asked)

    wanted = ReadLog(1, "job-7", None, None, True, False, False, 0, 0, 1 << 16)
    reading = WorkerLogReader(say)
    reading.serve("job-7", written)
    try:
        reading.read(wanted)
        async with asyncio.timeout(100):
            await over.wait()
    finally:
        reading.stop_all()
    return pieces


@slow_as_root
@pytest.mark.parametrize("trick", ["log", "folder"])
async def test_logs_show_no_file_put_in_place_of_a_workers_own(shared: Path, trick: str) -> None:
    home, secret = own_folder(shared, "home"), roots_secret(shared)
    written = Written(ADA)
    if trick == "log":
        round_of(home, written).symlink_to(secret)
    else:
        # No link as the last component: `O_NOFOLLOW` does not help here.
        vault = shared / "vault"
        vault.mkdir(mode=0o700)
        (vault / "stdout.log").write_text(SECRET)
        (home / "0").symlink_to(vault)
        round_of(home / "0", written)
    pieces = await read_log(written)
    assert b"".join(piece.data for piece in pieces) == b""
    assert any("cannot read" in piece.error for piece in pieces)


@slow_as_root
async def test_logs_are_read_that_are_the_workers_own(shared: Path) -> None:
    home = own_folder(shared, "home")
    written = Written(ADA)
    log = round_of(home, written)
    with acting_as(ADA):
        log.write_text("step 1\n")
    assert b"".join(piece.data for piece in await read_log(written)) == b"step 1\n"


@slow_as_root
def test_a_log_folder_is_made_where_its_account_may_and_nowhere_else(shared: Path) -> None:
    home = own_folder(shared, "home")
    folder = RunLogs(home / "logs", "job-7", "n1", identity=ADA).open_round(LINE, 1)
    assert (folder / "0").stat().st_uid == ADA.uid
    (home / "out").symlink_to(shared)
    for base in (shared / "logs", home / "out" / "logs"):
        with pytest.raises(PermissionError):
            RunLogs(base, "job-7", "n1", identity=ADA).open_round(LINE, 1)


# ---------------------------------------------------------------------- the folder of a run


@slow_as_root
def test_the_folder_of_a_run_is_its_accounts_alone(shared: Path) -> None:
    folder = RunFolders(shared).open("job-7", "r1", ADA)
    found = folder.path.stat()
    assert (found.st_uid, found.st_mode & 0o777) == (ADA.uid, 0o700)
    assert identity_of_owner(folder.path) is not None
    other = dataclasses.replace(ADA, uid=64_999)
    with acting_as(other), pytest.raises(PermissionError):
        list(folder.path.iterdir())
    with acting_as(ADA), pytest.raises(PermissionError):
        list(folder.path.parent.iterdir())
    with pytest.raises(PermissionError, match="belongs to uid 64321"):
        RunFolders(shared).open("job-7", "r1", other)


@slow_as_root
def test_the_index_of_a_run_is_the_agents_alone_and_names_the_account(shared: Path) -> None:
    folders = RunFolders(shared)
    folder = folders.open("job-7", "r1", ADA)
    written = Written(ADA)
    round_of(folder.path, written)
    folder.note(written)
    found = folder.index.stat()
    assert (found.st_uid, found.st_mode & 0o777) == (0, 0o600)
    for change in (folder.index.unlink, folder.index.read_bytes, folder.path.rmdir):
        with acting_as(ADA), pytest.raises(PermissionError):
            change()
    with acting_as(ADA), pytest.raises(PermissionError):
        (folder.path.parent / "r2").mkdir()
    past = folders.written("job-7", ["r1"])
    assert past is not None
    round_ = past.at(3)
    assert round_ is not None
    assert round_.identity is not None
    assert round_.identity.uid == ADA.uid


# ---------------------------------------------------------------------- steps, notices, snapshots


@slow_as_root
async def test_files_of_progress_are_the_workers_own_and_lead_nowhere_else(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = ProgressFiles(lambda _: None, shared, ADA)
    try:
        files.open_round(LINE, 1)
        lead_elsewhere(Path(files.file(0)), shared)
        assert files.furthest() is None
        assert "symbolic links" in caplog.text
        write_as_worker(Path(files.file(0)), "7")
        assert files.furthest() == 7
    finally:
        files.close()


def lead_elsewhere(path: Path, shared: Path) -> None:
    """Replace a worker's file by a link to a number that is none of its own."""
    assert path.stat().st_uid == ADA.uid
    number = shared / "number"
    number.write_text("42")
    number.chmod(0o644)
    with acting_as(ADA):
        path.unlink()
        path.symlink_to(number)


def write_as_worker(path: Path, text: str) -> None:
    with acting_as(ADA):
        path.unlink()
        path.write_text(text)


@slow_as_root
async def test_a_pipe_in_the_place_of_the_next_rounds_file_stops_nobody(shared: Path) -> None:
    files = ProgressFiles(lambda _: None, shared, ADA)
    try:
        files.open_round(LINE, 1)
        assert files.folder is not None
        with acting_as(ADA):
            trap = files.folder / "0" / "progress"
            trap.unlink()
            os.mkfifo(trap)
        files.open_round(replace(LINE, round=4), 1)
        assert files.file(0) == "", "without its file a worker says no steps"
    finally:
        files.close()


@slow_as_root
def test_a_notice_is_written_nowhere_but_to_the_workers(shared: Path) -> None:
    home, victim = own_folder(shared, "home"), roots_secret(shared)
    notice = NoticeFile(lambda: home, ADA)
    (home / "notice.new").symlink_to(victim)
    notice.write(1000, "maintenance")
    assert victim.read_text() == SECRET
    (home / "notice.new").unlink()
    notice.write(1000, "maintenance")
    assert "maintenance" in (home / "notice").read_text()
    assert (home / "notice").stat().st_uid == ADA.uid
    notice.take_back()
    assert not (home / "notice").exists()


@slow_as_root
async def test_a_snapshot_is_looked_at_with_the_workers_rights(shared: Path) -> None:
    private = shared / "private"
    private.mkdir(mode=0o700)
    (private / "model.pt").write_text("x")
    async with asyncio.timeout(100):
        snapshot = SnapshotFileWatch(private / "model.pt", identity=ADA)
        await snapshot.begin_round()
        assert await snapshot.has_changed(), "what cannot be seen counts as changed"
        seen = SnapshotFileWatch(private / "model.pt")
        await seen.begin_round()
        assert not await seen.has_changed()


@slow_as_root
async def test_progress_of_any_depth_is_removed_with_the_workers_rights(shared: Path) -> None:
    progress = ProgressFiles(lambda _: None, shared, ADA)
    progress.open_round(LINE, 1)
    folder = progress.folder
    assert folder is not None
    inner = os.open(folder / "0", os.O_RDONLY)
    for _ in range(1_300):
        os.mkdir("d", dir_fd=inner)
        os.chown("d", ADA.uid, ADA.gid, dir_fd=inner)
        below = os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = below
    os.close(inner)
    (folder / "roots").mkdir()
    (folder / "roots" / "kept").touch()
    progress.close_round()
    progress.close()
    assert not (folder / "0").exists()
    assert (folder / "roots" / "kept").exists(), "the account could not remove it"
