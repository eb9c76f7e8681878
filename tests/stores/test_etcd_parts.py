"""The parts of the etcd store that need no etcd: configuration, keys, the size of a large job."""

from __future__ import annotations

import asyncio
import random
import socket
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from etcd_cluster import openssl

from rdzv.core.model import Membership, Offer, Participant, Round, Settings
from rdzv.errors import InvalidRequestError, RendezvousConnectionError, RendezvousStateError
from rdzv.etcd import etcd_pb2 as pb
from rdzv.stores import codec, etcd, etcd_client
from rdzv.stores.base import Record
from rdzv.stores.etcd_client import (
    CHANNEL_OPTIONS,
    MAX_REQUEST_BYTES,
    EtcdClient,
    EtcdRefusedError,
)
from rdzv.stores.etcd_config import EtcdConfig
from rdzv.structs import replace

GOOD = EtcdConfig.parse("a:1")


def test_endpoints_are_read_with_and_without_scheme() -> None:
    assert list(map(str, EtcdConfig.parse("a:1, [::1]:2,c").endpoints)) == [
        "a:1",
        "[::1]:2",
        "c:2379",
    ]
    assert not EtcdConfig.parse("http://a:1/,http://b:1").secure
    assert EtcdConfig.parse("https://a:1,https://b:1").secure
    assert EtcdConfig.parse("a:1,b:2", prefix="/x").place == "etcd at a:1,b:2: /x"


@pytest.mark.parametrize(
    ("endpoints", "says"),
    [
        ("", "endpoint '' cannot be used: it names no host"),
        ("a:1,,b:1", "it names no host"),
        ("a:x", "'x' is not a port"),
        ("ftp://a:1", "'ftp' is not a scheme of etcd; give http, https or none"),
        ("a:1,a:1", "a:1 is given twice; leave one out"),
        ("https://a:1,b:1", "some are https and some are not"),
        ("http://a:1/v3", "is not a port"),
    ],
)
def test_endpoints_that_can_not_be_used_are_named(endpoints: str, says: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        EtcdConfig.parse(endpoints)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("status", "said", "says"),
    [
        ("UNAUTHENTICATED", "etcdserver: authentication failed, bad password", "or its password"),
        ("FAILED_PRECONDITION", "etcdserver: authentication is not enabled", "leave out user and"),
        ("PERMISSION_DENIED", "etcdserver: permission denied", "user 'ada' may not read it"),
        ("UNIMPLEMENTED", "unknown service", "what listens there is no etcd v3"),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision", "etcdserver: mvcc: required"),
    ],
)
def test_a_refusal_says_what_to_change(status: str, said: str, says: str) -> None:
    config = replace(GOOD, user="ada", password="x")
    mistake = etcd_client.mistake(config, EtcdRefusedError("", grpc.StatusCode[status], said))
    assert mistake.startswith(f"{config.place}: ")
    assert says in mistake


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prefix": ""}, "etcd prefix '' cannot be used"),
        ({"prefix": "rdzv"}, "give one like /rdzv"),
        ({"prefix": "/rdzv/"}, "etcd prefix '/rdzv/' cannot be used"),
        ({"prefix": "/a b"}, "not a path of letters, digits"),
        ({"user": "me"}, "etcd user 'me' has no password; give both or neither"),
        ({"password": "x"}, "etcd user '' is missing for the password"),
        ({"cert": Path("c")}, "one without the other"),
        ({"ca": Path("/missing.pem")}, "/missing.pem cannot be used: No such file"),
        ({"ca": Path("/dev/null")}, "etcd CA /dev/null cannot be used"),
        ({"cert": Path("/dev/null"), "key": Path("/dev/null")}, "files that belong together"),
    ],
)
def test_what_can_not_work_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        replace(GOOD, **given).check()  # type: ignore[arg-type]
    assert says in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoints", "within_s"), [("a:1", 5.0), ("a:1,b:1", 2.5), ("a:1,b:1,c:1", 2.5)]
)
def test_where_there_are_several_one_may_take_half_of_the_time(
    endpoints: str, within_s: float
) -> None:
    client = EtcdClient(replace(EtcdConfig.parse(endpoints), timeout_ms=5_000))
    assert client.attempt_s == within_s
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoints", "trouble", "raised", "says"),
    [
        ("https://a:1", "handshake failed", InvalidRequestError, "that the CA has signed"),
        ("https://a:1", "no answer", RendezvousConnectionError, "^no answer$"),
        ("http://a:1", "handshake failed", RendezvousConnectionError, "^handshake failed$"),
    ],
)
async def test_trouble_with_tls_is_an_operators_mistake_where_there_is_tls(
    endpoints: str,
    trouble: str,
    raised: type[Exception],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: EtcdClient, key: bytes) -> None:
        raise RendezvousConnectionError(trouble)

    monkeypatch.setattr(EtcdClient, "get", fail)
    with pytest.raises(raised, match=says):
        async with EtcdClient.connected(EtcdConfig.parse(endpoints)):
            pass


def test_the_password_is_not_shown() -> None:
    config = replace(GOOD, user="me", password="secret")
    assert "secret" not in f"{config} {config!r} {config.place}"


@pytest.mark.slow
def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-subj", f"/CN={name}"),
            *("-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem"),
        )
    one, two = tmp_path / "one.pem", tmp_path / "two.key"
    replace(GOOD, ca=one, cert=one, key=tmp_path / "one.key").check()
    with pytest.raises(InvalidRequestError, match=f"{one} with key {two} cannot be used"):
        replace(GOOD, cert=one, key=two).check()


def test_pings_are_not_so_many_that_etcd_ends_the_connection() -> None:
    options = dict(CHANNEL_OPTIONS)
    assert options["grpc.keepalive_time_ms"] > 5_000
    assert options["grpc.keepalive_permit_without_calls"] == 0
    # Without this one, the wait for an unanswered ping takes a minute.
    assert options["grpc.http2.ping_timeout_ms"] <= 5_000


# ---------------------------------------------------------------- members


@asynccontextmanager
async def member(*, stopped: bool = False) -> AsyncIterator[str]:
    """A member that gives everyone a token, executes each transaction, and has no keys."""

    def answer(method: Any, response: Any) -> Any:
        async def call(request: Any, _: Any) -> Any:
            if stopped:
                await asyncio.Event().wait()
            return response

        return grpc.unary_unary_rpc_method_handler(
            call, method.request.FromString, method.response.SerializeToString
        )

    answers: dict[Any, Any] = {
        etcd_client.AUTHENTICATE: pb.AuthenticateResponse(token="token"),
        etcd_client.RANGE: pb.RangeResponse(header=pb.ResponseHeader(revision=7)),
        etcd_client.TXN: pb.TxnResponse(succeeded=True),
    }
    server = grpc.aio.server()
    for method, response in answers.items():
        _, service, name = method.path.split("/")
        handlers = {name: answer(method, response)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.slow
async def test_a_write_goes_to_a_member_that_is_connected() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # It listens nowhere, so it refuses connections.
        dead = f"127.0.0.1:{unused.getsockname()[1]}"
        async with member() as alive:
            client = EtcdClient(EtcdConfig.parse(f"{dead},{alive}"))
            assert (await client.run(client.txn, (), ())).succeeded
            client.close()


@pytest.mark.slow
async def test_a_member_that_is_stopped_leaves_time_to_log_in_at_another() -> None:
    async with member(stopped=True) as silent, member() as alive:
        config = EtcdConfig.parse(f"{silent},{alive}")
        client = EtcdClient(replace(config, user="ada", password="x", timeout_ms=2_000))
        assert await client.run(client.get, b"key", timeout_s=60) == (None, 7)
        client.close()


# ---------------------------------------------------------------- sizes


def participant(number: int, dice: random.Random) -> Participant:
    """A node of a large cluster, with the long names that such clusters give."""
    suffix = f"{dice.getrandbits(40):010x}"
    node_id = f"gke-training-pool-a3-highgpu-8g-{suffix}.us-central1-a.c.some-company-ml-prod"
    offer = Offer(
        address=f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
        local_world_size=8,
        role="trainer",
        topology=f"us-central1-a/block-{number // 512}/subblock-{number // 16}/host-{number}",
        host_name=f"{node_id}.internal",
        machine=f"{dice.getrandbits(128):032x}",
        store_port=dice.randrange(32_768, 61_000),
        can_host_store=True,
    )
    incarnation = (1_763_700_000 << 32) + number
    return Participant(node_id, incarnation, offer, 8 * number, 8 * number, 80_000)


@pytest.mark.slow
def test_a_job_of_ten_thousand_nodes_fits_into_one_request() -> None:
    dice = random.Random(7)
    nodes = tuple(participant(number, dice) for number in range(10_000))
    membership = Membership(
        rdzv_id="pretraining",
        run="0badcafe0bad",
        run_number=1,
        settings=Settings(9_000, 10_000),
        began_at_ms=1_763_700_000_000,
        round=Round(3, nodes, nodes[0].offer.host_name, 29_500, True, 0, 0, ()),
    )
    data = codec.encode(membership)
    packed = codec.pack(data)
    print(f"{len(data)} bytes, packed {len(packed)}")
    assert len(data) > MAX_REQUEST_BYTES
    assert len(packed) < MAX_REQUEST_BYTES * 2 // 3
    assert codec.decode(codec.unpack(packed, "here"), "here") == membership


def test_what_is_small_or_does_not_get_smaller_is_kept_as_it_is() -> None:
    small = b'{"format":1}'
    assert codec.pack(small) == small == codec.unpack(small, "here")
    dense = b"{" + random.Random(7).randbytes(codec.PACK_ABOVE_BYTES)
    assert codec.pack(dense) == dense


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x78\x01damaged", "here cannot be read"),
        (zlib.compress(b"{" * 100_000)[:-1], "cut off, or too long"),
        (b"gibberish", "left untouched"),
    ],
)
def test_what_was_packed_and_is_damaged_says_so(data: bytes, says: str) -> None:
    with pytest.raises(RendezvousStateError) as refused:
        codec.unpack(data, "here")
    assert says in str(refused.value)


def test_what_would_fill_the_memory_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_UNPACKED_BYTES", 1_000)
    assert codec.unpack(zlib.compress(b"{" * 1_000), "here") == b"{" * 1_000
    with pytest.raises(RendezvousStateError, match="too long"):
        codec.unpack(zlib.compress(b"{" * 1_001), "here")


def test_history_is_written_in_as_few_keys_as_hold_it() -> None:
    """Each batch is as full as possible; a larger record has its own batch."""

    def record(weight: int) -> Record:
        return Record(0, "job-7", "r", "N", "x" * (weight - len("r") - len("N") - 64))

    def split(*weights: int) -> list[int]:
        return [len(batch) for batch in etcd.in_batches(map(record, weights))]

    assert split(100, etcd.BATCH_BYTES - 100, 100) == [2, 1]
    assert split(100, etcd.BATCH_BYTES - 99, 100) == [1, 1, 1]
    assert split(etcd.BATCH_BYTES + 1, 100, 100) == [1, 2]
    assert split() == []
