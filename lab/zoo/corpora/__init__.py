"""The zoo's eight domains: text made from a seed, split once and for all by the prompt's hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Literal

from lab.zoo.corpora import arithmetic, chat, entropy, instruction, qa, roleplay, sql, summary
from lab.zoo.template import Example

Split = Literal["train", "held_back", "prompts"]

GENERATORS: dict[str, Callable[[Random], Example]] = {
    module.DOMAIN: module.generate
    for module in (instruction, roleplay, summary, qa, chat, arithmetic, sql, entropy)
}
"""Maker of one example, by domain."""


def split_of(prompt: str) -> Split:
    """The part a prompt belongs to, whatever its answer: 92% train, 4% each of the others."""
    bucket = hashlib.sha256(prompt.encode()).digest()[0] % 25
    return "held_back" if bucket == 0 else "prompts" if bucket == 1 else "train"


def examples(domain: str, split: Split, seed: int = 0) -> Iterator[Example]:
    """Endless examples of one part of `domain`; the same seed gives the same ones.

    Raises:
        KeyError: there is no such domain.
    """
    make = GENERATORS[domain]
    rng = Random(f"{domain} {seed}")
    while True:
        example = make(rng)
        if split_of(example.prompt) == split:
            yield example
