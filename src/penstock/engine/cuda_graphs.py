"""Steps of few rows on a GPU: layers by torch.compile, launched whole as a CUDA graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.engine.eager import EagerRunner
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.decoder import Decoder, Layer, after_attention
from penstock.engine.runner import IntArray, RaggedBatch

# Rows of which a graph is recorded; a batch between two is padded. One row alone would be compiled
# by itself, which takes as long again at the start.
_SIZES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_LEAST_CONTEXT = 256
_MOST_KEYS = 1 << 16
"""Keys of all rows of a graph. Each row reads its context by itself, so that larger steps are
faster kernel by kernel."""


@dataclass(frozen=True, slots=True)
class Visible:
    """Cache slots that rows attend to, and those of them that are hidden.

    slots: [num_rows, context] int64, in the cache; hidden: [num_rows, context], added to scores"""

    slots: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def of_rows(
        cls, tables: torch.Tensor, positions: torch.Tensor, block_size: int, window: int | None
    ) -> Visible:
        """Return it for rows at `positions` [num_rows], by operations on the device.

        tables: block tables [num_rows, num_blocks]; context is what they hold."""
        within = torch.arange(block_size, device=tables.device)
        slots = (tables.long()[:, :, None] * block_size + within).flatten(1)
        keys = torch.arange(slots.shape[1], device=slots.device)
        known = keys <= positions[:, None]
        # Behind its end a row repeats a slot of its own: 0 times another's NaN would be NaN.
        slots = slots.where(known, slots[:, :1])
        if window is not None:
            known &= keys > positions[:, None] - window
        return cls(slots, torch.where(known, 0.0, float("-inf")))


def attend(q: torch.Tensor, by_slot: torch.Tensor, visible: Visible) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v of rows; see `Attention.attend`.

    by_slot: as of `PagedKVCache`. Written as sums over products for torch.compile, which makes
    loops of it that read the cache where it is."""
    num_rows, _, head_dim = q.shape
    num_kv_heads = by_slot.shape[0] // 2
    keys = by_slot[:num_kv_heads, visible.slots].float()  # [num_kv_heads, rows, context, head_dim]
    values = by_slot[num_kv_heads:, visible.slots].float()
    queries = q.float().view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1)
    scores = (queries[:, :, :, None] * keys[:, :, None]).sum(-1) * head_dim**-0.5
    weights = torch.softmax(scores + visible.hidden[:, None], dim=-1)
    out = (weights[..., None] * values[:, :, None]).sum(-2)
    return out.transpose(0, 1).reshape(q.shape).to(q.dtype)


ComputeLayer = Callable[
    [Decoder, Layer, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Visible], torch.Tensor
]
"""Signature of `compute_layer`."""


def compute_layer(
    decoder: Decoder,
    layer: Layer,
    hidden: torch.Tensor,
    rotations: torch.Tensor,
    by_slot: torch.Tensor,
    slots: torch.Tensor,
    visible: Visible,
) -> torch.Tensor:
    """Return a layer's output; the rows' keys and values are written to `slots` [num_rows]."""
    q, kv, _gate = decoder.before_attention(layer, hidden, rotations)
    if layer.num_kv_heads:
        by_slot.index_copy_(1, slots, kv.transpose(0, 1))
    return after_attention(layer, hidden, attend(q, by_slot, visible).flatten(1))


@functools.cache
def compiled_layer() -> ComputeLayer:
    """Return `compute_layer` by torch.compile, for any number of rows and keys."""
    torch._dynamo.config.recompile_limit = 64  # each model has a version
    # Without a compiler of C it is computed as it is written, and the log says so.
    torch._dynamo.config.suppress_errors = True
    # What it says of its own choices is no news for who runs a server.
    warnings.filterwarnings("ignore", module="torch._inductor")
    compiled = torch.compile(compute_layer)

    @functools.wraps(compute_layer)
    def compute(*args: Any) -> torch.Tensor:
        _, _, hidden, rotations, _, slots, visible = args
        for rows in (hidden, rotations, slots, visible.slots, visible.hidden):
            torch._dynamo.maybe_mark_dynamic(rows, 0)
        for keys in (visible.slots, visible.hidden):
            torch._dynamo.maybe_mark_dynamic(keys, 1)
        return compiled(*args)

    return compute


class Step:
    """A step of so many rows and so much context over memory of its own, recorded or not.

    inputs: [rows, 2 + blocks] int32, a row's token id, position and block table"""

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKVCache,
        inputs: torch.Tensor,
        compute_layer: ComputeLayer,
    ) -> None:
        self._decoder, self._cache, self._inputs = decoder, cache, inputs
        self._compute_layer = compute_layer
        self._graph: torch.cuda.CUDAGraph | None = None

    def record(self, pool: Any) -> None:
        """Record the step after warm-ups, which compile. pool: memory that graphs share."""
        current = torch.cuda.current_stream(self._inputs.device)
        stream = torch.cuda.Stream(self._inputs.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.compute()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may use the device meanwhile.
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            self._logits = self.compute()
        self._graph = graph

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of all rows, valid until the next run."""
        self._inputs.copy_(inputs)
        if self._graph is None:
            return self.compute()
        self._graph.replay()
        return self._logits

    def compute(self) -> torch.Tensor:
        """Compute the step kernel by kernel."""
        positions, tables, size = self._inputs[:, 1], self._inputs[:, 2:], self._cache.block_size
        blocks = tables.gather(1, (positions[:, None] // size).long())[:, 0].long()
        slots = blocks * size + positions % size
        variant = self._decoder.config.variant
        everywhere = windowed = Visible.of_rows(tables, positions, size, None)
        if variant.window is not None:
            windowed = Visible.of_rows(tables, positions, size, variant.window.size)

        def compute(index: int, hidden: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
            visible = windowed if variant.is_windowed(index) else everywhere
            layer, by_slot = self._decoder.layers[index], self._cache.by_slot[index]
            return self._compute_layer(
                self._decoder, layer, hidden, rotations, by_slot, slots, visible
            )

        return self._decoder.run(self._inputs[:, 0], positions, compute)


class GraphRunner(EagerRunner):
    """Eager runner on a GPU whose steps of few rows are compiled and recorded when first met.

    The cache has one block more, which rows that pad write. A mixture of experts is not recorded:
    which of them it reads is known on the host only. Nor are recurrent layers, sinks, or a head."""

    num_spare_blocks = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps: dict[tuple[int, int], Step] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        variant = self.config.variant
        self._can_record = variant.experts is None and variant.delta is None
        self._can_record &= not (self.config.gives_states or variant.sinks)
        self.compute_layer = compiled_layer()

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        shape = self._shape(batch)
        if shape is None:
            return super().forward(batch)
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = self.new_step(*shape)
        logits = step.run(torch.from_numpy(self._padded(batch, *shape)))
        if len(batch.logits_rows) == batch.num_tokens:
            return logits[: batch.num_tokens].clone()
        return logits.index_select(0, torch.from_numpy(batch.logits_rows).to(self.device))

    def new_step(self, num_rows: int, num_blocks: int) -> Step:
        """Return a step of that shape, recorded where the device is a GPU."""
        shape = (num_rows, 2 + num_blocks)
        inputs = torch.zeros(shape, dtype=torch.int32, device=self.device)
        inputs[:, 2:] = self.num_blocks
        step = Step(self._decoder, self.cache, inputs, self.compute_layer)
        if self._pool is not None:
            step.record(self._pool)
        return step

    def _shape(self, batch: RaggedBatch) -> tuple[int, int] | None:
        """Return rows and blocks of the graph for a batch; None if it has none."""
        is_plain = self._can_record and batch.carry is None
        if not is_plain or 2 * len(batch.logits_rows) < batch.num_tokens:
            return None
        num_rows = next((size for size in _SIZES if size >= batch.num_tokens), None)
        context = _LEAST_CONTEXT
        while context < int(batch.seq_lens.max()):
            context *= 2
        if num_rows is None or num_rows * context > _MOST_KEYS:
            return None
        return num_rows, -(-context // self.block_size)

    def _padded(self, batch: RaggedBatch, num_rows: int, num_blocks: int) -> IntArray:
        """Return the inputs of the recorded step: [num_rows, 2 + num_blocks] int32."""
        known, end = min(num_blocks, batch.block_tables.shape[1]), batch.num_tokens
        inputs = np.zeros((num_rows, 2 + num_blocks), dtype=np.int32)
        inputs[:end, 0], inputs[:end, 1] = batch.token_ids, batch.positions
        tables = batch.block_tables[:, :known]
        inputs[:end, 2 : 2 + known] = np.repeat(tables, np.diff(batch.query_start), axis=0)
        inputs[end:, 2:] = self.num_blocks  # the spare one
        return inputs
