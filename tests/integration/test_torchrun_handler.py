"""The plug-in for torch's own agent, with a server that says what the test wants."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from builders import Job, running
from tls_files import Files
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils import store as store_util

from rdzv import errors
from rdzv.client import ControlClient, Endpoint
from rdzv.core.model import JobState, LeaveCause, ScaleUp, Settings
from rdzv.errors import SettingsMismatchError
from rdzv.server import wire
from rdzv.structs import replace
from rdzv.torchrun import handler as handler_module
from rdzv.torchrun import plugin, plugin_options
from rdzv.torchrun.conversation import Talk
from rdzv.torchrun.handler import RdzvHandler
from rdzv.torchrun.plugin_options import KEYS, PluginOptions, read_options
from rdzv.torchrun.round_store import EXIT_BARRIER
from rdzv.torchrun.signals import watch_signals
from rdzv.torchrun.sync_stream import NodeStream
from rdzv.transport import grpc_forks
from rdzv.transport.channels import PLAIN, Credentials
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.v1.rdzv_pb2_grpc import RendezvousServicer, add_RendezvousServicer_to_server

RUN = "run-1"
UNCOUNTED = Settings(2, 3, max_restarts=None, last_call_timeout_ms=5_000)


# ------------------------------------------------------------------ the command line


def params(
    run_id: str = "job-7", endpoint: str = "127.0.0.1:1", **conf: Any
) -> RendezvousParameters:
    # `LaunchConfig` always includes this one.
    conf.setdefault("timeout", 900)
    return RendezvousParameters("rdzv", endpoint, run_id, 2, 4, **conf)


def test_torch_finds_the_plug_in_and_makes_its_handler() -> None:
    (entry,) = [e for e in entry_points(group="torchrun.handlers") if e.name == "rdzv"]
    assert entry.load() is plugin
    made = rendezvous_handler_registry.create_handler(params())
    assert (made.get_backend(), made.get_run_id()) == ("rdzv", "job-7")
    assert made.shutdown(), "one that has never joined has nothing to say"


def test_the_defaults_are_torchruns() -> None:
    options = read_options(params(endpoint="head,[::1]:7"))
    assert options.settings == Settings(2, 4, None, 600_000, 30_000, ScaleUp.EAGER)
    assert [str(endpoint) for endpoint in options.endpoints] == ["head:29400", "[::1]:7"]
    assert options.node_id.startswith(f"{socket.gethostname()}-{os.getpid()}")
    assert (options.local_world_size, options.refuse_reuse) == (1, False)


def test_every_handler_of_a_process_is_a_node_of_its_own() -> None:
    names = [read_options(params()).node_id for _ in range(3)]
    assert len(set(names)) == 3
    assert read_options(params(node_id="n1")).node_id == "n1"


def test_it_connects_with_the_credentials_of_rdzv_conf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tmp_path / "certs")
    node = files.node("n1")
    monkeypatch.setenv("RDZV_TOKEN", "abc")
    conf = {"tls_ca": node.ca, "tls_cert": node.cert, "tls_key": node.key}
    assert read_options(params(**conf)).credentials == replace(node, token="abc")
    with pytest.raises(ValueError, match=r"CA .*none cannot be used"):
        read_options(params(tls_ca=str(tmp_path / "none")))


def talk_to(port: int, credentials: Credentials = PLAIN) -> Talk:
    """Return what a node says to a server at this port; it has not joined."""
    at = (Endpoint("127.0.0.1", port),)
    return Talk(PluginOptions("job-7", "n1", at, UNCOUNTED, credentials, local_addr="10.0.0.1"))


class Listening(RendezvousServicer):
    """Hears Hellos, and ends each stream after its first message."""

    def __init__(self) -> None:
        self.hellos: queue.SimpleQueue[pb.Hello] = queue.SimpleQueue()

    def Attach(  # noqa: N802
        self, request_iterator: Iterator[pb.NodeMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.ServerMessage]:
        for message in request_iterator:
            self.hellos.put(message.hello)
            return
        yield pb.ServerMessage()


def test_its_address_is_that_of_the_connection_that_carries_the_hello(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was chosen once, before the network was there: loopback, or a name nobody else knew."""
    asked: list[str] = []

    def place(server: Endpoint) -> str:
        asked.append(str(server))
        if len(asked) == 1:
            raise errors.RendezvousConnectionError("cannot tell this node's address")
        return f"10.0.0.{len(asked)}"

    served, server = Listening(), grpc.server(ThreadPoolExecutor(4))
    add_RendezvousServicer_to_server(served, server)
    talk = talk_to(server.add_insecure_port("127.0.0.1:0"))
    monkeypatch.setattr(talk, "place", place)
    stream = NodeStream(talk)
    server.start()
    stream.open()
    try:
        heard = [served.hellos.get(timeout=60).address for _ in range(2)]
        assert heard == ["10.0.0.2", "10.0.0.3"]
    finally:
        stream.close(60)
        server.stop(None).wait()


def test_everything_in_rdzv_conf_has_its_effect() -> None:
    options = read_options(
        params(
            join_timeout="1.5",
            last_call_timeout="0",
            close_timeout="7",
            read_timeout="8",
            scale_up="on-restart",
            reuse="false",
            node_id="n1",
            topology="rack 1",
        )
    )
    assert options.settings == Settings(2, 4, None, 1_500, 0, ScaleUp.ON_RESTART)
    assert (options.close_timeout_s, options.read_timeout_s) == (7, 8)
    assert (options.refuse_reuse, options.node_id, options.topology) == (True, "n1", "rack 1")


def test_unknown_keys_are_warned_of_with_the_known_ones(caplog: pytest.LogCaptureFixture) -> None:
    read_options(params())
    assert not caplog.records
    read_options(params(keep_alive_interval="5", timeout="60"))
    texts = [record.getMessage() for record in caplog.records]
    assert [text.split(";")[0] for text in texts] == [
        "--rdzv-conf: ignoring unknown key keep_alive_interval",
        "--rdzv-conf: ignoring unknown key timeout",
    ]
    assert ", ".join(KEYS) in texts[0]
    assert texts[1].endswith("; did you mean `join_timeout`?")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run_id": "none"}, "--rdzv-id is missing"),
        ({"endpoint": ""}, "--rdzv-endpoint is missing"),
        ({"endpoint": "a:b"}, "'b' is not a port"),
        ({"join_timeout": "soon"}, "join_timeout=soon: give a number of seconds"),
        ({"join_timeout": "-1"}, "join_timeout=-1: give a number of seconds"),
        ({"read_timeout": "nan"}, "read_timeout=nan: give a number of seconds"),
        ({"reuse": "maybe"}, "reuse=maybe is not true or false"),
        ({"scale_up": "never"}, "scale_up=never is not one of eager, on-restart"),
        ({"scale_up": "after"}, "scale_up=after is not one of .*after:SECONDS"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(params(**given))


# ------------------------------------------------------------------ a job that torch restarts


def end_with_failure(job: Job, node_id: str) -> None:
    job.fail(node_id)
    job.leave(node_id, job.round.number, LeaveCause.FAILED, "rank 0 failed")


def test_the_failure_that_ends_a_torchrun_ends_the_job_once_the_others_have_stopped() -> None:
    job = running("n1", "n2", settings=UNCOUNTED)
    end_with_failure(job, "n1")
    assert job.job_state is JobState.STOPPING
    job.stopped("n2")
    assert job.job_state is JobState.FAILED
    assert "worker failure: rank 0" in job.reason
    assert "the node's own agent restarts no more" in job.reason


def test_a_torchrun_that_failed_because_a_node_was_lost_does_not_end_the_job() -> None:
    job = running("n1", "n2", "n3", settings=Settings(1, 3, max_restarts=None))
    end_with_failure(job, "n1")
    job.lost("n2")
    job.stopped("n3")
    assert (job.job_state, job.seated) == (JobState.RUNNING, ["n3"])


def test_a_job_is_launched_by_torchrun_or_by_rdzvrun_not_both() -> None:
    job = running("n1", "n2", settings=UNCOUNTED)
    with pytest.raises(SettingsMismatchError, match=r"max_restarts is 0 here and left to each"):
        job.join("n3", settings=replace(UNCOUNTED, max_restarts=0))


def test_settings_without_a_count_of_restarts_travel_as_such() -> None:
    talk = talk_to(9)
    talk.join()
    talk.store_socket.release()
    message = pb.NodeMessage(join=talk.beliefs()[0].join)
    speaker = wire.Speaker("n1", 1)
    _, command = wire.command_of(message, speaker, 0)
    assert getattr(command, "settings") == UNCOUNTED  # noqa: B009


# ------------------------------------------------------------------ a server that obeys the test


class FakeStream:
    """Records the messages, and answers a join if `answer` has a line for it."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.said: list[pb.NodeMessage] = []
        self.answers: list[pb.ServerMessage] = []
        self.apart_since_s: float | None = None
        self.trouble = "connection refused"
        self.hung_up = False

    def open(self) -> None:
        self.talk.place(self.talk.options.endpoints[0])
        for belief in self.talk.beliefs():
            self.say(pb.NodeMessage(join=belief.join))

    def say(self, message: pb.NodeMessage) -> None:
        self.said.append(message)
        if message.HasField("join") and self.answers:
            answer = self.answers.pop(0)
            if answer.HasField("round_completed") and not answer.round_completed.master_port:
                answer.round_completed.master_port = message.join.offer.store_port
            threading.Timer(0.01, self.tell, [answer]).start()

    def tell(self, message: pb.ServerMessage) -> None:
        with self.talk.news:
            self.talk.hear(message)
            self.talk.news.notify_all()

    def close(self, within_s: float, *, wait: bool = True) -> None:
        self.hung_up = True

    @property
    def bodies(self) -> list[str]:
        return [str(message.WhichOneof("body")) for message in self.said]


def line(number: int, group_rank: int = 0, nodes: int = 1, port: int = 0) -> pb.ServerMessage:
    completed = pb.Assignment(
        rdzv_id="job-7",
        run=RUN,
        round=number,
        group_rank=group_rank,
        group_world_size=nodes,
        master_addr="127.0.0.1",
        master_port=port,
        use_agent_store=True,
    )
    return pb.ServerMessage(round_completed=completed)


def round_ended(number: int) -> pb.ServerMessage:
    ended = pb.RoundOver(
        rdzv_id="job-7", run=RUN, round=number, cause=pb.NODE_LOST, reason="n2: lease expired"
    )
    return pb.ServerMessage(round_ended=ended)


def closed(result: pb.Result.ValueType, *, retry_sensible: bool = False) -> pb.ServerMessage:
    said = pb.Closed(
        rdzv_id="job-7", run=RUN, result=result, reason="why", retry_sensible=retry_sensible
    )
    return pb.ServerMessage(closed=said)


class Torchrun:
    """A handler, and the stream that it opens."""

    def __init__(self, *answers: pb.ServerMessage, **options: Any) -> None:
        self._answers = list(answers)
        self.streams: list[FakeStream] = []
        given = {"settings": UNCOUNTED, "close_timeout_s": 0.2, "read_timeout_s": 5.0, **options}
        read = read_options(params())
        self.handler = RdzvHandler(PluginOptions("job-7", "n1", read.endpoints, **given))

    def make_stream(self, talk: Talk) -> FakeStream:
        stream = FakeStream(talk)
        stream.answers = self._answers
        self.streams.append(stream)
        return stream

    @property
    def stream(self) -> FakeStream:
        return self.streams[0]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Torchrun]]:
    """Create handlers that talk to a `FakeStream`; in the end they disconnect."""
    # A handler sets it for the workers of its torchrun; here it must be gone afterwards.
    monkeypatch.setenv("RDZV_ROUND", "")
    monkeypatch.delenv("RDZV_ROUND")
    runs: list[Torchrun] = []

    def make(*answers: pb.ServerMessage, **options: Any) -> Torchrun:
        run = Torchrun(*answers, **options)
        monkeypatch.setattr(handler_module, "NodeStream", run.make_stream)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.handler.shutdown()


Made = Callable[..., Torchrun]


# ------------------------------------------------------------------ rounds


def test_a_round_is_met_in_a_fresh_store_and_left_by_name(made: Made) -> None:
    run = made(line(4), line(5))
    first = run.handler.next_rendezvous()
    assert (first.rank, first.world_size) == (0, 1)
    assert os.environ["RDZV_ROUND"] == "4"
    where = first.bootstrap_store_info
    assert where is not None
    worker = TCPStore("127.0.0.1", where.master_port, is_master=False, wait_for_workers=False)
    worker.set("key", "of the first attempt")

    second = run.handler.next_rendezvous()
    again = second.bootstrap_store_info
    assert again is not None
    assert again.master_port != where.master_port
    worker = TCPStore("127.0.0.1", again.master_port, is_master=False, wait_for_workers=False)
    assert not worker.check(["key"])
    joins = [message.join for message in run.stream.said]
    assert [join.HasField("left_round") for join in joins] == [False, True]
    assert (joins[1].left_round, joins[1].run) == (4, RUN)


def test_agents_and_workers_do_not_meet_each_others_keys(made: Made) -> None:
    info = made(line(0)).handler.next_rendezvous()
    where = info.bootstrap_store_info
    assert where is not None
    info.store.set("key", "of the agent")
    worker = TCPStore("127.0.0.1", where.master_port, is_master=False, wait_for_workers=False)
    assert not worker.check(["key"])
    assert info.store.multi_get(["key"]) == [b"of the agent"]


def test_workers_are_to_be_restarted_once_the_server_has_ended_the_round(made: Made) -> None:
    run = made(line(0))
    run.handler.next_rendezvous()
    assert run.handler.num_nodes_waiting() == 0
    run.stream.tell(round_ended(7))
    assert run.handler.num_nodes_waiting() == 0, "that was another round"
    run.stream.tell(round_ended(0))
    assert run.handler.num_nodes_waiting() > 0
    run.stream.answers.append(line(1))
    run.handler.next_rendezvous()
    assert run.handler.num_nodes_waiting() == 0


def test_a_round_that_ends_before_all_have_met_is_left_for_the_next(made: Made) -> None:
    """The other node is lost before it has come to the store."""
    run = made(line(0, nodes=2), line(1))
    threading.Timer(0.3, lambda: run.stream.tell(round_ended(0))).start()
    info = run.handler.next_rendezvous()
    assert info.world_size == 1
    assert run.stream.bodies == ["join", "join"]


def test_a_store_that_nobody_serves_is_reported_or_given_up(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_module, "EXPLAIN_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        run = made(line(0, group_rank=1, nodes=2, port=port), read_timeout_s=0.2)
        with pytest.raises(RendezvousConnectionError, match=f"in the store at 127.0.0.1:{port}"):
            run.handler.next_rendezvous()
    host = made(line(0, nodes=2), read_timeout_s=0.2)
    with pytest.raises(RendezvousConnectionError, match="did not meet in the store"):
        host.handler.next_rendezvous()
    assert host.stream.bodies == ["join", "store_host_failed"]


def test_what_the_server_has_lost_is_said_again(made: Made) -> None:
    run = made(line(3))
    run.handler.next_rendezvous()
    (belief,) = run.stream.talk.beliefs()
    assert (belief.phase, belief.round.round) == (pb.Belief.RUNNING, 3)
    assert wire.belief_of(belief, wire.Speaker("n1", 1), 0).round == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (closed(pb.RESULT_FAILED), RendezvousClosedError),
        (closed(pb.RESULT_STOPPED), RendezvousClosedError),
        (closed(pb.RESULT_FAILED, retry_sensible=True), RendezvousTimeoutError),
        (closed(pb.RESULT_SUCCEEDED), SystemExit),
        (pb.ServerMessage(refused=pb.Refused(code="SettingsMismatchError")), RendezvousError),
        (pb.ServerMessage(refused=pb.Refused(code="RendezvousClosedError")), RendezvousClosedError),
    ],
)
def test_a_spare_ends_as_the_job_does(
    made: Made, answer: pb.ServerMessage, error: type[BaseException]
) -> None:
    run = made(answer)
    with pytest.raises(error) as raised:
        run.handler.next_rendezvous()
    assert run.handler.is_closed()
    assert not isinstance(raised.value, SystemExit) or raised.value.code == 0
    run.handler.shutdown()
    assert run.stream.bodies == ["join"], "there is nothing left to say"


def test_without_a_server_it_gives_up_after_join_timeout(made: Made) -> None:
    run = made(settings=Settings(1, 1, None, join_timeout_ms=50))
    threading.Timer(0.02, lambda: setattr(run.stream, "apart_since_s", time.monotonic())).start()
    with pytest.raises(RendezvousConnectionError, match="connection refused"):
        run.handler.next_rendezvous()


def test_who_joins_again_waits_for_a_server_from_then_on(made: Made) -> None:
    """The server has been away for longer than join_timeout, and this node's workers ran on."""
    run = made(line(0), settings=Settings(1, 1, None, join_timeout_ms=200))
    run.handler.next_rendezvous()
    run.stream.apart_since_s = time.monotonic() - 1000
    began_s = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match=r"no server for 0.2 s \(join_timeout\)"):
        run.handler.next_rendezvous()
    assert time.monotonic() - began_s >= 0.2


UNKNOWN = errors.UnknownJobError("no job-7")


@pytest.mark.parametrize(
    ("joined", "answers", "expected"),
    [
        (False, [("r1", False), ("r1", True)], [False, True, True]),
        (False, [("r1", True), ("r1", True), ("r2", False), ("r2", True)], [False] * 3 + [True]),
        (False, [UNKNOWN, ("r1", False), UNKNOWN, ("r2", False)], [False] * 3 + [True] * 2),
        (True, [UNKNOWN, (RUN, False), (RUN, True)], [False, False, True, True]),
        (True, [("r2", False)], [True, True]),
    ],
)
def test_a_run_counts_as_closed_if_this_node_knew_it_open(
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    joined: bool,
    answers: list[Any],
    expected: list[bool],
) -> None:
    """However late an answer is: it was once compared by its age, and a fresh close looked old."""
    run = made(line(0))
    if joined:
        run.handler.next_rendezvous()
    given = iter(answers)

    def status(_: ControlClient, rdzv_id: str) -> SimpleNamespace:
        assert rdzv_id == "job-7"
        answer = next(given)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(run=answer[0], closed=answer[1])

    monkeypatch.setattr(ControlClient, "status", status)
    assert [run.handler.is_closed() for _ in expected] == expected


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (errors.RendezvousConnectionError("no answer"), RendezvousConnectionError),
        (errors.UnauthenticatedError("no token"), RendezvousError),
    ],
)
def test_what_cannot_be_asked_is_not_told_as_open_or_closed(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error

    handler = RdzvHandler(read_options(params()))
    with monkeypatch.context() as patched:
        patched.setattr(ControlClient, "status", fail)
        for call in (handler.is_closed, handler.set_closed, handler.is_closed):
            with pytest.raises(raised, match=str(error)):
                call()
    monkeypatch.setattr(ControlClient, "status", lambda *_: SimpleNamespace(run="r", closed=False))
    assert not handler.is_closed()
    with pytest.raises(RendezvousConnectionError, match=r"cannot reach rdzvd at 127\.0\.0\.1:1"):
        handler.set_closed()


def test_forked_workers_are_warned_of_if_grpc_was_imported_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warned(too_late: bool, method: str) -> bool:
        caplog.clear()
        launch = SimpleNamespace(start_method=method, nproc_per_node=1, role="default")
        monkeypatch.setattr(grpc_forks, "TOO_LATE", too_late)
        monkeypatch.setattr(plugin_options, "launch_config", lambda: launch)
        read_options(params())
        return "set GRPC_ENABLE_FORK_SUPPORT=0 before gRPC is imported" in caplog.text

    assert warned(True, "fork")
    assert not warned(True, "spawn")
    assert not warned(False, "fork")


# ------------------------------------------------------------------ its stream


class Scripted(RendezvousServicer):
    """A server that does to each stream what the test says: `script` yields the answers."""

    def __init__(self, script: Callable[[Iterator[pb.NodeMessage]], Iterator[Any]]) -> None:
        self._script = script

    def Attach(self, request_iterator: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        for answer in self._script(request_iterator):
            if not context.is_active():
                return
            yield answer


@contextlib.contextmanager
def serving(
    script: Callable[[Iterator[pb.NodeMessage]], Iterator[pb.ServerMessage]],
) -> Iterator[Callable[[], int]]:
    """Start the server when the port is requested a second time; the first only chooses it."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_RendezvousServicer_to_server(Scripted(script), server)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = False

    def start() -> int:
        nonlocal started
        if started:
            server.add_insecure_port(f"127.0.0.1:{port}")
            server.start()
        started = True
        return port

    try:
        yield start
    finally:
        server.stop(None).wait()


WELCOME = pb.ServerMessage(
    leadership=1, welcome=pb.Welcome(incarnation=1, heartbeat_interval_ms=60_000)
)


def of_leader(message: pb.ServerMessage) -> pb.ServerMessage:
    message.leadership = 1
    return message


# ------------------------------------------------------------------ the end


def test_success_is_told_and_the_other_nodes_are_waited_for(made: Made) -> None:
    run = made(line(0), close_timeout_s=600)
    run.handler.next_rendezvous()
    threading.Timer(0.1, lambda: run.stream.tell(closed(pb.RESULT_SUCCEEDED))).start()
    began_s = time.monotonic()
    run.handler.shutdown()
    assert 0.05 < time.monotonic() - began_s < 300
    assert run.stream.bodies == ["join", "succeeded"]
    assert run.stream.hung_up


def test_success_is_told_when_torch_enters_its_exit_barrier(made: Made) -> None:
    run = made(line(0))
    info = run.handler.next_rendezvous()
    store_util.barrier(info.store, 1, EXIT_BARRIER, barrier_timeout=5)
    assert run.stream.bodies == ["join", "succeeded"]
    assert run.stream.talk.beliefs()[0].phase == pb.Belief.SUCCEEDED


def test_nobody_waits_in_the_exit_barrier_of_a_round_that_is_over(made: Made) -> None:
    """A peer failed after this node's success; torch cannot start these workers again."""
    run = made(line(0))
    info = run.handler.next_rendezvous()
    threading.Timer(0.1, lambda: run.stream.tell(round_ended(0))).start()
    with pytest.raises(RuntimeError, match="the round is over"):
        store_util.barrier(info.store, 2, EXIT_BARRIER, barrier_timeout=60)
    run.handler.shutdown()
    assert run.stream.bodies == ["join", "succeeded", "leave"]
    assert run.stream.said[-1].leave.left_round == 0


@pytest.mark.parametrize("ask", ["get", "multi_get"])
def test_nobody_waits_for_a_value_in_a_round_that_is_over(made: Made, ask: str) -> None:
    run = made(line(0))
    store = run.handler.next_rendezvous().store
    store.set("there", "yes")
    assert (store.get("there"), store.multi_get(["there"])) == (b"yes", [b"yes"])
    threading.Timer(0.1, lambda: run.stream.tell(round_ended(0))).start()
    with pytest.raises(RuntimeError, match="the round is over"):
        getattr(store, ask)("never" if ask == "get" else ["there", "never"])


def test_the_exit_barrier_keeps_its_own_timeout(made: Made) -> None:
    info = made(line(0)).handler.next_rendezvous()
    with pytest.raises(RuntimeError, match="timeout"):
        info.store.wait(["never"], timedelta(seconds=0.3))


def child_failed() -> ChildFailedError:
    failures = {
        3: ProcessFailure(local_rank=1, pid=11, exitcode=-signal.SIGKILL, error_file="none"),
        2: ProcessFailure(local_rank=0, pid=10, exitcode=-signal.SIGTERM, error_file="none"),
    }
    failures[3].timestamp -= 2
    return ChildFailedError("train.py", failures)


def end_with(run: Torchrun, error: BaseException) -> pb.Leave:
    """Like `launch_agent`, call `shutdown` in a `finally` block."""
    with pytest.raises(type(error)):
        try:
            raise error
        finally:
            run.handler.shutdown()
    return run.stream.said[-1].leave


def test_the_failure_that_ends_a_torchrun_is_told_without_the_workers_it_stopped(
    made: Made,
) -> None:
    run = made(line(0))
    run.handler.next_rendezvous()
    leave = end_with(run, child_failed())
    assert run.stream.bodies == ["join", "failed", "leave"]
    (failure,) = run.stream.said[1].failed.failures
    assert (failure.rank, failure.local_rank, failure.signal) == (3, 1, signal.SIGKILL)
    assert 1_500 < failure.age_ms < 10_000
    assert (leave.cause, leave.left_round) == (pb.Leave.FAILED, 0)
    assert leave.reason == "rank 3 failed (exit code -9), and no restart is left"


@pytest.mark.parametrize(
    ("error", "cause", "reason"),
    [
        (KeyboardInterrupt(), pb.Leave.SIGNAL, "KeyboardInterrupt"),
        (FileNotFoundError(2, "no such file"), pb.Leave.START_FAILED, "FileNotFoundError: "),
        (RendezvousConnectionError("no server"), pb.Leave.TIMEOUT, "no server"),
    ],
)
def test_whatever_else_ends_a_torchrun_makes_it_leave_with_the_reason(
    made: Made, error: BaseException, cause: int, reason: str
) -> None:
    run = made(line(0))
    run.handler.next_rendezvous()
    leave = end_with(run, error)
    assert run.stream.bodies == ["join", "leave"]
    assert (leave.cause, leave.left_round) == (cause, 0)
    assert leave.reason.startswith(reason)


def test_a_signal_makes_it_leave_at_once_and_again_when_the_workers_are_gone(made: Made) -> None:
    run = made(line(0))
    run.handler.next_rendezvous()
    run.handler.talk.on_signal(signal.SIGTERM)
    assert not run.stream.said[-1].leave.HasField("left_round")
    (belief,) = run.stream.talk.beliefs()
    assert belief.phase == pb.Belief.LEAVING
    run.handler.talk.at_exit()
    leaves = [message.leave for message in run.stream.said[1:]]
    assert [leave.reason for leave in leaves] == ["received SIGTERM"] * 2
    assert leaves[1].left_round == 0
    assert run.stream.hung_up


def test_a_signal_that_torchs_agent_has_missed_ends_it_at_its_next_question(made: Made) -> None:
    run = made(line(0))
    run.handler.next_rendezvous()
    assert run.handler.num_nodes_waiting() == 0
    run.handler.talk.on_signal(signal.SIGTERM)
    assert run.handler.num_nodes_waiting() == 1
    with pytest.raises(SignalException, match="received SIGTERM") as raised:
        run.handler.next_rendezvous()
    assert raised.value.sigval is signal.SIGTERM
    assert run.stream.bodies == ["join", "leave"]


def test_a_signal_that_is_missed_while_it_waits_for_a_round_ends_it_too(made: Made) -> None:
    run = made()
    threading.Timer(0.1, lambda: run.handler.talk.on_signal(signal.SIGTERM)).start()
    with pytest.raises(SignalException, match="received SIGTERM"):
        run.handler.next_rendezvous()
    assert run.stream.bodies == ["join", "leave"]


def test_the_signals_that_end_torchrun_are_noticed_beside_its_own_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1,SIGNONSENSE")
    noticed: list[signal.Signals] = []
    former = {n: signal.signal(n, lambda *_: None) for n in (signal.SIGUSR1, signal.SIGUSR2)}
    stop = watch_signals(noticed.append)
    try:
        for signum in former:
            os.kill(os.getpid(), signum)
        deadline_s = time.monotonic() + 5
        while not noticed and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert noticed == [signal.SIGUSR1]
        watch_signals(noticed.append)()
        assert signal.set_wakeup_fd(-1) != -1, "a second watch has ended the first"
    finally:
        stop()
        for signum, action in former.items():
            signal.signal(signum, action)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_the_signals_of_a_fork_are_not_those_of_its_parent() -> None:
    noticed: list[signal.Signals] = []
    former = signal.signal(signal.SIGTERM, lambda *_: None)
    stop = watch_signals(noticed.append)
    try:
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        (watching,) = (t for t in threading.enumerate() if t.name == "rdzv-signals")
    finally:
        stop()
        signal.signal(signal.SIGTERM, former)
    watching.join(60)
    assert noticed == []


def test_a_watch_that_is_interrupted_as_it_begins_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []

    def start(thread: threading.Thread, start: Any = threading.Thread.start) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", start)
        watch_signals(lambda _: None)
    started[0].join(60)
    assert not started[0].is_alive()
    assert signal.set_wakeup_fd(-1) == -1


def test_a_stream_that_was_interrupted_before_it_opened_is_closed_all_the_same() -> None:
    stream = NodeStream(talk_to(1))
    stream.close(60)


def pipes() -> set[str]:
    """Return the pipes of this process, by unique names."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))  # noqa: PTH115
    return {name for name in found if name.startswith("pipe:")}


def test_a_pipe_is_closed_only_when_its_watch_reads_from_it_no_more() -> None:
    """A watch that is busy with a signal notices late that it was told to end."""
    busy, gate = threading.Event(), threading.Event()

    def on_signal(_: signal.Signals) -> None:
        busy.set()
        assert gate.wait(60)

    former = signal.signal(signal.SIGUSR1, lambda *_: None)
    former_pipes = pipes()
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1")
            patched.setattr("rdzv.torchrun.signals.LEFT_WITHIN_S", 60)
            first = watch_signals(on_signal)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert busy.wait(60)
            with ThreadPoolExecutor(1) as other:
                other.submit(first).result()
            late = threading.Timer(0.1, gate.set)
            late.start()
            watch_signals(lambda _: None)()
            late.join()
    finally:
        signal.signal(signal.SIGUSR1, former)
    for thread in threading.enumerate():
        if thread.name == "rdzv-signals":
            thread.join(60)
    assert pipes() <= former_pipes


def test_a_watch_that_is_being_ended_in_another_thread_is_replaced() -> None:
    """The data that ends it may not have been written yet."""
    begun, write = threading.Event(), os.write

    def write_late(fd: int, data: bytes) -> int:
        begun.set()
        time.sleep(0.2)
        return write(fd, data)

    former_pipes = pipes()
    first = watch_signals(lambda _: None)
    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(1) as other:
        patched.setattr("rdzv.torchrun.signals.LEFT_WITHIN_S", 60)
        patched.setattr(os, "write", write_late)
        ending = other.submit(first)
        assert begun.wait(60)
        second = watch_signals(lambda _: None)
        ending.result()
    second()
    for thread in threading.enumerate():
        if thread.name == "rdzv-signals":
            thread.join(60)
    assert pipes() <= former_pipes


def test_a_watch_that_ends_in_another_thread_leaves_room_for_the_next() -> None:
    """Only the main thread can take the descriptor back; until it does, signals are harmless."""

    def watching() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "rdzv-signals"]

    noticed = threading.Event()
    former = signal.signal(signal.SIGUSR1, lambda *_: None)
    before, former_pipes = watching(), pipes()
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1")
            patched.setattr("rdzv.torchrun.signals.LEFT_WITHIN_S", 60)
            first = watch_signals(lambda _: None)
            with ThreadPoolExecutor(1) as other:
                other.submit(first).result()
            os.kill(os.getpid(), signal.SIGUSR1)
            second = watch_signals(lambda _: noticed.set())
            os.kill(os.getpid(), signal.SIGUSR1)
            assert noticed.wait(60)
            second()
    finally:
        signal.signal(signal.SIGUSR1, former)
    for thread in set(watching()) - set(before):
        thread.join(60)
    assert signal.set_wakeup_fd(-1) == -1
    assert pipes() <= former_pipes


def test_a_new_lease_changes_how_often_the_node_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes over may have a shorter lease than the server that welcomed the node."""
    heartbeats = threading.Semaphore(0)
    shorter = of_leader(pb.ServerMessage(lease=pb.Lease(heartbeat_interval_ms=100)))

    def script(messages: Iterator[pb.NodeMessage]) -> Iterator[pb.ServerMessage]:
        assert next(messages).HasField("hello")
        yield WELCOME
        yield shorter
        yield of_leader(line(0))
        for message in messages:
            if message.HasField("heartbeat"):
                heartbeats.release()

    def hear(_: pb.ServerMessage) -> None:
        # The sender waits anew once it has sent something.
        stream.say(pb.NodeMessage(heartbeat=pb.Heartbeat()))

    with serving(script) as start:
        start()
        talk = talk_to(start())
        monkeypatch.setattr(talk, "hear", hear)
        stream = NodeStream(talk)
        stream.open()
        try:
            # One answers the welcome, and one the message after the lease.
            for _ in range(4):
                assert heartbeats.acquire(timeout=20)
        finally:
            stream.close(0)
