"""Protobuf messages made from their descriptors: a new field is tried without a change here.

Most fields have a plausible value, so that the code behind the checks is reached; a few are
hostile. A placeholder for something that only the server knows, such as the uid of a run, is
replaced when the message is sent: `known` does that.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz.surface import text

DEPTH = 5
"""The depth of nested messages; none of the protocol's is deeper."""

RUN = "@run"
"""Stands for the uid of a run of the job that the message names."""

JOBS = ("j1", "j2", "j3")
NODES = ("n1", "n2", "n3")
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "rdzv_id": JOBS,
    "node_id": NODES,
    "node_ids": NODES,
    "instance": ("one", "two"),
    "run": ("", RUN, RUN, "5f3a9c21"),
    "address": ("127.0.0.1", "10.0.0.5", "::1"),
    "machine": ("m1", "m2"),
    "host_name": ("h1",),
    "role": ("default", "trainer"),
    "topology": ("", "rack-1"),
    "reason": ("because",),
    "message": ("RuntimeError: no",),
    "traceback": ("Traceback (most recent call last):\n  no\n",),
    "args": ("train.py", "--nproc-per-node=2", "--nnodes=1:2", "-m"),
    "chdir": ("", "/tmp", "/home/ada"),
    "name": ("A_NAME", "zone", "ada"),
    "value": ("1", "a"),
    "account": ("", "ada"),
    "submitter": ("ada",),
    "submitted_by": ("ada",),
    "uuid": ("GPU-1", "GPU-2"),
    "roles": ("read", "admin", "node"),
    "secret": ("", "s3cret"),
    "id_or_name": ("ada",),
    "machine_type": ("a",),
}
_SMALL = {"protocol_version": (1,), "round": (0, 1, 2), "left_round": (0, 1)}
_MS = (0, 1, 50, 1_000, 60_000)
_COUNTS = (0, 1, 1, 2, 2, 3, 4)
_FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 1e308, 5e-324)
_LOWEST = {
    FieldDescriptor.CPPTYPE_INT32: -(2**31),
    FieldDescriptor.CPPTYPE_INT64: -(2**63),
}
_HIGHEST = {
    FieldDescriptor.CPPTYPE_INT32: 2**31 - 1,
    FieldDescriptor.CPPTYPE_INT64: 2**63 - 1,
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
}

USUAL = 0.88
"""How often a field is set, and how often a number is plausible."""


def make(dice: random.Random, descriptor: Descriptor, depth: int = DEPTH) -> Any:
    """Make a message of one type."""
    message = GetMessageClass(descriptor)()
    chosen = {
        oneof.name: dice.choice(oneof.fields).name
        for oneof in descriptor.oneofs
        if len(oneof.fields) > 1
    }
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is not None and oneof.name in chosen:
            if chosen[oneof.name] == field.name:
                _fill(dice, message, field, depth)
        elif dice.random() < USUAL:
            _fill(dice, message, field, depth)
    return message


def _fill(dice: random.Random, message: Any, field: FieldDescriptor, depth: int) -> None:
    held = getattr(message, field.name)
    if field.message_type is not None:
        if depth > 0 and field.is_repeated:
            few = range(dice.choice((0, 1, 1, 2, 3)))
            held.extend(make(dice, field.message_type, depth - 1) for _ in few)
        elif depth > 0:
            held.CopyFrom(make(dice, field.message_type, depth - 1))
            held.SetInParent()
    elif field.is_repeated:
        held.extend(_value(dice, field) for _ in range(dice.randint(0, 3)))
    else:
        setattr(message, field.name, _value(dice, field))


def _value(dice: random.Random, field: FieldDescriptor) -> Any:
    kind = field.cpp_type
    if field.type == FieldDescriptor.TYPE_BYTES:
        return dice.randbytes(dice.choice((0, 1, 30, 3_000)))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return text(dice, _TEXTS.get(field.name, ()))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return dice.random() < 0.5
    usual = dice.random() < USUAL
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return dice.choice((0.5, 1.0, 20.0) if usual else _FLOATS)
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        known_ones = [value.number for value in field.enum_type.values]
        return dice.choice(known_ones) if usual else dice.randint(-(2**31), 2**31 - 1)
    if usual:
        return dice.choice(_SMALL.get(field.name, _MS if field.name.endswith("_ms") else _COUNTS))
    low, high = _LOWEST.get(kind, 0), _HIGHEST[kind]
    return dice.choice((low, 0, high, high - 1, high // 2, dice.randint(low, high)))


def known(message: Message, runs: Mapping[str, str], rdzv_id: str = "") -> None:
    """Replace the placeholder for the uid of a run."""
    fields = message.ListFields()
    rdzv_id = next((value for field, value in fields if field.name == "rdzv_id"), rdzv_id)
    for field, value in fields:
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                known(part, runs, rdzv_id)
        elif field.name == "run" and value == RUN:
            setattr(message, field.name, runs.get(rdzv_id, ""))
