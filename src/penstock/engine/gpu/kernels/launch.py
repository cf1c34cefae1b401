"""How kernels follow each other."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

overlapped = False
"""Whether a kernel's programs may be placed while the one before still ends (programmatic dependent
launch, compute capability 9.0 and up). Off: not measured yet; lab.bench.gpu --overlap tries it."""


def options() -> dict[str, Any]:
    """What every launch is given beside its own arguments."""
    return {"OVERLAPPED": True, "launch_pdl": True} if overlapped else {"OVERLAPPED": False}


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """Type of the operands of matrix products over tensors of a type.

    Triton's interpreter multiplies bfloat16 as if it were integers: there, float32.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)


@triton.jit
def follow(OVERLAPPED: tl.constexpr):
    """Let the next kernel be placed, and wait until all before this one have written. The first
    thing in every kernel: whoever skipped it would let the next one read what is not there yet."""
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
