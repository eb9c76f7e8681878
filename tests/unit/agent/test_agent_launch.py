"""What a node can offer to a job: addresses, a listening socket for the store, an interpreter."""

import contextlib
import importlib.util
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdzv.agent.core.model import JobTerms
from rdzv.agent.launch import launch
from rdzv.agent.launch.launch import (
    Launch,
    SnapshotFiles,
    ask_count_devices,
    check_chdir,
    check_startable,
    has_torch,
    local_address,
)
from rdzv.client import Endpoint
from rdzv.core.model import Settings
from rdzv.errors import InvalidRequestError, RendezvousConnectionError
from rdzv.structs import replace
from rdzv.transport import addresses
from rdzv.transport.addresses import (
    StoreSocket,
    machine_id,
    missing_interfaces,
    socket_interfaces,
)
from rdzv.transport.endpoints import is_loopback

JOB = JobTerms("job-7", "n1", Settings(1, 1), local_world_size=1)


@pytest.fixture
def store() -> Iterator[StoreSocket]:
    held = StoreSocket(loopback_only=True)
    yield held
    held.release()


# ------------------------------------------------------------------ the store's socket


def test_the_port_stays_the_same_until_it_is_taken_or_released(store: StoreSocket) -> None:
    first = store.port
    assert store.port == first
    taken = store.take()
    assert taken is not None
    with taken:
        assert taken.getsockname() == ("127.0.0.1", first)
        assert store.port != first
    second = store.port
    store.release()
    assert store.port not in (first, second)


def test_there_is_nothing_to_take_or_release_twice(store: StoreSocket) -> None:
    assert store.take() is None
    assert store.port
    store.release()
    store.release()
    assert store.take() is None


class Forgetful(StoreSocket):
    """Binds the ports of a list, like a system that assigns the same ones again."""

    ports: list[int]

    def _bind(self) -> socket.socket:
        return socket.create_server(("127.0.0.1", self.ports.pop(0)))


def test_a_port_that_was_offered_is_never_offered_again() -> None:
    store = Forgetful(loopback_only=True)
    store.ports = [0]
    first = store.port
    store.release()
    store.ports = [first, 0]
    second = store.port
    assert second != first
    store.release()
    # The refused one was released, too.
    with socket.create_server(("127.0.0.1", first)):
        pass


def test_no_socket_is_lost_when_none_can_be_bound() -> None:
    store = Forgetful(loopback_only=True)
    store.ports = [0]
    first = store.port
    store.release()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        store.ports = [first, busy.getsockname()[1]]
        with pytest.raises(OSError, match="in use"):
            _ = store.port
    with socket.create_server(("127.0.0.1", first)):
        pass


def test_clients_can_connect_before_anyone_accepts(store: StoreSocket) -> None:
    port = store.port
    with contextlib.ExitStack() as stack:
        for number in range(20):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            client.sendall(b"%d\n" % number)
        taken = store.take()
        assert taken is not None
        served = stack.enter_context(taken).accept()[0]
        with served:
            assert served.recv(10) == b"0\n"


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1"])
def test_where_rank_0_serves_the_store_an_early_client_is_refused_not_reset(address: str) -> None:
    store = StoreSocket(loopback_only=is_loopback(address), listens=False)
    port = store.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    store.release()
    with socket.create_server(("127.0.0.1", port)):
        socket.create_connection(("127.0.0.1", port), timeout=60).close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6")
def test_the_store_can_be_reached_by_both_protocols() -> None:
    store = StoreSocket(loopback_only=False)
    for address in ("127.0.0.1", "::1"):
        socket.create_connection((address, store.port), timeout=60).close()
    store.release()


def test_without_ipv6_the_store_is_reached_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    store = StoreSocket(loopback_only=False)
    socket.create_connection(("127.0.0.1", store.port), timeout=60).close()
    store.release()


# ------------------------------------------------------------------ this machine


def test_a_machine_has_one_name() -> None:
    assert machine_id() == machine_id()
    boot_id, _, namespace = machine_id().partition("/")
    assert boot_id
    assert namespace.startswith("net:[")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("::1%lo", True),
        ("10.0.0.5", False),
        ("fe80::1%eth0", False),
        ("0.0.0.0", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.slow
@pytest.mark.parametrize("target", ["127.0.0.1", "::ffff:127.0.0.1"])
async def test_the_address_is_this_end_of_the_connection_whatever_the_route(target: str) -> None:
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(family) as client:
        port = server.getsockname()[1]
        client.bind((target.replace(".1", ".9"), 0))
        client.connect((target, port))
        assert await local_address(Endpoint("127.0.0.1", port)) == "127.0.0.9"
        assert await local_address(Endpoint("127.0.0.1", 29400)) == "127.0.0.1"
        assert client.getpeername()[1] == port, "nothing was closed"


async def test_without_names_no_address_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback was, or the own name, which others may not know: it was chosen once, too soon."""

    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror("no name service")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(RendezvousConnectionError, match=r"towards head:29400: no such host name"):
        await local_address(Endpoint("head", 29400))


async def test_a_silent_name_service_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        assert answers.wait(10)
        return []

    monkeypatch.setattr(launch, "PROBE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        with pytest.raises(RendezvousConnectionError, match="the name service does not answer"):
            await local_address(Endpoint("head", 29400))
    finally:
        answers.set()


async def test_a_link_local_address_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "address_towards", lambda _: "fe80::1%eth0")
    with pytest.raises(RendezvousConnectionError, match="fe80::1%eth0 is link-local, which other"):
        await local_address(Endpoint("127.0.0.1", 29400))


def interfaces(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    known = {address: name for name, text in found.items() for address in text.split()}
    monkeypatch.setattr(addresses, "interfaces", lambda: {"127.0.0.1": "lo", **known})
    monkeypatch.setattr(addresses, "RDMA_DEVICES", Path("/nowhere"))


def test_workers_use_the_nodes_interface(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gloo binds the address of the own name, which Debian resolves to 127.0.1.1."""
    both = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
    interfaces(monkeypatch, eth0="10.79.0.1 2001:db8::1")
    for address in ("10.79.0.1", "2001:db8::1", "::ffff:10.79.0.1"):
        assert socket_interfaces(address, {}) == both
    for address in ("127.0.0.1", "::1", "10.79.0.2", "box1", ""):
        assert socket_interfaces(address, {}) == {}
    for variable in both:
        assert socket_interfaces("10.79.0.1", {variable: "eth9"}) == {}
        assert socket_interfaces("10.79.0.1", {variable: ""}) == both
    interfaces(monkeypatch, eth0="10.79.0.1", eth1="10.80.0.1")
    assert socket_interfaces("10.80.0.1", {}) == {"GLOO_SOCKET_IFNAME": "eth1"}, "NCCL uses both"
    (tmp_path / "mlx5_0").touch()
    monkeypatch.setattr(addresses, "RDMA_DEVICES", tmp_path)
    assert socket_interfaces("10.79.0.1", {}) == both, "NCCL's data goes over RDMA"
    without = socket_interfaces("10.79.0.1", {"NCCL_IB_DISABLE": "1"})
    assert without == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_a_variable_that_names_no_interface_is_said() -> None:
    (text,) = missing_interfaces(
        {"GLOO_SOCKET_IFNAME": "eth9", "NCCL_SOCKET_IFNAME": "^docker,eth9"}
    )
    assert text.startswith("GLOO_SOCKET_IFNAME=eth9: this machine has no such interface, ")
    assert "it has lo" in text
    assert missing_interfaces({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo,eth9"}) == []


def test_a_node_that_moves_binds_its_store_where_the_others_reach_it() -> None:
    store = StoreSocket(loopback_only=True)
    inside = store.port
    store.confine(loopback_only=False)
    outside = store.port
    assert outside != inside
    store.confine(loopback_only=False)
    assert store.port == outside
    taken = store.take()
    assert taken is not None
    with taken:
        assert taken.getsockname()[0] in ("::", "0.0.0.0")


# ------------------------------------------------------------------ the job's interpreter


async def test_this_interpreter_is_asked_for_torch() -> None:
    here = importlib.util.find_spec("torch") is not None
    assert await has_torch(sys.executable) is here


async def test_another_python_path_is_anothers_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules that this process could import say nothing about a job with other folders."""
    asked: list[tuple[str, ...]] = []

    async def ask(python: str, args: tuple[str, ...], *_: object) -> tuple[bytes, bytes]:
        asked.append(args)
        return b"False", b""

    monkeypatch.setattr(launch, "ask_interpreter", ask)
    assert not await has_torch(sys.executable, {"PYTHONPATH": "/elsewhere"})
    assert len(asked) == 1


def program(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [("echo True", True), ("exit 0", False), ("echo False", False), ("kill -9 $$", False)],
)
async def test_the_interpreter_has_the_last_word(tmp_path: Path, text: str, expected: bool) -> None:
    assert await has_torch(program(tmp_path, text)) is expected


@pytest.mark.slow
@pytest.mark.parametrize("python", ["/nowhere/python", "", "/etc/passwd"])
async def test_what_is_no_interpreter_has_no_torch(python: str) -> None:
    assert not await has_torch(python)


@pytest.mark.slow
async def test_a_silent_one_has_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PROBE_TIMEOUT_S", 0.05)
    assert not await has_torch(program(tmp_path, "exec sleep 60"))


# ------------------------------------------------------------------ what is run


@pytest.mark.parametrize(
    ("job", "argv"),
    [
        (
            Launch(JOB, "train.py", ("--rank=${local_rank}", "x y"), python="/bin/python9"),
            ("/bin/python9", "-u", "train.py", "--rank=3", "x y"),
        ),
        (
            Launch(JOB, "pkg.train", ("a",), module=True, python="p"),
            ("p", "-u", "-m", "pkg.train", "a"),
        ),
        (Launch(JOB, "bash", ("-c", "true"), no_python=True), ("bash", "-c", "true")),
    ],
    ids=["script", "module", "program"],
)
def test_what_is_run_is_run_by_the_jobs_interpreter_or_as_it_is(
    job: Launch, argv: tuple[str, ...]
) -> None:
    assert job.argv(3) == argv


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            Launch(JOB, "nowhere.py"),
            "the script 'nowhere.py' is not on this node (looked in {cwd}); give a path that "
            "exists on every node",
        ),
        (
            Launch(JOB, "nowhere", no_python=True),
            "'nowhere' is not a program on this node; give its path, or make it executable",
        ),
        (
            Launch(JOB, "train.py", python="/nowhere/python"),
            "the interpreter '/nowhere/python' is not on this node; set PYTHON_EXEC to one that is",
        ),
        (
            Launch(JOB, "train.py", python=""),
            "the interpreter '' is not on this node; set PYTHON_EXEC to one that is",
        ),
    ],
)
def test_what_can_not_be_started_is_refused_with_the_remedy(
    what: Launch, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequestError) as refusal:
        check_startable(what)
    assert str(refusal.value) == message.format(cwd=tmp_path)


@pytest.mark.parametrize(
    "what",
    [
        Launch(JOB, "train.py"),
        Launch(JOB, "."),
        Launch(JOB, "only.python.can.tell", module=True),
        Launch(JOB, "sh", no_python=True),
    ],
)
def test_what_can_be_started_passes(
    what: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    check_startable(what)


# ------------------------------------------------------------------ a job's own place


def test_what_is_started_is_looked_for_from_where_the_workers_start(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    check_startable(Launch(JOB, "train.py", chdir=tmp_path))
    check_startable(Launch(JOB, "./run.sh", no_python=True, chdir=tmp_path))
    with pytest.raises(InvalidRequestError, match=f"looked in {tmp_path}"):
        check_startable(Launch(JOB, "other.py", chdir=tmp_path))


def test_programs_are_looked_for_in_the_jobs_own_path(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "mine").chmod(0o755)
    here = Launch(JOB, "mine", no_python=True, environ={"PATH": str(tmp_path)})
    check_startable(here)
    with pytest.raises(InvalidRequestError, match="'mine' is not a program on this node"):
        check_startable(replace(here, environ={"PATH": "/nowhere"}))


def test_only_logs_may_go_nowhere() -> None:
    here = Launch(JOB, sys.executable, no_python=True)
    check_startable(replace(here, output=replace(here.output, log_dir=Path(os.devnull))))
    files = SnapshotFiles(Path(os.devnull))
    with pytest.raises(InvalidRequestError) as refused:
        check_startable(replace(here, snapshot_files=files))
    said = "--snapshot-dir=/dev/null: /dev/null is not a directory; give another"
    assert str(refused.value) == said


def test_a_folder_that_workers_can_not_start_in_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_chdir(tmp_path)
    for folder, why in (
        (tmp_path / "no", "cannot be used on this node (No such file or directory)"),
        (tmp_path / "file", "is not a directory on this node"),
        (tmp_path / "file" / "below", "cannot be used on this node (Not a directory)"),
        (Path("/a\0b"), "cannot be used on this node"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            check_startable(Launch(JOB, "train.py", chdir=folder))
        assert repr(str(folder)) in str(refused.value)
        assert why in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("says", "kind", "count"),
    [("echo noise; echo 4", "gpu", 4), ("echo 0", "auto", len(os.sched_getaffinity(0)))],
)
async def test_devices_are_counted_while_other_jobs_go_on(
    tmp_path: Path, says: str, kind: str, count: int
) -> None:
    python = program(tmp_path, says)
    assert await ask_count_devices(kind, python, {}) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("echo 0", "torch sees no gpu on this node; give a number"),
        ("echo 'no torch' >&2; exit 1", r"cannot count them \(no torch\)"),
    ],
)
async def test_uncounted_devices_are_refused(tmp_path: Path, says: str, why: str) -> None:
    python = program(tmp_path, says)
    with pytest.raises(InvalidRequestError, match=why):
        await ask_count_devices("gpu", python, {"PATH": os.defpath})


@pytest.mark.slow
async def test_a_hung_one_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "COUNT_TIMEOUT_S", 0.05)
    python = program(tmp_path, "exec sleep 60")
    with pytest.raises(InvalidRequestError, match="cannot count them"):
        await ask_count_devices("gpu", python, {})


@pytest.mark.slow
async def test_the_jobs_own_environment_is_asked_for_torch(tmp_path: Path) -> None:
    python = program(tmp_path, 'test "$ASKED" = yes && echo True')
    assert await has_torch(python, {"ASKED": "yes"})
    assert not await has_torch(python, {"ASKED": "no"})
