"""What people read of numbers is said once, and as its doctests say."""

from __future__ import annotations

import doctest

from rdzv.core import words


def test_words_are_as_documented() -> None:
    result = doctest.testmod(words)
    assert result.attempted and not result.failed
