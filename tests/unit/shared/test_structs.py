"""Structs: what the code relies on, whether a struct is a dataclass or msgspec's."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import field

import pytest

from rdzv.structs import as_dict, field_names, replace, struct


@struct(frozen=True)
class Seat:
    rank: int
    labels: Mapping[str, str] = field(default_factory=dict)


@struct(frozen=True, order=True)
class Round:
    number: int
    seats: tuple[Seat, ...] = ()

    def size(self) -> int:
        return len(self.seats)


@struct(frozen=True)
class Other:
    rank: int
    labels: Mapping[str, str] = field(default_factory=dict)


@struct(frozen=True)
class Login:
    user: str
    password: str = field(default="", repr=False)
    asked_ms: int = field(default=0, compare=False)


@struct(frozen=True)
class AdminLogin(Login):
    level: int = 1


def test_a_struct_is_made_shown_and_replaced_as_a_dataclass() -> None:
    round_ = Round(3, (Seat(0, {"rack": "1"}), Seat(1)))
    assert repr(round_) == (
        "Round(number=3, seats=(Seat(rank=0, labels={'rack': '1'}), Seat(rank=1, labels={})))"
    )
    assert round_.size() == 2
    assert replace(round_, number=4) == Round(4, round_.seats)
    assert pickle.loads(pickle.dumps(round_)) == round_
    assert Round(1) < Round(2)
    assert field_names(Round) == ("number", "seats")
    assert as_dict(round_) == {
        "number": 3,
        "seats": ({"rank": 0, "labels": {"rack": "1"}}, {"rank": 1, "labels": {}}),
    }
    match round_:
        case Round(number, (Seat(rank=0), _)):
            assert number == 3
        case _:
            pytest.fail("it matches as it was written")


def test_equal_is_what_is_of_one_class_and_holds_the_same() -> None:
    assert Seat(0) == Seat(0)
    assert Seat(0) != Seat(1)
    assert Seat(0) != Other(0)
    assert hash(Round(1)) == hash(Round(1))


def test_nothing_in_a_struct_changes() -> None:
    seat, login = Seat(0), Login("ada")
    with pytest.raises(AttributeError):
        seat.rank = 1  # type: ignore[misc]
    with pytest.raises(AttributeError):
        login.user = "bob"  # type: ignore[misc]
    with pytest.raises(TypeError, match="say frozen=True"):
        struct()
    with pytest.raises(TypeError, match="renk"):
        replace(seat, renk=1)  # type: ignore[call-arg]


def test_a_struct_that_extends_one_has_plain_defaults() -> None:
    assert AdminLogin("ada").level == 1
    with pytest.raises(TypeError, match="Guest extends a struct"):

        @struct(frozen=True)
        class Guest(Login):
            until_ms: int = field(default=0, repr=False)


def test_a_struct_takes_all_of_its_fields() -> None:
    with pytest.raises(TypeError, match="make it a dataclass"):

        @struct(frozen=True)
        class Made:
            at_ms: int = field(init=False)


def test_each_has_a_default_of_its_own() -> None:
    assert Seat(0).labels is not Seat(0).labels


@pytest.mark.parametrize("kind", [Login, AdminLogin])
def test_a_secret_is_not_shown_and_what_is_not_compared_does_not_count(kind: type[Login]) -> None:
    login = kind("ada", "open sesame", 5)
    assert "sesame" not in repr(login) and f"{kind.__name__}(user='ada'" in repr(login)
    assert login == replace(login, asked_ms=6) and hash(login) == hash(replace(login, asked_ms=6))
    assert login != replace(login, password="other")
    assert login != ("ada", "open sesame")
