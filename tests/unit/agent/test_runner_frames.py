"""Frames as values: which JSON a request, or the report of a job's process, is made from."""

from __future__ import annotations

import doctest
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from rdzv.agent.runner import requests
from rdzv.agent.runner.frames import Number, RequestError, Small, Text, decode


@dataclass(frozen=True)
class Part:
    size: int


@dataclass(frozen=True)
class Whole:
    """Has one field of each kind."""

    whole: int = 0
    share: float = 0.0
    name: str = ""
    flag: bool = False
    text: Text = ""
    number: Number = 0
    small: Small = 0
    maybe: str | None = None
    parts: tuple[Part, ...] = ()
    pairs: tuple[tuple[str, int], ...] = ()
    env: Mapping[str, str] | None = None


@pytest.mark.parametrize(
    ("field", "taken", "refused"),
    [
        ("whole", [0, -1, 2**53], [True, 1.0, "1", None, 2**53 + 1]),
        ("share", [0, 1.5], [-1, float("nan"), float("inf"), True, "1"]),
        ("name", ["", "\ud800"], [1, None]),
        ("flag", [True, False], [0, 1, "True"]),
        ("text", ["a"], [1, None]),
        ("number", [0, 2**53], [-1, 2**53 + 1, True]),
        ("small", [0, 2**31 - 1], [-1, 2**31]),
        ("maybe", ["a", None], [1]),
        ("parts", [[], [{"size": 1}, {"size": 2, "more": 3}]], [{}, [{}], [3], [{"size": "1"}]]),
        ("pairs", [[], [["a", 1]]], [[["a"]], [["a", 1, 2]], [[1, "a"]], ["ab"]]),
        ("env", [{}, {"A": "b"}, None], [[], {"A": 1}]),
    ],
)
def test_a_field_holds_what_it_says(field: str, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        decode(Whole, {field: value})
    for value in refused:
        with pytest.raises(RequestError, match=f"^{field}: "):
            decode(Whole, {field: value})


def test_what_utf_8_cannot_carry_is_replaced_in_texts_alone() -> None:
    assert decode(Whole, {"text": "a\ud800", "name": "a\ud800"}) == Whole(text="a?", name="a\ud800")


@pytest.mark.parametrize("said", [[], None, 3, {"more": 1}, {}])
def test_a_frame_is_an_object_with_all_its_fields(said: object) -> None:
    with pytest.raises(RequestError):
        decode(Part, said)


def test_a_request_arrives_as_it_was_sent() -> None:
    identity = requests.Identity(1, 2, (3,), 0o22, (("nofile", 9, -1),))
    worker = requests.WorkerSpec(0, ("a",), {"A": "b"}, None, "out", cpus=(1,), identity=identity)
    start = requests.StartWorkers(3, (worker,), requests.KeepSpec((1,), 0, None))
    assert decode(requests.StartWorkers, _sent(start)) == start


def _sent(value: Any) -> Any:
    """Return the JSON of a request: it has lists in place of tuples."""

    def listed(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: listed(one) for name, one in part.items()}
        return [listed(one) for one in part] if isinstance(part, tuple) else part

    return listed(asdict(value))


def test_the_examples_hold() -> None:
    assert doctest.testmod(requests).failed == 0


RECORDED = Path(__file__).parent.parent / "golden/runner/requests.txt"


def test_other_requests_have_another_version(pytestconfig: pytest.Config) -> None:
    """An agent adopts a runner of its own version, so one version has one form of each request."""
    kinds = {kind for kind in vars(requests).values() if is_dataclass(kind)}
    lines = [f"version {requests.PROTOCOL_VERSION}"]
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        lines.append(
            " ".join((requests.type_of(kind), *(f"{f.name}: {f.type}" for f in fields(kind))))
        )
    text = "\n".join(lines) + "\n"
    if pytestconfig.getoption("--rewrite"):
        RECORDED.write_text(text)
    assert RECORDED.read_text() == text, "raise PROTOCOL_VERSION, then --rewrite"
