"""What a prompt is about, in few numbers and without a model."""

from __future__ import annotations

import math
import zlib

import numpy as np
import numpy.typing as npt

from penstock.core.types import Request

FloatArray = npt.NDArray[np.float64]

NUM_WORDS = 63
"""Dimensions that the words of a prompt are hashed to. With more, products with a drafter's 64 x 64
matrix would be shared out to threads, which then spin on cores that the models need."""
_NUM_BUCKETS = 8192
_HASH = np.uint64(0x9E3779B97F4A7C15)


class Words:
    """What a prompt is about, as a short vector: its words, projected by signed hashing, which
    keeps angles. Words that all prompts have tell nothing, those that no other has teach nothing:
    a word weighs as much as its presence has varied so far (a variance)."""

    def __init__(self) -> None:
        self._num_prompts = 0
        self._num_with = np.zeros(_NUM_BUCKETS)

    def features(self, request: Request) -> FloatArray:
        """[F] a constant, and the words of prompt and tenant in a vector of length 1 (0 if there
        are none)."""
        features = np.zeros(NUM_WORDS + 1)
        features[0] = 1.0
        ids = np.asarray(request.prompt_token_ids or (), dtype=np.uint64)
        tenant = np.uint64(zlib.crc32(request.tenant.encode()) + (1 << 40))
        words = np.unique(np.append(ids, tenant)) * _HASH
        buckets = (words >> np.uint64(40)) % np.uint64(_NUM_BUCKETS)
        share = (self._num_with[buckets] + 0.5) / (self._num_prompts + 1)
        weights = share * (1 - share)
        self._num_with[np.unique(buckets)] += 1
        self._num_prompts += 1
        places = (words >> np.uint64(20)) % np.uint64(NUM_WORDS)
        signs = 1.0 - 2.0 * ((words >> np.uint64(33)) & np.uint64(1))
        vector = np.bincount(places.astype(np.int64), weights * signs, minlength=NUM_WORDS)
        length = math.sqrt(float(vector @ vector))
        if length > 0:
            features[1:] = vector / length
        return features
