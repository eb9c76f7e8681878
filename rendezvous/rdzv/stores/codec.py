"""Encodes memberships as human-readable JSON, in an envelope that specifies the format.

`pack` compresses large values for stores that limit the size of a value.

Thousands of nodes may succeed one after another, and a membership has an entry for each node. So if
nothing else has changed since a store wrote a membership, it writes only the nodes that have
succeeded (`later_successes`), beside it; the next membership that it writes replaces both.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from rdzv.core.model import Membership
from rdzv.errors import RendezvousStateError
from rdzv.structs import replace

FORMAT = 4
"""Incremented whenever another version would misread or silently drop data. Others are refused."""

PACK_ABOVE_BYTES = 16 * 1024
"""The size above which values are compressed. Smaller values remain JSON, because they fit anywhere
and people can read them."""

MAX_UNPACKED_BYTES = 64 * 1024 * 1024
"""The maximum size after decompression: far above the membership of the largest job, and low enough
that damaged data cannot exhaust memory."""

_LEVEL = 3
"""Memberships are so repetitive that higher levels gain little and take much longer."""


class _Envelope(msgspec.Struct, frozen=True):
    format: int
    membership: msgspec.Raw


_envelope_decoder = msgspec.json.Decoder(_Envelope)
_membership_decoder = msgspec.json.Decoder(Membership)
_nodes_decoder = msgspec.json.Decoder(tuple[str, ...])
_encoder = msgspec.json.Encoder()


def encode(membership: Membership) -> bytes:
    return _encoder.encode(_Envelope(FORMAT, msgspec.Raw(_encoder.encode(membership))))


def decode(data: bytes, where: str) -> Membership:
    """Return the decoded membership; `where` names the file and the job in errors."""
    try:
        envelope = _envelope_decoder.decode(data)
        if envelope.format != FORMAT:
            raise _foreign(envelope.format, where)
        return _membership_decoder.decode(envelope.membership)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(error, where) from error


def may_have_more(membership: Membership) -> bool:
    """Return whether nodes that succeeded later may be stored beside this membership."""
    round_ = membership.round
    return membership.ended is None and round_ is not None and bool(round_.succeeded)


def later_successes(before: Membership | None, after: Membership) -> tuple[str, ...]:
    """Return the nodes that have succeeded since `before`, or () if `after` is to be stored whole.

    `before` is what the same process has stored. The first success of a round is stored whole, so
    that a reader knows that there may be others.
    """
    if before is None or not may_have_more(before) or after.round is None:
        return ()
    assert before.round is not None
    known, now = before.round.succeeded, after.round.succeeded
    # Fields that have not changed are identical, so this compares no participants.
    if replace(after, round=replace(after.round, succeeded=known)) != before:
        return ()
    return now[len(known) :] if now[: len(known)] == known else ()


def encode_nodes(node_ids: Sequence[str]) -> bytes:
    return _encoder.encode(node_ids)


def with_successes(membership: Membership, later: Sequence[bytes], where: str) -> Membership:
    """Return the membership with nodes from `encode_nodes`, in the order of their success."""
    if not later:
        return membership
    assert membership.round is not None
    try:
        nodes = [node for data in later for node in _nodes_decoder.decode(data)]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(error, where) from error
    succeeded = (*membership.round.succeeded, *nodes)
    return replace(membership, round=replace(membership.round, succeeded=succeeded))


def pack(data: bytes) -> bytes:
    """Return bytes from which `unpack` restores `data`, deflated if that makes them smaller.

    >>> pack(b"{}"), len(pack(b"{" * 100_000)) < 1_000
    (b'{}', True)
    """
    if len(data) <= PACK_ABOVE_BYTES:
        return data
    return min(zlib.compress(data, _LEVEL), data, key=len)


def unpack(data: bytes, where: str) -> bytes:
    """Return the data that was given to `pack`; `where` names it in errors."""
    # JSON starts with a brace or a bracket; deflated data never does.
    if data[:1] in (b"{", b"[", b""):
        return data
    try:
        inflate = zlib.decompressobj()
        unpacked = inflate.decompress(data, MAX_UNPACKED_BYTES)
        damage = "" if inflate.eof else "it is cut off, or too long"
    except zlib.error as error:
        damage = str(error)
    if damage:
        raise RendezvousStateError(
            f"{where} cannot be read: {damage}; it was left untouched. "
            "Restore it from a backup, or remove it if the job is over"
        )
    return unpacked


def _unreadable(error: Exception, where: str) -> RendezvousStateError:
    return RendezvousStateError(
        f"{where} cannot be read: {error} (format {FORMAT} expected); it was left untouched. "
        "Restore it from a backup, or remove it if the job is over"
    )


def _foreign(found: int, where: str) -> RendezvousStateError:
    return RendezvousStateError(
        f"{where} has format {found}, and this rdzvd reads only {FORMAT}; it was left untouched. "
        "Start the rdzvd version that wrote it, or remove it if the job is over"
    )
