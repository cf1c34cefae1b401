"""Steps of a model as CUDA graphs, one for each size: no launches to wait for in between.

A graph reads and writes buffers that stay where they are. A step fills them, padded up to the
next size that there is, and replays. Rows that pad write to a block of the cache that belongs to no
request. Without a GPU the same function over the same buffers is simply called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.batch import IntArray, RaggedBatch
from penstock.engine.eager import EagerRunner
from penstock.engine.gpu.decoder import StaticDecoder
from penstock.engine.gpu.operations import Operations, VerifyOutcome
from penstock.engine.gpu.static_batch import MAX_WINDOW, BatchShape, StaticBatch, StepInputs
from penstock.engine.gpu.streams import spare_stream
from penstock.engine.gpu.torch_operations import TorchOperations
from penstock.engine.gpu.triton_paged import why_not_triton
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import KeyedSampler

ROWS = (*(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320), 384, 448, 512)
WINDOWS = (1, 2, 4, 8, MAX_WINDOW)
_WIDTHS = 32
"""Tables are as wide as a multiple of so many blocks."""

_MOST_LATE = MAX_WINDOW + 2
"""Late tokens for each sequence: two that are known, and its draft."""

_CAPTURING = threading.Lock()
"""One capture at a time in this process, whatever threads its lanes have."""


def size_of(number: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes`, which ascend, that holds `number`."""
    return next(size for size in sizes if size >= number)


class CudaGraph:
    """A function over static buffers. On a GPU it is captured by the first replay."""

    def __init__(self, run: Callable[[], None], device: torch.device) -> None:
        self._run = run
        self._device = device
        self._captured: torch.cuda.CUDAGraph | None = None

    def replay(self) -> None:
        """Carry it out, on the current stream."""
        if self._device.type != "cuda":
            self._run()
            return
        if self._captured is None:
            with _CAPTURING:
                self._captured = self._capture()
        self._captured.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        with spare_stream(self._device) as stream:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                # Twice: what compiles, is tuned or makes its workspace does so outside the
                # capture.
                self._run()
                self._run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._run()
        return graph


@dataclass(frozen=True, slots=True)
class Draws:
    """How rows are sampled. temperature: [rows], 0 for greedy; keys: [rows, 1 + most, 2] uint32
    words of `penstock.engine.sampling.noise.row_keys`: for the position that a batch says, and for
    up to `most` positions before it, see `Late`."""

    temperature: np.ndarray
    keys: np.ndarray


@dataclass(frozen=True, slots=True)
class Late:
    """What the host does not know yet when it starts a step, int32 on the device.

    places: [num_tokens] on the host, where each row's token lies in `tokens`; -1 where the batch
    has it. short: [num_seqs], by how many positions a sequence is shorter than the batch says; None
    if none is.
    """

    places: IntArray
    tokens: torch.Tensor
    short: torch.Tensor | None = None


class Stepped(NamedTuple):
    """What a step leaves on the device. logits: [num_logits, V]; samples: [num_logits] int32;
    token_ids: [num_tokens or more] int32, what the rows read."""

    logits: torch.Tensor
    samples: torch.Tensor
    token_ids: torch.Tensor


class _Step:
    """One size of step: its inputs, and its graph. settled: the batch that the graph works
    on, and keys: [num_draws, 2] int32, after it has put in what the host did not know."""

    tokens: torch.Tensor

    def __init__(self, capacity: BatchShape, num_draws: int, device: torch.device) -> None:
        self.device = StepInputs.allocate(capacity, num_draws, device)
        self.host = self.device
        if device.type == "cuda":
            self.host = StepInputs.allocate(capacity, num_draws, torch.device("cpu"), pinned=True)
        self.settled = self.device.batch.with_own_rows()
        self.keys = torch.zeros(num_draws, 2, dtype=torch.int32, device=device)
        self.late = torch.zeros(_MOST_LATE * capacity.seqs, dtype=torch.int32, device=device)
        self.sent: torch.cuda.Event | None = None

    def writable(self) -> None:
        """Wait until the device has read what was last sent."""
        if self.sent is not None:
            self.sent.synchronize()

    def draw(self, places: np.ndarray, draws: Draws | None) -> None:
        """How the rows at `places` are sampled; others, and all without `draws`: greedily."""
        temperature = self.host.temperature.numpy()
        temperature[:] = 0.0
        if draws is not None:
            temperature[places] = draws.temperature
            self.host.keys.numpy()[places, : draws.keys.shape[1]] = draws.keys.view(np.int32)

    def send(self, late: Late | None) -> None:
        """Have the device read what was written, and what it alone knows."""
        places = self.host.places.numpy()
        places[:] = -1
        self.host.short.numpy()[:] = 0
        if late is not None:
            places[: len(late.places)] = late.places
        if self.host is not self.device:
            self.device.flat.copy_(self.host.flat, non_blocking=True)
            self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.sent.record()
        if late is not None:
            self.late[: late.tokens.numel()].copy_(late.tokens)
            if late.short is not None:
                self.device.short[: late.short.numel()].copy_(late.short)


class _Forward(_Step):
    """A pass over the model, and a sample of every row of logits."""

    logits: torch.Tensor


class _Draft(_Step):
    """A drafting loop. tokens: [seqs, steps] int32."""


def sent(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """On a device, without waiting until it is there."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class GraphRunner(ModelRunner):
    """Decoding and verifying steps are captured as CUDA graphs; others run eagerly.

    One step is in flight at a time: its results are overwritten by the next of the same size.
    """

    def __init__(
        self,
        runner: EagerRunner,
        instead: Callable[[KeyedSampler], KeyedSampler] = lambda really: really,
    ) -> None:
        """runner: its cache has a block more than it is asked to serve; see `scratch_slot`.
        instead: how to sample, made from how it is really done."""
        self._runner = runner
        self.cache = runner.cache
        self.config, self.sample = runner.config, runner.sample
        self.num_blocks, self.block_size = runner.num_blocks - 1, runner.block_size
        self.device = runner.device
        self.captures_graphs = self.device.type == "cuda"
        operations: Operations
        if why_not_triton(self.cache.device) is None:
            from penstock.engine.gpu.kernels.triton_operations import TritonOperations

            operations = TritonOperations(self.cache, runner.config.num_heads)
        else:
            operations = TorchOperations(self.cache, runner.config.num_heads)
        self.decoder = runner.decoder
        self._operations = operations
        self._decoder = StaticDecoder(runner.decoder, operations)
        self._decide = instead(operations.sample)
        self._forwards: dict[tuple[BatchShape, bool], tuple[_Forward, CudaGraph]] = {}
        self._drafts: dict[tuple[BatchShape, int, int], tuple[_Draft, CudaGraph]] = {}

    @property
    def num_positions(self) -> int:
        """Positions that there are rotations for."""
        return len(self.decoder.rotations)

    @property
    def scratch_slot(self) -> int:
        """A slot that belongs to no request."""
        return self.num_blocks * self.block_size

    def captures(self, batch: RaggedBatch) -> bool:
        """Whether the batch has a size that is captured."""
        return self.holds(batch.num_tokens, int(np.diff(batch.query_start).max()))

    def holds(self, rows: int, window: int) -> bool:
        """Whether so many rows, of one sequence at most `window`, have a size that is captured."""
        return rows <= ROWS[-1] and window <= MAX_WINDOW

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Float32 logits [num_logits, vocab_size]; see `ModelRunner.forward`."""
        if not self.captures(batch):
            return self._runner.forward(batch)
        return self.step(batch).logits

    def dummy_run(self, batch: RaggedBatch) -> None:
        """Until the samples are on the host: the device has then done everything before them."""
        if self.captures(batch):
            self.step(batch).samples.cpu()
        else:
            super().dummy_run(batch)

    @torch.inference_mode()
    def step(
        self,
        batch: RaggedBatch,
        draws: Draws | None = None,
        late: Late | None = None,
    ) -> Stepped:
        num_logits = len(batch.logits_rows)
        all_rows = num_logits > batch.num_seqs
        capacity = self._capacity(batch)
        step, graph = self._forwards.get((capacity, all_rows)) or self._new_forward(
            capacity, all_rows
        )
        step.writable()
        step.host.batch.fill(batch, self.block_size, self.scratch_slot, grows_by=0)
        step.draw(batch.logits_rows if all_rows else np.arange(num_logits), draws)
        step.send(late)
        graph.replay()
        if all_rows and num_logits < batch.num_tokens:
            wanted = torch.from_numpy(batch.logits_rows).to(self.device)
            logits, tokens = (x.index_select(0, wanted) for x in (step.logits, step.tokens))
        else:
            logits, tokens = step.logits[:num_logits], step.tokens[:num_logits]
        return Stepped(logits, tokens, step.settled.token_ids)

    @torch.inference_mode()
    def draft(
        self,
        first: RaggedBatch,
        limits: IntArray,
        draws: Draws,
        vocab: int,
        late: Late | None = None,
    ) -> torch.Tensor:
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
        step.host.batch.fill(first, self.block_size, self.scratch_slot, grows_by=steps - 1)
        wanted = step.host.limits.numpy()
        wanted[:num_seqs] = limits
        wanted[num_seqs:] = 0
        places = (np.arange(steps)[:, None] * capacity.seqs + np.arange(num_seqs)).reshape(-1)
        step.draw(places, draws)
        step.send(late)
        graph.replay()
        return step.tokens[:num_seqs]

    def _capacity(self, batch: RaggedBatch) -> BatchShape:
        seqs = size_of(batch.num_seqs, ROWS)
        window = size_of(int(np.diff(batch.query_start).max()), WINDOWS)
        width = -(-batch.block_tables.shape[1] // _WIDTHS) * _WIDTHS
        rows = size_of(batch.num_tokens, ROWS)
        return BatchShape(rows, seqs, window, width, self._operations.num_pieces(seqs))

    def outcome(self, before: Stepped, rows: IntArray, limits: IntArray) -> VerifyOutcome:
        """What a verification comes to for some of its sequences, found without waiting.

        rows: [n], where theirs begin; limits: [n], how many of their draft tokens count.
        """
        both = sent(np.stack((rows, limits)).astype(np.int32), self.device)
        return self._operations.outcome(before.token_ids, before.samples, *both.unbind())

    @property
    def graphs(self) -> list[CudaGraph]:
        """Of all sizes met so far, forward passes and drafting loops."""
        return [graph for _, graph in (*self._forwards.values(), *self._drafts.values())]

    def _new_forward(self, capacity: BatchShape, all_rows: bool) -> tuple[_Forward, CudaGraph]:
        step = _Forward(capacity, capacity.rows if all_rows else capacity.seqs, self.device)

        def run() -> None:
            self._settle(step, by_row=all_rows)
            step.logits = self._decoder.forward(step.settled, all_rows=all_rows)
            step.tokens = self._decide(
                step.logits, step.device.temperature, step.keys, step.logits.shape[1]
            )

        self._forwards[capacity, all_rows] = step, CudaGraph(run, self.device)
        return self._forwards[capacity, all_rows]

    def _new_draft(self, key: tuple[BatchShape, int, int]) -> tuple[_Draft, CudaGraph]:
        capacity, steps, vocab = key
        step = _Draft(capacity, steps * capacity.seqs, self.device)
        one_each = BatchShape(capacity.seqs, capacity.seqs, 1, capacity.width, capacity.pieces)
        later = StaticBatch.allocate(one_each, self.device)
        later.query_start.copy_(torch.arange(capacity.seqs + 1))

        def run() -> None:
            self._settle(step, by_row=False)
            heat, keys = step.device.temperature, step.keys.view(steps, -1, 2)
            logits = self._decoder.forward(step.settled, all_rows=False)
            tokens = [self._decide(logits, heat[: capacity.seqs], keys[0], vocab)]
            later.tables.copy_(step.settled.tables)
            later.piece_len.copy_(step.settled.piece_len)
            for number in range(1, steps):
                self._advance(step, later, tokens[-1], number)
                logits = self._decoder.forward(later, all_rows=True)
                at = slice(number * capacity.seqs, (number + 1) * capacity.seqs)
                tokens.append(self._decide(logits, heat[at], keys[number], vocab))
            step.tokens = torch.stack(tokens, dim=1)

        self._drafts[key] = step, CudaGraph(run, self.device)
        return self._drafts[key]

    def _settle(self, step: _Step, *, by_row: bool) -> None:
        self._operations.settle(
            step.device, step.late, step.settled, step.keys, self.scratch_slot, by_row=by_row
        )

    def _advance(self, step: _Draft, later: StaticBatch, tokens: torch.Tensor, number: int) -> None:
        """Draft token `number` of every sequence that wants one more becomes its only row."""
        lens = step.settled.seq_lens
        active = step.device.limits > number
        # Filled, not chosen by `torch.where`: a number there is copied to the device, which a
        # capture must not do.
        position = (lens + (number - 1)).masked_fill(~active, 0)
        block = later.tables.gather(1, (position // self.block_size)[:, None].long()).squeeze(1)
        slot = block * self.block_size + position % self.block_size
        later.token_ids.copy_(tokens)
        later.positions.copy_(position)
        later.slots.copy_(slot.masked_fill(~active, self.scratch_slot))
        later.seq_lens.copy_((lens + number).masked_fill(~active, 0))
        own = torch.arange(len(lens), device=lens.device, dtype=torch.int32)
        later.row_seq.copy_(own.masked_fill_(~active, -1))
