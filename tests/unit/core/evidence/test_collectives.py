"""Which ranks the others of a round wait for, according to their records of collectives."""

from __future__ import annotations

import pytest

from rdzv.core.evidence.collectives import (
    FINISHED,
    KINDS,
    CollectiveRecord,
    Evidence,
    GroupRecord,
    HangCause,
    compare,
)
from rdzv.structs import replace

WAIT_MS = 32_000


def entered(
    sequence: int, operation: str = "all_reduce", sizes: str = "[4] Float"
) -> CollectiveRecord:
    return CollectiveRecord(sequence, operation, sizes, done=True, age_ms=WAIT_MS + 500)


def waits(
    sequence: int, operation: str = "all_reduce", sizes: str = "[4] Float", ms: int = WAIT_MS
) -> CollectiveRecord:
    return CollectiveRecord(sequence, operation, sizes, done=False, age_ms=ms)


def group(
    *latest: CollectiveRecord, name: str = "0", description: str = "default_pg"
) -> GroupRecord:
    return GroupRecord(name, description, latest[-1].sequence if latest else 0, latest)


def pair(*latest: CollectiveRecord) -> GroupRecord:
    return group(*latest, name="1", description="pair")


def first(number: int, *members: int) -> Evidence:
    """Return the evidence of a rank that waits in the first collective of a subgroup."""
    of = replace(pair(waits(1, "barrier", "")), members=members)
    return rank(number, group(entered(40)), of, in_collective=True)


def gone(number: int, exited_ms: int | None = 4_900) -> Evidence:
    return rank(number, state=FINISHED, exited_ms=exited_ms)


def rank(number: int, *records: GroupRecord, **more: object) -> Evidence:
    return Evidence(number, records or None, **more)  # type: ignore[arg-type]


def waiting(number: int, sequence: int = 41) -> Evidence:
    return rank(number, group(entered(sequence - 1), waits(sequence)), in_collective=True)


def absent(number: int, sequence: int = 41, **more: object) -> Evidence:
    return rank(number, group(entered(sequence - 1)), **{"in_collective": False, **more})


WAIT_3 = "RANK 0-2 have waited in it for 32 s"
THREE = (waiting(0), waiting(1), waiting(2))


@pytest.mark.parametrize(
    ("evidence", "kind", "ranks", "sentence"),
    [
        pytest.param(
            (*THREE, absent(3)),
            "absent",
            (3,),
            f"RANK 3 has not entered all_reduce #41 of the default group; {WAIT_3}",
            id="an absent rank",
        ),
        pytest.param(
            (waiting(0), waiting(1), absent(2), absent(3)),
            "absent",
            (2, 3),
            "RANK 2-3 have not entered all_reduce #41 of the default group; "
            "RANK 0-1 have waited in it for 32 s",
            id="two absent ranks",
        ),
        pytest.param(
            (*THREE, rank(3, group(entered(40), waits(41, "broadcast")))),
            "other_operation",
            (3,),
            "RANK 3 has entered broadcast as #41 of the default group, where RANK 0-2 have entered "
            "all_reduce; RANK 0-3 have waited in it for 32 s",
            id="another operation",
        ),
        pytest.param(
            (*THREE, rank(3, group(entered(41, "broadcast"), waits(42)))),
            "other_operation",
            (3,),
            "RANK 3 has entered broadcast as #41 of the default group, where RANK 0-2 have entered "
            "all_reduce; RANK 0-3 have waited in it for 32 s",
            id="another operation, which it has completed alone",
        ),
        pytest.param(
            (*THREE, rank(3, group(entered(40), waits(41, sizes="[8] Float")))),
            "other_sizes",
            (3,),
            "in all_reduce #41 of the default group RANK 3 has [8] Float, where RANK 0-2 have "
            "[4] Float; RANK 0-3 have waited in it for 32 s",
            id="other sizes",
        ),
        pytest.param(
            (waiting(0), rank(1, group(entered(40), waits(41, "broadcast")))),
            "other_operation",
            (),
            "RANK 1 has entered broadcast as #41 of the default group, where RANK 0 has entered "
            "all_reduce; RANK 0-1 have waited in it for 32 s",
            id="two that differ: it may be either",
        ),
        pytest.param(
            (
                *(rank(n, group(entered(40), waits(41)), pair(entered(6))) for n in range(3)),
                rank(3, group(entered(40)), pair(entered(6), waits(7))),
            ),
            "other_order",
            (3,),
            "RANK 3 waits in all_reduce #7 of group pair, and has not entered all_reduce #41 of "
            f"the default group: these groups are entered in different orders; {WAIT_3}",
            id="another order of groups",
        ),
        pytest.param(
            (
                *(rank(n, group(entered(40), waits(41))) for n in (0, 1)),
                rank(2, group(entered(40)), pair(entered(6), waits(7))),
                rank(3, group(entered(40)), pair(entered(6)), in_collective=False),
            ),
            "absent",
            (3,),
            "RANK 3 has not entered all_reduce #41 of the default group; "
            "RANK 0-1 have waited in it for 32 s",
            id="one waits for another, which waits for nobody",
        ),
        pytest.param(
            (*THREE, rank(3, state="T")),
            "stopped",
            (3,),
            "RANK 3 is stopped by a signal; RANK 0-2 have waited in it for 32 s",
            id="stopped: it has not even given its record",
        ),
        pytest.param(
            (*THREE, rank(3, state="T"), rank(4, in_collective=True)),
            "stopped",
            (3,),
            "RANK 3 is stopped by a signal; RANK 0-2 have waited in it for 32 s",
            id="stopped, and another has no record either",
        ),
        pytest.param(
            (*THREE, absent(3, state="D")),
            "uninterruptible",
            (3,),
            "RANK 3 is uninterruptible in the kernel (D state) and has not entered all_reduce #41 "
            f"of the default group; {WAIT_3}",
            id="D state",
        ),
        pytest.param(
            (*THREE, absent(3, busy="loader", where="in read at data.py:7")),
            "loader",
            (3,),
            "RANK 3 waits for its data loader (in read at data.py:7) and has not entered "
            f"all_reduce #41 of the default group; {WAIT_3}",
            id="its loader is stuck",
        ),
        pytest.param(
            (*THREE, absent(3, busy="gil_held", where="in spin at train.py:7")),
            "gil_held",
            (3,),
            "RANK 3 holds the interpreter's lock (GIL) (in spin at train.py:7) and has not entered "
            f"all_reduce #41 of the default group; {WAIT_3}",
            id="the GIL is held",
        ),
        pytest.param(
            (*THREE, absent(3, in_collective=True), absent(4)),
            "absent",
            (4,),
            "RANK 4 has not entered all_reduce #41 of the default group; "
            "RANK 0-2 have waited in it for 32 s",
            id="one that is inside torch.distributed waits, too, without a record",
        ),
        pytest.param(
            (*THREE, rank(3)),
            "absent",
            (3,),
            "RANK 3 has no record, and all others have entered all_reduce #41 of the default "
            f"group; {WAIT_3}",
            id="one without a record, and nobody else is missing",
        ),
        pytest.param(
            (*(waiting(n, 42) for n in range(3)), waiting(3, 41)),
            "unfinished",
            (3,),
            "RANK 3 is still in all_reduce #41 of the default group, which others have left",
            id="one is still in what others have left",
        ),
        pytest.param(
            THREE,
            "unfinished",
            (),
            "RANK 0-2 have entered all_reduce #41 of the default group, no rank is missing, and it "
            "has not ended for 32 s",
            id="all have entered the same",
        ),
        pytest.param(
            (*THREE, gone(3)),
            "exited",
            (3,),
            "RANK 3 exited with 0, 4.9 s before; RANK 0-2 have waited in all_reduce #41 of the "
            "default group for 32 s",
            id="one has exited early",
        ),
        pytest.param(
            (waiting(0), absent(1), gone(2, None), gone(3, None)),
            "exited",
            (2, 3),
            "RANK 2-3 exited with 0; RANK 0 has waited in all_reduce #41 of the default group for "
            "32 s",
            id="two have, and another is on its way",
        ),
        pytest.param(
            (absent(0, 41), first(1, 0, 1, 2), first(2, 0, 1, 2)),
            "absent",
            (0,),
            "RANK 0 has not entered barrier #1 of group pair; RANK 1-2 have waited in it for 32 s",
            id="the first collective of a subgroup",
        ),
        pytest.param(
            (absent(0, 41), first(1, 1, 2), first(2, 1, 2), gone(3)),
            "unfinished",
            (),
            "RANK 1-2 have entered barrier #1 of group pair, no rank is missing, and it has not "
            "ended for 32 s",
            id="others are not in the subgroup",
        ),
        pytest.param(
            (absent(0, 41), first(1), first(2), rank(3)),
            "unfinished",
            (),
            "RANK 1-2 have entered barrier #1 of group pair, whose other members are not known, "
            "and it has not ended for 32 s",
            id="the members of a subgroup are not known",
        ),
        pytest.param(
            (absent(0, 41), first(1, 1, 2, 3, 4), first(2, 1, 2, 3, 4, 99), rank(3), rank(4)),
            "unfinished",
            (),
            "RANK 1-2 have entered barrier #1 of group pair, no information about RANK 3-4, and it "
            "has not ended for 32 s",
            id="no information about some members",
        ),
    ],
)
def test_whom_they_wait_for(
    evidence: tuple[Evidence, ...], kind: str, ranks: tuple[int, ...], sentence: str
) -> None:
    found = compare(evidence)
    assert isinstance(found, HangCause)
    expected = sentence.replace(
        "stopped by a signal; RANK 0-2 have waited in it",
        "stopped by a signal; RANK 0-2 have waited in all_reduce #41 of the default group",
    )
    assert (found.kind, found.ranks, found.sentence) == (kind, ranks, expected)
    assert found.kind in KINDS
    assert found.details


@pytest.mark.parametrize(
    "evidence",
    [
        pytest.param((), id="nobody"),
        pytest.param((rank(0), rank(1)), id="no records"),
        pytest.param((absent(0), absent(1)), id="nobody waits"),
        pytest.param(
            (rank(0, group(entered(40), waits(41, ms=500))), absent(1)),
            id="the wait is too short to be told from none",
        ),
    ],
)
def test_nothing_is_said_of(evidence: tuple[Evidence, ...]) -> None:
    assert compare(evidence) is None


@pytest.mark.parametrize("operation", ["all_to_all", "gather", "scatter", "alltoall_base"])
def test_ranks_may_rightly_differ_in_sizes(operation: str) -> None:
    evidence = [rank(n, group(entered(40), waits(41, operation, f"[{n}] Float"))) for n in range(3)]
    found = compare(evidence)
    assert found is not None
    assert (found.kind, found.ranks) == ("unfinished", ())


def test_ranks_of_the_round_that_show_nothing_are_counted() -> None:
    found = compare(THREE, world_size=5)
    assert found is not None
    assert (found.kind, found.ranks, found.finds) == ("unfinished", (), False)
    assert "no information about RANK 3-4, and it has not ended" in found.sentence


def test_sizes_prove_nothing_while_a_rank_is_absent() -> None:
    other = rank(2, group(entered(40), waits(41, sizes="[8] Float")))
    found = compare([waiting(0), waiting(1), other, absent(3)])
    assert found is not None
    assert (found.kind, found.ranks) == ("absent", (3,))


def test_the_details_say_where_everybody_is() -> None:
    found = compare([*THREE, absent(3)])
    assert found is not None
    assert found.details == (
        "the default group: RANK 0-2 wait in all_reduce #41 [4] Float; RANK 3 has not entered #41",
    )


def test_the_wait_is_named_by_the_collective_that_the_absent_have_not_entered() -> None:
    """Two have completed a broadcast as its root; the third has not entered it."""
    found = compare([waiting(0, 42), waiting(1, 42), absent(2, 41)])
    assert found is not None
    assert (found.sequence, found.ranks, found.waiting) == (42, (2,), (0, 1))
