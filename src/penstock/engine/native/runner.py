"""`ModelRunner` on the compiled kernels, with a drafting loop that never returns to Python."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.batch import IntArray, RaggedBatch
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.weights import load_weights
from penstock.engine.native import library as c
from penstock.engine.native.library import native_library
from penstock.engine.native.packing import Arena, Layout, pack_weights
from penstock.engine.sampling.noise import Salt

DTYPES = (torch.float32, torch.bfloat16)

# Compared with these, a dtype is checked ten times faster than with the type's name.
_INT32, _INT64, _UINT64 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint64)
_FLOAT64 = np.dtype(np.float64)


@dataclass(frozen=True, slots=True)
class NativeDraft:
    """What `NativeRunner.draft` sampled.

    token_ids: [num_seqs, max_steps] int32; -1 from a sequence's own limit on
    logits:    [num_seqs, max_steps, vocab_size] float32, before the temperature, or None; rows
               from a sequence's own limit on hold no logits
    """

    token_ids: IntArray
    logits: torch.Tensor | None


class NativeRunner:
    """A decoder, its packed weights and its paged cache, for one calling thread at a time.

    A row's logits are bitwise the same whatever else is in the batch, however its context was cut
    into batches, and with any number of threads.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, torch.Tensor],
        kv_dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        num_threads: int,
    ) -> None:
        """Pack `weights` (as `load_weights` names them; float32 or bfloat16 throughout).

        Raises NativeUnavailableError where nothing can be compiled, ValueError for a bad size.
        """
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_threads": num_threads}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; must be at least 1")
        self._library = native_library()
        self._config = config
        self._num_blocks = num_blocks
        self._block_size = block_size
        layout = Layout(config, self._library.penstock_lanes())
        self._weights = pack_weights(dict(weights), layout)
        self._rope = layout.rope(min(config.max_position_embeddings, num_blocks * block_size))
        self._cache = _allocate_cache(layout, kv_dtype, num_blocks, block_size)
        self._error = ctypes.create_string_buffer(c.ERROR_BYTES)
        self._model = self._create(num_threads)
        weakref.finalize(self, self._library.penstock_destroy, self._model)

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        num_threads: int,
    ) -> NativeRunner:
        """Load a checkpoint folder in Hugging Face layout.

        float32 keeps the cache in float32 and the weights as they are (a bfloat16 checkpoint is
        widened in registers, which loses nothing); bfloat16 rounds both. Sums are float32 in both.
        Raises ValueError (a CheckpointError for the folder), or NativeUnavailableError.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype}; allowed: {', '.join(map(str, DTYPES))}")
        config = DecoderConfig.from_pretrained(path)
        rounded = torch.bfloat16 in (dtype, config.dtype)
        weights = load_weights(path, config, torch.bfloat16 if rounded else torch.float32)
        return cls(config, weights, dtype, num_blocks, block_size, num_threads)

    @property
    def config(self) -> DecoderConfig:
        return self._config

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def limit_threads(self, num_threads: int) -> None:
        """Use at most so many of its threads from now on: others are at work."""
        self._library.penstock_limit_threads(self._model, num_threads)

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """See ModelRunner. Raises ValueError for a batch that does not fit model or cache."""
        _values, described = _flatten(batch)
        logits = torch.empty(described.num_logits, self._config.vocab_size)
        refused = self._library.penstock_forward(
            self._model, ctypes.byref(described), logits.data_ptr(), self._error
        )
        if refused:
            raise ValueError(self._error.value.decode())
        return logits

    def forward_sampled(
        self,
        batch: RaggedBatch,
        row_start: IntArray,
        temperatures: npt.NDArray[np.float64],
        seeds: npt.NDArray[np.uint64],
    ) -> IntArray:
        """The target's coupled samples behind `batch.logits_rows`, without the logits: [num_logits]
        int32, as `sample_coupled` would draw them.

        row_start: [num_requests + 1] int32, the rows of logits of each request; the others have
        one entry a request
        """
        count = len(row_start) - 1
        _require("row_start", row_start, _INT32, (count + 1,))
        _require("temperatures", temperatures, _FLOAT64, (count,))
        _require("seeds", seeds, _UINT64, (count,))
        token_ids = np.empty(len(batch.logits_rows), dtype=np.int32)
        order = c.TargetOrder(
            count,
            Salt.TARGET,
            _address(row_start),
            _address(temperatures),
            _address(seeds),
            _address(token_ids),
        )
        _values, described = _flatten(batch)
        refused = self._library.penstock_forward_sampled(
            self._model, ctypes.byref(described), ctypes.byref(order), self._error
        )
        if refused:
            raise ValueError(self._error.value.decode())
        return token_ids

    def draft(
        self,
        batch: RaggedBatch,
        num_steps: IntArray,
        temperatures: npt.NDArray[np.float64],
        seeds: npt.NDArray[np.uint64],
        salts: IntArray,
        *,
        return_logits: bool = False,
    ) -> NativeDraft:
        """Compute the batch's rows, then sample up to num_steps[i] tokens after sequence i's last.

        Every token but the last is fed back as a row of its own, so block_tables must reach
        num_steps[i] - 1 positions beyond seq_lens[i]. Sampling is argmax at temperature 0 (the
        lowest id on ties), else argmax of logits / temperature plus the noise of (seed, position,
        salt). `batch.logits_rows` is not read.

        num_steps:    [num_seqs] int32; 0 only catches up
        temperatures: [num_seqs] float64, 0 or more
        seeds:        [num_seqs] uint64
        salts:        [num_seqs] int32, values of `Salt`
        """
        count = batch.num_seqs
        _require("num_steps", num_steps, _INT32, (count,))
        max_steps = int(num_steps.max(initial=0))
        token_ids = np.full((count, max_steps), -1, dtype=np.int32)
        vocab_size = self._config.vocab_size
        logits = torch.empty(count, max_steps, vocab_size) if return_logits else None
        order = c.DraftOrder(
            max_steps=max_steps,
            num_steps=_address(num_steps),
            token_ids=_address(token_ids),
            logits=None if logits is None else logits.data_ptr(),
            **_sampling(temperatures, seeds, salts, count),
        )
        _values, described = _flatten(batch)
        refused = self._library.penstock_draft(
            self._model, ctypes.byref(described), ctypes.byref(order), self._error
        )
        if refused:
            raise ValueError(self._error.value.decode())
        return NativeDraft(token_ids, logits)

    def _create(self, num_threads: int) -> int:
        config, weights = self._config, self._weights
        layers = (c.LayerWeights * config.num_layers)()
        for index, (layer, (keys, values)) in enumerate(zip(layers, self._cache, strict=True)):
            for name in c.LAYER_TENSORS:
                tensor = weights.get(f"layers.{index}.{name}")
                setattr(layer, name, None if tensor is None else tensor.data_ptr())
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        cos, sin = self._rope
        described = c.ModelWeights(
            **{name: getattr(config, name) for name in c.CONFIG_SIZES},
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            max_positions=cos.shape[0],
            weights_bf16=weights["lm_head"].dtype == torch.bfloat16,
            kv_bf16=self._cache[0][0].dtype == torch.bfloat16,
            num_threads=num_threads,
            rms_norm_eps=config.rms_norm_eps,
            embedding=weights["embed_tokens"].data_ptr(),
            lm_head=weights["lm_head"].data_ptr(),
            norm=weights["norm"].data_ptr(),
            rope_cos=cos.data_ptr(),
            rope_sin=sin.data_ptr(),
            layers=layers,
        )
        model = self._library.penstock_create(ctypes.byref(described))
        if not model:
            raise MemoryError("no memory for the native runner's buffers")
        return int(model)


def sample_coupled(
    logits: torch.Tensor,
    temperatures: npt.NDArray[np.float64],
    seeds: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
    salts: IntArray,
) -> IntArray:
    """Samples of unfiltered logits, as `NativeRunner.draft` takes them: [rows] int32.

    logits: [rows, V] float32, contiguous; the others have one entry a row. positions: of the tokens
    that are being sampled.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.is_contiguous():
        raise ValueError("logits must be a contiguous float32 tensor of two dimensions")
    count, vocab_size = logits.shape
    if vocab_size < 1:
        raise ValueError("logits have no column")
    _require("positions", positions, _INT64, (count,))
    token_ids = np.empty(count, dtype=np.int32)
    order = c.SampleOrder(
        num_rows=count,
        vocab_size=vocab_size,
        logits=logits.data_ptr(),
        positions=_address(positions),
        token_ids=_address(token_ids),
        **_sampling(temperatures, seeds, salts, count),
    )
    error = ctypes.create_string_buffer(c.ERROR_BYTES)
    if native_library().penstock_sample(ctypes.byref(order), error):
        raise ValueError(error.value.decode())
    return token_ids


def _sampling(
    temperatures: npt.NDArray[np.float64],
    seeds: npt.NDArray[np.uint64],
    salts: IntArray,
    count: int,
) -> dict[str, int]:
    _require("temperatures", temperatures, _FLOAT64, (count,))
    _require("seeds", seeds, _UINT64, (count,))
    _require("salts", salts, _INT32, (count,))
    return {
        "temperatures": _address(temperatures),
        "seeds": _address(seeds),
        "salts": _address(salts),
    }


def _allocate_cache(
    layout: Layout, dtype: torch.dtype, num_blocks: int, block_size: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer; pages are taken from the system as blocks are written."""
    shapes = (
        layout.key_shape(num_blocks, block_size),
        layout.value_shape(num_blocks, block_size),
    )
    layers = layout.config.num_layers
    one_layer = sum(Arena.size_of(int(np.prod(s)) * dtype.itemsize) for s in shapes)
    arena = Arena(layers * one_layer)
    return [(arena.take(shapes[0], dtype), arena.take(shapes[1], dtype)) for _ in range(layers)]


def _address(array: npt.NDArray[np.generic]) -> int:
    if not array.size or not array.flags.writeable:
        return int(array.__array_interface__["data"][0])
    # A quarter of the time that the array interface takes; a step asks about twenty times.
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def _require(
    name: str, array: npt.NDArray[np.generic], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is {array.dtype} {array.shape}; expected contiguous {dtype} {shape}"
        )


def _flatten(batch: RaggedBatch) -> tuple[IntArray, c.BatchValues]:
    """The batch as one array, which must outlive the description beside it.

    Only shapes and types are checked here; the values are in C++, where it takes no time.
    """
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
    if values.dtype != _INT32 or len(values) != expected or tables.ndim != 2:
        _refuse(batch, max_blocks)
    return values, c.BatchValues(num_tokens, num_seqs, max_blocks, num_logits, _address(values))


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
        _require(name, getattr(batch, name), _INT32, shape)
