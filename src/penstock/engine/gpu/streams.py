"""Threads that work on a GPU at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_POOL_SIZE = 32
"""Streams that PyTorch has for a device, and hands out in turn."""

_lock = threading.Lock()
_taken: set[int] = set()


@contextlib.contextmanager
def spare_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A stream that nobody else is given meanwhile. PyTorch hands out the same few again and again,
    and what a thread launched on one that another captures would become a part of the graph."""
    with _lock:
        for _ in range(_POOL_SIZE):
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if stream.cuda_stream not in _taken:
                break
        else:
            raise RuntimeError(f"all {_POOL_SIZE} streams of {device} are in use")
        _taken.add(stream.cuda_stream)
    try:
        yield stream
    finally:
        with _lock:
            _taken.discard(stream.cuda_stream)


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A stream for this thread alone, waited for at the end; nothing where there is no GPU."""
    if device.type != "cuda":
        yield
        return
    with spare_stream(device) as stream:
        # Memory that this thread was given may still be written to on the stream it came from.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            try:
                yield
            finally:  # also of what failed: whoever has the next turn writes to the same memory
                stream.synchronize()
