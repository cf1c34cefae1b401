"""Imported before the rest of vLLM: lets its build for GPUs plan on a machine that has none."""

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

if vllm.platforms.current_platform.is_unspecified():
    vllm.platforms.current_platform = CpuPlatform()
