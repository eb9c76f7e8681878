"""Memberships as bytes: JSON in an envelope that names its format, so that people can read it."""

from __future__ import annotations

import msgspec

from rdzv.core.model import Membership
from rdzv.errors import RendezvousStateError

FORMAT = 1
"""Raised whenever an older server would misread, or silently drop, what this one writes."""


class _Envelope(msgspec.Struct, frozen=True):
    format: int
    membership: msgspec.Raw


_envelope_decoder = msgspec.json.Decoder(_Envelope)
_membership_decoder = msgspec.json.Decoder(Membership)
_encoder = msgspec.json.Encoder()


def encode(membership: Membership) -> bytes:
    """Return the bytes from which `decode` gives an equal membership."""
    return _encoder.encode(_Envelope(FORMAT, msgspec.Raw(_encoder.encode(membership))))


def decode(data: bytes, where: str) -> Membership:
    """Return the membership that was encoded; `where` names it in errors (file and job).

    Raises:
        RendezvousStateError: the bytes are damaged, or of a format that this server can not read.

    """
    try:
        envelope = _envelope_decoder.decode(data)
        if envelope.format != FORMAT:
            raise _foreign(envelope.format, where)
        return _membership_decoder.decode(envelope.membership)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RendezvousStateError(
            f"{where} can not be read: {error} (format {FORMAT} expected); it was left untouched. "
            "Restore it from a backup, or remove it if the job is over"
        ) from error


def _foreign(found: int, where: str) -> RendezvousStateError:
    return RendezvousStateError(
        f"{where} has format {found}, and this rdzvd reads format {FORMAT}; it was left "
        "untouched. Start the rdzvd version that wrote it"
    )
