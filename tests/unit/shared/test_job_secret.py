"""A job's secret keeps strangers out of its rendezvous, and is not sent anywhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import Job, join

from rdzv.agent.cli.options import parse_launch
from rdzv.core import rendezvous
from rdzv.core.commands import Resume
from rdzv.errors import DeniedError, InvalidRequestError
from rdzv.server import wire
from rdzv.structs import replace
from rdzv.transport.job_secret import read_secret
from rdzv.v1 import rdzv_pb2 as pb

SPEAKER = wire.Speaker("n1", 7)
SECRET = "0123456789abcdef"


def refused(job: Job, node_id: str, **given: Any) -> str:
    with pytest.raises(DeniedError) as error:
        rendezvous.step(job.state, join(node_id, **given), job.now_ms)
    return str(error.value)


def test_who_joins_knows_the_secret_of_the_first() -> None:
    job = Job()
    job.join("n1", secret="aa")
    job.join("n2", secret="aa")
    assert "n3 cannot join job-7" in refused(job, "n3")
    assert "was begun with a job secret, and it has none" in refused(job, "n3")
    assert "its job secret is not that of the job" in refused(job, "n3", secret="bb")


def test_a_secret_does_not_make_a_job_ones_own() -> None:
    job = Job()
    job.join("n1")
    assert "was begun without one" in refused(job, "n2", secret="aa")


def test_a_seat_is_not_taken_over_without_the_secret() -> None:
    job = Job()
    job.join("n1", "n2", "n3", secret="aa")
    assert job.seated
    run, number = job.membership.run, job.round.number
    with pytest.raises(DeniedError):
        rendezvous.step(job.state, Resume("n1", 2, run, number, secret="bb"), job.now_ms)
    rendezvous.step(job.state, Resume("n1", 2, run, number, secret="aa"), job.now_ms)


def test_the_next_run_may_have_another_secret() -> None:
    job = Job()
    job.join("n1", "n2", "n3", secret="aa")
    run = job.membership.run
    job.succeed("n1", "n2", "n3")
    job.join("n1", secret="bb")
    assert job.membership.secret == "bb"
    # A late node of the run before learns how that ended, not that it may not join.
    late = replace(join("n3", secret="aa"), run=run)
    with pytest.raises(Exception, match="has ended"):
        rendezvous.step(job.state, late, job.now_ms)


def read_join(secret: str, rdzv_id: str = "job-7") -> Any:
    message = pb.Join(
        rdzv_id=rdzv_id,
        settings=pb.Settings(
            min_nodes=1, max_nodes=1, max_restarts=0, join_timeout_ms=1, scale_up=pb.SCALE_UP_EAGER
        ),
        offer=pb.Offer(
            address="10.0.0.1", machine="m", local_world_size=1, store_port=1, role="default"
        ),
        secret=secret,
    )
    return wire.command_of(pb.NodeMessage(join=message), SPEAKER, 0)[1]


def test_a_server_keeps_a_hash_that_is_good_for_one_job() -> None:
    kept = read_join(SECRET).secret
    assert len(kept) == 64
    assert SECRET not in kept
    assert kept == read_join(SECRET).secret
    assert kept != read_join(SECRET, "job-8").secret
    assert read_join("").secret == ""


def test_a_secret_that_could_be_found_is_refused_without_being_shown() -> None:
    with pytest.raises(InvalidRequestError, match="has 9 characters; give 16") as error:
        read_join("password1")
    assert "password1" not in str(error.value)


def test_it_is_read_from_a_file_or_else_the_variable(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    assert read_secret({}) == ""
    assert read_secret({"RDZV_JOB_SECRET": "x"}) == "x"
    named = {"RDZV_JOB_SECRET": "x", "RDZV_JOB_SECRET_FILE": str(file)}
    assert read_secret(named) == SECRET
    file.write_text("")
    with pytest.raises(InvalidRequestError, match="is empty"):
        read_secret(named)
    file.unlink()
    with pytest.raises(InvalidRequestError, match="No such file"):
        read_secret(named)


def test_workers_do_not_get_it(tmp_path: Path) -> None:
    environ = {"RDZV_JOB_SECRET": SECRET, "RDZV_TOKEN": "rdzv_1_2", "KEPT": "yes"}
    launch, _ = parse_launch(["--nproc-per-node=1", "train.py"], environ=environ, chdir=tmp_path)
    assert launch.environ == {"KEPT": "yes"}
    assert SECRET not in repr(replace(launch, secret=SECRET))


def test_an_agent_reads_no_file_that_a_submitted_job_names(tmp_path: Path) -> None:
    environ = {"RDZV_JOB_SECRET_FILE": str(tmp_path / "there is none")}
    launch, _ = parse_launch(["--nproc-per-node=1", "train.py"], environ=environ, chdir=tmp_path)
    assert launch.secret == ""
