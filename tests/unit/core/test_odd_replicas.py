"""A worker that differs from the other replicas: its node leaves the job, and has a strike."""

import pytest

from rdzv.core.commands import Join, Place, Submit
from rdzv.core.fleet.quarantine import strikes_in
from rdzv.core.model import JobSpec, LeaveCause
from rdzv.core.root_cause import is_odd_replica
from rdzv.structs import replace
from tests.support.builders import SETTINGS, Job, join, odd_replica, running


def test_only_the_exception_itself_says_that_a_replica_is_odd() -> None:
    odd = odd_replica()
    assert is_odd_replica(odd)
    assert not is_odd_replica(odd_replica(kind="ReplicasDifferError"))
    # What a worker prints may be any text.
    assert not is_odd_replica(replace(odd, traceback=""))
    assert not is_odd_replica(replace(odd, message="ValueError: OddReplicaError: no"))


@pytest.mark.parametrize("kind", ["OddReplicaError", "ValueError"])
def test_a_submitted_run_does_not_choose_the_node_of_an_odd_replica_again(kind: str) -> None:
    job, settings = Job(), replace(SETTINGS, max_restarts=3)
    job.do(Submit("run-1", settings, JobSpec(("train.py",)), "ada"))
    job.do(Place("run-1", ("n1", "n2", "n3")))
    for node_id in ("n1", "n2", "n3"):
        offered: Join = join(node_id, settings=settings)
        job.do(replace(offered, run="run-1"))
    job.fail("n2", odd_replica(1, kind))
    job.leave("n2", 0, LeaveCause.FAILED, "unhealthy: replica digest: it differs")
    submission = job.membership.submission
    assert submission is not None
    assert submission.placed == ("n1", "n3")
    declined = [("n2", "unhealthy: replica digest: it differs")] if "Odd" in kind else []
    assert [(one.node_id, one.reason) for one in submission.declined] == declined


@pytest.mark.parametrize(
    ("kind", "struck"), [("OddReplicaError", ["n2"]), ("ReplicasDifferError", [])]
)
def test_only_who_differs_from_a_majority_has_a_strike(kind: str, struck: list[str]) -> None:
    """The strike is not the machine's: a script may do so on one rank, as by any exception."""
    job = running("n1", "n2", settings=replace(SETTINGS, max_restarts=3))
    job.fail("n2", odd_replica(1, kind))
    events = [*job.stopped("n1"), *job.stopped("n2")]
    found = strikes_in("job-7", "run-1", events, 0)
    assert [(one.node_id, one.machine) for one in found] == [(name, False) for name in struck]
