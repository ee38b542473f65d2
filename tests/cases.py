"""How many cases of a test run: all in `make test-all`, and fewer in `make test`."""

from collections.abc import Iterable

import pytest
from hypothesis import settings


def long_but[T](cases: Iterable[T], *always: T) -> list:
    """The cases, marked long but for those named; none named: but for the first."""
    cases = list(cases)
    always = always or tuple(cases[:1])
    assert all(case in cases for case in always)
    return [
        case if case in always else pytest.param(case, marks=pytest.mark.long) for case in cases
    ]


def examples(count: int) -> int:
    """A number of examples in proportion to the chosen profile, two at least."""
    return max(2, count * settings.default.max_examples // 100)
