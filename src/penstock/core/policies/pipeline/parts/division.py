"""Division of requests into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.core.state import DraftStage, RequestState


class Division:
    """Requests in `num` groups, with equal parts of each drafter's requests and of all."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._members: dict[tuple[str, int], list[RequestState]] = {}

    def put(self, state: RequestState, group: int) -> None:
        self._members.setdefault((state.drafter or "", group), []).append(state)

    def emptiest(self, drafter: str) -> int:
        """Return the group with the fewest requests of a drafter, then of all."""
        return min(range(self._num), key=lambda g: (self._count(drafter, g), self._size(g)))

    def balance(self) -> None:
        """Move requests between rounds until no counts differ by more than 1."""
        drafters = sorted({drafter for drafter, _ in self._members})
        for drafter in drafters:
            while self._move(drafter, partial(self._count, drafter)):
                pass
        while any(self._move(d, self._size, keeps_own=True) for d in drafters):
            pass

    def groups(self) -> dict[str, int]:
        """Return the group of each request id."""
        return {s.request.id: g for (_, g), states in self._members.items() for s in states}

    def _move(self, drafter: str, size: Callable[[int], int], *, keeps_own: bool = False) -> bool:
        """Move one request from the fullest to the emptiest group, unless `keeps_own` forbids."""
        order = sorted(range(self._num), key=size)
        to = order[0]
        for source in reversed(order):
            if size(source) - size(to) <= 1:
                return False
            if keeps_own and self._count(drafter, source) <= self._count(drafter, to):
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

    def _size(self, group: int) -> int:
        return sum(len(states) for (_, g), states in self._members.items() if g == group)


def _is_between_rounds(state: RequestState) -> bool:
    return not state.in_flight and state.draft.stage not in (DraftStage.ORDERED, DraftStage.HELD)
