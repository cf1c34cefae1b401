"""A drafter by itself, without a target: what a draft server runs."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.engine.backends import affordable_blocks, why_not_native
from penstock.engine.drafters.proposers import ModelProposer, Quantise
from penstock.engine.eager import EagerRunner
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.dtypes import resolve_dtype
from penstock.engine.native.runner import DTYPES, NativeRunner
from penstock.engine.native.sampler import sample_natively
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import Sampler, sample_coupled

_BLOCK_SIZE = 16


def load_model(path: Path, dtype_name: str, quantise: Quantise) -> ModelProposer:
    """A checkpoint folder as a drafter on the CPU, by the native kernels where they can be had.

    Its KV memory is a share of what is free, at most enough for 64 texts of full length. Raises:
    CheckpointError for a folder that cannot be used.
    """
    device = torch.device("cpu")
    dtype = resolve_dtype(dtype_name, device)
    config = DecoderConfig.from_pretrained(path)
    num_blocks = affordable_blocks(
        [config], dtype, device, _BLOCK_SIZE, config.max_position_embeddings, weights=0
    )
    threads = torch.get_num_threads()
    runner: ModelRunner
    sample: Sampler
    if dtype in DTYPES and why_not_native() is None:
        # The kernels have threads of their own; PyTorch's would spin on the same cores.
        torch.set_num_threads(1)
        runner = NativeRunner.load(path, dtype, num_blocks, _BLOCK_SIZE, threads)
        sample = sample_natively
    else:
        runner = EagerRunner.load(path, dtype, device, num_blocks, _BLOCK_SIZE)
        sample = sample_coupled
    return ModelProposer(runner, quantise, sample)
