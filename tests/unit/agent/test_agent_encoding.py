"""What the agent encodes is what the server decodes, and the other way round."""

import pytest

from rdzv import bounds
from rdzv.agent.core import commands, events
from rdzv.agent.core.model import (
    AgentState,
    Assignment,
    JobTerms,
    Leaving,
    Phase,
)
from rdzv.agent.server_link import encoding
from rdzv.core import commands as asked
from rdzv.core.fleet.node_resources import Gpu, Resources
from rdzv.core.model import (
    Cause,
    Failure,
    JobSpec,
    LeaveCause,
    Moved,
    Offer,
    RecoveryReport,
    Result,
    ScaleUp,
    Settings,
    SnapshotMark,
    Spent,
    Tally,
)
from rdzv.core.root_cause import MAX_FAILURES
from rdzv.core.snapshot_copies import CopySource
from rdzv.messages import Holding, Placed
from rdzv.server import wire
from rdzv.structs import field_names, replace
from rdzv.transport.wire import read, write
from rdzv.v1 import rdzv_pb2 as pb

SETTINGS = Settings(
    min_nodes=2,
    max_nodes=4,
    max_restarts=3,
    join_timeout_ms=4_000,
    last_call_timeout_ms=500,
    scale_up=ScaleUp.ON_RESTART,
    restart_window_ms=60_000,
)
JOB = JobTerms("job-7", "n1", SETTINGS, local_world_size=8)
OFFER = Offer(
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
LINE = Assignment(
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
FAILURE = Failure(1, 5, 99, 3, None, "ValueError: no", "Traceback ...", at_ms=NOW_MS - 40)
KILLED = Failure(2, 6, 98, None, 9, "received SIGKILL (pid 98)", "", at_ms=NOW_MS + 5)
LEAVING = Leaving(LeaveCause.SIGNAL, "its agent received SIGTERM", 143)
SPEAKER = wire.Speaker("n1", 12)

REPORTED_KILL = replace(KILLED, at_ms=NOW_MS)


def heard(message: pb.NodeMessage) -> asked.Command:
    """Return the server's view of a message that was serialized and parsed again."""
    message = pb.NodeMessage.FromString(message.SerializeToString())
    rdzv_id, command = wire.command_of(message, SPEAKER, NOW_MS)
    assert rdzv_id == "job-7"
    return command


# ------------------------------------------------------------------ what the agent says


def test_a_join_brings_the_launch_the_offer_and_the_round_that_was_left() -> None:
    say = commands.SayJoin("r1", 5, (FAILURE, KILLED))
    join = encoding.join(say, AgentState(JOB), OFFER, NOW_MS, refuse_reuse=True)
    assert heard(pb.NodeMessage(join=join)) == asked.Join(
        "n1",
        12,
        "r1",
        SETTINGS,
        OFFER,
        left_round=5,
        failures=(FAILURE, REPORTED_KILL),
        refuse_reuse=True,
    )


@pytest.mark.parametrize(
    "moved",
    [Moved(), Moved(furthest_step=0), Moved(furthest_step=2**64 - 1), Moved(snapshot_changed=True)],
    ids=str,
)
def test_how_far_a_round_has_come_is_heard_with_the_join_and_after_a_reconnect(
    moved: Moved,
) -> None:
    state = AgentState(JOB, run="r1", assignment=LINE, left_round=5, moved=moved)
    say = commands.SayJoin("r1", 5, (), moved=moved)
    join = encoding.join(say, state, OFFER, NOW_MS, refuse_reuse=False)
    command = heard(pb.NodeMessage(join=join))
    assert isinstance(command, asked.Join)
    assert command.moved == moved
    belief = encoding.belief(state, OFFER, NOW_MS, refuse_reuse=False)
    *_, again = wire.belief_of(belief, SPEAKER, NOW_MS).commands
    assert isinstance(again, asked.Join)
    assert again.moved == moved


def test_the_end_of_a_job_without_progress_is_understood() -> None:
    closed = pb.Closed(rdzv_id="job-7", run="r1", result=pb.RESULT_FAILED, no_progress=True)
    event = encoding.event(pb.ServerMessage(closed=closed), NOW_MS)
    assert isinstance(event, events.RunClosed)
    assert event.no_progress


def test_a_jobs_secret_is_said_with_all_that_asks_for_a_place() -> None:
    state = AgentState(JOB, run="r1", assignment=LINE)
    secret = "0123456789abcdef"
    say = commands.SayJoin("", None, ())
    join = encoding.join(say, AgentState(JOB), OFFER, NOW_MS, refuse_reuse=False, secret=secret)
    command = heard(pb.NodeMessage(join=join))
    assert isinstance(command, asked.Join)
    belief = encoding.belief(state, OFFER, NOW_MS, refuse_reuse=False, secret=secret)
    resume = wire.belief_of(belief, SPEAKER, NOW_MS).commands[0]
    assert isinstance(resume, asked.Join | asked.Resume)
    assert command.secret == resume.secret != ""


def test_a_node_that_was_fenced_says_how_long_its_workers_are_dead() -> None:
    state = AgentState(JOB, run="r1", left_round=5, fenced=True, stopping_since_ms=NOW_MS - 22_000)
    for fenced, age_ms in ((True, 22_000), (False, 0)):
        say = commands.SayJoin("r1", 5, (), fenced=fenced)
        join = encoding.join(say, state, OFFER, NOW_MS, refuse_reuse=False)
        command = heard(pb.NodeMessage(join=join))
        assert isinstance(command, asked.Join)
        assert (command.fenced, command.fenced_age_ms) == (fenced, age_ms)


def test_a_fresh_join_names_no_round() -> None:
    say = commands.SayJoin("", None, ())
    join = encoding.join(say, AgentState(JOB), OFFER, NOW_MS, refuse_reuse=False)
    assert heard(pb.NodeMessage(join=join)) == asked.Join("n1", 12, "", SETTINGS, OFFER)


@pytest.mark.parametrize("forks", [None, False, True])
def test_a_server_without_a_running_round_says_nothing_of_zygotes(forks: bool | None) -> None:
    told = pb.ServerMessage(joined=pb.Joined(rdzv_id="job", run="r1", run_number=2, forks=forks))
    assert encoding.event(told, NOW_MS) == events.Joined("r1", 2, forks)


@pytest.mark.parametrize("left_round", [None, 0])
def test_a_node_that_leaves_a_round_prepares_nothing_that_others_wait_for(
    left_round: int | None,
) -> None:
    state = AgentState(JOB, run="r1", left_round=left_round)
    say = commands.SayJoin("r1", left_round, ())
    join = encoding.join(say, state, OFFER, NOW_MS, refuse_reuse=False, preparing=True)
    belief = encoding.belief(state, OFFER, NOW_MS, refuse_reuse=False, preparing=True)
    assert join.preparing == belief.join.preparing == (left_round is None)
    command = heard(pb.NodeMessage(join=join))
    assert isinstance(command, asked.Join)
    assert command.preparing == (left_round is None)


def test_round_0_is_a_round_that_can_be_left() -> None:
    say = commands.SayJoin("r1", 0, ())
    join = encoding.join(say, AgentState(JOB), OFFER, NOW_MS, refuse_reuse=False)
    command = heard(pb.NodeMessage(join=join))
    assert isinstance(command, asked.Join)
    assert command.left_round == 0


@pytest.mark.parametrize(
    ("say", "expected"),
    [
        (
            commands.SayFailed("r1", 5, (FAILURE, KILLED)),
            asked.Fail("n1", 12, "r1", 5, (FAILURE, REPORTED_KILL)),
        ),
        (commands.SaySucceeded("r1", 5), asked.Succeed("n1", 12, "r1", 5)),
        (
            commands.SayLeave("r1", LEAVING, None),
            asked.Leave("n1", 12, "r1", LeaveCause.SIGNAL, "its agent received SIGTERM"),
        ),
        (
            commands.SayLeave("r1", replace(LEAVING, cause=LeaveCause.START_FAILED), 0),
            asked.Leave("n1", 12, "r1", LeaveCause.START_FAILED, LEAVING.reason, left_round=0),
        ),
        (commands.SayStuck("r1", 5, (7, 8)), asked.ReportStuck("n1", 12, "r1", 5, (7, 8))),
        (
            commands.SayStoreHostFailed("r1", 5, "exit code 1"),
            asked.ReportStoreHost("n1", 12, "r1", 5, "exit code 1"),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_report_is_heard_as_it_was_said(say: commands.SayFailed, expected: asked.Command) -> None:
    assert heard(encoding.report(say, "job-7", NOW_MS)) == expected


@pytest.mark.parametrize("cause", LeaveCause)
def test_every_cause_to_leave_can_be_said(cause: LeaveCause) -> None:
    say = commands.SayLeave("r1", replace(LEAVING, cause=cause), 5)
    command = heard(encoding.report(say, "job-7", NOW_MS))
    assert isinstance(command, asked.Leave)
    assert command.cause is cause


def test_names_with_bytes_that_are_no_characters_can_be_told() -> None:
    failure = replace(FAILURE, message="no file caf\udce9", traceback="caf\udce9")
    leaving = replace(LEAVING, reason="no folder caf\udce9")
    fail = heard(encoding.report(commands.SayFailed("r1", 5, (failure,)), "job-7", NOW_MS))
    assert isinstance(fail, asked.Fail)
    assert fail.failures[0].message == r"no file caf\udce9"
    assert fail.failures[0].traceback == r"caf\udce9"
    leave = heard(encoding.report(commands.SayLeave("r1", leaving, 5), "job-7", NOW_MS))
    assert isinstance(leave, asked.Leave)
    assert leave.reason == r"no folder caf\udce9"
    say = commands.SayStoreHostFailed("r1", 5, "caf\udce9")
    store = heard(encoding.report(say, "job-7", NOW_MS))
    assert isinstance(store, asked.ReportStoreHost)
    assert store.reason == r"caf\udce9"


# ------------------------------------------------------------------ what a node believes

IN_ROUND = AgentState(JOB, run="r1", assignment=LINE, workers_gone=False)
REJOINING = AgentState(JOB, run="r1", assignment=LINE, left_round=5, failures=(FAILURE,))
REPORT_OF_ROUND = RecoveryReport(
    round=5,
    group_rank=LINE.group_rank,
    group_world_size=LINE.group_world_size,
    rank_first=LINE.rank_first,
    world_size=LINE.world_size,
    role_rank_first=LINE.role_rank_first,
    role_world_size=LINE.role_world_size,
    master_addr=LINE.master_addr,
    master_port=LINE.master_port,
    use_agent_store=LINE.use_agent_store,
    restarts=LINE.restarts,
    settings=SETTINGS,
    offer=OFFER,
)
RESUME = asked.Resume("n1", 12, "r1", 5, REPORT_OF_ROUND)
FAIL = asked.Fail("n1", 12, "r1", 5, (FAILURE,))
LEAVE = asked.Leave("n1", 12, "r1", LeaveCause.SIGNAL, LEAVING.reason)

BELIEFS = {
    "a fresh node": (AgentState(JOB), False, (asked.Join("n1", 12, "", SETTINGS, OFFER),)),
    "admitted": (
        AgentState(JOB, run="r1"),
        False,
        (asked.Join("n1", 12, "r1", SETTINGS, OFFER),),
    ),
    "rejoining": (
        REJOINING,
        False,
        (asked.Join("n1", 12, "r1", SETTINGS, OFFER, 5, (FAILURE,), recovery=REPORT_OF_ROUND),),
    ),
    "rejoining after its store host failed": (
        replace(REJOINING, store_host_failed="died"),
        False,
        (
            RESUME,
            asked.ReportStoreHost("n1", 12, "r1", 5, "died"),
            asked.Join("n1", 12, "r1", SETTINGS, OFFER, 5, (FAILURE,), recovery=REPORT_OF_ROUND),
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
}


def belief_of(state: AgentState, offer: Offer = OFFER) -> pb.Belief:
    believed = encoding.belief(state, offer, NOW_MS, refuse_reuse=False)
    return pb.Belief.FromString(believed.SerializeToString())


@pytest.mark.parametrize(("state", "has_workers", "expected"), BELIEFS.values(), ids=BELIEFS)
def test_the_server_learns_all_that_it_missed(
    state: AgentState, has_workers: bool, expected: tuple[asked.Command, ...]
) -> None:
    found = wire.belief_of(belief_of(state), SPEAKER, NOW_MS)
    assert found.commands == expected
    assert found.has_workers == has_workers
    assert (found.rdzv_id, found.run) == ("job-7", state.run)
    assert found.round == (state.assignment.round if state.assignment else None)


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED])
def test_every_phase_can_be_believed(phase: Phase) -> None:
    assert belief_of(replace(IN_ROUND, phase=phase)).phase == pb.Belief.Phase.Value(phase.name)


def test_the_round_is_told_in_full_so_that_it_can_be_adopted() -> None:
    believed = belief_of(replace(IN_ROUND, phase=Phase.RUNNING))
    assert believed.round.rdzv_id == "job-7"
    told = pb.ServerMessage(round_completed=believed.round)
    assert encoding.event(told, NOW_MS) == events.RoundCompleted(LINE)


def test_what_a_run_has_spent_is_said_back_as_old_as_it_has_become() -> None:
    spent = Spent(1, 2, 3, 4, 500)
    announced = pb.Assignment(rdzv_id="job-7", run="r1", round=5)
    write(announced.tally, Tally(spent, (30_000, 99_000)), now_ms=100_000)
    heard_of = encoding.event(pb.ServerMessage(round_completed=announced), NOW_MS)
    assert isinstance(heard_of, events.RoundCompleted)
    assert heard_of.assignment.tally == Tally(spent, (NOW_MS - 70_000, NOW_MS - 1_000))
    state = replace(IN_ROUND, assignment=heard_of.assignment, phase=Phase.RUNNING)
    believed = encoding.belief(state, OFFER, NOW_MS + 5_000, refuse_reuse=False)
    assert list(believed.round.tally.restart_ages_ms) == [75_000, 6_000]
    # A repeated announcement of the same round does not make it another round.
    assert heard_of.assignment == replace(heard_of.assignment, tally=None)


def test_an_age_beyond_all_clocks_is_no_number_that_a_store_could_not_hold() -> None:
    tally = read(Tally, pb.Tally(restart_ages_ms=[2**64 - 1]), checked=True, now_ms=5)
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

ANNOUNCED = set(field_names(Assignment)) - {"tally"}
TOLD = {
    "joined": (
        pb.ServerMessage(joined=pb.Joined(rdzv_id="job-7", run="r1", run_number=2)),
        events.Joined("r1", 2),
    ),
    "round_completed": (
        pb.ServerMessage(
            round_completed=pb.Assignment(
                rdzv_id="job-7",
                **{name: getattr(LINE, name) for name in ANNOUNCED},
            )
        ),
        events.RoundCompleted(LINE),
    ),
    "snapshot_watermark": (
        pb.ServerMessage(
            snapshot_watermark=pb.SnapshotWatermark(
                rdzv_id="job-7",
                run="r1",
                mark=pb.SnapshotMark(lineage=3, step=40, series="3.a", shards=2, world_size=4),
                whole_ms=7_000,
                given_up=pb.SnapshotMark(lineage=3, step=60, series="3.a", shards=2, world_size=4),
            )
        ),
        events.SnapshotWatermark(
            "r1", SnapshotMark(3, 40, "3.a", 2, 4), 7_000, SnapshotMark(3, 60, "3.a", 2, 4)
        ),
    ),
    "keep_copies": (
        pb.ServerMessage(
            keep_copies=pb.KeepCopies(
                rdzv_id="job-7",
                run="r1",
                mark=pb.SnapshotMark(lineage=3, step=40, series="3.a", shards=2, world_size=4),
                sources=[pb.CopySource(node_id="n2", address="h2", port=7_000, token="secret")],
            )
        ),
        events.CopiesWanted(
            "r1",
            SnapshotMark(3, 40, "3.a", 2, 4),
            (CopySource("n2", "h2", 7_000, "secret", ()),),
        ),
    ),
    "round_ended": (
        pb.ServerMessage(
            round_ended=pb.RoundOver(
                rdzv_id="job-7", run="r1", round=5, cause=pb.NODE_LOST, reason="why", broken=True
            )
        ),
        events.RoundEnded("r1", 5, Cause.NODE_LOST, "why", broken=True),
    ),
    "closed": (
        pb.ServerMessage(
            closed=pb.Closed(
                rdzv_id="job-7",
                run="r1",
                result=pb.RESULT_FAILED,
                reason="why",
                retry_sensible=True,
                failures=[
                    pb.WorkerFailure(
                        node_id="n2",
                        address="10.0.0.2",
                        local_rank=0,
                        rank=8,
                        pid=7,
                        exit_code=0,
                        message="m",
                        traceback="t",
                    ),
                    pb.WorkerFailure(node_id="n3", signal=9),
                ],
            )
        ),
        events.RunClosed(
            "r1",
            Result.FAILED,
            "why",
            True,
            (
                Failure(0, 8, 7, 0, None, "m", "t", NOW_MS, node_id="n2", address="10.0.0.2"),
                Failure(0, 0, 0, None, 9, "", "", NOW_MS, node_id="n3"),
            ),
        ),
    ),
    "refused": (
        pb.ServerMessage(refused=pb.Refused(rdzv_id="job-7", code="X", message="why")),
        events.Refused("X", "why"),
    ),
    "waiting": (pb.ServerMessage(waiting=pb.Waiting(rdzv_id="job-7", reason="why")), None),
    "welcome": (pb.ServerMessage(welcome=pb.Welcome(incarnation=1)), None),
    "servers": (pb.ServerMessage(servers=pb.Servers(addresses=["b:1"])), None),
    "heard": (pb.ServerMessage(heard=pb.Heard(number=7)), None),
    "read_log": (pb.ServerMessage(read_log=pb.ReadLog(request=5, rdzv_id="job-7")), None),
    "stop_log": (pb.ServerMessage(stop_log=pb.StopLog(request=5)), None),
    # These are for the object that accepts jobs, which may have no driver for this one (any more).
    "placed": (pb.ServerMessage(placed=pb.Placed(rdzv_id="job-7", run="r1")), None),
    "withdrawn": (pb.ServerMessage(withdrawn=pb.Withdrawn(rdzv_id="job-7", run="r1")), None),
    "look_again": (pb.ServerMessage(look_again=pb.LookAgain()), None),
    "lease": (pb.ServerMessage(lease=pb.Lease(lease_ms=5_000)), None),
    "take_stacks": (pb.ServerMessage(take_stacks=pb.TakeStacks(rdzv_id="job-7")), None),
    # These concern the node, whatever jobs it has.
    "drain": (pb.ServerMessage(drain=pb.DrainNode(left_ms=5, reason="why", number=7)), None),
    "undrain": (pb.ServerMessage(undrain=pb.UndrainNode()), None),
}


@pytest.mark.parametrize(("message", "expected"), TOLD.values(), ids=TOLD)
def test_what_the_server_says_becomes_an_event(
    message: pb.ServerMessage, expected: events.Event | None
) -> None:
    message = pb.ServerMessage.FromString(message.SerializeToString())
    assert encoding.event(message, NOW_MS) == expected
    of_the_node = {"welcome", "servers", "heard", "lease", "stop_log"}
    of_the_node |= {"look_again", "drain", "undrain"}
    about_the_node = message.WhichOneof("body") in of_the_node
    assert encoding.rdzv_id_of(message) == ("" if about_the_node else "job-7")


def test_every_message_of_the_server_is_known() -> None:
    (body,) = pb.ServerMessage.DESCRIPTOR.oneofs
    assert {field.name for field in body.fields} == set(TOLD)


def test_what_was_submitted_arrives_whole() -> None:
    message = pb.Placed(
        rdzv_id="job-7",
        run="r1",
        spec=pb.JobSpec(
            args=["--nnodes=2", "train.py", "--lr=1"],
            env=[pb.EnvironmentVariable(name="A", value="1")],
            chdir="/srv",
            labels=[pb.Label(name="gpu", value="h100")],
            priority=-3,
            gpus_per_node=0,
            local_world_size=4,
        ),
    )
    spec = JobSpec(
        args=("--nnodes=2", "train.py", "--lr=1"),
        env=(("A", "1"),),
        chdir="/srv",
        labels=(("gpu", "h100"),),
        priority=-3,
        gpus_per_node=0,
        local_world_size=4,
    )
    assert read(Placed, message) == Placed("job-7", "r1", spec)
    message.spec.ClearField("gpus_per_node")
    assert read(Placed, message).spec.gpus_per_node is None


def test_what_a_node_has_and_holds_is_said_in_full() -> None:
    has = Resources(8, 64, (Gpu("GPU-a", "H100", 80),), (("gpu", "h100"),), 2, "rack-1")
    assert write(pb.Resources(), has) == pb.Resources(
        cpus=8,
        memory_bytes=64,
        gpus=[pb.Gpu(uuid="GPU-a", name="H100", memory_bytes=80)],
        labels=[pb.Label(name="gpu", value="h100")],
        capacity=2,
        topology="rack-1",
    )
    assert encoding.holdings([Holding("job-7", "r1", 4)]) == pb.Holdings(
        holdings=[pb.Holding(rdzv_id="job-7", run="r1", gpus=4)]
    )
    declined = encoding.declined("job-7", "r1", "no folder \udcff").declined
    assert declined == pb.Declined(rdzv_id="job-7", run="r1", reason="no folder \\udcff")


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_of_an_end_is_understood(cause: Cause) -> None:
    told = pb.ServerMessage(round_ended=pb.RoundOver(cause=pb.Cause.Value(cause.name)))
    event = encoding.event(told, NOW_MS)
    assert isinstance(event, events.RoundEnded)
    assert event.cause is cause


@pytest.mark.parametrize("result", Result)
def test_every_result_is_understood(result: Result) -> None:
    told = pb.ServerMessage(closed=pb.Closed(result=pb.Result.Value(f"RESULT_{result.name}")))
    event = encoding.event(told, NOW_MS)
    assert isinstance(event, events.RunClosed)
    assert event.result is result


def test_the_unheard_of_is_no_obstacle() -> None:
    assert encoding.event(pb.ServerMessage(), NOW_MS) is None
    assert encoding.rdzv_id_of(pb.ServerMessage()) == ""
    odd = pb.RoundOver(cause=4711, reason="new")  # type: ignore[arg-type]
    event = encoding.event(pb.ServerMessage(round_ended=odd), NOW_MS)
    assert isinstance(event, events.RoundEnded)
    assert event.reason == "new"
    closed = encoding.event(pb.ServerMessage(closed=pb.Closed()), NOW_MS)
    assert isinstance(closed, events.RunClosed)
    assert closed.result is Result.FAILED


def test_a_crowd_of_suspects_never_hides_the_failure() -> None:
    crowd = tuple(replace(FAILURE, local_rank=n, at_ms=n, suspect=True) for n in range(2, 99))
    said = commands.SayFailed("r1", 5, (*crowd, FAILURE))
    reported = encoding.report(said, "job-7", NOW_MS).failed.failures
    assert len(reported) == MAX_FAILURES
    assert [one.suspect for one in reported[:2]] == [False, True]
