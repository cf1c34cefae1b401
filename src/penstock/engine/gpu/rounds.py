"""Rounds of draft and verification that are under way on the device.

A round that has been started says what it will answer, and to whom, before the host has seen any of
its tokens; and from what it leaves on the device the next one can be started.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.loop import Clock
from penstock.core.types import DraftSource, Verdict, VerifyItem
from penstock.engine.batch import IntArray, RaggedBatch
from penstock.engine.gpu.graphs import Draws, Stepped
from penstock.engine.sampling import SamplingRows
from penstock.engine.sampling.noise import Salt, row_keys
from penstock.engine.steps import DraftsAtHand


@dataclass(slots=True)
class Entry:
    """One request of a round. start: the position of its first row of samples, -1 while only the
    device knows it; row: which row of samples that is; tokens: its draft, by `drafter`, zeros until
    it is fetched if it has a `place` among the drafts that are made on the device."""

    request_id: str
    epoch: int
    start: int
    row: int
    tokens: list[int]
    drafter: str | None
    place: int | None = None

    def answers(self, item: VerifyItem) -> bool:
        """Whether the rows are what the item asks for, perhaps behind a longer or shorter draft. A
        draft that was ordered must at least have been begun: its drafter has read the text then."""
        if (item.epoch, item.start) != (self.epoch, self.start) or item.num_scheduled_tokens != 1:
            return False
        order = item.draft
        if order is None:
            return item.source is DraftSource.NONE
        return bool(self.tokens) and order.drafter == self.drafter and order.start >= self.start - 1


class Answer:
    """Tokens on their way to the host, in the order in which the device does its work."""

    def __init__(self, tokens: torch.Tensor, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tokens
        if device.type == "cuda":
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[int]:
        """The one time in a step that the host waits for the device, and not for what was started
        after it."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._host.tolist()
        return numbers


@dataclass(slots=True)
class InFlightRound:
    """A target step that has been started, with its drafts.

    stepped: what the target's pass leaves on the device. answer: all drafts that are made on the
    device, `num_drafted` tokens, then the samples.
    """

    entries: dict[str, Entry]
    batch: RaggedBatch
    stepped: Stepped
    answer: Answer
    num_drafted: int
    drafted: DraftsAtHand
    watch: Stopwatch
    started_at: float

    @property
    def is_aligned(self) -> bool:
        """Whether every row samples."""
        return self.stepped.samples.numel() == self.batch.num_tokens

    def answers(self, item: VerifyItem) -> bool:
        """See `Entry.answers`."""
        entry = self.entries.get(item.request_id)
        return entry is not None and entry.answers(item)

    def fetch(self) -> list[int]:
        """Wait for it: all samples. The drafts that were made take the zeros' places."""
        numbers = self.answer.wait()
        for entry in self.entries.values():
            if entry.place is not None:
                entry.tokens[:] = numbers[entry.place : entry.place + len(entry.tokens)]
        times = enumerate(self.drafted.times)
        self.drafted.times = [replace(t, seconds=self.watch.seconds(n)) for n, t in times]
        return numbers[self.num_drafted :]

    def begin(self, items: Iterable[VerifyItem], verdicts: Iterable[Verdict], now: float) -> None:
        """The round before it is over by now, and came to this."""
        self.started_at = now
        accepted = {v.request_id: v.num_accepted for v in verdicts}
        for item in items:
            entry = self.entries.get(item.request_id)
            if entry is not None:
                known = item.start + item.num_scheduled_tokens
                entry.start = known + accepted[item.request_id]


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All numbers, end to end."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def next_batch(
    starts: IntArray, counts: IntArray, block_tables: IntArray, *, last_only: bool
) -> RaggedBatch:
    """Rows of sequences from position `starts[i]` on, of which only the device knows the tokens."""
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows = int(query_start[-1])
    offsets = np.arange(rows) - np.repeat(query_start[:-1], counts)
    return RaggedBatch(
        token_ids=np.zeros(rows, dtype=np.int32),
        positions=(np.repeat(starts, counts) + offsets).astype(np.int32),
        query_start=query_start,
        seq_lens=(starts + counts).astype(np.int32),
        block_tables=block_tables,
        logits_rows=query_start[1:] - 1 if last_only else np.arange(rows, dtype=np.int32),
    )


def draws_of(
    params: SamplingRows,
    of_row: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    most_short: int = 0,
) -> Draws:
    """The target's own noise, which a drafter shares, for rows of the requests `of_row`, also at up
    to `most_short` positions before theirs."""
    seeds = params.seed[of_row].repeat(most_short + 1)
    at = (positions[:, None] - np.arange(most_short + 1)).clip(min=0).reshape(-1)
    keys = row_keys(seeds, at, Salt.TARGET).reshape(len(positions), most_short + 1, 2)
    return Draws(params.temperature[of_row].astype(np.float32), keys)


class Stopwatch:
    """Seconds of stretches of work: of the device's own where there is a GPU."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._on_gpu = device.type == "cuda"
        self._clock = clock
        self._marks: list[float | torch.cuda.Event] = []

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._mark()
        else:
            # What failed is no stretch.
            self._marks.pop()

    def _mark(self) -> None:
        if not self._on_gpu:
            self._marks.append(self._clock.now())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def seconds(self, number: int) -> float:
        """Of the stretch `number`, once all has been done."""
        begin, end = self._marks[2 * number : 2 * number + 2]
        if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return float(begin.elapsed_time(end)) / 1e3
        return float(end) - float(begin)  # type: ignore[arg-type]
