"""Encodes memberships as human-readable JSON, in an envelope that specifies the format.

`pack` compresses large values for stores that limit the size of a value.
"""

from __future__ import annotations

import zlib

import msgspec

from rdzv.core.model import Membership
from rdzv.errors import RendezvousStateError

FORMAT = 3
"""Incremented whenever an older server would misread or silently drop data from this one."""

OLDEST_FORMAT = 1
"""The oldest format that can still be read; fields added since then have defaults."""

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
_encoder = msgspec.json.Encoder()


def encode(membership: Membership) -> bytes:
    """Encode a membership; `decode` restores an equal one."""
    return _encoder.encode(_Envelope(FORMAT, msgspec.Raw(_encoder.encode(membership))))


def decode(data: bytes, where: str) -> Membership:
    """Return the decoded membership; `where` names the file and the job in errors.

    Raises:
        RendezvousStateError: the bytes are damaged or in a format that this server cannot read.

    """
    try:
        envelope = _envelope_decoder.decode(data)
        if not OLDEST_FORMAT <= envelope.format <= FORMAT:
            raise _foreign(envelope.format, where)
        return _membership_decoder.decode(envelope.membership)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RendezvousStateError(
            f"{where} cannot be read: {error} (format {FORMAT} expected); it was left untouched. "
            "Restore it from a backup, or remove it if the job is over"
        ) from error


def pack(data: bytes) -> bytes:
    """Return bytes from which `unpack` restores `data`, deflated if that makes them smaller.

    >>> pack(b"{}"), len(pack(b"{" * 100_000)) < 1_000
    (b'{}', True)
    """
    if len(data) <= PACK_ABOVE_BYTES:
        return data
    return min(zlib.compress(data, _LEVEL), data, key=len)


def unpack(data: bytes, where: str) -> bytes:
    """Return the data that was given to `pack`; `where` names it in errors.

    Raises:
        RendezvousStateError: the bytes are damaged.

    """
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


def _foreign(found: int, where: str) -> RendezvousStateError:
    return RendezvousStateError(
        f"{where} has format {found}, and this rdzvd reads format {FORMAT}; it was left "
        "untouched. Start the rdzvd version that wrote it"
    )
