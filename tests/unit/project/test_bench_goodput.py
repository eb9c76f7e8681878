"""How bench/goodput.py makes its table from the steps that a worker has written."""

import doctest

import bench_path  # noqa: F401
import goodput
from goodput import Ledgered, Result, Step, row, steps_in, table, trained


def test_the_examples_hold() -> None:
    assert doctest.testmod(goodput).failed == 0


def test_only_new_steps_of_one_process_are_goodput() -> None:
    """Time between two processes is no training, nor are steps made before."""
    first = [Step(float(at), 7, at) for at in range(1, 11)]
    again = [Step(20.0 + at, 8, 5 + at) for at in range(1, 11)]
    spent_s, new, redone = trained([*first, *again])
    assert (spent_s, new, redone) == (9.0 + 5.0, 15, 5)
    assert trained([]) == (0.0, 0, 0)


def test_a_line_that_is_being_written_is_left_out() -> None:
    assert steps_in("1.0 7 1\n2.0 7") == [Step(1.0, 7, 1)]
    assert steps_in("") == []


def test_the_table_has_both_words_for_it() -> None:
    ledger = Ledgered(0.48, 0.0004, {"training": 48.0, "loading": 52.0})
    ours = Result("rdzvrun", 100.0, 6, 900, 70, 0.476, ledger)
    theirs = Result("torchrun", 100.0, 3, 300, 10, 0.1, None, "its launchers have ended with [1]")
    text = table([theirs, ours])
    assert "10.0% (its launchers have ended with [1])" in text
    assert text.splitlines()[2].split() == [
        *("rdzvrun", "6", "900", "70", "47.6%", "48.0%", "0.04%"),
    ]
    assert row(ours, 15.0)["ledger_goodput"] == 0.48
    assert row(theirs, 15.0)["ledger_goodput"] is None
