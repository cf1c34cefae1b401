"""Steps of a model recorded once for each size and replayed: no launches to wait for in between.

A recording reads and writes buffers that stay where they are. A step fills them, padded up to the
next size that there is, and replays. Rows that pad write to a block of the cache that belongs to no
request. Without a GPU the same function over the same buffers is simply called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.attention.triton_paged import why_not_triton
from penstock.engine.batch import IntArray, RaggedBatch
from penstock.engine.eager import EagerRunner
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.static import StaticDecoder
from penstock.engine.operations import Operations
from penstock.engine.static import MAX_WINDOW, Capacity, StaticBatch
from penstock.engine.streams import spare_stream
from penstock.engine.torch_operations import TorchOperations

ROWS = (*(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320), 384, 448, 512)
WINDOWS = (1, 2, 4, 8, MAX_WINDOW)
_WIDTHS = 32
"""Tables are as wide as a multiple of so many blocks."""

_RECORDING = threading.Lock()
"""One recording at a time in this process, whatever threads its lanes have."""


def size_of(number: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes`, which ascend, that holds `number`."""
    return next(size for size in sizes if size >= number)


class Graph:
    """A function over static buffers. On a GPU it is recorded by the first replay."""

    def __init__(self, run: Callable[[], None], device: torch.device) -> None:
        self._run = run
        self._device = device
        self._recorded: torch.cuda.CUDAGraph | None = None

    def replay(self) -> None:
        """Carry it out, on the current stream."""
        if self._device.type != "cuda":
            self._run()
            return
        if self._recorded is None:
            with _RECORDING:
                self._recorded = self._record()
        self._recorded.replay()

    def _record(self) -> torch.cuda.CUDAGraph:
        with spare_stream(self._device) as stream:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                # Twice: what compiles, is tuned or makes its workspace does so outside the
                # recording.
                self._run()
                self._run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._run()
        return graph


@dataclass(frozen=True, slots=True)
class Draws:
    """How rows are sampled. temperature: [rows], 0 for greedy; keys: [rows, 2] uint32 words of
    `penstock.engine.sampling.noise.row_keys`."""

    temperature: np.ndarray
    keys: np.ndarray


Decide = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Tokens of rows, from their logits, temperatures, keys, and the number of tokens to choose from;
see `Operations.sample`."""


class _Buffer:
    """Numbers that the host writes and the device reads."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self.device = torch.zeros(shape, dtype=dtype, device=device) if pinned else self.host
        self.array = self.host.numpy()

    def send(self) -> None:
        if self.device is not self.host:
            self.device.copy_(self.host, non_blocking=True)


class _Step:
    """One size of step: its buffers, and its recording."""

    def __init__(self, capacity: Capacity, num_draws: int, device: torch.device) -> None:
        self.device = StaticBatch.allocate(capacity, device)
        self.host = self.device
        if device.type == "cuda":
            self.host = StaticBatch.allocate_pinned(capacity)
        self.temperature = _Buffer((num_draws,), torch.float32, device)
        self.keys = _Buffer((num_draws, 2), torch.int32, device)
        self.sent: torch.cuda.Event | None = None

    def writable(self) -> None:
        """Wait until the device has read what was last sent."""
        if self.sent is not None:
            self.sent.synchronize()

    def send(self) -> None:
        if self.host is not self.device:
            self.device.flat.copy_(self.host.flat, non_blocking=True)
            self.temperature.send()
            self.keys.send()
            self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.sent.record()

    def draw(self, places: np.ndarray, draws: Draws | None) -> None:
        """How the rows at `places` are sampled; others, and all without `draws`: greedily."""
        self.temperature.array[:] = 0.0
        if draws is not None:
            self.temperature.array[places] = draws.temperature
            self.keys.array[places] = draws.keys.view(np.int32)


class _Forward(_Step):
    """A pass over the model, and a sample of every row of logits. places: [rows] int32, see
    `GraphRunner.step`."""

    logits: torch.Tensor
    tokens: torch.Tensor
    places: _Buffer

    def insert(self, tokens: torch.Tensor) -> None:
        """Give rows with a place the token that lies there."""
        places, ids = self.places.device, self.device.token_ids
        ids.copy_(torch.where(places < 0, ids, tokens.index_select(0, places.clamp(min=0))))


class _Draft(_Step):
    """A drafting loop. limits: [seqs] int32, tokens to draft; tokens: [seqs, steps] int32."""

    limits: _Buffer
    tokens: torch.Tensor


class GraphRunner:
    """A `ModelRunner` whose decoding and verifying steps are recorded; others run eagerly.

    One step is in flight at a time: its results are overwritten by the next of the same size.
    """

    def __init__(
        self, runner: EagerRunner, instead: Callable[[Decide], Decide] = lambda really: really
    ) -> None:
        """runner: its cache has a block more than it is asked to serve; see `scratch_slot`.
        instead: how to sample, made from how it is really done."""
        self._runner = runner
        self.cache = runner.cache
        operations: Operations
        if why_not_triton(self.cache.device) is None:
            from penstock.engine.kernels.triton_operations import TritonOperations

            operations = TritonOperations(self.cache, runner.config.num_heads)
        else:
            operations = TorchOperations(self.cache, runner.config.num_heads)
        self.decoder = runner.decoder
        self._num_pieces = operations.num_pieces
        self._decoder = StaticDecoder(runner.decoder, operations)
        self._decide = instead(operations.sample)
        self._forwards: dict[tuple[Capacity, bool], tuple[_Forward, Graph]] = {}
        self._drafts: dict[tuple[Capacity, int, int], tuple[_Draft, Graph]] = {}

    @property
    def config(self) -> DecoderConfig:
        return self._runner.config

    @property
    def num_blocks(self) -> int:
        return self.cache.num_blocks - 1

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    @property
    def device(self) -> torch.device:
        return self.cache.device

    @property
    def scratch_slot(self) -> int:
        """A slot that belongs to no request."""
        return self.num_blocks * self.block_size

    def records(self, batch: RaggedBatch) -> bool:
        """Whether the batch has a size that is recorded."""
        return self.holds(batch.num_tokens, int(np.diff(batch.query_start).max()))

    def holds(self, rows: int, window: int) -> bool:
        """Whether so many rows, of one sequence at most `window`, have a size that is recorded."""
        return rows <= ROWS[-1] and window <= MAX_WINDOW

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Float32 logits [num_logits, vocab_size]; see `ModelRunner`."""
        if not self.records(batch):
            return self._runner.forward(batch)
        return self.step(batch)[0]

    @torch.inference_mode()
    def step(
        self,
        batch: RaggedBatch,
        draws: Draws | None = None,
        late: tuple[IntArray, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [num_logits, V] and samples [num_logits] int32, on the device.

        late: for rows whose tokens the host does not know yet, where they lie in a tensor on the
        device: [num_tokens] places, -1 for the others, and that tensor, int32.
        """
        num_logits = len(batch.logits_rows)
        all_rows = num_logits > batch.num_seqs
        capacity = self._capacity(batch)
        step, graph = self._forwards.get((capacity, all_rows)) or self._new_forward(
            capacity, all_rows
        )
        step.writable()
        step.host.fill(batch, self.block_size, self.scratch_slot, grows_by=0)
        step.draw(batch.logits_rows if all_rows else np.arange(num_logits), draws)
        if late is not None:
            step.places.array[: batch.num_tokens] = late[0]
            step.places.array[batch.num_tokens :] = -1
            step.places.send()
        step.send()
        if late is not None:
            step.insert(late[1])
        graph.replay()
        if all_rows and num_logits < batch.num_tokens:
            wanted = torch.from_numpy(batch.logits_rows).to(self.device)
            return step.logits.index_select(0, wanted), step.tokens.index_select(0, wanted)
        return step.logits[:num_logits], step.tokens[:num_logits]

    @torch.inference_mode()
    def draft(self, first: RaggedBatch, limits: IntArray, draws: Draws, vocab: int) -> torch.Tensor:
        """Read, then draft token by token: [num_seqs, max(limits)] int32 on the device, of which a
        row's first limits[i] count.

        first: what is read; one row of logits for each sequence that drafts, its last; tables reach
        as far as the drafts. limits: [num_seqs], each at least 1. draws: [steps * num_seqs], step
        by step. vocab: tokens to choose from.
        """
        num_seqs, steps = first.num_seqs, int(limits.max())
        capacity = self._capacity(first)
        key = (capacity, steps, vocab)
        step, graph = self._drafts.get(key) or self._new_draft(key)
        step.writable()
        step.host.fill(first, self.block_size, self.scratch_slot, grows_by=steps - 1)
        step.limits.array[:num_seqs] = limits
        step.limits.array[num_seqs:] = 0
        places = (np.arange(steps)[:, None] * capacity.seqs + np.arange(num_seqs)).reshape(-1)
        step.draw(places, draws)
        step.limits.send()
        step.send()
        graph.replay()
        return step.tokens[:num_seqs]

    def _capacity(self, batch: RaggedBatch) -> Capacity:
        seqs = size_of(batch.num_seqs, ROWS)
        window = size_of(int(np.diff(batch.query_start).max()), WINDOWS)
        width = -(-batch.block_tables.shape[1] // _WIDTHS) * _WIDTHS
        rows = size_of(batch.num_tokens, ROWS)
        return Capacity(rows, seqs, window, width, self._num_pieces(seqs))

    @property
    def recordings(self) -> list[Graph]:
        """Of all sizes met so far, forward passes and drafting loops."""
        return [graph for _, graph in (*self._forwards.values(), *self._drafts.values())]

    def _new_forward(self, capacity: Capacity, all_rows: bool) -> tuple[_Forward, Graph]:
        step = _Forward(capacity, capacity.rows if all_rows else capacity.seqs, self.device)
        step.places = _Buffer((capacity.rows,), torch.int32, self.device)

        def run() -> None:
            step.logits = self._decoder.forward(step.device, all_rows=all_rows)
            step.tokens = self._decide(
                step.logits, step.temperature.device, step.keys.device, step.logits.shape[1]
            )

        self._forwards[capacity, all_rows] = step, Graph(run, self.device)
        return self._forwards[capacity, all_rows]

    def _new_draft(self, key: tuple[Capacity, int, int]) -> tuple[_Draft, Graph]:
        capacity, steps, vocab = key
        step = _Draft(capacity, steps * capacity.seqs, self.device)
        step.limits = _Buffer((capacity.seqs,), torch.int32, self.device)
        one_each = Capacity(capacity.seqs, capacity.seqs, 1, capacity.width, capacity.pieces)
        later = StaticBatch.allocate(one_each, self.device)
        later.query_start.copy_(torch.arange(capacity.seqs + 1))

        def run() -> None:
            heat, keys = step.temperature.device, step.keys.device.view(steps, -1, 2)
            logits = self._decoder.forward(step.device, all_rows=False)
            tokens = [self._decide(logits, heat[: capacity.seqs], keys[0], vocab)]
            later.tables.copy_(step.device.tables)
            later.piece_len.copy_(step.device.piece_len)
            for number in range(1, steps):
                self._advance(step, later, tokens[-1], number)
                logits = self._decoder.forward(later, all_rows=True)
                at = slice(number * capacity.seqs, (number + 1) * capacity.seqs)
                tokens.append(self._decide(logits, heat[at], keys[number], vocab))
            step.tokens = torch.stack(tokens, dim=1)

        self._drafts[key] = step, Graph(run, self.device)
        return self._drafts[key]

    def _advance(self, step: _Draft, later: StaticBatch, tokens: torch.Tensor, number: int) -> None:
        """Draft token `number` of every sequence that wants one more becomes its only row."""
        lens = step.device.seq_lens
        active = step.limits.device > number
        # Filled, not chosen by `torch.where`: a number there is copied to the device, which a
        # recording must not do.
        position = (lens + (number - 1)).masked_fill(~active, 0)
        block = later.tables.gather(1, (position // self.block_size)[:, None].long()).squeeze(1)
        slot = block * self.block_size + position % self.block_size
        later.token_ids.copy_(tokens)
        later.positions.copy_(position)
        later.slots.copy_(slot.masked_fill(~active, self.scratch_slot))
        later.seq_lens.copy_((lens + number).masked_fill(~active, 0))
        own = torch.arange(len(lens), device=lens.device, dtype=torch.int32)
        later.row_seq.copy_(own.masked_fill_(~active, -1))
