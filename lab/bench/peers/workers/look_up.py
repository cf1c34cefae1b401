"""Drafts found in a request's own text, for engines that leave that to their callers."""

from __future__ import annotations

import numpy as np


def look_up(text: list[int], count: int) -> list[int]:
    """What followed the last 4 tokens where they stood last before, or the last 3, or 2."""
    ids = np.array(text)
    for size in (4, 3, 2):
        if len(ids) <= size:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(ids[:-1], size)
        places = np.flatnonzero((windows == ids[-size:]).all(axis=1))
        if len(places):
            first = int(places[-1]) + size
            return text[first : first + max(count, 0)]
    return []
