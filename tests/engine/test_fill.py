"""Fill-in-the-middle tokens of the known families, and of a real file."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.serving.fakes import TOKENIZER
from tokenizers import AddedToken

from penstock.engine.fill import FillTokens
from penstock.engine.tokenizer import Tokenizer, load_tokenizer

QWEN = Path.home() / ".cache/penstock/models/qwen2.5-coder-1.5b-q4_k_m.gguf"


def with_tokens(*spellings: str, special: bool = True) -> Tokenizer:
    tokenizer = load_tokenizer(TOKENIZER)
    added = [AddedToken(s, normalized=False, special=special) for s in spellings]
    tokenizer._fast.backend_tokenizer.add_tokens(added)
    return Tokenizer(tokenizer._fast)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("spellings", "prompt"),
    [
        (
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
            "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>",
        ),
        (
            ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
            "<fim_prefix>A<fim_suffix>B<fim_middle>",
        ),
        (("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"), "▁<PRE>A▁<SUF>B▁<MID>"),
        (
            ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>",
        ),
        (
            ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
            "<|code_prefix|>A<|code_suffix|>B<|code_middle|>",
        ),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]B[PREFIX]A"),
    ],
)
def test_prompts_of_the_families(spellings: Sequence[str], prompt: str, special: bool) -> None:
    tokenizer = with_tokens(*spellings, special=special)
    tokens = FillTokens.of(tokenizer)
    made = tokens.prompt(tokenizer.encode("A", False), tokenizer.encode("B", False))
    assert tokenizer.strings(made) == tokenizer.strings(tokenizer.encode(prompt, False))
    assert len(made) == 2 + len(spellings) - ("▁<EOT>" in spellings)
    assert set(tokenizer.strings(sorted(tokens.ends))) >= set(spellings)


@pytest.mark.parametrize("spellings", [(), ("<|fim_prefix|>", "<|fim_suffix|>"), ("▁<EOT>",)])
def test_a_vocabulary_without_them(spellings: Sequence[str]) -> None:
    assert FillTokens.of(with_tokens(*spellings)) is None


@pytest.mark.skipif(not QWEN.exists(), reason="the model is not here")
def test_a_real_file() -> None:
    tokenizer = load_tokenizer(QWEN)
    tokens = FillTokens.of(tokenizer)
    assert tokens is not None
    begin = tokenizer.encode("def f(x):\n    return ", False)
    text = tokenizer.decode(tokens.prompt(begin, tokenizer.encode("\n", False)), False)
    assert text == "<|fim_prefix|>def f(x):\n    return <|fim_suffix|>\n<|fim_middle|>"
    ends = {"<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}
    assert ends <= set(tokenizer.strings(sorted(tokens.ends)))
