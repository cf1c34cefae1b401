"""A tiny target with drafters that are right always, often and hardly ever, on disk."""

from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 256


def byte_tokenizer() -> Tokenizer:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_tokenizer(path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(path)


def small_llama(layers: int, seed: int, **changes: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_hidden_layers=layers,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
        **sizes | changes,
    )
    return LlamaForCausalLM(config)


def add_noise(model: LlamaForCausalLM) -> LlamaForCausalLM:
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * parameter.std() * torch.randn_like(parameter))
    return model


def write_family(root: Path) -> dict[str, Path]:
    """target, and drafters `same` (its copy), `near` (its copy with noise) and `far` (another)."""
    target, near = small_llama(2, seed=1), add_noise(small_llama(2, seed=1))
    family = {"target": target, "same": target, "near": near, "far": small_llama(1, seed=3)}
    paths = {}
    for name, model in family.items():
        paths[name] = root / name
        model.save_pretrained(paths[name])
        write_tokenizer(paths[name])
    return paths


def make_unreliable(
    monkeypatch: pytest.MonkeyPatch,
    drafter: object,
    methods: Sequence[str],
    failing: Container[int],
) -> Iterator[int]:
    """Let some of a drafter's calls fail: the odd ones before they do their work, the others after
    it. Returns the count that all its methods share."""
    calls = iter(range(10**6))

    def unreliable(work: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            number = next(calls)
            if number in failing and number % 2:
                raise RuntimeError("out of luck")
            done = work(*args)
            if number in failing:
                raise RuntimeError("out of luck, afterwards")
            return done

        return call

    for name in methods:
        monkeypatch.setattr(drafter, name, unreliable(getattr(drafter, name)))
    return calls
