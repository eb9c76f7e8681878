"""The environment of each worker is torchrun's, variable by variable."""

from typing import Any

import pytest

from rdzv.agent.core.environ import substitute_local_rank, worker_environ
from rdzv.core.model import Assignment, SnapshotMark
from rdzv.structs import replace

LINE = Assignment(
    "job-7",
    run="r1",
    round=5,
    group_rank=1,
    group_world_size=3,
    rank_first=4,
    world_size=10,
    role_rank_first=2,
    role_world_size=6,
    master_addr="10.0.0.1",
    master_port=4711,
    use_agent_store=True,
    restarts=2,
    max_restarts=7,
)

EXPORTED_BY_TORCHRUN = {
    "LOCAL_RANK": "3",
    "RANK": "7",
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "ROLE_NAME": "trainer",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "10",
    "GROUP_WORLD_SIZE": "3",
    "ROLE_WORLD_SIZE": "6",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4711",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "7",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_ERROR_FILE": "/logs/error.json",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "OMP_NUM_THREADS": "1",
}
"""The variables that torchrun 2.13 sets if none were set before and no watchdog timer is on."""

BEYOND_TORCHRUN = {
    "RDZV_ROUND": "5",
    "RDZV_PROGRESS_FILE": "/tmp/progress",
    "RDZV_NOTICE_FILE": "/tmp/notice",
}


def environ(
    base: dict[str, str] | None = None,
    local_rank: int = 3,
    local_world_size: int = 4,
    assignment: Assignment = LINE,
) -> dict[str, str]:
    return worker_environ(
        base or {},
        assignment,
        rdzv_id="job-7",
        role="trainer",
        local_rank=local_rank,
        local_world_size=local_world_size,
        error_file="/logs/error.json",
        progress_file="/tmp/progress",
        notice_file="/tmp/notice",
    )


def test_a_worker_gets_what_torchrun_exports_and_its_round() -> None:
    assert environ() == EXPORTED_BY_TORCHRUN | BEYOND_TORCHRUN


def test_workers_of_one_node_differ_in_their_ranks_alone() -> None:
    first, last = environ(local_rank=0), environ(local_rank=3)
    differ = {name for name in first if first[name] != last[name]}
    assert differ == {"LOCAL_RANK", "RANK", "ROLE_RANK"}
    assert (first["RANK"], first["ROLE_RANK"]) == ("4", "2")


def test_the_agents_own_environment_is_inherited_whole() -> None:
    base = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "2,3", "TORCHELASTIC_SIGNALS_TO_HANDLE": "X"}
    found = environ(base)
    assert {name: found[name] for name in base} == base
    assert base.keys() & EXPORTED_BY_TORCHRUN.keys() == set()


@pytest.mark.parametrize("name", sorted(EXPORTED_BY_TORCHRUN | BEYOND_TORCHRUN))
def test_what_is_inherited_gives_way_but_for_what_users_tune(name: str) -> None:
    tuned = {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS"}
    assert (environ({name: "of another job"})[name] == "of another job") == (name in tuned)


def test_one_worker_may_use_all_cores() -> None:
    assert "OMP_NUM_THREADS" not in environ(local_rank=0, local_world_size=1)
    assert environ({"OMP_NUM_THREADS": "8"}, 0, 1)["OMP_NUM_THREADS"] == "8"


def test_the_agents_own_environment_is_not_changed() -> None:
    base = {"RANK": "9"}
    environ(base)
    assert base == {"RANK": "9"}


def test_false_is_spelled_as_torch_reads_it() -> None:
    found = worker_environ(
        {},
        replace(LINE, use_agent_store=False),
        rdzv_id="job-7",
        role="trainer",
        local_rank=0,
        local_world_size=1,
        error_file="/logs/error.json",
        progress_file="/tmp/progress",
        notice_file="/tmp/notice",
    )
    assert found["TORCHELASTIC_USE_AGENT_STORE"] == "False"


@pytest.mark.parametrize(
    ("arg", "expected"),
    [
        ("--local-rank=${local_rank}", "--local-rank=3"),
        ("${local_rank}${local_rank}", "33"),
        ("${LOCAL_RANK} $HOME $$ {local_rank} %d", "${LOCAL_RANK} $HOME $$ {local_rank} %d"),
        ("", ""),
    ],
)
def test_only_the_local_rank_is_replaced_in_arguments(arg: str, expected: str) -> None:
    assert substitute_local_rank((arg, "x"), 3) == (expected, "x")


MARK = SnapshotMark(2, 40, "f00d", 2)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        # A server without support for snapshots; and a first round, which has none.
        ({"round": 3}, None),
        ({"round": 0}, None),
        ({"round": 3, "snapshot": MARK, "snapshot_loads": 1, "origin": 0}, "2:40:f00d"),
        # The round starts from the script's own checkpoint, or kept workers have the state.
        ({"round": 3, "origin": 3}, ""),
        ({"round": 3, "source": 1, "snapshot": MARK}, ""),
    ],
)
def test_workers_learn_which_snapshots_to_load(given: dict[str, Any], named: str | None) -> None:
    assert environ(assignment=replace(LINE, **given)).get("RDZV_SNAPSHOT") == named


def test_a_snapshot_of_the_worker_that_started_the_agent_is_not_handed_on() -> None:
    found = environ({"RDZV_SNAPSHOT": "1:9:cafe", "RDZV_SNAPSHOT_ORIGIN": "1"})
    assert found.keys().isdisjoint({"RDZV_SNAPSHOT", "RDZV_SNAPSHOT_ORIGIN"})
