"""What a prompt is about, without a model."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from penstock.core.types import Request


def words_of(request: Request) -> npt.NDArray[np.int64]:
    """The words of prompt and tenant, as whole numbers; a word may come more than once."""
    tenant = zlib.crc32(request.tenant.encode()) + (1 << 40)
    return np.append(np.asarray(request.prompt_token_ids or (), dtype=np.int64), tenant)
