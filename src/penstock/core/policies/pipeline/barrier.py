"""Rounds: nothing is verified while a draft is on its way (GoodSpeed, section III-A)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.pipeline import Drafts, Pipeline


class Barrier(Pipeline):
    """The target waits for all drafts."""

    name: ClassVar[str] = "off"

    @dataclass(frozen=True, slots=True)
    class Options:
        """None."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def hold_until(self, drafts: Drafts) -> float | None:
        return math.inf if drafts.pending else None


POLICY = Barrier
