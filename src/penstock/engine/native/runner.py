"""Native runner: compiled kernels, with a drafting loop that stays in compiled code."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.config import DrafterWeights
from penstock.core.learn.confidence import EDGES, Stop
from penstock.engine.drafters.drafts import Draft, Drafts
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.head import HEAD_NORMS, ids_of
from penstock.engine.models.quantized import Weight
from penstock.engine.models.rounding import is_large, round_weights
from penstock.engine.models.variant import DeltaNet
from penstock.engine.models.weights import stored_weights
from penstock.engine.native import library as c
from penstock.engine.native.heads import channel_scales
from penstock.engine.native.library import native_library
from penstock.engine.native.packing import BLOCK_FORMATS, Arena, Layout, Packer, round_up
from penstock.engine.native.sampler import sample_natively
from penstock.engine.runner import Carry, IntArray, ModelRunner, RaggedBatch
from penstock.engine.sampling import SamplingRows
from penstock.engine.sampling.noise import Salt, draft_seeds
from penstock.engine.sampling.params import BoolArray
from penstock.engine.states import MOST_KEPT, StateMoves, StateSlots

DTYPES = (torch.float32, torch.bfloat16)
_KV_KINDS = (*DTYPES, torch.int8)
"""Number formats of the KV cache, numbered as `KvKind` in attention.h."""
_NO_ROWS: IntArray = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class NativeDraft:
    """Result of `NativeRunner.draft`.

    token_ids: [num_seqs, max_steps] int32; -1 from a sequence's limit on, or where its logits are
               not finite
    logits:    [num_seqs, max_steps, vocab_size] float32, before the temperature, or None; undefined
               from a sequence's limit on
    confidences: [num_seqs, max_steps] float32 or None: probability of the token at the sequence's
               temperature (greedy: 1); in a `ratio` draft that of the likeliest token, as it must
               not depend on the sample"""

    token_ids: IntArray
    logits: torch.Tensor | None
    confidences: npt.NDArray[np.float32] | None


class NativeRunner(ModelRunner):
    """A decoder, its packed weights and its paged cache, for one calling thread at a time.

    A row's logits are bitwise the same in any batch, for any split of its context into batches, and
    with any number of threads."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Weight],
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        num_threads: int,
        kv_dtype: torch.dtype | None = None,
        num_slots: int = 8,
        assisted: NativeRunner | None = None,
    ) -> None:
        """Pack `weights` (as `load_weights` names them; float32, bfloat16 or quantised).

        kv_dtype: of the cache, if not `dtype`. num_slots: room for recurrent states.
        assisted: runner of the model whose embeddings, keys and values this one, its assistant,
        reads; it keeps this one.

        Raises NativeUnavailableError without compiled kernels, ValueError for a bad size."""
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_threads": num_threads}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; must be at least 1")
        self._library = native_library()
        self.config = config
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device("cpu")
        self.sample = sample_natively
        self._qk_scales: dict[str, torch.Tensor] = {}
        layout = Layout(config, self._library.penstock_lanes())
        pairs = dtype == torch.bfloat16 and bool(self._library.penstock_has_bf16_pairs())
        if kv_dtype == torch.int8:
            read = {} if assisted is None else assisted._qk_scales
            self._qk_scales = dict(channel_scales(config, weights, read))
            weights = {**weights, **self._qk_scales}
        self._head_tokens = torch.empty(0, dtype=torch.int32)
        if (offsets := weights.get("head.d2t")) is not None:
            weights = {name: w for name, w in weights.items() if name != "head.d2t"}
            assert isinstance(offsets, torch.Tensor)
            self._head_tokens = ids_of(offsets, config.vocab_size).to(torch.int32)
        packer = Packer(weights, layout, bf16_pairs=pairs)
        self._matrices, self._vectors = packer.pack(num_threads)
        positions = min(config.max_position_embeddings, num_blocks * block_size)
        ropes = {}
        for i, shape in enumerate(map(config.shape, range(config.num_all_layers))):
            kind = (config.layer_rope(i), shape.head_dim)
            if kind[0] is not None and kind not in ropes:
                ropes[kind] = replace(layout, config=config.at(i)).rope(positions)
        self._ropes = ropes
        if assisted is None:
            self._cache = _allocate_cache(layout, kv_dtype or dtype, num_blocks, block_size)
        else:
            reads = [~config.shape(i).kv_layer for i in range(config.num_layers)]
            self._cache = [assisted._cache[i] for i in reads]
            self._matrices["embed_tokens"] = assisted._matrices["embed_tokens"]
        self._states: StateSlots | None = None
        self._state_memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if config.variant.delta is not None:
            self.num_slots = num_slots
            memory = _allocate_states(layout, config.variant.delta, num_slots)
            before = config.variant.delta.kernel - 1
            both = (part for x, y in memory.values() for part in (x, y[:, :before]))
            parts = [part for part in both if part.numel()]
            self._state_memory, self._states = memory, StateSlots(num_slots, parts)
        self._error = ctypes.create_string_buffer(c.ERROR_BYTES)
        self._model = self._create(num_threads, positions)
        self._thread_limit = num_threads
        weakref.finalize(self, self._library.penstock_destroy, self._model)
        self._assistant: NativeRunner | None = None
        if assisted is not None:
            assisted._assistant = self

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        num_threads: int,
        *,
        rounding: DrafterWeights = "stored",
        max_model_len: int | None = None,
        kv_dtype: torch.dtype | None = None,
        num_slots: int = 8,
        head: Path | None = None,
    ) -> NativeRunner:
        """Load a checkpoint for texts of at most `max_model_len` tokens.

        rounding: of matrices to 4 bits (`models.rounding`), for drafters.
        kv_dtype: of the cache, if not `dtype`; int8 has a scale for each token and KV head.
        num_slots: room for recurrent states. head: checkpoint of the model's head, if it has one.

        float32 keeps the cache in float32 and the weights as stored (bfloat16 is widened in
        registers). bfloat16 rounds both, and with AVX512-BF16 also the activations of every
        product. Sums are float32. Matrices in block formats are multiplied by activations rounded
        to 8 bits, by blocks or, where the checkpoint was made for it, by rows. Raises ValueError
        (CheckpointError for the checkpoint), or NativeUnavailableError."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype}; allowed: {', '.join(map(str, DTYPES))}")
        config = DecoderConfig.from_pretrained(path).within(max_model_len, head)
        rounded = torch.bfloat16 in (dtype, config.dtype)
        plain = torch.bfloat16 if rounded else torch.float32
        with stored_weights(path, config, plain, BLOCK_FORMATS, head) as stored:
            rounds = rounding == "int4" or (rounding == "auto" and is_large(stored))
            weights = round_weights(stored, num_threads) if rounds else stored
            room = (num_blocks, block_size, num_threads, kv_dtype)
            runner = cls(config, weights, dtype, *room, num_slots)
        if (own := config.assistant) is not None and head is not None:
            with stored_weights(head, own, plain, BLOCK_FORMATS) as stored:
                cls(own, stored, dtype, *room, assisted=runner)
        return runner

    def limit_threads(self, num_threads: int) -> None:
        if self._assistant is not None:
            self._assistant.limit_threads(num_threads)
        if num_threads != self._thread_limit:
            self._library.penstock_limit_threads(self._model, num_threads)
            self._thread_limit = num_threads

    def poison(self, wanted: bool) -> None:
        """Have NaN in memory that no pass has written, or no longer; while no request runs."""
        self._library.penstock_poison(wanted)  # buffers, and logits, of all runners
        for tensor in chain(*self._cache, *self._state_memory.values()) if wanted else ():
            tensor.view(torch.uint8).fill_(255)  # NaN in every format

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Compute the logits of a batch. Raises ValueError where it does not fit model or cache."""
        logits = torch.empty(len(batch.logits_rows), self.config.vocab_size)
        self._compute(self._library.penstock_forward, batch, logits.data_ptr())
        return logits

    def forward_sampled(
        self,
        batch: RaggedBatch,
        row_start: IntArray,
        temperatures: npt.NDArray[np.float64],
        seeds: npt.NDArray[np.uint64],
        kept: IntArray = _NO_ROWS,
    ) -> tuple[IntArray, torch.Tensor]:
        """Return the target's coupled samples of `batch.logits_rows`, and the logits of some rows.

        Samples are [num_logits] int32, as `sample_coupled` draws them.

        row_start: [num_requests + 1] int32, rows of logits of each request
        temperatures, seeds: one entry per request
        kept: int32, rows whose logits are returned, rising"""
        count = len(row_start) - 1
        c.require("kept", kept, c.INT32, (len(kept),))
        logits = torch.empty(len(kept), self.config.vocab_size)
        c.require("row_start", row_start, c.INT32, (count + 1,))
        c.require("temperatures", temperatures, c.FLOAT64, (count,))
        c.require("seeds", seeds, c.UINT64, (count,))
        token_ids = np.empty(len(batch.logits_rows), dtype=np.int32)
        order = c.VerifyCall(
            count,
            Salt.TARGET,
            len(kept),
            c.address(row_start),
            c.address(temperatures),
            c.address(seeds),
            c.address(token_ids),
            c.address(kept),
            logits.data_ptr(),
        )
        self._compute(self._library.penstock_forward_sampled, batch, ctypes.byref(order))
        return token_ids, logits

    def forward_head(self, batch: RaggedBatch) -> torch.Tensor:
        logits = torch.empty(len(batch.logits_rows), _num_logits(self.config, batch))
        self._compute(self._library.penstock_forward, batch, logits.data_ptr(), of_head=True)
        return logits

    def _compute(
        self, function: Any, batch: RaggedBatch, order: Any, *, of_head: bool = False
    ) -> None:
        """Call the library with a batch. Raises ValueError where it refuses."""
        runner = (self._assistant or self) if of_head else self
        states = None if of_head else self._states
        moves = None if states is None else states.moves(batch)
        _values, described = _flatten(batch, moves)
        described.is_head, described.vocab = of_head, self.config.vocab_size
        if batch.carry is not None:
            _describe(batch.carry, described)
        if function(runner._model, ctypes.byref(described), order, self._error):
            raise ValueError(self._error.value.decode())
        if states is not None and moves is not None:
            states.moved(batch, moves)

    def draft(
        self,
        batch: RaggedBatch,
        num_steps: IntArray,
        temperatures: npt.NDArray[np.float64],
        seeds: npt.NDArray[np.uint64],
        salts: IntArray,
        *,
        stop: Stop | None = None,
        return_logits: bool = False,
    ) -> NativeDraft:
        """Compute the batch's rows, then sample up to num_steps[i] tokens after sequence i's last.

        Every token but the last is fed back as a row, so block_tables must reach num_steps[i] - 1
        positions beyond seq_lens[i]. Sampling is argmax at temperature 0 (the lowest id on ties),
        else argmax of logits / temperature plus the noise of (seed, position, salt).
        `batch.logits_rows` is ignored.

        num_steps:    [num_seqs] int32; 0 only catches up
        temperatures: [num_seqs] float64, 0 or more
        seeds:        [num_seqs] uint64
        salts:        [num_seqs] int32, values of `Salt`
        stop:         condition for ending drafts before their limit"""
        count = batch.num_seqs
        c.require("num_steps", num_steps, c.INT32, (count,))
        max_steps = int(num_steps.max(initial=0))
        token_ids = np.full((count, max_steps), -1, dtype=np.int32)
        of_head, vocab_size = batch.carry is not None, _num_logits(self.config, batch)
        logits = torch.empty(count, max_steps, vocab_size) if return_logits else None
        confidences, stopping = None, None
        if stop is not None:
            confidences = np.empty((count, max_steps), dtype=np.float32)
            survival = np.ones(count, dtype=np.float32)
            stopping = c.stop_call(EDGES, stop, survival, confidences)
        order = c.DraftCall(
            max_steps=max_steps,
            stop=None if stopping is None else ctypes.pointer(stopping),
            num_steps=c.address(num_steps),
            token_ids=c.address(token_ids),
            logits=None if logits is None else logits.data_ptr(),
            **c.sampling_fields(temperatures, seeds, salts, count),
        )
        self._compute(self._library.penstock_draft, batch, ctypes.byref(order), of_head=of_head)
        return NativeDraft(token_ids, logits, confidences)

    def verify(
        self,
        batch: RaggedBatch,
        row_start: IntArray,
        params: SamplingRows,
        kept: IntArray,
    ) -> tuple[list[int], torch.Tensor] | None:
        samples, logits = self.forward_sampled(
            batch, row_start, params.temperature, params.seed, kept
        )
        return samples.tolist(), logits

    def propose(
        self,
        first: RaggedBatch,
        limits: IntArray,
        params: SamplingRows,
        ratio: BoolArray,
        starts: npt.NDArray[np.int64],
        stop: Stop | None = None,
    ) -> Drafts | None:
        salts = np.full(len(limits), Salt.TARGET, dtype=np.int32)
        seeds, is_any_ratio = params.seed, bool(ratio.any())
        if is_any_ratio:
            salts[ratio] = Salt.DRAFT
            seeds = np.where(ratio, draft_seeds(params.seed, starts), params.seed)
        drafted = self.draft(
            first, limits, params.temperature, seeds, salts, stop=stop, return_logits=is_any_ratio
        )
        # A draft ends where it stops, or where its logits are not finite.
        limits = (drafted.token_ids >= 0).sum(axis=1)
        tokens = [row[:n].tolist() for row, n in zip(drafted.token_ids, limits, strict=True)]
        prob_rows = [[-1] * len(t) for t in tokens]
        probs = None
        if drafted.logits is not None:
            job = np.repeat(np.arange(len(limits)), np.where(ratio, limits, 0))
            step = np.concatenate([np.arange(n) for n in limits[ratio]] or [job])
            temperature = torch.from_numpy(params.temperature[job]).float().unsqueeze(-1)
            rows = drafted.logits[torch.from_numpy(job), torch.from_numpy(step)]
            probs = (rows / temperature).softmax(dim=-1)
            for row, i in enumerate(job):
                prob_rows[i][step[row]] = row
        confidences: list[list[float]] = [[] for _ in tokens]
        if drafted.confidences is not None:
            confidences = [
                row[:n].tolist() for row, n in zip(drafted.confidences, limits, strict=True)
            ]
        parts = zip(tokens, prob_rows, confidences, strict=True)
        return Drafts([Draft(t, p, confidences=c) for t, p, c in parts], probs)

    def _create(self, num_threads: int, positions: int) -> int:
        config, vectors = self.config, self._vectors
        variant, delta = config.variant, config.variant.delta
        window, experts = variant.window, variant.experts
        matrices = {
            name: c.Matrix(matrix.data.data_ptr(), matrix.kind)
            for name, matrix in self._matrices.items()
        }
        layers = (c.LayerWeights * config.num_all_layers)()
        for index, (layer, (keys, values)) in enumerate(zip(layers, self._cache, strict=True)):
            for name in c.MATRICES:
                setattr(layer, name, matrices.get(f"layers.{index}.{name}", c.Matrix()))
            for name in c.VECTORS:
                tensor = vectors.get(f"layers.{index}.{name}")
                setattr(layer, name, None if tensor is None else tensor.data_ptr())
            layer.shared_size = 0 if experts is None else experts.shared_size
            if index in self._state_memory:
                layer.states, layer.kept = (x.data_ptr() for x in self._state_memory[index])
            else:
                layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            shape, scale = config.shape(index), vectors.get(f"layers.{index}.scale")
            for name in c.LAYER_SIZES:
                setattr(layer, name, getattr(shape, name))
            layer.expert_size = config.intermediate_size
            layer.scale = 1.0 if scale is None else float(scale[0])
            layer.window = positions
            if (rope := self._ropes.get((config.layer_rope(index), shape.head_dim))) is not None:
                layer.rope_cos, layer.rope_sin = (x.data_ptr() for x in rope)
            if window is not None and index in window.layers:
                layer.window = min(window.size, positions)
        sizes = {name: getattr(config, name) for name in c.CONFIG_SIZES}
        sizes["head_dim"] = max(layer.head_dim for layer in layers)
        sizes["num_kv_heads"] = min(layer.num_kv_heads for layer in layers)
        sizes["intermediate_size"] = max(layer.inner_size for layer in layers)
        ple_norm = vectors.get("ple_norm")
        described = c.ModelWeights(
            **sizes,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_positions=positions,
            kv_kind=_KV_KINDS.index(self._cache[0][0].dtype),
            num_threads=num_threads,
            rms_norm_eps=config.rms_norm_eps,
            embedding=matrices["embed_tokens"],
            lm_head=matrices["lm_head"],
            norm=vectors["norm"].data_ptr(),
            layers=layers,
            embedding_scale=variant.embedding_scale / variant.residual_scale,
            gelu_tanh=variant.activation == "gelu_tanh",
            num_experts=0 if experts is None else experts.count,
            experts_per_token=1 if experts is None else experts.per_token,
            norm_topk_prob=experts is not None and experts.norm_topk_prob,
            **({} if delta is None else {name: getattr(delta, name) for name in c.DELTA_SIZES}),
            num_slots=0 if self.num_slots is None else self.num_slots,
            most_kept=MOST_KEPT,
            **self._head_fields(matrices),
            sigmoid_scores=experts is not None and experts.sigmoid_scores,
            gates_shared=experts is not None and experts.gates_shared,
            expert_scale=1.0 if experts is None else experts.scale,
            clamped=variant.activation == "clamped",
            query_scale=1.0 if variant.qk_norm else variant.query_scale,  # else of q_norm
            query_growth=variant.query_growth,
            query_period=variant.query_period,
            softcap=variant.softcap,
            ple_size=variant.ple_size,
            ple_embed=matrices.get("ple_embed", c.Matrix()),
            ple_proj=matrices.get("ple_proj", c.Matrix()),
            ple_norm=None if ple_norm is None else ple_norm.data_ptr(),
            has_assistant=config.assistant is not None,
            state_size=variant.assists or config.hidden_size,
        )
        model = self._library.penstock_create(ctypes.byref(described))
        if not model:
            raise MemoryError("no memory for the native runner's buffers")
        return int(model)

    def _head_fields(self, matrices: dict[str, c.Matrix]) -> dict[str, Any]:
        head, none = self.config.head, (-1, -1, -1)
        if self.config.variant.assists:
            own = {f"head_{x}": matrices[f"head.{x}"] for x in ("fc", "out")}
            return {**own, "head_reads": none}
        if head is None:
            return {}
        norms = {f"head_{n}": self._vectors[f"head.{n}"].data_ptr() for n in HEAD_NORMS}
        return {
            **norms,
            "head_fc": matrices["head.fc"],
            "head_reads": head.reads or none,
            "head_vocab": head.vocab_size,
            "head_lm_head": matrices.get("head.lm_head", c.Matrix()),
            "head_tokens": self._head_tokens.data_ptr(),
        }


def _allocate_cache(
    layout: Layout, dtype: torch.dtype, num_blocks: int, block_size: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of every layer, its own or those that it reads.

    Pages are committed as blocks are written."""
    config, room = layout.config, (num_blocks, block_size, dtype)
    layouts = {i: replace(layout, config=config.at(i)) for i in config.kv_layers}
    shapes = {i: (x.key_shape(*room), x.value_shape(*room)) for i, x in layouts.items()}
    sizes = [int(np.prod(shape)) * dtype.itemsize for pair in shapes.values() for shape in pair]
    arena, none = Arena(sum(map(Arena.size_of, sizes))), torch.empty(0, dtype=dtype)
    made = {
        i: (arena.next_tensor(keys, dtype), arena.next_tensor(values, dtype))
        for i, (keys, values) in shapes.items()
    }
    reads = [config.shape(i).kv_layer for i in range(config.num_all_layers)]
    return [made.get(i, (none, none)) for i in reads]


def _allocate_states(
    layout: Layout, delta: DeltaNet, num_slots: int
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Allocate each recurrent layer's states, if any, and the inputs of rows kept behind them.

    The latter take memory only as far as drafts are long."""
    width = round_up(delta.value_dim, layout.lanes)
    state = (num_slots, delta.value_heads, delta.key_dim, width)
    kept = (num_slots, delta.kernel - 1 + MOST_KEPT, layout.inputs_stride)
    sizes = [len(delta.layers) * Arena.size_of(4 * int(np.prod(s))) for s in (state, kept)]
    arenas = Arena(sizes[0]), Arena(sizes[1], huge=False)
    return {
        i: (
            arenas[0].next_tensor(state, torch.float32) if delta.key_heads else torch.empty(0),
            arenas[1].next_tensor(kept, torch.float32),
        )
        for i in sorted(delta.layers)
    }


def _flatten(
    batch: RaggedBatch, moves: StateMoves | None
) -> tuple[tuple[IntArray, ...], c.BatchValues]:
    """Return the batch as one array, with the moves, and its description, which points into them.

    Only shapes and types are checked here; C++ checks the values."""
    token_ids, tables, logits_rows = batch.token_ids, batch.block_tables, batch.logits_rows
    num_tokens, num_seqs, num_logits = len(token_ids), len(batch.seq_lens), len(logits_rows)
    max_blocks = tables.shape[1] if tables.ndim == 2 else 0
    arrays = (
        token_ids,
        batch.positions,
        batch.query_start,
        batch.seq_lens,
        logits_rows,
        tables.reshape(-1),
    )
    values = np.concatenate(arrays)
    expected = 2 * num_tokens + 2 * num_seqs + 1 + num_logits + num_seqs * max_blocks
    if values.dtype != c.INT32 or len(values) != expected or tables.ndim != 2:
        _refuse(batch, max_blocks)
    sizes = (num_tokens, num_seqs, max_blocks, num_logits)
    if moves is None:
        return (values,), c.BatchValues(*sizes, c.address(values))
    moved = np.concatenate((moves.slots, moves.replayed, moves.committed))
    return (values, moved), c.BatchValues(*sizes, c.address(values), c.address(moved))


def _num_logits(config: DecoderConfig, batch: RaggedBatch) -> int:
    return config.vocab_size if batch.carry is None else batch.carry.vocab or config.vocab_size


def _describe(carry: Carry, described: c.BatchValues) -> None:
    """Describe a head's states, and allocate those that the pass is to keep."""
    num_seqs, width = carry.before.shape
    c.require("kept rows", carry.rows, c.INT32, (len(carry.rows),))
    if num_seqs != described.num_seqs or carry.before.dtype != torch.float32:
        raise ValueError(f"states before are {carry.before.dtype} {tuple(carry.before.shape)}")
    carry.after = torch.empty(len(carry.rows), width)
    described.before, described.after = carry.before.data_ptr(), carry.after.data_ptr()
    described.vocab = carry.vocab or described.vocab
    described.kept_rows, described.num_kept = c.address(carry.rows), len(carry.rows)
    if (anchors := carry.anchors) is not None:
        c.require("anchors", anchors, c.INT32, (num_seqs,))
        described.anchors = c.address(anchors)


def _refuse(batch: RaggedBatch, max_blocks: int) -> None:
    shapes = {
        "token_ids": (batch.num_tokens,),
        "positions": (batch.num_tokens,),
        "query_start": (batch.num_seqs + 1,),
        "seq_lens": (batch.num_seqs,),
        "block_tables": (batch.num_seqs, max_blocks),
        "logits_rows": (len(batch.logits_rows),),
    }
    for name, shape in shapes.items():
        c.require(name, getattr(batch, name), c.INT32, shape)
