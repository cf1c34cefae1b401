"""Random models to be timed are files that the engine reads and runs."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.small_gguf import write_gguf
from tests.engine.small_models import CASES, Paging
from tokenizers import Tokenizer
from tokenizers.models import BPE

from lab.bench import random_gguf
from penstock.engine.eager import EagerRunner

SMALL = {"layers": 2, "hidden": 64, "inner": 96, "heads": 2, "kv_heads": 1, "head_dim": 32}


@pytest.mark.parametrize("name", random_gguf.SHAPES)
def test_a_random_model_runs(name: str, tmp_path: Path) -> None:
    words = {chr(97 + i): i for i in range(26)}
    like, out = tmp_path / "like.gguf", tmp_path / "out.gguf"
    stop = {"eos_token_id": 0}
    case = dataclasses.replace(CASES["llama-tied"], changes=stop)
    write_gguf(like, case, tokenizer=Tokenizer(BPE(words, [])))
    shape = random_gguf.SHAPES[name]
    experts = None if shape.experts is None else (64, 32)
    random_gguf.write(dataclasses.replace(shape, experts=experts, **SMALL), out, like)
    runner = EagerRunner.load(out, torch.float32, torch.device("cpu"), 16, 16)
    ids = np.arange(20, dtype=np.int32)
    paging = Paging(runner.num_blocks, runner.block_size)
    logits = runner.forward(paging.batch(("a", ids, 0, len(ids))))
    assert logits.shape[1] == 26
    assert 0.1 < logits.std() < 10
