"""What `auto` and no word mean, on this machine and for the models at hand."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

import torch

from penstock.config import ConfigError, EngineConfig
from penstock.engine.attention import backend_names
from penstock.engine.attention.triton_paged import why_not_triton
from penstock.engine.kv_cache import kv_bytes_per_token
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.dtypes import resolve_dtype
from penstock.engine.models.weights import weight_bytes
from penstock.engine.native.build import NativeUnavailableError
from penstock.engine.native.library import native_library

_MEMORY_SHARE = 0.25
_GPU_MEMORY_SHARE = 0.8
_DEFAULT_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """Where models are run, and how. num_threads: of the kernels on a CPU."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    backend: str
    num_threads: int


def resolve_placement(config: EngineConfig) -> Placement:
    """Also tells PyTorch how many threads to use. Raises: ConfigError."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    num_threads = torch.get_num_threads()
    device = _device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    backend = _backend(config, device, dtype)
    if backend == "native":
        # The kernels have threads of their own; PyTorch's would spin on the same cores.
        torch.set_num_threads(1)
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "float8" else dtype
    if kv_dtype != dtype and resolve_attention(config.attention, device) != "triton_paged":
        raise ConfigError("kv_dtype float8 needs attention triton_paged; allowed otherwise: auto")
    return Placement(device, dtype, kv_dtype, backend, num_threads)


def resolve_attention(name: str, device: torch.device) -> str:
    """The attention backend that is meant on a device. Raises: ConfigError."""
    if name == "auto":
        usable = device.type == "cuda" and why_not_triton(device) is None
        return "triton_paged" if usable else "packed"
    if name not in backend_names():
        raise ConfigError(f"attention is {name!r}; allowed: auto, {', '.join(backend_names())}")
    return name


def why_not_native() -> str | None:
    """Why the native CPU kernels cannot be used on this machine; None if they can."""
    try:
        native_library()
    except NativeUnavailableError as error:
        return str(error)
    return None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but PyTorch sees no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use cpu, cuda or cuda:N")
    return device


def _backend(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Recorded steps on a GPU; the native CPU kernels where they can be had, else eager."""
    if config.backend in ("eager", "graphs"):
        return config.backend
    if config.backend == "auto" and device.type == "cuda":
        return "graphs"
    why_not: str | None = None
    if device.type != "cpu":
        why_not = f"it runs on the CPU, not on {device}"
    elif dtype not in (torch.float32, torch.bfloat16):
        why_not = f"it computes float32 or bfloat16, not {str(dtype).removeprefix('torch.')}"
    else:
        why_not = why_not_native()
    if config.backend == "native" and why_not is not None:
        raise ConfigError(f"backend native cannot be used: {why_not}")
    return "eager" if why_not is not None else "native"


def resolve_context(config: EngineConfig, target: DecoderConfig) -> int:
    """Most tokens of a request. Raises: ConfigError."""
    limit = target.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the {limit} positions of the target"
        )
    return config.max_model_len or limit


def resolve_num_blocks(
    config: EngineConfig, place: Placement, models: Collection[DecoderConfig], max_model_len: int
) -> int:
    """KV blocks of every model: as asked, or what a share of the free memory holds."""
    if config.kv_tokens is not None:
        return -(-config.kv_tokens // config.block_size)
    weights = sum(weight_bytes(model, place.dtype) for model in models)
    return affordable_blocks(
        models, place.kv_dtype, place.device, config.block_size, max_model_len, weights
    )


def affordable_blocks(
    models: Collection[DecoderConfig],
    kv_dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    max_model_len: int,
    weights: int,
) -> int:
    """KV blocks that each of the models may have out of a share of the free memory; no more than 64
    texts of full length need, and at least 1.

    weights: bytes that are yet to be loaded, which a GPU's memory has to hold beside the KV.

    Raises: ConfigError where it cannot hold even them.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if weights >= free:
            raise ConfigError(
                f"the models take {weights / 1e9:.1f} GB and {device} has {free / 1e9:.1f} GB "
                "free: smaller models, fewer drafters or a smaller dtype would fit"
            )
        free -= weights
        share = _GPU_MEMORY_SHARE
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        share = _MEMORY_SHARE
    tokens = int(free * share) // sum(kv_bytes_per_token(m, kv_dtype) for m in models)
    return max(1, min(tokens, _DEFAULT_SEQUENCES * max_model_len) // block_size)
