"""ctypes declarations of penstock.cpp; fields as in model.h and penstock.cpp."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_size_t, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config import ConfigError
from penstock.core.learn.confidence import Floats, Stop
from penstock.engine.models.head import HEAD_NORMS
from penstock.engine.native.loading import load_library

ERROR_BYTES = 256
"""Size of the buffer for error messages; longer ones are cut."""

# Comparison with these is ten times faster than with the type's name.
INT32, INT64, UINT64 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint64)
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)

LAYER_MATRICES = ("query", "key", "value", "o", "gate", "up", "down")
DELTA_MATRICES = ("linear_qkv", "linear_z", "beta", "alpha")
DELTA_VECTORS = ("conv", "dt_bias", "rate", "linear_norm")
SHARED_MATRICES = ("shared_gate", "shared_up", "shared_down")
OWN_VECTORS = ("sinks", "router_bias", "gate_bias", "up_bias", "down_bias", "choice_bias")
"""Vectors that some models with experts have."""
DELTA_SIZES = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel", "strided")
LAYER_VECTORS = (
    "input_norm",
    "post_norm",
    "qkv_bias",
    "o_bias",
    "q_norm",
    "k_norm",
    "qk_scale",
    "o_norm",
    "down_norm",
)
PLE_MATRICES = ("ple_gate", "ple_out")
BESIDE_MATRICES = ("experts_gate", "experts_up", "experts_down")
BESIDE_VECTORS = ("router_norm", "experts_scale", "experts_norm", "experts_out_norm", "dense_norm")
MATRICES = (
    *(*LAYER_MATRICES, "router", "query_gate"),
    *(*DELTA_MATRICES, *SHARED_MATRICES, *PLE_MATRICES, *BESIDE_MATRICES),
)
VECTORS = (
    *(*LAYER_VECTORS, *DELTA_VECTORS, *OWN_VECTORS, "v_norm", "ple_norm"),
    *BESIDE_VECTORS,
)
CONFIG_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
)
LAYER_SIZES = ("head_dim", "num_kv_heads", "inner_size")


class Matrix(Structure):
    """Address and `Kind` of a packed matrix."""

    _fields_ = [("data", c_void_p), ("kind", c_int32)]


class LayerWeights(Structure):
    """Weights and KV cache of one layer."""

    _fields_ = [
        *((name, Matrix) for name in LAYER_MATRICES),
        *((name, c_void_p) for name in (*LAYER_VECTORS, "keys", "values")),
        ("window", c_int32),
        *((name, c_void_p) for name in ("rope_cos", "rope_sin")),
        ("router", Matrix),
        ("query_gate", Matrix),
        *((name, Matrix) for name in DELTA_MATRICES),
        *((name, c_void_p) for name in (*DELTA_VECTORS, "states", "kept")),
        *((name, Matrix) for name in SHARED_MATRICES),
        ("shared_size", c_int32),
        *((name, c_void_p) for name in OWN_VECTORS),
        *((name, c_int32) for name in LAYER_SIZES),
        ("scale", c_float),
        ("v_norm", c_void_p),
        *((name, Matrix) for name in PLE_MATRICES),
        ("ple_norm", c_void_p),
        *((name, Matrix) for name in BESIDE_MATRICES),
        *((name, c_void_p) for name in BESIDE_VECTORS),
        ("expert_size", c_int32),
    ]


class ModelWeights(Structure):
    """Sizes, weights and cache of a model."""

    _fields_ = [
        *((name, c_int32) for name in CONFIG_SIZES),
        ("num_blocks", c_int32),
        ("block_size", c_int32),
        ("max_positions", c_int32),
        ("kv_kind", c_int32),
        ("num_threads", c_int32),
        ("rms_norm_eps", c_float),
        ("embedding", Matrix),
        ("lm_head", Matrix),
        ("norm", c_void_p),
        ("layers", POINTER(LayerWeights)),
        ("embedding_scale", c_float),
        ("gelu_tanh", c_int32),
        *((name, c_int32) for name in ("num_experts", "experts_per_token", "norm_topk_prob")),
        *((name, c_int32) for name in (*DELTA_SIZES, "num_slots", "most_kept")),
        ("head_fc", Matrix),
        *((f"head_{name}", c_void_p) for name in HEAD_NORMS),
        *((name, c_int32) for name in ("sigmoid_scores", "gates_shared")),
        ("expert_scale", c_float),
        ("clamped", c_int32),
        ("query_scale", c_float),
        ("query_growth", c_float),
        ("query_period", c_int32),
        ("softcap", c_float),
        ("ple_size", c_int32),
        *((name, Matrix) for name in ("ple_embed", "ple_proj")),
        ("ple_norm", c_void_p),
        ("head_reads", c_int32 * 3),
        ("head_vocab", c_int32),
        ("head_lm_head", Matrix),
        ("head_tokens", c_void_p),
        *((name, c_int32) for name in ("has_assistant", "state_size")),
        ("head_out", Matrix),
    ]


class BatchValues(Structure):
    """Sizes of a `RaggedBatch`, and the address of its values."""

    _fields_ = [
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("max_blocks", c_int32),
        ("num_logits", c_int32),
        ("values", c_void_p),
        ("moves", c_void_p),
        *((name, c_void_p) for name in ("before", "after", "kept_rows")),
        ("num_kept", c_int32),
        ("is_head", c_int32),
        ("vocab", c_int32),
        ("anchors", c_void_p),
    ]


class StopCall(Structure):
    """Early stopping of drafts (`drafters.confidence.Stop`)."""

    _fields_ = [
        ("num_bins", c_int32),
        *((name, c_void_p) for name in ("edges", "acceptance", "least", "survival", "confidence")),
    ]


class DraftCall(Structure):
    """Arguments of a drafting call."""

    _fields_ = [
        ("max_steps", c_int32),
        *(
            (name, c_void_p)
            for name in ("num_steps", "salts", "temperatures", "seeds", "token_ids", "logits")
        ),
        ("stop", POINTER(StopCall)),
    ]


class VerifyCall(Structure):
    """Arguments of sampling in a verification pass."""

    _fields_ = [
        *((name, c_int32) for name in ("num_requests", "salt", "num_kept")),
        *(
            (name, c_void_p)
            for name in (
                *("row_start", "temperatures", "seeds", "token_ids"),
                *("kept", "logits"),
            )
        ),
    ]


class SampleCall(Structure):
    """Arguments of sampling from logits."""

    _fields_ = [
        *((name, c_int32) for name in ("num_rows", "vocab_size")),
        *(
            (name, c_void_p)
            for name in ("logits", "salts", "temperatures", "seeds", "positions", "token_ids")
        ),
    ]


@lru_cache(maxsize=1)
def native_library() -> ctypes.CDLL:
    """Return the compiled library with declared signatures. Raises NativeUnavailableError."""
    return declared(load_library())


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the library's signatures. Raises ConfigError for one of older sources."""
    pointer = c_void_p
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "penstock_lanes": (c_int32, []),
        "penstock_has_bf16_pairs": (c_int32, []),
        "penstock_tiles_agree": (c_int32, []),
        "penstock_matrix_bytes": (c_size_t, [c_int32, c_int32, c_int32]),
        "penstock_pack": (None, [c_int32, pointer, c_int32, c_int32, pointer]),
        "penstock_create": (pointer, [pointer]),
        "penstock_destroy": (None, [pointer]),
        "penstock_limit_threads": (None, [pointer, c_int32]),
        "penstock_poison": (None, [c_int32]),
        "penstock_forward": (c_int32, [pointer, pointer, pointer, pointer]),
        "penstock_forward_sampled": (c_int32, [pointer, pointer, pointer, pointer]),
        "penstock_draft": (c_int32, [pointer, pointer, pointer, pointer]),
        "penstock_sample": (c_int32, [pointer, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            raise ConfigError(
                f"{library._name} was built from older sources; `make native` builds it anew"
            )
        function.restype, function.argtypes = result, arguments
    return library


def stop_call(edges: Floats, stop: Stop, survival: Floats, confidences: Floats) -> StopCall:
    """Build a `StopCall` of float32 arrays, which must outlive the call."""
    count, num_bins = len(survival), len(edges) + 1
    require("least", stop.least, FLOAT32, (count,))
    require("acceptance", stop.acceptance, FLOAT32, (count, num_bins))
    return StopCall(
        num_bins=num_bins,
        edges=address(edges),
        acceptance=address(stop.acceptance),
        least=address(stop.least),
        survival=address(survival),
        confidence=address(confidences),
    )


def sampling_fields(
    temperatures: npt.NDArray[np.float64],
    seeds: npt.NDArray[np.uint64],
    salts: npt.NDArray[np.int32],
    count: int,
) -> dict[str, int]:
    """Return checked addresses of one temperature, seed and salt per row."""
    require("temperatures", temperatures, FLOAT64, (count,))
    require("seeds", seeds, UINT64, (count,))
    require("salts", salts, INT32, (count,))
    return {
        "temperatures": address(temperatures),
        "seeds": address(seeds),
        "salts": address(salts),
    }


def address(array: npt.NDArray[np.generic]) -> int:
    """Return the address of an array's first value."""
    if not array.size or not array.flags.writeable:
        return int(array.__array_interface__["data"][0])
    # Takes a quarter of the time of the array interface; a step asks about twenty times.
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


def require(
    name: str, array: npt.NDArray[np.generic], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    """Raises ValueError for another dtype or shape, or a non-contiguous array."""
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is {array.dtype} {array.shape}; expected contiguous {dtype} {shape}"
        )
