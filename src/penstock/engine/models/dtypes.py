"""Number format of a model's computation."""

from __future__ import annotations

import torch

_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DTYPES = tuple(_BY_NAME.values())


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return a dtype by name; "auto": bfloat16 where the processor computes in it, else float32.

    A CPU needs AVX512-BF16 or AMX; emulation is several times slower than float32. Raises
    ValueError for another name."""
    if name == "auto":
        return torch.bfloat16 if _computes_bfloat16(device) else torch.float32
    if name not in _BY_NAME:
        raise ValueError(f"dtype is {name!r}; allowed: auto, {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def _computes_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    if not hasattr(torch.cpu, "get_capabilities"):  # torch before 2.11
        return bool(torch.cpu._is_avx512_bf16_supported())
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
