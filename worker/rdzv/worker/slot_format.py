"""The format of a snapshot in memory, for programs that read no tensors, and thus import no torch.

    seal     48 bytes: magic, format, length and digest of the header; zero during a write
    header   JSON, up to 64 KiB from the start: step, lineage, layout, sizes, digest of the rest
    tensors  each aligned to 64 bytes
    head     pickled: everything else, and the names, shapes and types of the tensors

The seal is written last: a process that is killed while writing leaves no seal, so a slot with a
seal is complete. The digest detects any other damage. It is verified before anything in the
snapshot is used, and before its head is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from typing import NamedTuple


class SnapshotError(Exception):
    """A snapshot cannot be stored, or written to disk; the message gives the reason."""


TENSORS_AT = 64 << 10

_MAGIC, _FORMAT = b"rdzvsnap", 1
_SEAL = struct.Struct(">8sII32s")
SEAL_BYTES = _SEAL.size


class Mark(NamedTuple):
    """Identifies a state. It is equal for all of the state's parts, and larger for newer states."""

    lineage: int = -1
    step: int = -1
    series: str = ""
    shards: int = 0

    @property
    def time(self) -> tuple[int, int]:
        """The lineage and step, which are equal for everything that was saved with this state."""
        return self.lineage, self.step


NO_MARK = Mark()
"""Precedes all others."""


@dataclass(frozen=True)
class Header:
    """Describes the snapshot in a slot."""

    step: int
    """The number of sealed steps in the saved state."""
    lineage: int
    """The last round in which all workers of this training were new."""
    shard: int
    shards: int
    """The number of parts, or 0 if the snapshot holds no state but only this rank's own values
    (random number generators).
    """
    rank: int
    world_size: int
    state: str
    """A digest of the names, shapes and types of the values given to State(...)."""
    part: str = ""
    """The same digest for the values added by state.add()."""
    nonce: str = ""
    """A random identifier that all ranks share from the start of their lineage.

    It is needed because a server restored from a backup may reuse a lineage's number.
    """
    round: int = 0
    """The round in which it was saved.

    Kept workers of a later round may repeat the step with other results. A node that was left out
    of that round still holds the first ones.
    """
    tensors_bytes: int = 0
    head_bytes: int = 0
    tensors_digest: str = ""
    """Equal on all ranks that have saved the same tensors."""
    digest: str = ""

    @property
    def series(self) -> str:
        """An identifier shared by snapshots from different ranks that form a consistent set."""
        ranks = self.world_size if self.part else 0
        text = f"{self.state}/{self.part}/{self.shards}/{ranks}/{self.nonce}/{self.round}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def mark(self) -> Mark:
        return Mark(self.lineage, self.step, self.series, self.shards)

    @property
    def bytes(self) -> int:
        return TENSORS_AT + self.tensors_bytes + self.head_bytes


def digest_of_seal(seal: bytes | memoryview) -> str:
    """Return what workers report of each saved snapshot, to tell it from any other."""
    return hashlib.blake2b(seal, digest_size=32).hexdigest()


class SealedMemory:
    """Memory for one snapshot that outlives this process."""

    def __init__(self, memory: memoryview | bytearray) -> None:
        """Wrap more than 64 KiB of memory."""
        self.memory = memoryview(memory)

    @property
    def size(self) -> int:
        return len(self.memory)

    def header(self) -> Header | None:
        """Return the snapshot's header, or None if there is no complete snapshot."""
        magic, version, length, sealed = _SEAL.unpack_from(self.memory)
        if (magic, version) != (_MAGIC, _FORMAT) or length > TENSORS_AT - SEAL_BYTES:
            return None
        said = bytes(self.memory[SEAL_BYTES : SEAL_BYTES + length])
        if hashlib.blake2b(said, digest_size=32).digest() != sealed:
            return None
        header = Header(**json.loads(said))
        return header if header.bytes <= self.size else None

    @property
    def seal_digest(self) -> str:
        return digest_of_seal(self.memory[:SEAL_BYTES])

    @property
    def is_damaged(self) -> bool:
        """Whether it is neither empty nor holds a snapshot whose header can be read."""
        return any(self.memory[:SEAL_BYTES]) and self.header() is None

    def clear(self) -> None:
        self.memory[:SEAL_BYTES] = bytes(SEAL_BYTES)

    def _complete(self, header: Header) -> None:
        said = json.dumps(asdict(header)).encode()
        self.memory[SEAL_BYTES : SEAL_BYTES + len(said)] = said
        sealed = hashlib.blake2b(said, digest_size=32).digest()
        self.memory[:SEAL_BYTES] = _SEAL.pack(_MAGIC, _FORMAT, len(said), sealed)
