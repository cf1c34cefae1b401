"""Bytes that are nearly right."""

import os
import random
import time
from collections.abc import Iterator, Sequence

SECONDS = float(os.environ.get("FUZZ_SECONDS", "30"))
"""Of each fuzzer. Seeds count up: a longer run begins with what a shorter one tried."""

_ODD = [
    *(int(n).to_bytes(size, "little") for size in (1, 2, 4, 8) for n in (0, 1)),
    *((1 << bits).to_bytes(8, "little") for bits in (7, 8, 15, 31, 32, 62, 63)),
    *(b"\xff" * size for size in (1, 4, 8)),
    b"\x00",
    b"\r\n",
    b'"',
    b"{",
    b"]",
    b"NaN",
    b"-1",
    b"1e999",
    b"\xf0\x9f\x98",
    b"\\ud800",
]


def mutated(data: bytes, rng: random.Random, within: int | None = None) -> bytes:
    """One to eight changes in the first `within` bytes (None: all): bytes turned, odd values put in
    or over, pieces doubled, left out or moved, the end cut off."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        size = min(len(changed), within or len(changed))
        at, length = rng.randrange(size + 1), rng.randint(1, 32)
        piece = bytes(changed[at : at + length])
        match rng.randrange(6):
            case 0 if at < size:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                odd = rng.choice(_ODD)
                changed[at : at + len(odd)] = odd
            case 2:
                changed[at:at] = rng.choice(_ODD)
            case 3:
                changed[at:at] = piece * rng.randint(1, 4)
            case 4:
                del changed[at : at + length]
                to = rng.randrange(size + 1)
                changed[to:to] = piece * rng.randint(0, 1)
            case 5 if rng.random() < 0.2:
                del changed[at:]
    return bytes(changed)


def attempts(examples: Sequence[bytes], within: int | None = None) -> Iterator[bytes]:
    """For `SECONDS`, and a hundred at least: the examples as they are, then changed."""
    yield from examples
    end, seed = time.monotonic() + SECONDS, 0
    while seed < 100 or time.monotonic() < end:
        rng = random.Random(seed)
        yield mutated(rng.choice(examples), rng, within)
        seed += 1
