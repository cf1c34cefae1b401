"""Division of requests into micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from penstock.core.state import DraftStage, RequestState

_ROUNDING = 1e-9  # tolerance of float shares


class Division:
    """Requests in groups with given `shares`, of each drafter's requests and of all."""

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._members: dict[tuple[str, int], list[RequestState]] = {}
        self._loads: Counter[str] = Counter()

    def put(self, state: RequestState, group: int) -> None:
        drafter = state.drafter or ""
        self._members.setdefault((drafter, group), []).append(state)
        self._loads[drafter] += 1

    def emptiest(self, drafter: str) -> int:
        """Return the group with the fewest requests of a drafter for its share, then of all."""

        def size(group: int) -> tuple[float, float]:
            one_more = (self._loads[drafter] + 1) * self._shares[group]
            return self._count(drafter, group) - one_more, self._surplus(group)

        return min(range(len(self._shares)), key=size)

    def balance(self) -> None:
        """Move requests between rounds until no surpluses differ by more than 1."""
        drafters = sorted(self._loads)
        for drafter in drafters:
            while self._move(drafter, partial(self._own_surplus, drafter)):
                pass
        while any(self._move(d, self._surplus, keeps_own=True) for d in drafters):
            pass

    def groups(self) -> dict[str, int]:
        """Return the group of each request id."""
        return {s.request.id: g for (_, g), states in self._members.items() for s in states}

    def _move(
        self, drafter: str, surplus: Callable[[int], float], *, keeps_own: bool = False
    ) -> bool:
        """Move one request from the fullest to the emptiest group, unless `keeps_own` forbids."""
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
