"""The nodes core: one live stream per node_id, and no unheard node is lost without proof."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import pytest

from rdzv.core.fleet.nodes import (
    FENCE_MARGIN_MS,
    AgentKind,
    Connect,
    Disconnect,
    Expect,
    Hear,
    LeaseGrown,
    LeaseRules,
    NodeAway,
    NodeConnected,
    NodeGivenUp,
    Nodes,
    NodesCommand,
    NodesEvent,
    Pause,
    PlanAway,
    Tick,
    step,
)
from rdzv.errors import InvalidRequestError, NodeSupersededError, RendezvousConnectionError
from rdzv.transport.node_stream import FINAL_REFUSALS


@dataclass
class Fleet:
    """The nodes of one server, which ticks exactly when it is due."""

    nodes: Nodes = field(default_factory=lambda: Nodes(leadership=3))
    now_ms: int = 0
    streams: int = 0
    events: list[NodesEvent] = field(default_factory=list)

    def do(self, command: NodesCommand) -> tuple[NodesEvent, ...]:
        transition = step(self.nodes, command, self.now_ms)
        if isinstance(command, Tick) and transition.wake_at_ms is not None:
            assert transition.wake_at_ms > self.now_ms, "a busy loop"
        before = self.nodes.records
        for node_id, record in transition.nodes.records.items():
            if node_id in before:
                assert record.incarnation >= before[node_id].incarnation
        self.nodes = transition.nodes
        self.events += transition.events
        return transition.events

    def pass_until(self, at_ms: int) -> None:
        while self.nodes.wake_at_ms is not None and self.nodes.wake_at_ms <= at_ms:
            self.now_ms = max(self.nodes.wake_at_ms, self.now_ms)
            self.do(Tick())
        self.now_ms = at_ms

    def connect(
        self,
        node_id: str,
        instance: str = "a",
        kind: AgentKind = AgentKind.DAEMON,
        incarnation: int = 0,
        fence_after_ms: int = 0,
    ) -> int:
        """Open a stream and return the incarnation that was assigned."""
        self.do(
            Connect(
                node_id=node_id,
                instance=instance,
                kind=kind,
                address=f"{node_id}.net",
                pid=4711,
                stream=self.streams + 1,
                incarnation=incarnation,
                fence_after_ms=fence_after_ms,
            )
        )
        self.streams += 1
        return self.nodes.records[node_id].incarnation

    def disconnect(self, node_id: str) -> None:
        stream = self.nodes.records[node_id].stream
        assert stream is not None
        self.do(Disconnect(node_id, stream))

    @property
    def lost(self) -> list[str]:
        return [event.node_id for event in self.events if isinstance(event, NodeGivenUp)]


# ------------------------------------------------------------------ leases


def test_a_silent_node_is_lost_when_its_lease_is_over_and_not_before() -> None:
    fleet = Fleet()
    fleet.connect("n1")
    fleet.pass_until(4_999)
    assert not fleet.lost
    fleet.pass_until(5_000)
    assert fleet.lost == ["n1"]
    assert fleet.nodes.wake_at_ms is None


def test_whatever_a_node_says_renews_its_lease() -> None:
    fleet = Fleet()
    fleet.connect("n1")
    for second in range(1, 100):
        fleet.pass_until(second * 1_000)
        fleet.do(Hear(frozenset({"n1", "unheard of"})))
    assert not fleet.lost
    fleet.pass_until(99_000 + 5_000)
    assert fleet.lost == ["n1"]


def test_a_word_after_the_stream_has_ended_renews_nothing() -> None:
    fleet = Fleet()
    fleet.connect("n1")
    fleet.disconnect("n1")
    fleet.pass_until(3_000)
    fleet.do(Hear(frozenset({"n1"})))
    fleet.pass_until(15_000)
    assert fleet.lost == ["n1"]


@pytest.mark.parametrize(("kind", "worth_ms"), [("foreground", 250), ("daemon", 15_000)])
def test_an_absence_is_worth_what_the_agents_workers_survive(kind: str, worth_ms: int) -> None:
    fleet = Fleet()
    fleet.connect("n1", kind=AgentKind(kind))
    fleet.pass_until(1_000)
    fleet.disconnect("n1")
    assert fleet.events[-1] == NodeAway(
        "n1", fleet.nodes.records["n1"].incarnation, 1_000 + worth_ms, firm=False
    )
    fleet.pass_until(1_000 + worth_ms - 1)
    assert not fleet.lost
    fleet.pass_until(1_000 + worth_ms)
    assert fleet.lost == ["n1"]


def test_a_daemon_that_was_silent_before_its_stream_ended_has_a_lease() -> None:
    """Such as a dead machine, whose stream an unanswered ping ends."""
    fleet = Fleet()
    fleet.connect("n1")
    fleet.pass_until(2_500)
    fleet.disconnect("n1")
    assert fleet.nodes.records["n1"].until_ms == 2_500 + 5_000


def test_a_daemon_whose_workers_a_fence_kills_has_a_lease() -> None:
    fleet = Fleet()
    fleet.connect("n1", fence_after_ms=3_000)
    fleet.disconnect("n1")
    assert fleet.nodes.records["n1"].until_ms == 5_000


def test_a_daemon_with_a_longer_lease_has_no_less() -> None:
    fleet = Fleet(Nodes(3, LeaseRules(duration_ms=20_000)))
    fleet.connect("n1")
    fleet.disconnect("n1")
    assert fleet.nodes.records["n1"].until_ms == 20_000


def test_the_lease_grows_with_the_number_of_nodes() -> None:
    tuning = LeaseRules(nodes=2, longest_nodes=4, duration_ms=5_000, longest_ms=30_000)
    fleet = Fleet(Nodes(1, tuning))
    for i in range(6):
        fleet.connect(f"n{i}")
    leases = [e.lease_ms for e in fleet.events if isinstance(e, NodeConnected)]
    assert leases == [5_000, 5_000, 17_500, 30_000, 30_000, 30_000]


def test_who_came_first_has_a_longer_lease_once_it_is_heard() -> None:
    """Otherwise the first thousand nodes would send most of all heartbeats forever."""
    tuning = LeaseRules(nodes=2, longest_nodes=4, duration_ms=5_000, longest_ms=30_000)
    fleet = Fleet(Nodes(1, tuning))
    for i in range(3):
        fleet.connect(f"n{i}")
    fleet.pass_until(1_000)
    fleet.do(Hear(frozenset({"n0", "n2"})))
    grown = [e for e in fleet.events if isinstance(e, LeaseGrown)]
    assert grown == [LeaseGrown("n0", fleet.nodes.records["n0"].incarnation, 17_500)]
    fleet.do(Hear(frozenset({"n0"})))
    assert sum(isinstance(e, LeaseGrown) for e in fleet.events) == 1, "it is told once"
    fleet.pass_until(5_000)
    assert fleet.lost == ["n1"], "what was not heard of is not given more time"
    fleet.pass_until(1_000 + 17_499)
    fleet.do(Hear(frozenset({"n2"})))
    assert fleet.lost == ["n1"]
    fleet.pass_until(1_000 + 17_500)
    assert fleet.lost == ["n1", "n0"]


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "grown"), [(1_000, 0), (1_800, 0), (1_900, 1)])
def test_a_lease_is_not_given_anew_for_a_few_more_nodes(nodes: int, grown: int) -> None:
    """Each new node would call for another lease; each node is sent few changes."""
    fleet = Fleet()
    for i in range(nodes):
        fleet.connect(f"n{i}")
    fleet.do(Hear(frozenset({"n0"})))
    assert sum(isinstance(e, LeaseGrown) for e in fleet.events) == grown


# ------------------------------------------------------------------ instances


def test_one_instance_keeps_its_incarnation_over_all_its_streams() -> None:
    fleet = Fleet()
    first = fleet.connect("n1")
    assert fleet.connect("n1", incarnation=first) == first
    [again] = fleet.events[1:]
    assert isinstance(again, NodeConnected)
    assert (again.replaced, again.stale_stream) == (None, 1)


def test_incarnations_grow_also_when_the_server_starts_without_memory() -> None:
    before = Fleet(Nodes(leadership=1))
    old = max(before.connect(f"n{i}") for i in range(100))
    assert Fleet(Nodes(leadership=2)).connect("n1") > old


def test_another_instance_is_refused_while_the_stream_is_open() -> None:
    fleet = Fleet()
    fleet.connect("n1", "a")
    fleet.now_ms = 2_000
    in_use = r"in use by n1\.net pid 4711, connected 2 s ago"
    with pytest.raises(RendezvousConnectionError, match=in_use) as refused:
        fleet.connect("n1", "b")
    # The other one may end at any moment, so this is nothing to stop for.
    assert refused.value.code not in FINAL_REFUSALS


def test_another_instance_takes_over_once_the_stream_has_ended() -> None:
    fleet = Fleet()
    first = fleet.connect("n1", "a")
    fleet.disconnect("n1")
    second = fleet.connect("n1", "b")
    assert second > first
    last = fleet.events[-1]
    assert isinstance(last, NodeConnected) and last.replaced == first
    with pytest.raises(NodeSupersededError, match="was taken over"):
        fleet.connect("n1", "a", incarnation=first)


def test_another_instance_takes_over_once_the_lease_is_over_ticked_or_not() -> None:
    fleet = Fleet()
    fleet.connect("n1", "a")
    fleet.now_ms = 5_000
    fleet.connect("n1", "b")
    assert fleet.nodes.records["n1"].instance == "b"


def test_the_end_of_a_stale_stream_is_no_news() -> None:
    fleet = Fleet()
    fleet.connect("n1")
    fleet.connect("n1")
    assert not fleet.do(Disconnect("n1", 1))
    assert not fleet.do(Disconnect("unheard of", 7))
    assert fleet.nodes.records["n1"].stream == 2


# ------------------------------------------------------------------ planned absence


def test_a_planned_absence_is_waited_for_until_its_deadline() -> None:
    fleet = Fleet()
    fleet.connect("n1")
    fleet.do(PlanAway("n1", 1, 60_000))
    fleet.disconnect("n1")
    last = fleet.events[-1]
    assert isinstance(last, NodeAway) and (last.until_ms, last.firm) == (60_000, True)
    fleet.pass_until(59_999)
    assert not fleet.lost
    fleet.pass_until(60_000)
    assert fleet.lost == ["n1"]


def test_a_plan_whose_deadline_has_passed_is_none() -> None:
    fleet = Fleet()
    fleet.connect("n1")
    fleet.do(PlanAway("n1", 1, 1_000))
    fleet.pass_until(2_000)
    fleet.disconnect("n1")
    last = fleet.events[-1]
    assert isinstance(last, NodeAway) and (last.until_ms, last.firm) == (17_000, False)


def test_a_plan_said_in_a_stale_stream_is_none() -> None:
    fleet = Fleet()
    fleet.connect("n1")
    fleet.connect("n1")
    fleet.do(PlanAway("n1", 1, 60_000))
    assert not fleet.nodes.records["n1"].firm


# ------------------------------------------------------------------ silence that proves nothing


def test_after_a_take_over_nobody_is_lost_for_takeover_grace() -> None:
    fleet = Fleet()
    fleet.do(Expect("n1", 7))
    fleet.pass_until(29_999)
    assert not fleet.lost
    fleet.pass_until(30_000)
    assert fleet.lost == ["n1"]
    [lost] = fleet.events
    assert isinstance(lost, NodeGivenUp) and lost.incarnation == 7


def test_ten_thousand_nodes_have_longer_before_the_first_of_them_has_come_back() -> None:
    fleet = Fleet()
    fleet.do(Expect("n1", 7, nodes=10_000))
    fleet.pass_until(49_999)
    assert not fleet.lost
    fleet.pass_until(50_000)
    assert fleet.lost == ["n1"]


def test_while_those_who_were_expected_still_come_back_nobody_is_lost() -> None:
    """Thousands that reconnect at once take longer than takeover_grace: the server is slow."""
    fleet = Fleet()
    for number in range(10):
        fleet.do(Expect(f"n{number}", 7))
    for number in range(9):
        fleet.pass_until(4_000 * (number + 1))
        fleet.do(Hear(frozenset(f"n{n}" for n in range(number))))
        fleet.connect(f"n{number}", incarnation=7)
    assert not fleet.lost
    fleet.pass_until(45_999)
    assert not fleet.lost
    fleet.pass_until(46_000)
    assert fleet.lost[0] == "n9"


def test_those_who_come_too_late_for_long_are_lost_all_the_same() -> None:
    fleet = Fleet()
    fleet.do(Expect("never", 7))
    for number in range(35):
        fleet.do(Expect(f"n{number}", 7))
    for number in range(35):
        fleet.pass_until(4_000 * (number + 1))
        fleet.do(Hear(frozenset(f"n{n}" for n in range(number))))
        fleet.connect(f"n{number}", incarnation=7)
        assert ("never" in fleet.lost) == (4_000 * (number + 1) >= 120_000)


def test_who_only_opens_its_stream_anew_is_none_of_those_who_come_back() -> None:
    fleet = Fleet()
    fleet.do(Expect("never", 7))
    fleet.pass_until(29_000)
    fleet.connect("n1")
    fleet.disconnect("n1")
    fleet.connect("n1")
    fleet.pass_until(30_000)
    assert fleet.lost == ["never"]


def test_a_stream_that_ends_while_others_come_back_is_waited_for() -> None:
    fleet = Fleet()
    fleet.do(Expect("n1", 7))
    fleet.do(Expect("n2", 7))
    fleet.connect("n1", kind=AgentKind.FOREGROUND, incarnation=7)
    fleet.disconnect("n1")
    assert fleet.nodes.records["n1"].until_ms == fleet.now_ms + 30_000


def test_once_all_are_back_a_stream_that_ends_is_worth_reconnect_grace() -> None:
    fleet = Fleet()
    fleet.do(Expect("n1", 7))
    fleet.connect("n1", kind=AgentKind.FOREGROUND, incarnation=7)
    fleet.do(Hear(frozenset({"n1"})))
    fleet.disconnect("n1")
    assert fleet.nodes.records["n1"].until_ms == fleet.now_ms + 250


def test_a_node_that_has_not_answered_the_welcome_is_still_coming_back() -> None:
    """At a busy server it gives up waiting for the Welcome, and tries again."""
    fleet = Fleet()
    fleet.do(Expect("n1", 7))
    for _ in range(5):
        fleet.connect("n1", kind=AgentKind.FOREGROUND, incarnation=7)
        fleet.pass_until(fleet.now_ms + 10_000)
        fleet.disconnect("n1")
        assert fleet.nodes.records["n1"].until_ms == fleet.now_ms + 30_000
        fleet.pass_until(fleet.now_ms + 12_000)
    assert not fleet.lost


def test_a_node_that_never_answers_a_welcome_is_lost_all_the_same() -> None:
    fleet = Fleet()
    fleet.do(Expect("n1", 7))
    while fleet.now_ms < 120_000:
        fleet.connect("n1", kind=AgentKind.FOREGROUND, incarnation=7)
        fleet.pass_until(fleet.now_ms + 4_000)
        fleet.disconnect("n1")
    assert fleet.nodes.records["n1"].until_ms == fleet.now_ms + 250


def test_while_others_come_back_no_lease_ends_before_the_welcome_is_answered() -> None:
    fleet = Fleet()
    for number in range(1, 12):
        fleet.do(Expect(f"n{number}", 7))
    for number in range(1, 12):
        fleet.connect(f"n{number}", incarnation=7)
        fleet.pass_until(4_000 * number)
        fleet.do(Hear(frozenset(f"n{n}" for n in range(2, number + 1))))
    fleet.pass_until(48_000)
    fleet.do(Hear(frozenset(f"n{n}" for n in range(2, 12))))
    fleet.pass_until(49_999)
    assert not fleet.lost
    fleet.pass_until(50_000)
    assert fleet.lost == ["n1"]


def test_who_was_expected_keeps_its_incarnation() -> None:
    fleet = Fleet()
    fleet.do(Expect("n1", 7))
    assert fleet.connect("n1", "a", incarnation=7) == 7
    assert not fleet.do(Expect("n1", 7))
    assert fleet.nodes.records["n1"].stream is not None


def test_who_adopted_the_place_later_than_was_stored_is_let_in() -> None:
    fleet = Fleet()
    fleet.do(Expect("n1", 7))
    assert fleet.connect("n1", "b", incarnation=9) == 9


@pytest.mark.parametrize("incarnation", [0, 6, 7])
def test_who_was_expected_is_known_by_its_id(incarnation: int) -> None:
    """Its server was killed before it had sent the incarnation that it had stored."""
    fleet = Fleet()
    fleet.do(Expect("n1", 7, "a"))
    assert fleet.connect("n1", "a", incarnation=incarnation) == 7


def test_the_successor_of_a_fenced_instance_waits_for_no_more_than_the_fence() -> None:
    fleet = Fleet()
    fleet.do(Expect("n1", 7, "a", fence_after_ms=4_000))
    fleet.pass_until(4_999)
    with pytest.raises(RendezvousConnectionError) as refused:
        fleet.connect("n1", "b")
    assert "its fence kills them 4 s after it was last heard" in str(refused.value)
    assert "admitted after 0 s" in str(refused.value)
    fleet.pass_until(5_000)
    assert fleet.connect("n1", "b") > 7
    assert not fleet.lost


def test_the_successor_of_a_fenced_instance_does_not_wait_for_an_announced_return() -> None:
    fleet = Fleet()
    fleet.connect("n1", "a", fence_after_ms=4_000)
    fleet.do(PlanAway("n1", fleet.nodes.records["n1"].stream or 0, 600_000))
    fleet.disconnect("n1")
    fleet.pass_until(4_999)
    with pytest.raises(RendezvousConnectionError, match="may still have workers of"):
        fleet.connect("n1", "b")
    fleet.pass_until(5_000)
    assert fleet.connect("n1", "b")


@pytest.mark.parametrize("incarnation", [0, 6])
def test_a_stranger_is_not_let_in_where_somebody_is_expected(incarnation: int) -> None:
    fleet = Fleet()
    fleet.do(Expect("n1", 7))
    refused = RendezvousConnectionError if incarnation == 0 else NodeSupersededError
    with pytest.raises(refused):
        fleet.connect("n1", "stranger", incarnation=incarnation)
    fleet.pass_until(30_000)
    assert fleet.connect("n1", "stranger") > 7


def test_after_a_pause_of_the_server_leases_begin_anew() -> None:
    fleet = Fleet()
    fleet.connect("n1")
    fleet.connect("n2", kind=AgentKind.FOREGROUND)
    fleet.disconnect("n2")
    fleet.now_ms = 60_000
    fleet.do(Pause())
    fleet.do(Tick())
    assert not fleet.lost
    fleet.pass_until(65_000)
    assert fleet.lost == ["n1"]
    fleet.pass_until(90_000)
    assert fleet.lost == ["n1", "n2"]


# ------------------------------------------------------------------ the silence of everyone


def test_the_silence_of_everyone_at_once_is_excused_for_takeover_grace() -> None:
    """A switch beside the server restarts: no node is lost, even if its ping went unanswered."""
    fleet = Fleet()
    for name in ("n1", "n2", "n3"):
        fleet.connect(name, kind=AgentKind.FOREGROUND)
    fleet.pass_until(20_000)
    fleet.disconnect("n1")
    fleet.pass_until(29_999)
    assert not fleet.lost
    fleet.pass_until(30_000)
    assert sorted(fleet.lost) == ["n1", "n2", "n3"]


def test_who_is_not_heard_within_a_lease_of_the_others_is_lost() -> None:
    fleet = Fleet()
    for name in ("n1", "n2", "n3"):
        fleet.connect(name)
    fleet.pass_until(20_000)
    for second in range(20, 25):
        fleet.pass_until(second * 1_000)
        fleet.do(Hear(frozenset({"n1", "n3"})))
    assert not fleet.lost
    fleet.pass_until(25_000)
    assert fleet.lost == ["n2"]


def test_who_is_heard_again_has_its_lease_and_no_more() -> None:
    """All excused nodes have been heard; the timer is again that of their leases."""
    fleet = Fleet()
    for name in ("n1", "n2", "n3"):
        fleet.connect(name)
    fleet.pass_until(10_000)
    fleet.do(Hear(frozenset({"n1", "n2", "n3"})))
    fleet.pass_until(13_000)
    fleet.do(Hear(frozenset({"n1", "n2"})))
    fleet.pass_until(15_000)
    assert fleet.lost == ["n3"]


def test_a_new_stream_is_heard_as_well() -> None:
    fleet = Fleet()
    for name in ("n1", "n2"):
        fleet.connect(name)
    fleet.pass_until(20_000)
    fleet.connect("n3")
    fleet.pass_until(23_000)
    fleet.do(Hear(frozenset({"n3"})))
    fleet.pass_until(25_000)
    assert sorted(fleet.lost) == ["n1", "n2"]


def test_silence_excuses_nobody_from_being_replaced() -> None:
    """Its machine restarted while the server heard no node: it is not kept out for long."""
    fleet = Fleet()
    for name in ("n1", "n2"):
        fleet.connect(name)
    fleet.pass_until(20_000)
    assert fleet.connect("n1", instance="b") > 0


def test_one_node_alone_is_given_up_when_its_lease_is_over() -> None:
    fleet = Fleet()
    fleet.connect("n1")
    fleet.pass_until(5_000)
    assert fleet.lost == ["n1"]


# ------------------------------------------------------------------ fences


@pytest.mark.parametrize(
    ("kind", "fence_ms", "kept_ms"),
    [
        ("foreground", 1_000, 2_000),
        ("foreground", 4_000, 5_000),
        ("daemon", 1_000, 5_000),
        ("daemon", 4_000, 5_000),
    ],
)
def test_a_node_with_a_fence_is_waited_for_until_its_workers_are_gone(
    kind: str, fence_ms: int, kept_ms: int
) -> None:
    """The end of its stream does not prove that, so nothing shortens the wait."""
    fleet = Fleet()
    fleet.connect("n1", kind=AgentKind(kind), fence_after_ms=fence_ms)
    fleet.pass_until(1_000)
    fleet.disconnect("n1")
    last = fleet.events[-1]
    assert isinstance(last, NodeAway) and (last.until_ms, last.firm) == (1_000 + kept_ms, True)
    fleet.pass_until(1_000 + kept_ms - 1)
    assert not fleet.lost
    fleet.pass_until(1_000 + kept_ms)
    assert fleet.lost == ["n1"]


def test_a_planned_absence_that_is_shorter_than_the_fence_does_not_shorten_it() -> None:
    fleet = Fleet()
    fleet.connect("n1", kind=AgentKind.FOREGROUND, fence_after_ms=4_000)
    fleet.do(PlanAway("n1", 1, 10))
    fleet.disconnect("n1")
    fleet.pass_until(4_999)
    assert not fleet.lost


def test_another_instance_is_let_in_only_behind_the_fence() -> None:
    """Also after the end of the stream: the previous instance's workers may still run."""
    fleet = Fleet()
    first = fleet.connect("n1", "a", AgentKind.FOREGROUND, fence_after_ms=4_000)
    fleet.disconnect("n1")
    fleet.pass_until(2_000)
    with pytest.raises(RendezvousConnectionError, match=r"n1\.net pid 4711.* admitted after 3 s"):
        fleet.connect("n1", "b")
    fleet.pass_until(3_000)
    assert fleet.connect("n1", "a", incarnation=first, fence_after_ms=4_000) == first
    fleet.disconnect("n1")
    fleet.pass_until(3_000 + 5_000)
    assert fleet.lost == ["n1"]
    assert fleet.connect("n1", "b") > first


def test_a_fence_too_close_to_the_lease_is_refused() -> None:
    fleet = Fleet()
    with pytest.raises(InvalidRequestError, match=r"--fence-after=4\.001 .* give at most 4$"):
        fleet.connect("n1", fence_after_ms=4_001)
    assert not fleet.nodes.records
    fleet.connect("n1", fence_after_ms=4_000)


def test_the_fence_is_measured_by_the_lease_that_the_node_gets() -> None:
    tuning = LeaseRules(nodes=1, longest_nodes=2, duration_ms=5_000, longest_ms=30_000)
    fleet = Fleet(Nodes(1, tuning))
    with pytest.raises(InvalidRequestError):
        fleet.connect("n1", fence_after_ms=20_000)
    fleet.connect("n2")
    fleet.connect("n1", fence_after_ms=20_000)


# ------------------------------------------------------------------ any order

SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed >= 5 else []) for seed in range(20)]


@pytest.mark.parametrize("seed", SEEDS)
def test_in_any_order_no_node_is_given_up_or_replaced_before_its_fence(seed: int) -> None:
    random = Random(seed)
    fleet = Fleet()
    fence_ms = random.choice([1_000, 2_500, 4_000])
    heard: dict[str, tuple[str, int]] = {}
    """The time at which each node_id was last heard."""
    given_up = 0
    for _ in range(300):
        node_id, instance = random.choice(["n1", "n2"]), random.choice("ab")
        record = fleet.nodes.records.get(node_id)
        kinds = ["connect", "hear", "disconnect", "plan", "pass", "pause"]
        match random.choices(kinds, [4, 4, 4, 2, 9, 0.1])[0]:
            case "connect":
                with suppress(NodeSupersededError, RendezvousConnectionError):
                    agent = random.choice(list(AgentKind))
                    fleet.connect(node_id, instance, agent, fence_after_ms=fence_ms)
                    former, at_ms = heard.get(node_id, (instance, 0))
                    if former != instance:
                        assert fleet.now_ms >= at_ms + fence_ms + FENCE_MARGIN_MS
                        given_up += 1
                    heard[node_id] = instance, fleet.now_ms
            case "hear":
                fleet.do(Hear(frozenset({node_id})))
                if record is not None and record.stream is not None:
                    heard[node_id] = record.instance, fleet.now_ms
            case "disconnect" if record is not None and record.stream is not None:
                fleet.do(Disconnect(node_id, record.stream))
            case "plan" if record is not None and record.stream is not None:
                fleet.do(PlanAway(node_id, record.stream, random.choice([10, 9_000])))
            case "pause":
                fleet.do(Pause())
            case _:
                until_ms = fleet.now_ms + random.choice([1, 300, 2_000])
                while fleet.now_ms < until_ms:
                    wake_at_ms = fleet.nodes.wake_at_ms
                    fleet.pass_until(min(until_ms, max(wake_at_ms or until_ms, fleet.now_ms + 1)))
                    for lost in fleet.lost:
                        assert fleet.now_ms >= heard[lost][1] + fence_ms + FENCE_MARGIN_MS
                        given_up += 1
                    fleet.events.clear()
    assert given_up


@pytest.mark.parametrize("seed", SEEDS)
def test_in_any_order_timers_are_honest_and_every_absence_ends(seed: int) -> None:
    random = Random(seed)
    fleet = Fleet()
    for _ in range(300):
        node_id = random.choice(["n1", "n2", "n3"])
        stream = random.randint(1, max(fleet.streams, 1))
        command = random.choice(
            [
                Hear(frozenset({node_id})),
                Disconnect(node_id, stream),
                PlanAway(node_id, stream, random.choice([10, 60_000])),
                Expect(node_id, random.randint(1, 9)),
                Pause(),
                None,
            ]
        )
        if command is not None:
            fleet.do(command)
        else:
            with suppress(NodeSupersededError, RendezvousConnectionError):
                fleet.connect(node_id, random.choice("ab"), random.choice(list(AgentKind)))
        wake_at_ms = fleet.nodes.wake_at_ms
        if wake_at_ms is not None:
            early = step(fleet.nodes, Tick(), max(fleet.now_ms, wake_at_ms - 1))
            assert wake_at_ms <= fleet.now_ms or early.nodes == fleet.nodes
            assert wake_at_ms <= fleet.now_ms or not early.events
        fleet.pass_until(fleet.now_ms + random.choice([0, 1, 100, 2_000]))
    fleet.pass_until(fleet.now_ms + 120_000)
    assert not fleet.nodes.records


def test_excuses_end_whenever_somebody_is_heard_not_only_once() -> None:
    fleet = Fleet()
    for name in ("n1", "n2", "n3"):
        fleet.connect(name)
    for silence_ms in (20_000, 40_000):
        fleet.pass_until(silence_ms)
        fleet.do(Hear(frozenset({"n1", "n2", "n3"})))
        assert not fleet.lost
    fleet.pass_until(60_000)
    fleet.do(Hear(frozenset({"n1"})))
    fleet.pass_until(64_999)
    assert not fleet.lost
    fleet.do(Hear(frozenset({"n1"})))
    fleet.pass_until(65_000)
    assert sorted(fleet.lost) == ["n2", "n3"]


def test_one_that_was_heard_and_has_gone_does_not_speak_for_those_that_are_silent() -> None:
    """Its end came before theirs, which could not be noticed: they are excused all the same."""
    fleet = Fleet()
    for name in ("n1", "n2", "n3"):
        fleet.connect(name, kind=AgentKind.FOREGROUND)
    fleet.pass_until(2_400)
    fleet.do(Hear(frozenset({"n1"})))
    fleet.disconnect("n1")
    fleet.now_ms = 2_500
    fleet.disconnect("n2")
    fleet.pass_until(29_999)
    assert "n2" not in fleet.lost
