"""Torch's records of a worker's collectives are read, and reduced to what is compared."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rdzv.agent.observers import flight_records

NOW_NS = 1_795_421_148_000_000_000


def entry(sequence: int, operation: str = "gloo:all_reduce", **more: Any) -> dict[str, Any]:
    """Return an entry as torch 2.13 writes it."""
    return {
        "collective_seq_id": sequence,
        "input_dtypes": ["Float"],
        "input_sizes": [[2, 3]],
        "is_p2p": False,
        "op_id": sequence + 1,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": operation,
        "retired": True,
        "state": "scheduled",
        "time_created_ns": NOW_NS - 5_000_000_000,
        "time_discovered_completed_ns": 0,
        **more,
    }


def record(*entries: dict[str, Any], **more: Any) -> flight_records.FlightRecord:
    trace = {"entries": entries, "pg_config": {}, "version": "2.10", **more}
    return flight_records.read_record(json.dumps(trace).encode(), NOW_NS, more.get("keep", 64))


def test_gloos_entries_are_done_once_they_are_retired() -> None:
    (group,) = record(entry(1), entry(2, retired=False)).groups
    assert (group.group, group.description, group.entered) == ("0", "default_pg", 2)
    assert [one.done for one in group.latest] == [True, False]
    assert group.pending is not None
    assert (group.pending.operation, group.pending.sizes) == ("all_reduce", "[2, 3] Float")
    assert group.pending.age_ms == 5_000


def test_nccls_entries_are_done_once_they_are_completed() -> None:
    """A retired collective has not timed out."""
    done = entry(1, "nccl:all_reduce", state="completed")
    late = entry(2, "nccl:all_reduce", state="started", retired=True)
    (group,) = record(done, late).groups
    assert [one.done for one in group.latest] == [True, False]


def test_the_latest_of_a_worker_whose_collective_has_failed_is_not_done() -> None:
    """Torch may or may not have retired it by then."""
    for retired in (True, False):
        latest = entry(2, retired=retired, time_created_ns=NOW_NS - 3_000_000_000)
        text = json.dumps({"entries": [latest, entry(1)]}).encode()
        found = flight_records.read_record(text, NOW_NS, failed=True)
        assert [one.done for one in found.groups[0].latest] == [True, False]
        assert found.waiting_ms == 3_000
    assert flight_records.read_record(b"{}", NOW_NS, failed=True).waiting_ms == 0


def test_a_collective_times_out_by_its_own_timeout() -> None:
    def waits(timeout_ms: int, **more: Any) -> bool:
        return record(
            entry(1), entry(2, timeout_ms=timeout_ms, **{"retired": False, **more})
        ).timed_out

    assert [waits(ms) for ms in (0, 4_999, 5_000, 5_001)] == [False, True, True, False]
    assert not waits(4_999, retired=True)
    assert not waits(4_999, is_p2p=True)


def test_the_first_that_is_not_done_is_kept_however_old() -> None:
    open_ = [entry(n, retired=n < 3) for n in range(1, 100)]
    (group,) = record(*open_, keep=8).groups
    assert [one.sequence for one in group.latest] == [3, *range(93, 100)]


def test_of_a_group_that_was_made_again_only_the_new_one_counts() -> None:
    old = [entry(n, pg_id=0, retired=False) for n in (1, 2)]
    (group,) = record(*old, entry(1, pg_id=3)).groups
    assert (group.entered, group.pending) == (1, None)


def test_of_a_group_that_was_reconfigured_only_what_followed_counts() -> None:
    """Its numbers begin again; what the former ranks had begun is never done."""
    former = [entry(n, retired=n < 3) for n in range(1, 4)]
    now = [entry(n, time_created_ns=NOW_NS - 1_000 + n) for n in range(1, 3)]
    for entries in (former + now, now + former):  # In whatever order torch writes them.
        (group,) = record(*entries).groups
        assert (group.entered, [one.done for one in group.latest]) == (2, [True, True])


def test_messages_between_two_ranks_are_no_collectives() -> None:
    (group,) = record(entry(1), entry(1, "nccl:send 0->1", is_p2p=True, retired=False)).groups
    assert group.pending is None


def test_a_worker_that_has_entered_nothing_yet_says_so() -> None:
    found = record()
    assert [(group.description, group.entered) for group in found.groups] == [("default_pg", 0)]
    assert not found.waits


def test_what_is_completed_is_counted_over_all_groups() -> None:
    status = {
        "0": {"last_completed_collective": "12", "last_enqueued_collective": "13"},
        "1": {"last_completed_collective": "-1"},
        "2": {"last_completed_collective": "3"},
    }
    assert record(pg_status=status).completed == 15


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"entries": 7}',
        b"\xff",
        b'{"entries": [{"pg_id": "x"}]}',
        b'{"entries": [{"input_sizes": 7}]}',
        b'{"entries": [{"input_dtypes": [7]}]}',
    ],
)
def test_what_is_no_record_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        flight_records.read_record(text, NOW_NS)


def test_a_record_costs_no_more_than_a_large_one_of_torchs() -> None:
    """The agent reads it again and again, and whoever writes it may be hostile."""
    most = b",".join([b"{}"] * (flight_records.MAX_RECORDED - 1))
    assert flight_records.read_record(b'{"entries":[' + most + b"]}", NOW_NS).groups
    for read in (
        lambda text: flight_records.read_record(text, NOW_NS),
        lambda text: flight_records.read_times(text, 0),
    ):
        with pytest.raises(ValueError, match="too large"):
            read(b'{"entries":[' + most + b",{}]}")


def test_sizes_that_are_too_long_are_not_shown() -> None:
    short, long = (
        record(entry(1, input_sizes=[[2, 3]] * times)).groups[0].latest[0].sizes
        for times in (2, 20_000)
    )
    assert (short, long) == ("[2, 3] [2, 3] Float", "")


def test_the_more_ranks_the_fewer_entries_of_each() -> None:
    assert [flight_records.entries_for(size) for size in (1, 64, 1_000, 100_000)] == [64, 64, 4, 4]


def times(*entries: dict[str, Any]) -> dict[str, flight_records.GroupTimes]:
    trace = {"entries": entries, "pg_config": {}, "version": "2.10"}
    return flight_records.read_times(json.dumps(trace).encode(), NOW_NS)


def test_gloos_are_entered_when_they_are_recorded() -> None:
    found = times(
        entry(1, time_created_ns=NOW_NS), entry(2, retired=False, time_created_ns=NOW_NS + 5_000)
    )
    assert found == {"0": flight_records.GroupTimes({1: 0, 2: 5}, {1: 0, 2: 5})}


def test_nccls_are_told_by_their_durations_where_these_are_measured() -> None:
    """Collectives are recorded when enqueued, so the last to enter has the shortest duration."""
    done = {"operation": "nccl:all_reduce", "state": "completed", "time_created_ns": NOW_NS}
    found = times(entry(1, **done, duration_ms=1.5), entry(2, **done))
    assert found == {"0": flight_records.GroupTimes({1: -1_500}, {1: 0}, by_duration=True)}
    assert times(entry(1, **done)) == {}
