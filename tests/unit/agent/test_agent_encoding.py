"""What the agent encodes is what the server decodes, and the other way round."""

from typing import Any

import pytest

from rdzv import bounds
from rdzv.agent.core import commands
from rdzv.agent.core.model import AgentState, JobTerms, Leaving, Phase
from rdzv.agent.server_link import encoding
from rdzv.core import commands as asked
from rdzv.core import model
from rdzv.core.root_cause import MAX_FAILURES
from rdzv.messages import Announcement, Closed, RoundOver, Said
from rdzv.server import wire
from rdzv.structs import as_dict, replace
from rdzv.transport.wire import read
from rdzv.v1 import rdzv_pb2 as pb

SETTINGS = model.Settings(
    min_nodes=2,
    max_nodes=4,
    max_restarts=3,
    join_timeout_ms=4_000,
    last_call_timeout_ms=500,
    scale_up=model.ScaleUp.ON_RESTART,
    restart_window_ms=60_000,
)
JOB = JobTerms("job-7", "n1", SETTINGS, local_world_size=8)
OFFER = model.Offer(
    address="10.0.0.5",
    local_world_size=8,
    role="trainer",
    topology="rack-1",
    host_name="host-5",
    machine="boot/net:[1]",
    store_port=4711,
    can_host_store=True,
    shutdown_timeout_ms=7_000,
)
LINE = model.Assignment(
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
    master_port=4712,
    use_agent_store=True,
    restarts=2,
    max_restarts=7,
)
NOW_MS = 10_000
FAILURE = model.Failure(1, 5, 99, 3, None, "ValueError: no", "Traceback ...", at_ms=NOW_MS - 40)
KILLED = model.Failure(2, 6, 98, None, 9, "received SIGKILL (pid 98)", "", at_ms=NOW_MS + 5)
MARK = model.SnapshotMark(2, 40, "2.a1b2", 2)
SNAPSHOTS = (
    model.Snapshot(0, MARK, 1, 1 << 30, "f00"),
    model.Snapshot(1, MARK, 0, 7, "f01", copy_of=0),
)
WHOLE_LINE = replace(
    LINE,
    tally=model.Tally(model.Spent(1, 2, 3, 4, 500), (NOW_MS - 70_005, NOW_MS - 1_005)),
    kept=(0, 3),
    source=0,
    resume_step=0,
    charged_suspects=(1,),
    snapshot=MARK,
    snapshot_loads=1,
    origin=1,
    lineage=2,
)
LEAVING = Leaving(model.LeaveCause.SIGNAL, "its agent received SIGTERM", 143)
SPEAKER = wire.Speaker("n1", 12)

REPORTED_KILL = replace(KILLED, at_ms=NOW_MS)


def heard(message: pb.NodeMessage) -> asked.Command:
    """Return the server's view of a message that was serialized and parsed again."""
    message = pb.NodeMessage.FromString(message.SerializeToString())
    rdzv_id, command = wire.command_of(message, SPEAKER, NOW_MS)
    assert rdzv_id == "job-7"
    return command


def joined(
    say: commands.SayJoin, state: AgentState, *, reuse: bool = True, **given: Any
) -> asked.Join:
    join = encoding.join(say, state, OFFER, NOW_MS, refuse_reuse=not reuse, **given)
    command = heard(pb.NodeMessage(join=join))
    assert isinstance(command, asked.Join)
    return command


# ------------------------------------------------------------------ what the agent says


def test_a_join_brings_the_launch_the_offer_and_the_round_that_was_left() -> None:
    kept = (model.KeptWorker(0), model.KeptWorker(3, 7, True, 1, 2, 0))
    say = commands.SayJoin("r1", 5, (FAILURE, KILLED), kept=kept)
    assert joined(say, AgentState(JOB, snapshots=SNAPSHOTS), reuse=False) == asked.Join(
        "n1",
        12,
        "r1",
        SETTINGS,
        OFFER,
        left_round=5,
        failures=(FAILURE, REPORTED_KILL),
        refuse_reuse=True,
        kept=kept,
        snapshots=SNAPSHOTS,
    )


@pytest.mark.parametrize(
    "moved",
    [
        model.Moved(),
        model.Moved(furthest_step=0),
        model.Moved(furthest_step=2**64 - 1),
        model.Moved(snapshot_changed=True),
    ],
    ids=str,
)
def test_how_far_a_round_came_is_heard_with_joins_and_hellos(moved: model.Moved) -> None:
    state = AgentState(JOB, run="r1", assignment=LINE, left_round=5, moved=moved)
    say = commands.SayJoin("r1", 5, (), moved=moved)
    assert joined(say, state).moved == moved
    belief = belief_of(state)
    *_, again = wire.belief_of(belief, SPEAKER, NOW_MS).commands
    assert isinstance(again, asked.Join)
    assert again.moved == moved


def test_a_jobs_secret_is_said_with_all_that_asks_for_a_place() -> None:
    state = AgentState(JOB, run="r1", assignment=LINE)
    secret = "0123456789abcdef"
    say = commands.SayJoin("", None, ())
    command = joined(say, AgentState(JOB), secret=secret)
    belief = belief_of(state, secret=secret)
    resume = wire.belief_of(belief, SPEAKER, NOW_MS).commands[0]
    assert isinstance(resume, asked.Join | asked.Resume)
    assert command.secret == resume.secret != ""


def test_a_node_that_was_fenced_says_how_long_its_workers_are_dead() -> None:
    state = AgentState(JOB, run="r1", left_round=5, fenced=True, stopping_since_ms=NOW_MS - 22_000)
    for fenced, age_ms in ((True, 22_000), (False, 0)):
        say = commands.SayJoin("r1", 5, (), fenced=fenced)
        command = joined(say, state)
        assert (command.fenced, command.fenced_age_ms) == (fenced, age_ms)


def test_a_fresh_join_names_no_round() -> None:
    say = commands.SayJoin("", None, ())
    assert joined(say, AgentState(JOB)) == asked.Join("n1", 12, "", SETTINGS, OFFER)


@pytest.mark.parametrize("left_round", [None, 0])
def test_a_node_that_leaves_a_round_prepares_nothing_for_others(left_round: int | None) -> None:
    state = AgentState(JOB, run="r1", left_round=left_round)
    say = commands.SayJoin("r1", left_round, ())
    command = joined(say, state, preparing=True)
    # Round 0 is a round that can be left.
    assert command.left_round == left_round
    belief = belief_of(state, preparing=True)
    assert command.preparing == belief.join.preparing == (left_round is None)


@pytest.mark.parametrize(
    "say",
    [
        asked.Fail("n1", 12, "r1", 5, (FAILURE, REPORTED_KILL)),
        asked.Succeed("n1", 12, "r1", 5),
        asked.Leave("n1", 12, "r1", model.LeaveCause.SIGNAL, "its agent received SIGTERM"),
        asked.Leave("n1", 12, "r1", model.LeaveCause.START_FAILED, "no", left_round=0),
        asked.Leave("n1", 12, "r1", model.LeaveCause.SIGNAL, "no", exited_zero=True),
        asked.ReportStuck("n1", 12, "r1", 5, (7, 8)),
        asked.ReportStoreHost("n1", 12, "r1", 5, "exit code 1"),
        asked.Decline("n1", "r1", "no GPU", passing=True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_report_is_heard_as_it_was_said(say: Said) -> None:
    assert heard(encoding.report(say, "job-7", NOW_MS)) == say


@pytest.mark.parametrize("cause", model.LeaveCause)
def test_every_cause_to_leave_can_be_said(cause: model.LeaveCause) -> None:
    say = asked.Leave("n1", 12, "r1", cause, "why", 5)
    command = heard(encoding.report(say, "job-7", NOW_MS))
    assert isinstance(command, asked.Leave)
    assert command.cause is cause


def test_names_with_bytes_that_are_no_characters_can_be_told() -> None:
    say = asked.ReportStoreHost("n1", 12, "r1", 5, "no file caf\udce9")
    written = replace(say, reason=r"no file caf\udce9")
    assert heard(encoding.report(say, "job-7", NOW_MS)) == written
    belief = belief_of(replace(REJOINING, store_host_failed=say.reason))
    assert written in wire.belief_of(belief, SPEAKER, NOW_MS).commands


# ------------------------------------------------------------------ what a node believes

IN_ROUND = AgentState(JOB, run="r1", assignment=LINE, workers_gone=False)
REJOINING = AgentState(JOB, run="r1", assignment=LINE, left_round=5, failures=(FAILURE,))
REPORT_OF_ROUND = model.RecoveryReport(LINE, SETTINGS, OFFER)
REJOINED = asked.Join("n1", 12, "r1", SETTINGS, OFFER, 5, (FAILURE,), recovery=REPORT_OF_ROUND)
RESUME = asked.Resume("n1", 12, "r1", 5, REPORT_OF_ROUND)
FAIL = asked.Fail("n1", 12, "r1", 5, (FAILURE,))
LEAVE = asked.Leave("n1", 12, "r1", model.LeaveCause.SIGNAL, LEAVING.reason)

BELIEFS = {
    "a fresh node": (AgentState(JOB), False, (asked.Join("n1", 12, "", SETTINGS, OFFER),)),
    "admitted": (AgentState(JOB, run="r1"), False, (asked.Join("n1", 12, "r1", SETTINGS, OFFER),)),
    "rejoining": (
        REJOINING,
        False,
        (REJOINED,),
    ),
    "rejoining after its store host failed": (
        replace(REJOINING, store_host_failed="died"),
        False,
        (
            RESUME,
            asked.ReportStoreHost("n1", 12, "r1", 5, "died"),
            REJOINED,
        ),
    ),
    "running": (replace(IN_ROUND, phase=Phase.RUNNING), True, (RESUME,)),
    "stopping": (
        replace(IN_ROUND, phase=Phase.STOPPING, failures=(FAILURE,)),
        True,
        (RESUME, FAIL),
    ),
    "succeeded": (
        replace(IN_ROUND, phase=Phase.SUCCEEDED),
        True,
        (RESUME, asked.Succeed("n1", 12, "r1", 5)),
    ),
    "leaving": (
        replace(IN_ROUND, phase=Phase.LEAVING, leaving=LEAVING),
        True,
        (RESUME, LEAVE),
    ),
    "leaving without workers": (
        replace(IN_ROUND, phase=Phase.LEAVING, leaving=LEAVING, left_round=5, workers_gone=True),
        False,
        (RESUME, replace(LEAVE, left_round=5)),
    ),
    "leaving before a round": (
        AgentState(JOB, run="r1", phase=Phase.LEAVING, leaving=LEAVING),
        False,
        (LEAVE,),
    ),
    "with all of a round": (
        replace(REJOINING, assignment=WHOLE_LINE),
        False,
        (replace(REJOINED, recovery=replace(REPORT_OF_ROUND, assignment=WHOLE_LINE)),),
    ),
}


def belief_of(
    state: AgentState, offer: model.Offer = OFFER, now_ms: int = NOW_MS, **given: Any
) -> pb.Belief:
    join = encoding.join(None, state, offer, now_ms, refuse_reuse=False, **given)
    believed = encoding.belief(state, join, now_ms)
    return pb.Belief.FromString(believed.SerializeToString())


@pytest.mark.parametrize(("state", "has_workers", "expected"), BELIEFS.values(), ids=BELIEFS)
def test_the_server_learns_all_that_it_missed(
    state: AgentState, has_workers: bool, expected: tuple[asked.Command, ...]
) -> None:
    found = wire.belief_of(belief_of(state), SPEAKER, NOW_MS)
    assert as_dict(found.commands) == as_dict(expected)
    assert found.has_workers == has_workers
    assert (found.rdzv_id, found.run) == ("job-7", state.run)
    assert found.round == (state.assignment.round if state.assignment else None)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED])
def test_every_phase_can_be_believed(phase: Phase) -> None:
    assert belief_of(replace(IN_ROUND, phase=phase)).phase == pb.Belief.Phase.Value(phase.name)


def test_what_a_run_has_spent_is_said_back_as_old_as_it_has_become() -> None:
    tally = model.Tally(model.Spent(1, 2, 3, 4, 500), (NOW_MS - 70_000, NOW_MS - 1_000))
    state = replace(IN_ROUND, assignment=replace(LINE, tally=tally), phase=Phase.RUNNING)
    believed = belief_of(state, now_ms=NOW_MS + 5_000)
    assert list(believed.round.tally.restart_ages_ms) == [75_000, 6_000]
    # A repeated announcement of the same round does not make it another round.
    assert state.assignment == LINE


def test_an_age_beyond_all_clocks_is_no_number_that_a_store_could_not_hold() -> None:
    tally = read(model.Tally, pb.Tally(restart_ages_ms=[2**64 - 1]), checked=True, now_ms=5)
    assert tally.restarts_ms == (5 - bounds.TIMEOUT_MS,)


def test_a_node_that_has_workers_does_not_say_that_they_are_gone() -> None:
    for name in ("running", "stopping", "succeeded", "leaving"):
        believed = belief_of(BELIEFS[name][0])
        assert not believed.join.HasField("left_round")
        assert not believed.leave.HasField("left_round")
        assert not believed.join.failures


def test_a_node_with_workers_holds_no_port_and_is_heard_all_the_same() -> None:
    """Otherwise a restarted server would refuse every node that is training."""
    for state, has_workers, expected in BELIEFS.values():
        if has_workers:
            offer = replace(OFFER, store_port=0)
            heard_of = wire.belief_of(belief_of(state, offer), SPEAKER, NOW_MS)
            resume = replace(RESUME, recovery=replace(REPORT_OF_ROUND, offer=offer))
            assert heard_of.commands == (resume, *expected[1:])


# ------------------------------------------------------------------ what the server says


def told(announced: Announcement) -> Announcement | None:
    """Return what a node hears, by bytes, of what the server tells it."""
    message = wire.server_message([announced], 3, "1.2", NOW_MS)
    return encoding.announcement(pb.ServerMessage.FromString(message.SerializeToString()), NOW_MS)


@pytest.mark.parametrize("cause", model.Cause)
def test_every_cause_of_an_end_is_understood(cause: model.Cause) -> None:
    over = RoundOver("job-7", "r1", 5, model.RoundEnd(cause, "why", broken=True, keep=False), (1,))
    assert told(over) == over


@pytest.mark.parametrize("result", model.Result)
def test_every_result_is_understood(result: model.Result) -> None:
    closed = Closed(
        "job-7", "r1", model.Ended(result, "why", 0, True, (FAILURE,), no_progress=True)
    )
    assert told(closed) == closed


def test_the_unheard_of_is_no_obstacle() -> None:
    assert encoding.announcement(pb.ServerMessage(), NOW_MS) is None
    odd = pb.RoundOver(cause=4711, reason="new")  # type: ignore[arg-type]
    over = encoding.announcement(pb.ServerMessage(round_ended=odd), NOW_MS)
    assert isinstance(over, RoundOver)
    assert (over.end.cause, over.end.reason) == (model.Cause.NODE_LEFT, "new")
    closed = encoding.announcement(pb.ServerMessage(closed=pb.Closed()), NOW_MS)
    assert isinstance(closed, Closed)
    assert closed.ended.result is model.Result.FAILED


def test_a_crowd_of_suspects_never_hides_the_failure() -> None:
    crowd = tuple(replace(FAILURE, local_rank=n, at_ms=n, suspect=True) for n in range(2, 99))
    said = asked.Fail("n1", 0, "r1", 5, (*crowd, FAILURE))
    reported = encoding.report(said, "job-7", NOW_MS).failed.failures
    assert len(reported) == MAX_FAILURES
    assert [one.suspect for one in reported[:2]] == [False, True]
