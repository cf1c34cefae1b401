"""Arriving requests: types with their lengths and rates (WAIT, section 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

LengthArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Speculation:
    """Progress of a decode step.

    tokens_per_step: mean accepted tokens + 1. num_draft_tokens: rows beside the decoding one. The
    default is no speculation."""

    tokens_per_step: float = 1.0
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.tokens_per_step <= self.num_draft_tokens + 1:
            raise ValueError(
                f"a step with {self.num_draft_tokens} draft tokens yields between 1 and "
                f"{self.num_draft_tokens + 1} tokens, not {self.tokens_per_step}"
            )


NO_SPECULATION = Speculation()


def decode_len(output_len: int) -> int:
    """Return the tokens left to decode steps: the prefill step samples the first one.

    The paper's l'_j is the number of decode iterations after the prefill. It is
    `TrafficType.decode_len` as it stands, and its request has l'_j + 1 output tokens."""
    if output_len < 1:
        raise ValueError(f"an output has at least 1 token, not {output_len}")
    return output_len - 1


@dataclass(frozen=True)
class TrafficType:
    """Requests of one kind, with Poisson arrivals at `rate` (1/s).

    prompt_len, decode_len: l_j and l'_j of the paper, in tokens (see the function `decode_len`)."""

    rate: float
    prompt_len: int
    decode_len: int

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf:
            raise ValueError(f"a type arrives at a positive rate, not {self.rate}")
        if self.prompt_len < 1 or self.decode_len < 0:
            raise ValueError(
                f"a type has a prompt of at least 1 token and no negative decode length, "
                f"not {self.prompt_len} and {self.decode_len}"
            )

    @property
    def output_len(self) -> int:
        return self.decode_len + 1


Traffic = tuple[TrafficType, ...]


def scaled(traffic: Traffic, factor: float) -> Traffic:
    """Return the same mix at `factor` times the rate."""
    return tuple(replace(t, rate=t.rate * factor) for t in traffic)


def offered_throughput(traffic: Traffic) -> float:
    """Return Throughput* of eq. 6, the offered output tokens/s.

    A machine may be unable to serve them; see `capacity_bound`."""
    return sum(t.rate * t.output_len for t in traffic)


def traffic_from_lengths(
    prompt_len: Sequence[int] | LengthArray,
    output_len: Sequence[int] | LengthArray,
    rate: float,
    max_types: int = 64,
) -> Traffic:
    """Group recorded requests into at most `max_types` types of about equal size.

    prompt_len, output_len: (N,) tokens; `rate`: requests/s in total. A type takes the longest
    decode length of its requests, so that its stages hold all of them, and their mean prompt,
    rounded up. Types are ordered by decode length, each with its own."""
    prompts, outputs = np.asarray(prompt_len), np.asarray(output_len)
    if prompts.shape != outputs.shape or prompts.ndim != 1 or not len(prompts):
        raise ValueError("prompt and output lengths come in pairs, at least one of them")
    if max_types < 1 or outputs.min() < 1:
        raise ValueError("lengths are binned into at least 1 type; outputs have at least 1 token")
    order = np.argsort(outputs, kind="stable")
    prompts, decodes = prompts[order], outputs[order] - 1
    cuts = [round(i * len(order) / max_types) for i in range(1, max_types)]
    tops = np.unique(np.append(decodes[[max(c, 1) - 1 for c in cuts]], decodes[-1]))
    which = np.searchsorted(tops, decodes)
    return tuple(
        TrafficType(
            rate=rate * float((which == i).mean()),
            prompt_len=math.ceil(prompts[which == i].mean()),
            decode_len=int(top),
        )
        for i, top in enumerate(tops)
    )
