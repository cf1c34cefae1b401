"""losses_llamacpp.py FILE.gguf, in llama.cpp's environment: reads {"window": ids, "first": n} line
by line, and answers each with the sum of the negative log-likelihoods of the tokens behind n + 1.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from run_llamacpp import CONTEXT_TOKENS, LlamaModel, silence

# Its flash attention on the CPU rounds more: half a per cent of a window's perplexity.
SETTINGS = {"ubatch": CONTEXT_TOKENS, "unified": False, "flash": False}


def loss(model: LlamaModel, window: list[int], first: int) -> float:
    """Each of the tokens behind `first` is the next one of a row of logits."""
    model.clear()
    rows = [(token, i, 0, i >= first) for i, token in enumerate(window[:-1])]
    logits = model.logits(rows).astype(np.float64)
    wanted = logits[np.arange(len(logits)), window[first + 1 :]]
    highest = logits.max(axis=1)
    total = np.log(np.exp(logits - highest[:, None]).sum(axis=1)) + highest
    return float((total - wanted).sum())


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _log = silence()
    model = LlamaModel(Path(sys.argv[1]), 1, SETTINGS)
    for line in sys.stdin:
        answers.write(f"{loss(model, **json.loads(line))!r}\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
