"""Converts messages about nodes' snapshots to bounded and validated values."""

from __future__ import annotations

from collections.abc import Collection

from rdzv.core.model import Snapshot, SnapshotMark
from rdzv.core.snapshot_copies import CopyCarrier, MissingCopies
from rdzv.errors import InvalidRequestError
from rdzv.server.messages import SnapshotsHeld
from rdzv.server.settings import bounds
from rdzv.v1 import rdzv_pb2 as pb


def snapshots_held_of(message: pb.SnapshotsHeld) -> SnapshotsHeld:
    """Read a node's report of all the snapshots that it holds for a job."""
    return SnapshotsHeld(
        rdzv_id=bounds.rdzv_id_of(message.rdzv_id),
        run=bounds.uid("run", message.run),
        snapshots=_snapshots(message.snapshots, bounds.LOCAL_WORLD_SIZE),
        carrier=_carrier(message.carrier) if message.HasField("carrier") else None,
        missing=_missing(message.missing) if message.HasField("missing") else None,
    )


def readable_snapshots(
    messages: Collection[pb.Snapshot], local_world_size: int
) -> tuple[Snapshot, ...]:
    """Read a joining node's snapshots, or return () if any is invalid, as a join needs none."""
    try:
        return _snapshots(messages, local_world_size)
    except InvalidRequestError:
        return ()


def mark_of(message: pb.SnapshotMark) -> SnapshotMark:
    """Read the mark that identifies the saved state of a snapshot."""
    return SnapshotMark(
        lineage=message.lineage,
        step=bounds.within("snapshot: step", message.step, 0, bounds.STEPS),
        series=_printable("snapshot: series", message.series),
        shards=bounds.within("snapshot: shards", message.shards, 1, bounds.SHARDS),
        world_size=bounds.within("snapshot: world_size", message.world_size, 1, bounds.SHARDS),
    )


def _snapshots(messages: Collection[pb.Snapshot], local_world_size: int) -> tuple[Snapshot, ...]:
    most = bounds.SNAPSHOTS_PER_WORKER * local_world_size
    if len(messages) > most:
        raise bounds.refusal("snapshots", len(messages), "are too many", f"hold at most {most}")
    return tuple(_snapshot(one) for one in messages)


def _snapshot(message: pb.Snapshot) -> Snapshot:
    mark = mark_of(message.mark)
    return Snapshot(
        local_rank=bounds.within(
            "snapshot: local_rank", message.local_rank, 0, bounds.LOCAL_WORLD_SIZE - 1
        ),
        mark=mark,
        shard=bounds.within("snapshot: shard", message.shard, 0, mark.shards - 1),
        bytes=bounds.within("snapshot: bytes", message.bytes, 0, bounds.STEPS),
        digest=_printable("snapshot: digest", message.digest),
        copy_of=bounds.within("snapshot: copy_of", message.copy_of, 0, bounds.SHARDS - 1)
        if message.HasField("copy_of")
        else None,
    )


def _carrier(message: pb.CopyCarrier) -> CopyCarrier:
    return CopyCarrier(
        port=bounds.within("carrier: port", message.port, 1, 65535),
        token=_printable("carrier: token", message.token),
        fingerprint=bounds.label("carrier: fingerprint", message.fingerprint),
    )


def _missing(message: pb.MissingCopies) -> MissingCopies:
    return MissingCopies(mark_of(message.mark), bounds.sentence(message.reason))


def _printable(what: str, text: str) -> str:
    if not text:
        raise bounds.refusal(what, text, "is empty", "name it")
    return bounds.label(what, text)
