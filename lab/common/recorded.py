"""Recorded lengths of conversations, in place of the WAIT paper's LMSYS-Chat-1M."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.sim.workloads import Workload, load_workload

RECORDED = "etalon_sharegpt_8k_stats.csv.gz"
LONGEST, PROMPT = 500, 62
"""Tokens, as in appendix B.2: outputs of 1 to 500, prompts of one length."""


def recorded_lengths(data: Path | None) -> Workload | None:
    """Outputs of ShareGPT's conversations that are no longer than `LONGEST`; None without them."""
    if data is None or not (data / RECORDED).is_file():
        return None
    outputs = load_workload(data / RECORDED).output_len
    outputs = outputs[outputs <= LONGEST]
    return Workload("recorded", np.full(len(outputs), PROMPT), outputs)
