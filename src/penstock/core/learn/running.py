"""Running means that choose their own memory."""

from __future__ import annotations

import math

_LONG, _MIDDLE, _SHORT = _WEIGHTS = 1 / 128, 1 / 32, 1 / 8
"""Weights of the latest value in means that run side by side."""
ERROR_WEIGHT = 1 / 128  # of the latest value in the errors of predictions
CLEARLY = 0.9
"""Share of a longer memory's squared error below which a shorter one answers: noise must not
choose, and after a change the error is many times as large."""


class RunningMean:
    """Mean of all values while they are few, then of the latest ones.

    How many these are is chosen by the error of prediction: means of several memories run side by
    side, and the one which predicted the latest values best answers."""

    __slots__ = ("_errors", "_means", "num", "value")

    def __init__(self, value: float = 0.0, num: int = 0) -> None:
        """num: values that a first mean counts for; 0: there is none."""
        self.restart(value, num)

    def restart(self, value: float, num: int) -> None:
        """Forget all values but a mean that counts for `num` of them."""
        self.value, self.num = value, num
        self._means = (value, value, value)
        self._errors = (0.0, 0.0, 0.0)

    def add(self, value: float) -> None:
        """Take in a value."""
        num = self.num = self.num + 1
        share = 1 / num
        # Written out, since a step adds several values.
        long, middle, short = self._means
        e_long, e_middle, e_short = self._errors
        if num > 1:  # the first value had no prediction
            of_error = share if share > ERROR_WEIGHT else ERROR_WEIGHT
            e_long += of_error * ((value - long) ** 2 - e_long)
            e_middle += of_error * ((value - middle) ** 2 - e_middle)
            e_short += of_error * ((value - short) ** 2 - e_short)
            self._errors = (e_long, e_middle, e_short)
        long += (share if share > _LONG else _LONG) * (value - long)
        middle += (share if share > _MIDDLE else _MIDDLE) * (value - middle)
        short += (share if share > _SHORT else _SHORT) * (value - short)
        self._means = (long, middle, short)
        if CLEARLY * e_long <= e_middle:
            self.value = long if CLEARLY * e_long <= e_short else short
        else:
            self.value = middle if CLEARLY * e_middle <= e_short else short

    def move(self, by: float) -> None:
        """Move the mean, in all memories."""
        long, middle, short = self._means
        self._means = (long + by, middle + by, short + by)
        self.value += by

    @property
    def error(self) -> float:
        """Standard deviation of values from their predictions."""
        return math.sqrt(min(self._errors))

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, by the memory that answers."""
        weight = max(1 / max(1, self.num), _WEIGHTS[self._means.index(self.value)])
        return self.error * math.sqrt(weight / (2 - weight))
