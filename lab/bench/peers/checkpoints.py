"""The models that are measured: two of random weights, written here, the bundled family, and GGUF
files of real models."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from lab.bench.real_prompts import RealPrompt, mixed, real_prompts, token_ids
from penstock.zoo.registry import DEFAULT_TARGET, DOMAINS, load_prompts, model_path

PROMPT_TOKENS = 128
NUM_LAYERS = 8
DRAFTER_LAYERS = 2
RIGHT = "first-layers"
GGUF_DRAFTER = "model"
MIXED, CODE = "mixed", "code"

_CODE_KINDS = ("completion", "edit", "docstring", "translation")
"""Of real prompts: those whose answers are code or stand in it."""

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# The specialists know two or three of the eight domains; on mixed prompts they cannot win.
_GENERALISTS = ("draft-tiny", "draft-base")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PeerCheckpoint:
    """One target with its drafters.

    shape: models of one shape share the engines' best target-only settings; of GGUF files, too,
    the best drafters.
    prompts: token ids; every engine gets the same, in the same order.
    ngram: whether look-up in the request's own text is tried, too.
    """

    name: str
    shape: str
    target: Path
    drafters: dict[str, Path] = field(default_factory=dict)
    prompts: tuple[tuple[int, ...], ...] = ()
    ngram: bool = False

    @property
    def is_gguf(self) -> bool:
        """A pass over such a file takes so long that little is tried and short."""
        return self.target.suffix == ".gguf"


def random_llama(seed: int = 0) -> Weights:
    """Weights of a 28 M Llama in bfloat16, under Hugging Face's names.

    Every matrix keeps activations near unit size, so that each layer has a say in the output.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)
        return drawn.to(torch.bfloat16)

    hidden, ffn, vocab = _CONFIG["hidden_size"], _CONFIG["intermediate_size"], _CONFIG["vocab_size"]
    kv = _CONFIG["num_key_value_heads"] * _CONFIG["head_dim"]
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights: Weights = {"model.embed_tokens.weight": normal(vocab, hidden, hidden**0.5)}
    for i in range(NUM_LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.input_layernorm.weight": ones.clone(),
            f"{layer}.self_attn.q_proj.weight": normal(hidden, hidden, 1.0),
            f"{layer}.self_attn.k_proj.weight": normal(kv, hidden, 1.0),
            f"{layer}.self_attn.v_proj.weight": normal(kv, hidden, 1.0),
            f"{layer}.self_attn.o_proj.weight": normal(hidden, hidden, 0.5),
            f"{layer}.post_attention_layernorm.weight": ones.clone(),
            f"{layer}.mlp.gate_proj.weight": normal(ffn, hidden, 1.0),
            f"{layer}.mlp.up_proj.weight": normal(ffn, hidden, 1.0),
            f"{layer}.mlp.down_proj.weight": normal(hidden, ffn, 0.5),
        }
    weights["model.norm.weight"] = ones.clone()
    weights["lm_head.weight"] = normal(vocab, hidden, 2.0)
    return weights


def silence(weights: Weights, first_layer: int) -> Weights:
    """The same weights with what the layers from `first_layer` on add to the stream set to zero."""
    outputs = ("self_attn.o_proj", "mlp.down_proj")
    silent = {
        f"model.layers.{i}.{output}.weight"
        for i in range(first_layer, NUM_LAYERS)
        for output in outputs
    }
    return {n: torch.zeros_like(w) if n in silent else w for n, w in weights.items()}


def first_layers(weights: Weights, num_layers: int) -> Weights:
    """The same weights without the layers from `num_layers` on."""
    return {
        name: weight
        for name, weight in weights.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }


def write_checkpoint(folder: Path, weights: Weights) -> Path:
    """Write `weights` in Hugging Face layout, with the bundled tokenizer of the same vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = {int(n.split(".")[2]) for n in weights if n.startswith("model.layers.")}
    config = _CONFIG | {"num_hidden_layers": len(layers)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in _TOKENIZER_FILES:
        shutil.copy(model_path(DEFAULT_TARGET) / file, folder / file)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load_models(names: list[str], folder: Path) -> list[PeerCheckpoint]:
    """Write or find the models of these `names` (of `MODELS`); new files go under `folder`."""
    return [_MAKERS[name](folder) for name in names]


def _random(folder: Path) -> PeerCheckpoint:
    target = write_checkpoint(folder / "random", random_llama())
    return PeerCheckpoint("random", "28M", target, prompts=_random_prompts())


def _right(folder: Path) -> PeerCheckpoint:
    weights = silence(random_llama(), DRAFTER_LAYERS)
    target = write_checkpoint(folder / "right", weights)
    drafter = write_checkpoint(folder / "right-drafter", first_layers(weights, DRAFTER_LAYERS))
    return PeerCheckpoint("right", "28M", target, {RIGHT: drafter}, _random_prompts())


def _zoo(folder: Path) -> PeerCheckpoint:
    from penstock.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_path(DEFAULT_TARGET))
    by_domain = [load_prompts(domain) for domain in DOMAINS]
    prompts = tuple(
        tuple(tokenizer.encode(p.prompt))
        for one_of_each in zip(*by_domain, strict=False)
        for p in one_of_each
    )
    drafters = {name: model_path(name) for name in _GENERALISTS}
    target = model_path(DEFAULT_TARGET)
    return PeerCheckpoint("zoo", "zoo", target, drafters, prompts[:32], ngram=True)


def gguf_models(target: Path, drafter: Path | None) -> list[PeerCheckpoint]:
    """A GGUF file with real prompts of all kinds, and the same with those about code."""
    from penstock.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(target)
    drafters = {} if drafter is None else {GGUF_DRAFTER: drafter}

    def model(name: str, prompts: list[RealPrompt]) -> PeerCheckpoint:
        ids = tuple(token_ids(prompt, tokenizer) for prompt in prompts[:32])
        return PeerCheckpoint(name, target.stem, target, drafters, ids, ngram=True)

    held = mixed(real_prompts(), "held")
    code = [prompt for prompt in held if prompt.kind in _CODE_KINDS]
    return [model(f"{target.stem} {MIXED}", held), model(f"{target.stem} {CODE}", code)]


def _random_prompts(num: int = 32, seed: int = 1) -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, _CONFIG["vocab_size"], (num, PROMPT_TOKENS), generator=generator)
    return tuple(tuple(row) for row in ids.tolist())


_MAKERS = {"random": _random, "right": _right, "zoo": _zoo}
MODELS = tuple(_MAKERS)
