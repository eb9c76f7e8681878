"""From a submitted job to its launch: nothing is inherited, everything is explicit."""

import os
import sys
from pathlib import Path

import pytest

from rdzv.agent.launch.launch import NO_FILES, SnapshotFiles
from rdzv.agent.node import submitted_launch
from rdzv.agent.node.submitted_launch import (
    SERVER_TIMEOUT_MS,
    Share,
    Surroundings,
    job_environ,
    make_launch,
    passed_on,
    working_directory,
)
from rdzv.client import Endpoint
from rdzv.core.model import JobSpec
from rdzv.errors import InvalidRequestError
from rdzv.messages import Placed
from rdzv.structs import replace

SPEC = JobSpec(args=("--nnodes=2:4", "--max-restarts=3", "train.py", "--lr=1"), chdir="/srv")
PLACED = Placed("job-7", "r1", SPEC)
AROUND = Surroundings(
    "n1", (Endpoint("head", 1), Endpoint("head", 2)), {"PATH": "/usr/bin:/bin", "HOME": "/home/me"}
)


def placed(*args: str, **spec: object) -> Placed:
    return Placed("job-7", "r1", replace(SPEC, args=args or SPEC.args, **spec))  # type: ignore[arg-type]


@pytest.fixture
def share(tmp_path: Path) -> Share:
    return Share(None, tmp_path / "run")


@pytest.mark.slow
async def test_a_launch_says_what_was_submitted_and_where_the_node_is(share: Share) -> None:
    launch = await make_launch(PLACED, AROUND, share)
    assert (launch.job.rdzv_id, launch.job.node_id) == ("job-7", "n1")
    assert (launch.job.settings.min_nodes, launch.job.settings.max_nodes) == (2, 4)
    assert launch.job.settings.max_restarts == 3
    assert (launch.script, launch.args) == ("train.py", ("--lr=1",))
    assert launch.chdir == Path("/srv")
    assert launch.python == sys.executable
    assert launch.job.server_timeout_ms == SERVER_TIMEOUT_MS


@pytest.mark.slow
async def test_a_job_has_none_of_the_agents_env(
    share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("PET_NNODES", "9")
    monkeypatch.setenv("PYTHON_EXEC", "/of/the/agent")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    launch = await make_launch(placed("train.py"), AROUND, share)
    assert launch.environ == AROUND.environ
    assert launch.job.settings.max_nodes == 1
    assert launch.job.shutdown_timeout_ms == 30_000
    assert launch.python == sys.executable


@pytest.mark.slow
async def test_the_jobs_own_environment_counts(share: Share) -> None:
    env = (("PYTHON_EXEC", "venv/bin/python"), ("PET_MAX_RESTARTS", "5"), ("PATH", "/opt"))
    launch = await make_launch(placed("train.py", env=env), AROUND, share)
    assert launch.python == "/srv/venv/bin/python"
    assert launch.job.settings.max_restarts == 5
    assert launch.environ["PATH"] == "/opt"
    assert launch.environ["HOME"] == "/home/me"


@pytest.mark.parametrize(
    ("gpus", "visible"), [(None, None), ((), ""), (("GPU-a", "GPU-b"), "GPU-a,GPU-b")]
)
def test_gpus_are_shown_by_their_uuids(
    tmp_path: Path, gpus: tuple[str, ...] | None, visible: str | None
) -> None:
    spoofed = placed(env=(("CUDA_VISIBLE_DEVICES", "GPU-z"),)) if gpus is not None else PLACED
    environ = job_environ(spoofed, AROUND, Share(gpus, tmp_path))
    assert environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_a_job_without_a_folder_starts_at_home() -> None:
    assert working_directory(PLACED, AROUND) == Path("/srv")
    assert working_directory(placed(chdir=""), AROUND) == Path("/home/me")
    assert working_directory(placed(chdir=""), replace(AROUND, environ={})) == Path("/")


@pytest.mark.slow
async def test_the_nodes_own_address_and_place_are_offered(share: Share) -> None:
    around = replace(AROUND, address="10.0.0.7", topology="rack-1")
    launch = await make_launch(PLACED, around, share)
    assert (launch.local_addr, launch.topology) == ("10.0.0.7", "rack-1")


@pytest.mark.parametrize(
    ("node", "job", "limit"),
    [
        (None, (), None),
        (None, ("2",), 2e9),
        (10**9, (), 1e9),
        (10**9, ("2",), 1e9),
        (8**9, ("0",), 0),
    ],
)
async def test_snapshots_get_what_both_job_and_node_allow(
    share: Share, node: int | None, job: tuple[str, ...], limit: float | None
) -> None:
    args = [f"--snapshot-memory={gb}" for gb in job]
    launch = await make_launch(
        placed(*args, "train.py"), replace(AROUND, snapshot_memory=node), share
    )
    assert launch.snapshot_memory == limit


async def test_a_folder_for_snapshots_is_below_the_jobs_own(share: Share) -> None:
    env = (("RDZV_SNAPSHOT_DIR", "/of/another/job"),)
    launch = await make_launch(placed("--snapshot-dir=kept", "train.py", env=env), AROUND, share)
    assert launch.snapshot_files == SnapshotFiles(Path("/srv/kept"), 600, 2)
    assert launch.environ["RDZV_SNAPSHOT_DIR"] == "/srv/kept"
    launch = await make_launch(placed("train.py", env=env), AROUND, share)
    assert "RDZV_SNAPSHOT_DIR" not in launch.environ


@pytest.mark.parametrize(
    ("arg", "said"),
    [
        ("--snapshot-memory=-1", "a number of gigabytes from 0 to 1000000"),
        ("--snapshot-memory=nan", "a number of gigabytes from 0 to 1000000"),
        ("--snapshot-dir-keep=0", "a whole number from 1 to 1000000"),
        ("--snapshot-dir-every=0.5", "a number of seconds from 1 to 2592000, or 0"),
    ],
)
async def test_senseless_snapshots_are_refused(share: Share, arg: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{arg}: give {said}"):
        await make_launch(placed(arg, "train.py"), AROUND, share)


# ------------------------------------------------------------------ output


@pytest.mark.slow
async def test_all_output_goes_to_files_of_the_run(share: Share) -> None:
    launch = await make_launch(placed("--nproc-per-node=2", "--tee=1", "a.py"), AROUND, share)
    output = launch.output
    assert (output.run_dir, output.log_dir) == (share.run_dir, None)
    assert (output.redirects, output.tee, output.console) == ({0: 3, 1: 3}, {}, False)


async def test_who_names_a_log_folder_has_the_files_there(share: Share) -> None:
    launch = await make_launch(placed("--log-dir=logs", "a.py"), AROUND, share)
    assert (launch.output.run_dir, launch.output.log_dir) == (None, Path("/srv/logs"))
    assert launch.output.redirects == {0: 3}


async def test_who_wants_no_files_has_no_output_on_the_daemons_console(share: Share) -> None:
    launch = await make_launch(placed(f"--log-dir={NO_FILES}", "a.py"), AROUND, share)
    assert (launch.output.run_dir, launch.output.log_dir) == (None, NO_FILES)
    assert launch.output.redirects == {0: 3}


# ------------------------------------------------------------------ what the node counts itself


@pytest.mark.slow
async def test_workers_are_counted_as_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def count(kind: str, python: str, environ: dict[str, str], _account: None) -> int:
        asked.append((kind, python, environ["CUDA_VISIBLE_DEVICES"]))
        return 2

    monkeypatch.setattr(submitted_launch, "ask_count_devices", count)
    share = Share(("GPU-a", "GPU-b"), tmp_path)
    launch = await make_launch(placed("--nproc-per-node=gpu", "a.py"), AROUND, share)
    assert asked == [("gpu", sys.executable, "GPU-a,GPU-b")]
    assert launch.job.local_world_size == 2
    assert launch.output.redirects == {0: 3, 1: 3}
    launch = await make_launch(placed("--nproc-per-node=cpu", "a.py"), AROUND, share)
    assert launch.job.local_world_size == len(os.sched_getaffinity(0))
    assert len(asked) == 1


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    "own", ["--rdzv-id=other", "--node-id=other", "--rdzv-endpoint=other", "--standalone"]
)
async def test_nothing_may_name_a_job_a_node_or_a_server_of_its_own(share: Share, own: str) -> None:
    with pytest.raises(InvalidRequestError, match="their own job, node or server"):
        await make_launch(placed(own, "a.py"), AROUND, share)


async def test_arguments_that_are_not_rdzvruns_are_refused_in_silence(
    share: Share, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await make_launch(placed("--max-restarts=many", "a.py"), AROUND, share)
    said = "--max-restarts=many: give a whole number from 0"
    assert said in str(refused.value)
    assert capfd.readouterr() == ("", "")


async def test_a_value_that_makes_no_sense_is_refused(share: Share) -> None:
    with pytest.raises(InvalidRequestError, match="--nnodes=0"):
        await make_launch(placed("--nnodes=0", "a.py"), AROUND, share)


def test_a_star_passes_on_everything() -> None:
    assert passed_on({"A": "1", "B": "2"}, ["*"]) == {"A": "1", "B": "2"}
    assert passed_on({"A": "1"}, []) == {}
