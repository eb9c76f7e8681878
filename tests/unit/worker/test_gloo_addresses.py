"""Gloo's addresses in the store are read, and all other keys are left alone."""

from __future__ import annotations

import socket
import struct

import pytest

from rdzv.worker.gloo_addresses import Published, parse

V4 = struct.pack("<H", socket.AF_INET) + struct.pack(">H", 29500) + bytes([10, 0, 0, 5])
V6 = struct.pack("<H", socket.AF_INET6) + struct.pack(">HI", 29500, 0) + bytes(15) + b"\x01"
IDS = [b"peer-one", b"peer-two"]


def published(address: bytes, ids: list[bytes], host: bytes = b"node-1") -> bytes:
    storage = address.ljust(128, b"\0") + struct.pack("<Q", 7)
    parts = struct.pack("<Q", len(host)), host, struct.pack("<Q", len(storage)), storage, *ids
    return b"".join(parts)


@pytest.mark.parametrize(("address", "host"), [(V4, "10.0.0.5"), (V6, "::1")], ids=["4", "6"])
@pytest.mark.parametrize("ids", [[], IDS[:1], IDS], ids=len)
@pytest.mark.parametrize("name", [b"", b"node-1.example.org"])
def test_address_and_ids_are_read(address: bytes, host: str, ids: list[bytes], name: bytes) -> None:
    assert parse(published(address, ids, name)) == ((host, 29500), ids)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"all returned",
        published(V4, IDS)[:-1],
        published(V4[:2] + b"\0\0" + V4[4:], IDS),
        published(b"\x01\0" + V4[2:], IDS),
        struct.pack("<Q", 1 << 63) + published(V4, IDS),
        struct.pack("<QQ", 0, 64) + V4.ljust(64, b"\0"),
    ],
    ids=["nothing", "a word", "cut off", "no port", "a socket of Unix", "too long", "too short"],
)
def test_everything_else_is_left_alone(value: bytes) -> None:
    assert parse(value) is None
    noted = Published()
    noted.note(value, own=True)
    assert noted == Published()


def test_ids_are_kept_of_the_own_address_alone() -> None:
    noted = Published()
    noted.note(published(V4, IDS), own=True)
    noted.note(published(V6, IDS), own=False)
    assert noted.addresses == {("10.0.0.5", 29500), ("::1", 29500)}
    assert noted.own == [(("10.0.0.5", 29500), IDS)]
