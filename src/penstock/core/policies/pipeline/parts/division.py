"""Requests in groups, each with its share of them: micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from penstock.core.state import DraftStage, RequestState

_ROUNDING = 1e-9


class Division:
    """Requests in groups that should have `shares` of them, of each drafter's and altogether."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._members: dict[tuple[str, int], list[RequestState]] = {}
        self._loads: Counter[str] = Counter()

    def put(self, state: RequestState, group: int) -> None:
        """Add a request."""
        drafter = state.drafter or ""
        self._members.setdefault((drafter, group), []).append(state)
        self._loads[drafter] += 1

    def emptiest(self, drafter: str) -> int:
        """The group with the fewest requests of a drafter for its share of one more; of several,
        with the fewest at all."""

        def size(group: int) -> tuple[float, float]:
            one_more = (self._loads[drafter] + 1) * self._shares[group]
            return self._count(drafter, group) - one_more, self._surplus(group)

        return min(range(len(self._shares)), key=size)

    def balance(self) -> None:
        """Move requests between their rounds until no group has more than one too many beside
        another, of a drafter's or altogether."""
        drafters = sorted(self._loads)
        for drafter in drafters:
            while self._move(drafter, partial(self._own_surplus, drafter)):
                pass
        while any(self._move(d, self._surplus, keeps_own=True) for d in drafters):
            pass

    def groups(self) -> dict[str, int]:
        """By request id."""
        return {s.request.id: g for (_, g), states in self._members.items() for s in states}

    def _move(
        self, drafter: str, surplus: Callable[[int], float], *, keeps_own: bool = False
    ) -> bool:
        """Move one of a drafter's requests from the group with the most too many to the one with
        the fewest. keeps_own: only if the drafter's own are then no worse divided."""
        order = sorted(range(len(self._shares)), key=surplus)
        to = order[0]
        for source in reversed(order):
            if surplus(source) - surplus(to) <= 1 + _ROUNDING:
                return False
            own = self._own_surplus(drafter, source) - self._own_surplus(drafter, to)
            if keeps_own and own < 1 - _ROUNDING:
                continue
            members = self._members.get((drafter, source), [])
            movable = next((s for s in reversed(members) if _is_between_rounds(s)), None)
            if movable is not None:
                members.remove(movable)
                self._members.setdefault((drafter, to), []).append(movable)
                return True
        return False

    def _count(self, drafter: str, group: int) -> int:
        return len(self._members.get((drafter, group), ()))

    def _own_surplus(self, drafter: str, group: int) -> float:
        return self._count(drafter, group) - self._loads[drafter] * self._shares[group]

    def _surplus(self, group: int) -> float:
        return sum(self._own_surplus(drafter, group) for drafter in self._loads)


def _is_between_rounds(state: RequestState) -> bool:
    return not state.in_flight and state.draft.stage not in (DraftStage.ORDERED, DraftStage.HELD)
