"""Products of parameters, of which `make test` runs a part and `make test-slow` the rest."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def covering(*axes: Iterable[Any], strength: int = 2, fast: Iterable[Any] = ()) -> list[Any]:
    """The product of the axes for `parametrize`, slow but for a covering array in it: all
    combinations of values of `strength` axes, in as few cases as a greedy choice finds.

    fast: cases that are not slow either.
    """
    product = list(itertools.product(*axes))
    covered = {case: set(itertools.combinations(enumerate(case), strength)) for case in product}
    kept = set(fast)
    missing = set().union(*covered.values()).difference(*(covered[case] for case in kept))
    while missing:
        case = max(product, key=lambda c: len(covered[c] & missing))
        kept.add(case)
        missing -= covered[case]
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case not in kept)) for case in product]


def slow(*axes: Iterable[Any]) -> list[Any]:
    """The product of the axes for `parametrize`, all of it slow."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product(*axes)]


def first_fast(values: Iterable[Any], num: int = 1) -> list[Any]:
    """The values for `parametrize`, slow but for the first."""
    return [
        pytest.param(value, marks=[pytest.mark.slow] * (i >= num)) for i, value in enumerate(values)
    ]
