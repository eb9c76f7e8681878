"""The state that nodes of torch's own rendezvous store, as `rdzvctl` shows it over time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from rdzv.c10d import observations
from rdzv.c10d.observations import GIVEN_UP_MS, KEEP_ALIVE_MS, STALE_MS, State, Watch
from rdzv.view.answers import JobStatus

N1, N2, N3, N4 = (f"h{i}_{100 + i}_0" for i in (1, 2, 3, 4))


def state(
    *participants: str,
    round_: int = 0,
    complete: bool = True,
    closed: bool = False,
    last_call: bool = False,
    waiting: Iterable[str] = (),
    spare: Iterable[str] = (),
    beat: int = 0,
    silent: Iterable[str] = (),
) -> State:
    """A state in which all nodes but the silent ones have sent a heartbeat of this number."""
    waiting, spare, silent = frozenset(waiting), frozenset(spare), frozenset(silent)
    everyone = {*participants, *waiting, *spare}
    return State(
        round=round_,
        complete=complete,
        closed=closed,
        last_call=last_call,
        participants={node: rank for rank, node in enumerate(participants)},
        waiting=waiting,
        spare=spare,
        heartbeats={n: "" if n in silent else str(beat) for n in everyone},
    )


def look(seen: Watch, now_ms: int, found: State | None) -> JobStatus:
    seen.take({"j": found}, (), now_ms)
    return shown(seen, now_ms)


def shown(seen: Watch, now_ms: int) -> JobStatus:
    view = seen.view("j", now_ms)
    assert view is not None
    return view


def nodes(view: JobStatus) -> list[tuple[str, str, int | None]]:
    return [(node.address, node.state.value, node.group_rank) for node in view.nodes]


def test_a_job_joins_runs_restarts_grows_and_is_closed() -> None:
    seen = Watch()
    view = look(seen, 1_000, None)
    assert view.kept == 0
    assert (view.state, view.reason.headline, view.round) == (
        "joining",
        "no node has joined yet",
        None,
    )
    assert (view.backend, view.run, view.restarts, view.max_restarts) == ("c10d", None, None, None)

    view = look(seen, 2_000, state(N1, complete=False))
    assert (view.state, view.reason.headline) == ("joining", "round 0 has 1 node; waiting for more")
    assert nodes(view) == [("h1", "waiting", None)]
    view = look(seen, 3_000, state(N1, N2, complete=False, last_call=True))
    assert (view.state, view.reason.headline) == ("joining", "round 0 has 2 nodes; last call")

    view = look(seen, 4_000, state(N1, N2))
    assert (view.state, view.reason.headline, view.round) == ("running", "2 nodes run round 0", 0)
    assert (view.state_age_ms, view.run_age_ms) == (0, 3_000)
    assert nodes(view) == [("h1", "seated", 0), ("h2", "seated", 1)]
    assert view.nodes[0].node_id == "h1_101_0"

    # A worker of h1 fails: its agent leaves the round and waits until h2 leaves as well.
    view = look(seen, 5_000, state(N2, waiting=[N1]))
    assert (view.state, view.state_age_ms) == ("running", 1_000)
    assert view.reason.headline == "1 node runs round 0; waiting until they restart: h1_101_0"
    assert nodes(view) == [("h2", "seated", 0), ("h1", "waiting", None)]
    assert str(view.reason.items[0]) == (
        "h1_101_0 (waiting): waits until the participants restart for it"
    )
    view = look(seen, 6_000, state(N1, N2, round_=1, complete=False, last_call=True))
    assert (view.state, view.round) == ("joining", 0)
    assert [str(i) for i in view.reason.items] == [
        "round 0 ended: all its participants have left it"
    ]
    view = look(seen, 7_000, state(N1, N2, round_=1))
    assert (view.state, view.round, view.reason.items, view.state_age_ms) == ("running", 1, (), 0)

    view = look(seen, 8_000, state(N1, N2, N3, round_=2, spare=[N4]))
    assert nodes(view)[2:] == [("h3", "seated", 2), ("h4", "spare", None)]

    seen.take({"j": state(N1, N2, N3, round_=2, closed=True)}, (), 9_000)
    view = shown(seen, 99_000_000)
    assert (view.state, view.state_age_ms) == ("stopped", 99_000_000 - 9_000)
    assert view.reason.headline == "closed by its nodes; c10d does not report how it ended"
    assert {node.state.value for node in view.nodes} == {"left"}


def test_a_heartbeat_is_heard_by_the_clock_of_the_server() -> None:
    seen = Watch()
    look(seen, 0, state(N1, N2, beat=1))
    view = look(seen, 14_000, state(N1, N2, beat=2, silent=[N2]))
    assert view.reason.items == ()
    late = look(seen, 14_000 + KEEP_ALIVE_MS, state(N1, N2, beat=3, silent=[N2]))
    assert late.reason.headline == "2 nodes run round 0; no heartbeat from h2_102_0"
    assert [str(item) for item in late.reason.items] == [
        "h2_102_0 (seated): its last heartbeat was seen 15 s ago"
    ]
    back = look(seen, 40_000, state(N1, N2, beat=4))
    assert back.reason.headline == "2 nodes run round 0"


def test_who_is_dropped_for_silence_is_lost_and_the_job_does_not_re_form() -> None:
    seen = Watch()
    look(seen, 0, state(N1, N2, N3))
    view = look(seen, 20_000, state(N1, N2, beat=4))
    assert (
        view.reason.headline
        == "2 nodes run round 0 without h3_103_0, for which c10d does not re-form"
    )
    assert nodes(view)[2] == ("h3", "lost", None)
    (item,) = view.reason.items
    assert "dropped by its peers after 20 s of silence" in item.cause
    # It is remembered as long as the round is.
    assert nodes(look(seen, 30_000, state(N1, N2, beat=5)))[2] == ("h3", "lost", None)
    assert len(look(seen, 31_000, state(N1, N2, round_=1, complete=False, beat=6)).nodes) == 2


def test_who_is_out_for_a_moment_between_two_rounds_is_not_lost() -> None:
    seen = Watch()
    look(seen, 0, state(N1, N2))
    assert nodes(look(seen, 1_000, state(N2)))[1] == ("h1", "left", None)
    assert nodes(look(seen, 2_000, state(N2, waiting=[N1])))[1] == ("h1", "waiting", None)


def test_a_job_whose_nodes_are_all_silent_counts_as_stopped_in_the_end() -> None:
    seen = Watch()
    look(seen, 0, state(N1, N2))
    seen.take({}, (), GIVEN_UP_MS - 1)
    assert shown(seen, GIVEN_UP_MS - 1).state == "running"
    view = shown(seen, GIVEN_UP_MS)
    assert (view.state, view.state_age_ms) == ("stopped", GIVEN_UP_MS)
    assert view.reason.headline == (
        "no heartbeat from any of its 2 nodes for 10 min 0 s, and nobody has closed it"
    )
    assert look(seen, GIVEN_UP_MS + 1, state(N1, N2, beat=1)).state == "running"


def test_a_view_that_is_old_says_so() -> None:
    seen = Watch()
    look(seen, 0, state(N1))
    assert shown(seen, STALE_MS - 1).reason.headline == "1 node runs round 0"
    assert shown(seen, STALE_MS).reason.headline == "1 node runs round 0; last seen 5.0 s ago"
    seen.take({"j": state(N1, closed=True)}, (), 6_000)
    assert "last seen" not in shown(seen, 600_000).reason.headline


def test_jobs_that_are_gone_are_shown_no_more() -> None:
    seen = Watch()
    seen.take({"b": state(N1), "a": None, "c": state(N1, closed=True)}, (), 0)
    assert [view.rdzv_id for view in seen.views(0)] == ["a", "b", "c"]
    seen.take({}, ("b", "never there"), 1)
    assert [view.rdzv_id for view in seen.views(1)] == ["a", "c"]
    assert seen.view("b", 1) is None
    assert seen.clear() == ("a",)
    assert seen.views(2) == ()


def test_the_oldest_closed_jobs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observations, "MOST_CLOSED", 2)
    seen = Watch()
    seen.take({"runs": state(N1)}, (), 0)
    for number in range(4):
        seen.take({f"closed{number}": state(N1, closed=True)}, (), number)
    assert [view.rdzv_id for view in seen.views(9)] == ["closed2", "closed3", "runs"]
