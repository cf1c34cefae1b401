"""Threads that work on a GPU at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A stream for this thread alone, waited for at the end; nothing where there is no GPU."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # Memory that this thread was given may still be written to on the stream it came from.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()
