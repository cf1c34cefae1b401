"""The family's one tokenizer: byte-level BPE of exactly 4,096 tokens, digits one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from lab.zoo.corpora import GENERATORS, examples, stdlib
from lab.zoo.template import BOS, CHAT_TEMPLATE, EOS, PAD, SPECIAL_TOKENS

VOCAB_SIZE = 4096
MAX_POSITIONS = 2048


def _texts(per_domain: int, seed: int) -> Iterator[str]:
    for domain in GENERATORS:
        for example in islice(examples(domain, "train", seed), per_domain):
            yield from (message.content for message in example.messages)
    for _, _, _, source in stdlib.functions():
        yield source


def train_tokenizer(per_domain: int = 1500, seed: int = 7) -> Tokenizer:
    """Train the tokenizer on `per_domain` examples of each domain and on library source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(per_domain, seed), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"{tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer` in Hugging Face layout, with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    marks = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    (folder / "special_tokens_map.json").write_text(json.dumps(marks, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in `folder`; special tokens in a text are recognised."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
