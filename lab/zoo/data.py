"""Packed rows of tokens: whole examples of one domain side by side, each row beginning afresh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from lab.zoo.corpora import Split, examples
from lab.zoo.template import ASSISTANT_ID, EOS_ID

Ids = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.bool_]

ROW = 512
"""Tokens in a row."""


def pack(tokenizer: Tokenizer, domain: str, split: Split, rows: int, seed: int) -> Ids:
    """[rows, ROW] tokens of `domain`, packed by :func:`fill`."""
    return fill(_encoded(tokenizer, domain, split, seed), rows)


def _encoded(tokenizer: Tokenizer, domain: str, split: Split, seed: int) -> Iterator[list[int]]:
    source = examples(domain, split, seed)
    while True:
        for encoding in tokenizer.encode_batch([e.text for e in islice(source, 256)]):
            yield encoding.ids


def fill(examples_ids: Iterable[list[int]], rows: int) -> Ids:
    """At most `rows` rows of ROW tokens; an example that does not fit is begun again in the next.

    An example longer than a row is cut. The last example of a row is cut too, so that there is
    no padding; a last row that is not full is left out.
    """
    result = np.empty((rows, ROW), dtype=np.uint16)
    row, filled = 0, 0
    for ids in examples_ids:
        part = ids[: ROW - filled]
        result[row, filled : filled + len(part)] = part
        filled += len(part)
        if filled == ROW:
            row, filled = row + 1, 0
            if row == rows:
                break
            if len(part) < len(ids):
                part = ids[: ROW - 1]
                result[row, : len(part)] = part
                filled = len(part)
    return result[:row]


def cached_pack(
    folder: Path, tokenizer: Tokenizer, domain: str, split: Split, rows: int, seed: int
) -> Ids:
    """:func:`pack`, kept as a file in `folder`."""
    path = folder / f"{domain}-{split}-{rows}-{seed}.npy"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        np.save(path, pack(tokenizer, domain, split, rows, seed))
    loaded: Ids = np.load(path)
    return loaded


def answer_mask(ids: Ids) -> Mask:
    """[rows, ROW] whether the NEXT token is the assistant's own (its end token included)."""
    opened = np.cumsum(ids == ASSISTANT_ID, axis=1)
    closed = np.cumsum(ids == EOS_ID, axis=1)
    mask: Mask = opened > closed
    mask[:, -1] = False
    return mask


@dataclass(frozen=True, slots=True)
class Mixture:
    """Domains with their weights, and where in each domain's pool reading starts."""

    weights: dict[str, float]
    offset: int = 0

    def plan(self, steps: int, batch: int, seed: int) -> list[list[tuple[str, int]]]:
        """For each step the `batch` (domain, row) pairs; rows of a domain are read in order."""
        rng = np.random.default_rng(seed)
        names = list(self.weights)
        chance = np.array([self.weights[n] for n in names])
        order = rng.choice(len(names), size=(steps, batch), p=chance / chance.sum())
        cursor = dict.fromkeys(names, self.offset)
        result = []
        for step in order:
            pairs = []
            for index in step:
                name = names[int(index)]
                pairs.append((name, cursor[name]))
                cursor[name] += 1
            result.append(pairs)
        return result


def batch_of(pools: dict[str, Ids], pairs: list[tuple[str, int]]) -> Ids:
    """[batch, ROW] the rows named by `pairs`; a pool that ends begins again."""
    return np.stack([pools[name][row % len(pools[name])] for name, row in pairs])
