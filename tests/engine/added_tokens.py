"""Bundled models with tokens added to their vocabulary as real models have them: found in a text
before it is cut, not special, and not all in ASCII."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from penstock.zoo.registry import model_path

ADDED = {"čas": "Ġthe", "<číslo>": "1", "日本": "Ġa", "<tool_call>": "{", "</tool_call>": "}"}
"""By their contents, the tokens that they are taken for; the model prefers the added ones.
The characters of the first are all in the alphabet that byte-level vocabularies write bytes in."""


def with_added_tokens(folder: Path) -> Path:
    """Add them to the checkpoint in a folder."""
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    twins = [tokenizer.token_to_id(twin) for twin in ADDED.values()]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    tokenizer.save(str(file))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            rows = weights[name]
            weights[name] = torch.cat([rows, rows[twins] * 1.02]).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(folder: Path, name: str) -> Path:
    """A bundled model with them."""
    shutil.copytree(model_path(name), folder)
    return with_added_tokens(folder)
