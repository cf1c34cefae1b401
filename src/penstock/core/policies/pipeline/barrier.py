"""Rounds: nothing is verified while a draft is on its way (GoodSpeed, section III-A)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from penstock.core.policies.base import Pipeline, View
from penstock.core.state import RequestState


class Barrier(Pipeline):
    """The target waits for all drafts."""

    name: ClassVar[str] = "off"

    def hold_until(
        self, ready: Sequence[RequestState], pending: Sequence[RequestState], view: View
    ) -> float | None:
        return math.inf if pending else None


POLICY = Barrier
