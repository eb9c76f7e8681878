"""Numbers for people are formatted in one place, as its doctests show."""

from __future__ import annotations

import doctest

from rdzv.core import words


def test_words_are_as_documented() -> None:
    result = doctest.testmod(words)
    assert result.attempted and not result.failed
