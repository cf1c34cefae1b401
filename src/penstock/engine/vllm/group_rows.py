"""Rows of a decode group in the workers' steps: written from columns, changed one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.core.types import GroupTokens, SamplingParams
from penstock.engine.sampling.filters import NO_TOKEN
from penstock.engine.sequences import TokenBuffer
from penstock.engine.steps import NOT_FINITE


class StepRows(NamedTuple):
    """A step's rows of requests that decode on, by column.

    computed: tokens before the row; num_outputs: made since the workers know the request;
    new_blocks: ids, or None. sampling: by row; None: the rows are those of the step before."""

    ids: Sequence[str]
    computed: list[int]
    num_outputs: list[int]
    new_blocks: list[tuple[list[int]] | None]
    sampling: list[SamplingParams] | None


class _Row(NamedTuple):
    """A member.

    made: tokens that its text does not have yet; origins: computed and output tokens, extrapolated
    to step 0."""

    text: TokenBuffer
    made: list[int]
    origins: tuple[int, int]


class GroupRows:
    """Members of the decode group with texts, in the scheduler's order."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._steps = 0
        self._has_changed = True
        self._computed: Sequence[int] = ()
        self._num_outputs: Sequence[int] = ()
        self._made: list[list[int]] = []
        # Tokens that may end an output.
        self._ends: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self._rows)

    def leave(self, request_id: str) -> None:
        """Remove a row, if it is there; its text gets the tokens made here."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            row.text.append_inside(row.made)
            self._has_changed = True

    def join(self, request_id: str, text: TokenBuffer, num_outputs: int) -> None:
        """Add a row. num_outputs: tokens since the workers know the request."""
        origins = (text.length - 1 - self._steps, num_outputs - self._steps)
        self._rows[request_id] = _Row(text, [], origins)
        self._has_changed = True

    def write(self, new_blocks: Mapping[str, list[int]]) -> StepRows:
        """Return the rows of the next step."""
        rows, sampling = self._rows, None
        if self._has_changed:
            self._has_changed = False
            self._computed, self._num_outputs = zip(
                *[r.origins for r in rows.values()], strict=True
            )
            self._made = [row.made for row in rows.values()]
            requests = [row.text.request for row in rows.values()]
            self._ends = frozenset((NO_TOKEN,)).union(*[r.stop_token_ids for r in requests])
            sampling = [r.sampling for r in requests]
        blocks: list[tuple[list[int]] | None] = [None] * len(rows)
        if new_blocks:
            blocks = [(new_blocks[i],) if i in new_blocks else None for i in rows]
        computed = [n + self._steps for n in self._computed]
        num_outputs = [n + self._steps for n in self._num_outputs]
        self._steps += 1
        return StepRows(list(rows), computed, num_outputs, blocks, sampling)

    def take_in(self, token_ids: Sequence[int]) -> GroupTokens:
        """Keep the step's tokens, and find those that end an output."""
        any(map(list.append, self._made, token_ids))
        if self._ends.isdisjoint(token_ids):
            return GroupTokens(token_ids)
        rows = list(zip(self._rows.items(), token_ids, strict=True))
        stopped = [i for (i, r), t in rows if t in r.text.request.stop_token_ids]
        failures = {i: NOT_FINITE for (i, _), t in rows if t == NO_TOKEN}
        return GroupTokens(token_ids, stopped, failures)
