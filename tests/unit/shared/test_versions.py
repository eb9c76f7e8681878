"""Numbers and types of the protocol's fields stay, so programs of one protocol read each other.

`protocol/v1.fields.json` has the number and type of every field. Fields are only added, never
changed: a change that breaks them needs a new protocol. `--rewrite` records what was added.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor

from rdzv.agent.server_link import encoding as agent_wire
from rdzv.errors import InvalidRequestError
from rdzv.server import wire
from rdzv.v1 import rdzv_pb2 as pb
from rdzv.version import PROTOCOL_VERSION

FIELDS = Path(__file__).parents[1] / f"protocol/v{PROTOCOL_VERSION}.fields.json"


def test_no_field_changes_its_number_or_type(pytestconfig: pytest.Config) -> None:
    now = fields_of_all()
    recorded = json.loads(FIELDS.read_text())
    lost = {key: was for key, was in recorded.items() if now.get(key) != was}
    assert not lost, "these were changed or removed; older programs still send them"
    if pytestconfig.getoption("--rewrite"):
        rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(now[key])}" for key in sorted(now))
        FIELDS.write_text(f"{{\n{rows}\n}}\n")
    assert now.keys() == json.loads(FIELDS.read_text()).keys(), "--rewrite records what is new"


@pytest.mark.parametrize(("version", "behind"), [(0, "agent"), (6, "agent"), (8, "server")])
def test_a_server_accepts_its_own_protocol_alone(
    version: int, behind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PROTOCOL_VERSION", 7)
    wire.check_protocol(7)
    with pytest.raises(InvalidRequestError, match=f"protocol {version}, .* upgrade the {behind}$"):
        wire.check_protocol(version)


def test_what_is_of_a_later_version_is_passed_over() -> None:
    """New fields and messages do no harm to programs that do not know them."""
    later = b"\xfa\x3e\x03new"
    message = pb.NodeMessage.FromString(
        pb.NodeMessage(hello=pb.Hello()).SerializeToString() + later
    )
    assert message.WhichOneof("body") == "hello"
    unknown = pb.ServerMessage.FromString(b"\x08\x05" + later)
    assert agent_wire.announcement(unknown, now_ms=0) is None


def fields_of_all() -> dict[str, list[Any]]:
    """Return number, type and kind of every field of the protocol, by its full name."""
    found: dict[str, list[Any]] = {}

    def visit(descriptor: Descriptor) -> None:
        for field in descriptor.fields:
            kind = field.message_type or field.enum_type
            of = kind.full_name if kind else ""
            # Not field.label, which newer runtimes of protobuf no longer have.
            found[field.full_name] = [field.number, field.type, of, field.has_presence]
        for enum in descriptor.enum_types:
            found.update(_values(enum))
        for nested in descriptor.nested_types:
            visit(nested)

    for descriptor in pb.DESCRIPTOR.message_types_by_name.values():
        visit(descriptor)
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        found.update(_values(enum))
    return found


def _values(enum: EnumDescriptor) -> dict[str, list[Any]]:
    return {f"{enum.full_name}.{value.name}": [value.number] for value in enum.values}
