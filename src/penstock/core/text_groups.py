"""Decode groups of requests with texts: their blocks and tokens are known one by one.

An executor keeps rows of the members, in their order, and is told of changes only."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import repeat

from penstock.core.groups import DecodeGroup, GroupedState
from penstock.core.kv import BlockPool
from penstock.core.types import TARGET, GroupChange, GroupTokens, Output

_NO_CHANGE = GroupChange()
_new_tuple = tuple.__new__
"""Without the frame of a named tuple's own constructor, for hundreds in every step."""
_REST = [repeat(value) for value in Output("", (), 1)[2:]]


class TextState(GroupedState):
    """A request of which only the next token is asked, one after the other."""

    __slots__ = ("_in_flight",)

    @property
    def in_flight(self) -> bool:
        """True also between two steps of its group: nobody drafts for it."""
        return self._in_flight or self.decode_group is not None

    @in_flight.setter
    def in_flight(self, value: bool) -> None:
        self._in_flight = value


class TextGroup(DecodeGroup):
    """Group of `TextState`s."""

    def __init__(self, key: Hashable, block_size: int, *, keeps_accounts: bool = False) -> None:
        super().__init__(key, block_size, keeps_accounts=keeps_accounts)
        self._left: list[str] = []
        self._joined: dict[str, None] = {}
        self._new_blocks: dict[str, int] = {}
        # Ids and texts of the members; None after a change.
        self._rows: tuple[tuple[str, ...], list[list[int]]] | None = None
        self._planned: tuple[str, ...] = ()

    def join(self, state: GroupedState) -> None:
        super().join(state)
        self._joined[state.request.id] = None
        self._rows = None

    def leave(self, state: GroupedState) -> None:
        super().leave(state)
        if state.request.id in self._joined:
            del self._joined[state.request.id]
        else:
            self._left.append(state.request.id)
        self._rows = None

    def grow(self, pool: BlockPool) -> None:
        for request_id, state in self._phase(0).items():
            (self._new_blocks[request_id],) = state.kv[TARGET].grow(pool, 1)

    def take_change(self) -> GroupChange:
        ids, _ = self._rows or self._drawn()
        self._planned = ids
        if not (self._left or self._joined or self._new_blocks):
            return _NO_CHANGE
        change = GroupChange(self._left, tuple(self._joined), self._new_blocks)
        self._left, self._joined, self._new_blocks = [], {}, {}
        return change

    def _drawn(self) -> tuple[tuple[str, ...], list[list[int]]]:
        texts = [state.output_token_ids for state in self.members.values()]
        self._rows = (tuple(self.members), texts)
        return self._rows

    def append(self, tokens: GroupTokens) -> list[Output]:
        """Append the planned step's tokens to the members' texts, before `advance`."""
        token_ids = tokens.token_ids
        if self._rows is None:
            # Some have left meanwhile; none has joined.
            by_id = dict(zip(self._planned, token_ids, strict=True))
            token_ids = [by_id[i] for i in self.members]
        ids, texts = self._rows or self._drawn()
        any(map(list.append, texts, token_ids))
        rows = zip(ids, zip(token_ids), *_REST, strict=False)
        return list(map(_new_tuple, repeat(Output), rows))

    def filled(self) -> Iterator[GroupedState]:
        """Yield the members that fill a block with the planned step, their KV counted up to it."""
        for state in self._phase(-1).values():
            state.kv[TARGET].num_computed_tokens = state.num_known_tokens
            yield state
