"""Messages between the HTTP process and the engine process, and their framing.

Up go `Events`, `StatsRequest` and `Stop`; down come `Ready` or `Failed`, then `Outputs` (one per
turn), `DraftOrders`, `AuditFinding` and `EngineStats`; `Heartbeat` all the time. The engine's end
is the standard library's `Connection`; the other is asyncio's, which frames its messages here. The
socket is private to the two processes: pickles are safe."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from penstock.core.learn.memory import FluidKV
from penstock.core.policies.declared import Gauge
from penstock.core.types import (
    STEP_TOKENS,
    DraftOrder,
    Event,
    Output,
    PhaseTimes,
    Pooling,
    SamplingParams,
)

HEADER = struct.Struct("!i")
"""Length of the pickle that follows, as in `multiprocessing.connection.Connection`."""


@dataclass(frozen=True, slots=True)
class RemoteDraft:
    """A draft server's checked answer to an order.

    An unknown request id only shows that the server lives. weights: per token the ids and integer
    weights of the distribution that it was sampled from; None for a draft that is compared with the
    target's own sample. audit: the local drafter that recomputes it behind `prefix_len` tokens, if
    any."""

    request_id: str
    epoch: int
    round: int
    drafter: str
    token_ids: tuple[int, ...] = ()
    weights: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] | None = None
    audit: str | None = None
    prefix_len: int = 0


@dataclass(frozen=True, slots=True)
class Events:
    """Arrivals, cancellations, drafts and other events, in order."""

    events: tuple[Event | RemoteDraft, ...]


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """Request for one `EngineStats`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Command to end the process; unfinished requests are abandoned."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded.

    max_request_tokens: limit of prompt and output of one request, by context and KV memory.
    draft_model: what a draft server drafts with, where the engine is at the other end of its link.
    scores_prompts: it can report log-probabilities of a prompt's tokens. pooling: of embeddings;
    None: it gives none. generates: False of an embedding model."""

    tokenizer_path: Path
    max_request_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    drafters: tuple[str, ...]
    description: dict[str, Any]
    draft_model: str | None = None
    scores_prompts: bool = True
    pooling: Pooling | None = None
    generates: bool = True


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine could not be loaded; the reason in one line."""

    message: str


@dataclass(frozen=True, slots=True)
class Outputs:
    """All outputs of one turn. Pickled as plain tuples: no class is looked up for each."""

    outputs: tuple[Output, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return _outputs, ([tuple(output) for output in self.outputs],)


def _outputs(rows: list[tuple[Any, ...]]) -> Outputs:
    return Outputs(tuple(Output(*row) for row in rows))


class RequestText(NamedTuple):
    """A request as a draft server sees it. token_ids: prompt and output so far."""

    tenant: str
    sampling: SamplingParams
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftOrders:
    """Orders for draft servers. new_requests: those that were never ordered before."""

    orders: tuple[DraftOrder, ...]
    new_requests: dict[str, RequestText]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life. step_s: seconds that the loop's present step has taken so far."""

    step_s: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counters run from the start of the process.

    kv_usage: share of each model's KV blocks in use, `target` among them
    busy_s: seconds inside the loop's turns
    num_target_steps, phases: target steps, and their seconds by phase
    drafter_seconds: of drafting and reading, by local drafter
    num_ahead, num_ahead_used: tokens that draft servers have sent ahead, and those that were part
    of a verified draft
    plan_s: seconds from the start of target steps' turns to the start of the steps
    kv_capacity_tokens, kv_block_size: of the target; kv_fluid: demand in the fluid model, if known
    tenant_weights: of the tenants that are configured, or have sent requests
    num_deferred: waiting requests whose grammar or tokenizer is prepared
    steps_by_tokens, num_step_tokens: as in `engine.steps.Totals`
    gauges: what the scheduler's policies declare for `/metrics`
    server_failures: failed calls of OpenAI-compatible servers, by drafter
    state_slots, state_bytes: requests whose recurrent states have room, and their memory"""

    num_running: int
    num_waiting: int
    num_preemptions: int
    kv_usage: dict[str, float]
    num_steps: int
    busy_s: float
    num_target_steps: int
    phases: PhaseTimes
    drafter_seconds: dict[str, float]
    num_ahead: int = 0
    num_ahead_used: int = 0
    plan_s: float = 0.0
    kv_capacity_tokens: int = 0
    kv_fluid: FluidKV | None = None
    tenant_weights: dict[str, float] = field(default_factory=dict)
    num_deferred: int = 0
    kv_block_size: int = 1
    steps_by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    num_step_tokens: int = 0
    gauges: dict[Gauge, Any] = field(default_factory=dict)
    server_failures: dict[str, int] = field(default_factory=dict)
    state_slots: int | None = None
    state_bytes: int = 0


def frame(message: object) -> bytes:
    """Encode a message for the wire."""
    payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(payload)) + payload
