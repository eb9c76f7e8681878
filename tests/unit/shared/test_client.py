"""The client's boundary: endpoints are parsed strictly; every failure is an error of the table."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import control_samples
import grpc
import pytest
from fake_control import FakeControl, serving

from rdzv.client import ControlClient, Endpoint, parse_endpoint
from rdzv.errors import (
    InvalidRequestError,
    LimitExceededError,
    NotLeaderError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    UnknownJobError,
    short,
)
from rdzv.transport.node_stream import Attempts, Backoff, Rota, error_from_status
from rdzv.v1 import rdzv_pb2 as pb


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def client(control: FakeControl) -> Iterator[ControlClient]:
    with serving(control) as endpoint, ControlClient(parse_endpoint(endpoint)) as client:
        yield client


# ------------------------------------------------------------------------------------ endpoints


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("head", "head", 29400),
        ("head:7", "head", 7),
        (" head.cluster.local:65535\n", "head.cluster.local", 65535),
        ("my_service", "my_service", 29400),
        ("10.0.0.1:29401", "10.0.0.1", 29401),
        ("[::1]", "::1", 29400),
        ("[fe80::1%eth0]:7", "fe80::1%eth0", 7),
    ],
)
def test_an_endpoint_is_a_host_and_perhaps_a_port(text: str, host: str, port: int) -> None:
    endpoint = parse_endpoint(text, 29400)
    assert endpoint == Endpoint(host, port)
    assert parse_endpoint(str(endpoint), 1) == endpoint


@pytest.mark.parametrize(
    ("text", "reason", "remedy"),
    [
        ("", "it names no host", "write HOST or HOST:PORT"),
        (":29400", "it names no host", "write HOST or HOST:PORT"),
        ("::1", "more than one colon", "[ADDRESS]:PORT"),
        ("fe80::1:29400", "more than one colon", "[ADDRESS]:PORT"),
        ("http://head:29400", "it is a URL", "HOST:PORT"),
        ("head:", "'' is not a port", "1 to 65535"),
        ("head:0", "'0' is not a port", "1 to 65535"),
        ("head:65536", "'65536' is not a port", "1 to 65535"),
        ("head:-1", "'-1' is not a port", "1 to 65535"),
        ("head:²", "'²' is not a port", "1 to 65535"),
        ("head:" + "9" * 5000, "is not a port", "1 to 65535"),
        ("[::1]:", "'' is not a port", "1 to 65535"),
        ("[head]:1", "'head' is not an IPv6 address", "only IPv6 addresses are in brackets"),
        ("[::1", "more than one colon", "[ADDRESS]:PORT"),
        ("he ad", "'he ad' is not a host name", "write HOST"),
        ("head,other", "'head,other' is not a host name", "write HOST"),
        ("-server", "'-server' is not a host name", "write HOST"),
    ],
)
def test_a_bad_endpoint_is_refused_with_value_reason_and_remedy(
    text: str, reason: str, remedy: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_endpoint(text)
    for part in (repr(short(text)), reason, remedy):
        assert part in str(refused.value)


def test_an_endpoint_of_any_length_is_not_shown_whole() -> None:
    for text in ("x" * 10_000, f"head:{'x' * 10_000}", f"[{'x' * 10_000}]"):
        with pytest.raises(InvalidRequestError) as refused:
            parse_endpoint(text)
        assert len(str(refused.value)) < 300


def test_a_host_is_never_taken_for_a_uri_scheme() -> None:
    assert parse_endpoint("unix:29400").target == "dns:///unix:29400"
    assert parse_endpoint("[fe80::1%eth0]:7").target == "dns:///[fe80::1%25eth0]:7"


# ------------------------------------------------------------------------------------ the values


@pytest.mark.slow
def test_events_are_asked_for_by_number(control: FakeControl, client: ControlClient) -> None:
    control.jobs["a"] = pb.JobStatus(rdzv_id="a")
    control.history = control_samples.history()
    assert [event.name for event in client.events("a", limit=2)] == ["RoundEnded", "NodeStopped"]
    assert len(client.events("a")) == 3
    assert control.limits == [2, 0]


@pytest.mark.slow
def test_a_status_beyond_the_usual_limit_of_grpc_arrives(
    control: FakeControl, client: ControlClient
) -> None:
    control.jobs["huge"] = pb.JobStatus(rdzv_id="huge", owner="x" * (8 << 20))
    assert len(client.status("huge").owner or "") == 8 << 20


# ------------------------------------------------------------------------------------ the errors


def test_the_code_in_the_trailing_metadata_decides(
    control: FakeControl, client: ControlClient
) -> None:
    with pytest.raises(UnknownJobError, match="no job nix is known here"):
        client.status("nix")
    control.error = RendezvousStateError("job a: unreadable")
    with pytest.raises(RendezvousStateError, match="job a: unreadable"):
        client.jobs()
    control.error = RendezvousConnectionError("the store is away")
    with pytest.raises(RendezvousConnectionError, match=r"^the store is away$"):
        client.jobs()


@pytest.mark.slow
def test_a_code_of_a_newer_server_is_an_error_all_the_same(
    control: FakeControl, client: ControlClient
) -> None:
    class NewerError(RendezvousError):
        code = "NewerError"
        grpc_status = "ABORTED"

    control.error = NewerError("not before Monday")
    with pytest.raises(RendezvousError, match=r"^not before Monday$") as raised:
        client.jobs()
    assert type(raised.value) is RendezvousError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, RendezvousConnectionError, "not an rdzv server"),
        (grpc.StatusCode.UNAVAILABLE, RendezvousConnectionError, "gone fishing"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, LimitExceededError, "gone fishing"),
        (grpc.StatusCode.INTERNAL, RendezvousError, "answered INTERNAL: gone fishing"),
        (grpc.StatusCode.NOT_FOUND, RendezvousError, "answered NOT_FOUND: gone fishing"),
    ],
)
def test_a_status_without_a_code_names_the_server(
    control: FakeControl,
    client: ControlClient,
    status: grpc.StatusCode,
    error: type[RendezvousError],
    text: str,
) -> None:
    control.error, control.error_text = status, "gone fishing"
    with pytest.raises(RendezvousError) as raised:
        client.jobs()
    assert type(raised.value) is error
    assert text in str(raised.value)
    assert str(client.server) in str(raised.value)


@pytest.mark.slow
def test_a_server_that_hangs_hits_the_deadline(control: FakeControl) -> None:
    control.hangs = True
    with (
        serving(control) as endpoint,
        ControlClient(parse_endpoint(endpoint), timeout_s=0.2) as client,
    ):
        began = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match=r"no answer within 0\.2 s; .+ check"):
            client.status("a")
        # It would hang for far longer.
        assert time.monotonic() - began < 50


@pytest.mark.slow
def test_nobody_listens() -> None:
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", bound.getsockname()[1])
        with ControlClient(endpoint) as client, pytest.raises(RendezvousConnectionError) as raised:
            client.jobs()
    assert str(raised.value) == (
        f"cannot reach rdzvd at {endpoint}: connection refused; "
        "check the address, and that rdzvd runs there"
    )


def _answer_like_a_web_server(connection: socket.socket) -> None:
    connection.recv(100)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def _greet_like_ssh(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
    connection.recv(100)


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:29400: "
            "Delayed close due to in-progress write (ping timeout) (goaway sent)",
            "it may be stopped or overloaded: the connection is open, and it does not answer",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:29400: "
            "a word that gRPC has not said before",
            "a word that gRPC has not said before",
        ),
        (None, "no details given"),
    ],
)
def test_why_there_is_no_connection_is_said_without_what_grpc_puts_before_it(
    details: str | None, reason: str
) -> None:
    error = error_from_status(grpc.StatusCode.UNAVAILABLE, details, (), A, 5.0)
    assert str(error).startswith(f"cannot reach rdzvd at {A}: {reason}; check the address")


@pytest.mark.slow
def test_a_server_that_is_stopped_is_not_waited_for_as_long_as_a_slow_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rdzv.transport.node_stream.CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        server = Endpoint("127.0.0.1", stopped.getsockname()[1])
        with (
            ControlClient(server, timeout_s=0.5) as client,
            pytest.raises(RendezvousConnectionError, match="it may be stopped or overloaded"),
        ):
            client.stacks("job-7")


@contextmanager
def _listening(answer: Callable[[socket.socket], None]) -> Iterator[Endpoint]:
    """Accept connections until the end of the block, and answer each once."""
    ended = threading.Event()

    def accept(listener: socket.socket) -> None:
        while not ended.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection:
                answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        try:
            yield Endpoint("127.0.0.1", listener.getsockname()[1])
        finally:
            ended.set()
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (_answer_like_a_web_server, "the program that listens there is not an rdzv server"),
        (_greet_like_ssh, "the program that listens there is not an rdzv server"),
        (_reset, "the other side closed the connection at once"),
    ],
)
def test_what_listens_is_something_else(
    answer: Callable[[socket.socket], None], reason: str
) -> None:
    with _listening(answer) as endpoint, ControlClient(endpoint) as client:
        with pytest.raises(RendezvousConnectionError) as raised:
            client.jobs()
        assert f"{endpoint}: {reason};" in str(raised.value)


@pytest.mark.slow
def test_a_proxy_for_the_internet_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with _listening(_answer_like_a_web_server) as proxy:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://{proxy}")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        control = FakeControl()
        with serving(control) as endpoint, ControlClient(parse_endpoint(endpoint)) as client:
            assert client.jobs() == ()


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="timeout"):
        ControlClient(Endpoint("head", 1), timeout_s)


@pytest.mark.slow
def test_what_can_not_travel_is_refused(client: ControlClient) -> None:
    with pytest.raises(InvalidRequestError, match="job name"):
        client.status("\udcff")
    with pytest.raises(InvalidRequestError, match="limit"):
        client.events("a", limit=2**32)


# ------------------------------------------------------------------------- several servers

A, B, C = (Endpoint(host, 29400) for host in "abc")
GONE = RendezvousConnectionError("cannot be reached")


def test_servers_are_asked_in_turn() -> None:
    rota = Rota([A, B])
    assert rota.present == A
    assert not rota.failed(GONE)
    assert rota.present == B
    assert not rota.failed(GONE)
    assert rota.present == A


def test_the_one_that_leads_is_asked_at_once_although_it_was_not_given() -> None:
    rota = Rota([A, B])
    assert rota.failed(NotLeaderError("ask c", "c:29400"))
    assert rota.present == C
    assert not rota.failed(GONE)
    assert rota.present == B


def test_servers_that_point_to_each_other_are_not_asked_without_a_pause() -> None:
    rota = Rota([A])
    assert rota.failed(NotLeaderError("ask b", "b:29400"))
    assert not rota.failed(NotLeaderError("ask a", "a:29400"))


@pytest.mark.parametrize("leader", ["", "not an address:x", "a:29400"])
def test_a_redirection_that_leads_nowhere_is_a_failure_like_any_other(leader: str) -> None:
    assert not Rota([A, B]).failed(NotLeaderError("elsewhere", leader))


def test_servers_that_the_leader_names_are_next_once_it_fails() -> None:
    rota = Rota([A])
    rota.learn(["b:29400", "not an address:x", ""])
    assert (rota.present, rota.next) == (A, B)
    assert not rota.failed(GONE)
    assert (rota.present, rota.next) == (B, A)
    assert rota.failed(NotLeaderError("ask c", "c:29400"))
    # The one that leads now names others, and the one that was given is still known.
    rota.learn(["b:29400"])
    assert [rota.present, rota.next, rota.failed(GONE), rota.present] == [C, B, False, B]
    assert [rota.failed(GONE), rota.present, rota.failed(GONE), rota.present] == [
        *(False, A),
        *(False, B),
    ]


def test_a_leader_that_names_nobody_leaves_the_given_ones() -> None:
    rota = Rota([A, B])
    assert not rota.failed(GONE)
    rota.learn([])
    assert (rota.present, rota.next) == (B, A)


# ------------------------------------------------------------------------- a node's attempts

STANDBY = NotLeaderError("this rdzvd stands by", "")
LONGEST = Backoff(spread=lambda _, longest_s: longest_s)


def test_the_first_attempt_is_repeated_at_once_and_further_ones_ever_later() -> None:
    attempts = Attempts([A, B], LONGEST)
    waits_s = [attempts.failed(GONE, now_s) for now_s in range(9)]
    assert waits_s == [0.0, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert attempts.rota.present == B


def test_half_of_every_wait_is_left_to_chance() -> None:
    bounds: list[tuple[float, float]] = []

    def choose(*found: float) -> float:
        bounds.append((found[0], found[1]))
        return 0.125

    attempts = Attempts([A], Backoff(spread=choose))
    assert [attempts.failed(GONE, 0.0) for _ in range(3)] == [0.0, 0.125, 0.125]
    assert bounds == [(0.1, 0.2), (0.2, 0.4)]


@pytest.mark.slow
def test_an_attempt_long_after_many_failures_is_bounded() -> None:
    attempts = Attempts([A], LONGEST)
    for _ in range(5_000):
        attempts.failed(GONE, 0.0)
    assert attempts.failed(GONE, 0.0) == 5.0


def test_a_good_stream_is_opened_again_at_once_and_a_short_one_is_not() -> None:
    attempts = Attempts([A], LONGEST)
    assert [attempts.failed(GONE, 0.0) for _ in range(3)] == [0.0, 0.2, 0.4]
    attempts.welcomed(now_s=10.0)
    assert attempts.welcome
    assert attempts.failed(GONE, now_s=14.9) == 0.8
    attempts.welcomed(now_s=20.0)
    assert attempts.failed(GONE, now_s=25.0) == 0.0
    assert not attempts.welcome
    # That stream has ended; the time since then does not count as connected.
    assert attempts.failed(GONE, now_s=99.0) == 0.2


def test_the_one_that_leads_is_asked_at_once_which_is_no_failed_attempt() -> None:
    attempts = Attempts([A, B], LONGEST)
    assert attempts.failed(GONE, 0.0) == 0.0
    assert attempts.failed(NotLeaderError("ask c", "c:29400"), 0.0) is None
    assert attempts.rota.present == C
    assert attempts.failed(GONE, 0.0) == 0.2


def test_while_servers_stand_by_waits_are_short_until_one_leads() -> None:
    attempts = Attempts([A, B], LONGEST)
    waits_s = [attempts.failed(STANDBY if n == 2 else GONE, 0.0) for n in range(5)]
    assert waits_s == [0.0, 0.2, 0.4, 0.5, 0.5]
    attempts.welcomed(0.0)
    assert attempts.failed(GONE, 1.0) == 3.2


def test_who_fences_its_workers_waits_no_longer_than_the_fence_allows() -> None:
    attempts = Attempts([A], LONGEST)
    assert [attempts.failed(GONE, 0.0, most_s=0.3) for _ in range(4)] == [0.0, 0.2, 0.3, 0.3]


@pytest.mark.slow
def test_calls_follow_to_the_server_that_leads(control: FakeControl) -> None:
    standby = FakeControl()
    with serving(control) as leads, serving(standby) as stands_by:
        standby.error = NotLeaderError("this rdzvd stands by", leads)
        with ControlClient(parse_endpoint(stands_by)) as client:
            assert client.jobs() == ()
            assert str(client.server) == leads


@pytest.mark.slow
def test_a_call_waits_for_a_leader_while_servers_stand_by(control: FakeControl) -> None:
    """The leader was killed: its peers name it until its lease is over; then one of them leads."""
    with closing(socket.socket()) as dead, serving(control) as stands_by:
        dead.bind(("127.0.0.1", 0))
        killed = f"127.0.0.1:{dead.getsockname()[1]}"
        answers = iter(
            [
                NotLeaderError("this rdzvd stands by; another leads", killed),
                NotLeaderError("this rdzvd stands by and no other leads yet; try again"),
                None,
            ]
        )
        control.next_error = lambda: next(answers)
        with ControlClient([parse_endpoint(killed), parse_endpoint(stands_by)]) as client:
            assert client.jobs() == ()


@pytest.mark.slow
def test_a_leader_that_does_not_come_is_not_waited_for_without_end(control: FakeControl) -> None:
    control.error = NotLeaderError("this rdzvd stands by and no other leads yet; try again")
    with (
        serving(control) as endpoint,
        ControlClient(parse_endpoint(endpoint), takeover_s=0.1) as client,
    ):
        began = time.monotonic()
        with pytest.raises(NotLeaderError, match="no other leads yet"):
            client.jobs()
        assert time.monotonic() - began >= 0.1


def test_servers_none_of_which_answers_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdzv.client.TAKEOVER_RETRY_S", 1000.0)
    with closing(socket.socket()) as dead:
        dead.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", dead.getsockname()[1])
        with (
            ControlClient([endpoint, endpoint]) as client,
            pytest.raises(RendezvousConnectionError),
        ):
            client.jobs()


@pytest.mark.slow
def test_a_watch_of_a_quiet_job_outlives_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the time without a server counts, not the time without news before."""
    clock, states = itertools.count(0, 3_600), iter(("running", "stopping"))
    fake = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    monkeypatch.setattr("rdzv.client.time", fake)

    class Restarting(FakeControl):
        def WatchJob(  # noqa: N802
            self, request: pb.GetStatusRequest, context: grpc.ServicerContext
        ) -> Iterator[pb.JobStatus]:
            yield pb.JobStatus(rdzv_id=request.rdzv_id, state=next(states))
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    with (
        serving(Restarting()) as endpoint,
        ControlClient(parse_endpoint(endpoint)) as client,
        closing(client.watch("a")) as watched,  # type: ignore[type-var]
    ):
        assert [next(watched).state for _ in range(2)] == ["running", "stopping"]


@pytest.mark.slow
def test_a_token_that_may_have_been_made_is_not_made_again(control: FakeControl) -> None:
    control.error, control.error_text = grpc.StatusCode.UNAVAILABLE, "Socket closed"
    with serving(control) as endpoint:
        server = parse_endpoint(endpoint)
        in_doubt = pytest.raises(
            RendezvousConnectionError, match="it is unknown whether the token was created"
        )
        with ControlClient([server, server]) as client, in_doubt:
            client.create_token("ann", ["read"], 0)
    assert control.tokens_asked == 1
