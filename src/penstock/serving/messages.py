"""What the HTTP process and the engine process tell each other, and how it is framed.

Up go `Events`, `StatsRequest` and `Stop`; down come `Ready` or `Failed`, then `Outputs` (one
message a turn) and `EngineStats`. A frame is a 4-byte length and a pickle; the socket is private to
the two processes, so that pickles are safe here.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.types import Event, Output

_HEADER = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Events:
    """Arrivals, cancellations and the like, in order."""

    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """Asks for one `EngineStats`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process; what runs is abandoned."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded. `max_request_tokens`: the most that prompt and output of one request
    may be together, by context and by KV memory."""

    tokenizer_path: Path
    max_request_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    drafters: tuple[str, ...]
    description: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be loaded, and why, in one line."""

    message: str


@dataclass(frozen=True, slots=True)
class Outputs:
    """All outputs of one turn. Pickled as plain tuples: no class is looked up for each."""

    outputs: tuple[Output, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _outputs, ([tuple(output) for output in self.outputs],)


def _outputs(rows: list[tuple[Any, ...]]) -> Outputs:
    return Outputs(tuple(Output(*row) for row in rows))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counters run from the start of the process.

    kv_usage: share of each model's KV blocks in use, `target` among them
    busy_s, uptime_s: seconds inside the loop's turns, and since the engine was ready
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    kv_usage: dict[str, float]
    num_steps: int
    busy_s: float
    uptime_s: float


def frame(message: object) -> bytes:
    """A message as bytes for the wire."""
    payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(payload)) + payload


class Deframer:
    """Cuts a stream of bytes into messages again."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes."""
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer, start)
            end = start + _HEADER.size + size
            if end > len(self._buffer):
                break
            messages.append(pickle.loads(self._buffer[start + _HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return messages
