"""Writing of the shipped prompts, from the part of the corpora that no model is trained on."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from penstock.zoo.corpora import GENERATORS, examples

PROMPT_TOKENS = (12, 260)
REFERENCE_TOKENS = (60, 260)
"""Bounds on the tokens of a shipped prompt and of its reference answer, both included."""


def write_prompts(folder: Path, tokenizer: Tokenizer, per_domain: int = 64, seed: int = 1) -> None:
    """Write `per_domain` prompts of every domain to ``folder/<domain>.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain in GENERATORS:
        lines: list[str] = []
        seen: set[str] = set()
        for example in islice(examples(domain, "prompts", seed), 200 * per_domain):
            if example.prompt in seen or not _fits(tokenizer, example.prompt, example.answer):
                continue
            seen.add(example.prompt)
            record = {"prompt": example.prompt, "domain": domain, "reference": example.answer}
            lines.append(json.dumps(record))
            if len(lines) == per_domain:
                break
        (folder / f"{domain}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _fits(tokenizer: Tokenizer, prompt: str, answer: str) -> bool:
    low, high = PROMPT_TOKENS
    if not low <= len(tokenizer.encode(prompt).ids) <= high:
        return False
    low, high = REFERENCE_TOKENS
    return low <= len(tokenizer.encode(answer).ids) <= high
