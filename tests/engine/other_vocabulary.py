"""Bundled models under other tokenizers, on disk."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from penstock.zoo.registry import model_path

TARGET = "target-large"


def reordered(definition: dict[str, Any], ids: np.ndarray) -> None:
    """The same tokens under other ids: texts are cut as before."""
    vocab = definition["model"]["vocab"]
    definition["model"]["vocab"] = {token: int(ids[i]) for token, i in vocab.items()}
    for added in definition["added_tokens"]:
        added["id"] = int(ids[added["id"]])


def finer(definition: dict[str, Any], ids: np.ndarray) -> None:
    """Under other ids, and without the later merges: texts are cut into more tokens."""
    reordered(definition, ids)
    merges = definition["model"]["merges"]
    del merges[len(merges) // 4 :]


def write(folder: Path, name: str, change: Callable[[dict[str, Any], np.ndarray], None]) -> Path:
    """A bundled model whose token i is called ids[i]."""
    source = model_path(name)
    shutil.copytree(source, folder)
    definition = json.loads((source / "tokenizer.json").read_text())
    ids = np.random.default_rng(0).permutation(len(definition["model"]["vocab"]))
    change(definition, ids)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    weights = load_file(source / "model.safetensors")
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        if key in weights:
            weights[key] = weights[key][torch.from_numpy(np.argsort(ids))].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for file in ("config.json", "generation_config.json"):
        content = json.loads((folder / file).read_text())
        named = {k: int(ids[v]) for k, v in content.items() if k.endswith("_token_id")}
        (folder / file).write_text(json.dumps(content | named))
    return folder
