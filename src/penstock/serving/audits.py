"""Which drafts are recomputed, what came of it, and who is trusted no more."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.serving.messages import AuditFinding

MAX_DISTANCE = 0.1
"""Mean total variation between a reported and a recomputed distribution. Machines that round
differently, or compute in another dtype, stay well below."""

_MIN_FAILURES = 2
_MAX_FAILURE_SHARE = 0.05


@dataclass(slots=True)
class Audited:
    """Drafts of one draft server that were recomputed, and draft tokens that were false."""

    num_drafts: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_false_draws: int = 0


class Audits:
    """Chooses drafts at random, and counts by the operator's name of the draft server.

    share: of the drafts whose model is among `models`
    """

    def __init__(self, share: float, models: Iterable[str]) -> None:
        self._share = share
        self._models = frozenset(models)
        self._random = random.SystemRandom()
        self.by_server: defaultdict[str, Audited] = defaultdict(Audited)
        self.demoted: set[str] = set()
        """Servers whose `ratio` drafts are not taken any more."""

    def choose(self, model: str) -> str | None:
        """The drafter of this machine by which to recompute the next draft of a server of `model`,
        or None."""
        if model not in self._models or self._random.random() >= self._share:
            return None
        return model

    def count(self, server: str, finding: AuditFinding) -> bool:
        """Take in a finding. True where the server has just lost its trust: one failure may be a
        rounding, a row of them is not."""
        audited = self.by_server[server]
        audited.num_drafts += 1
        audited.num_tokens += finding.num_tokens
        audited.num_false_draws += finding.num_false_draws
        if not finding.weighted:
            return False
        audited.num_failed += finding.num_false_draws > 0 or finding.distance > MAX_DISTANCE
        fails = audited.num_failed >= max(_MIN_FAILURES, _MAX_FAILURE_SHARE * audited.num_drafts)
        if not fails or server in self.demoted:
            return False
        self.demoted.add(server)
        return True
