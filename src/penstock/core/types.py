"""The data that flows round the loop: requests, events, plans, results, outputs.

A plan never holds a tensor; tensors stay with the executor under (request, epoch, round). What
every request needs in every step is a named tuple: it is made faster than a frozen dataclass."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from penstock.core.ahead import LinePiece
from penstock.fluid.step_profile import StepWork

TARGET: Final = "target"
"""Name of the lane, and of the KV pool, of the target model."""

AUTO_DRAFTER: Final = "auto"
NO_DRAFTER: Final = "none"


class Status(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    ERROR = "error"


MAX_LOGPROBS = 20
"""Most alternatives whose log-probabilities are told beside a token's own."""


MAX_STOP_STRINGS = 16
"""Most stop strings of one request."""

MAX_STOP_CHARS = 1024
"""Most characters of them together: the engine looks at so many for each token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's distribution is shaped, and which verification keeps it.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. `coupled` verification makes the
    output a function of (prompt, seed) alone. num_logprobs, num_prompt_logprobs: alternatives to
    report for each token; None reports nothing. presence_penalty and frequency_penalty are taken
    from the logits of tokens that the output has, once and for each time; repetition_penalty
    divides those of tokens that prompt or output have (a negative one is multiplied); logit_bias,
    pairs of a token id (ascending) and a value, is added; before min_tokens there is no stop token;
    grammar: the only text that may come."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    verification: Literal["coupled", "ratio"] = "coupled"
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str | None = None

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def reads_text(self) -> bool:
        """Whether logits are changed by what the text is so far, or by a token's id."""
        return self.reads_tokens or self.grammar is not None

    @property
    def reads_tokens(self) -> bool:
        """Whether something else than a grammar does."""
        return bool(self.min_tokens or self.logit_bias) or self.has_penalties

    @property
    def is_ratio(self) -> bool:
        """Whether drafts are verified by rejection sampling; greedy ones never are."""
        return self.verification == "ratio" and self.temperature > 0


class LatencyTarget(NamedTuple):
    """How fast a client wants a request, in seconds; None asks for nothing. tpot: the mean time of
    a token after the first. deadline: from arrival to the last token."""

    tpot: float | None = None
    deadline: float | None = None

    def is_met(self, tpot: float, latency: float) -> bool:
        """By what a request took, in seconds."""
        asked = ((self.tpot, tpot), (self.deadline, latency))
        return all(most is None or taken <= most for most, taken in asked)


NO_TARGET: Final = LatencyTarget()


def latency_target(tpot_ms: float | None, deadline_ms: float | None) -> LatencyTarget:
    """From milliseconds, as clients say it."""
    given = (tpot_ms, deadline_ms)
    return LatencyTarget(*[None if ms is None else ms / 1000 for ms in given])


class StopStrings(NamedTuple):
    """Strings that end an output, which the executor finds in its text. previous: the token of the
    prompt that the text goes on from (None: it is a text of its own). shown: special tokens that
    are part of it. num_made: tokens at the end of the prompt that are output already."""

    strings: tuple[str, ...]
    previous: int | None = None
    shown: frozenset[int] = frozenset()
    num_made: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to make. `block_hashes` are those of the prompt's full blocks (may be empty:
    then nothing is shared); `prompt_token_ids` is None where only lengths are known.
    `expected_output_tokens` is what the client says about its output, if anything; `latency` what
    it asks for. `stop`: None without stop strings."""

    id: str
    prompt_len: int
    max_tokens: int
    arrival_time: float = 0.0
    tenant: str = "default"
    prompt_token_ids: tuple[int, ...] | None = None
    block_hashes: tuple[bytes, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = SamplingParams()
    drafter: str = AUTO_DRAFTER
    max_draft_tokens: int | None = None
    expected_output_tokens: int | None = None
    latency: LatencyTarget = NO_TARGET
    stop: StopStrings | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who fairness is between. shares_prompts: draft servers of others may see its prompts.
    max_running_requests: None is no limit. drafters: names of those that may draft for it; None:
    all."""

    name: str
    weight: float = 1.0
    shares_prompts: bool = False
    max_running_requests: int | None = None
    drafters: frozenset[str] | None = None


# --- events: everything that comes from outside -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrive:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class DraftReady:
    """A drafter's lane has a draft of `num_draft_tokens` tokens, held by the executor."""

    request_id: str
    epoch: int
    round: int
    drafter: str
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class DrafterUp:
    """A drafter can be used. A name that is not known yet is a draft server's: `tenant` is the only
    one whose prompts it may see (None: every tenant's), and unless it `takes_assignments` it drafts
    for requests that name it alone."""

    drafter: str
    max_draft_tokens: int = 16
    tenant: str | None = None
    takes_assignments: bool = True


@dataclass(frozen=True, slots=True)
class DrafterDown:
    drafter: str


@dataclass(frozen=True, slots=True)
class DraftAhead:
    """A draft server has sent likely continuations of a request, unasked."""

    request_id: str
    drafter: str
    pieces: tuple[LinePiece, ...]


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Tenants as they are from now on. One that is not named keeps what it has."""

    tenants: tuple[Tenant, ...]


Event = Arrive | Cancel | DraftReady | DraftAhead | DrafterUp | DrafterDown | Reconfigure


# --- plans --------------------------------------------------------------------------------------


class DraftSource(StrEnum):
    NONE = "none"
    INLINE = "inline"
    HELD = "held"
    AHEAD = "ahead"


class RoundCosts(NamedTuple):
    """What a drafter that chooses between sources has to weigh, in seconds. rounds: a round without
    its drafting, with 0, 1, … draft tokens of every request; step: of its model for one more token
    of all drafts; read: of its model for a known token that it has not read; num_requests: in the
    round, those that others draft for included."""

    rounds: tuple[float, ...]
    step: float
    read: float
    num_requests: int = 1


class DraftOrder(NamedTuple):
    """Let `drafter` read known tokens `start..start + num_catch_up_tokens - 1` into its KV, then
    draft up to `max_draft_tokens` more (0: only catch up), but none once the predicted survival of
    the draft falls under `min_survival`. An answer after `deadline` is too late. new_blocks: of the
    drafter's KV. evaluate: count the tokens that it would itself have guessed (`Replayed`). costs:
    see there."""

    request_id: str
    epoch: int
    round: int
    drafter: str
    start: int
    num_catch_up_tokens: int
    max_draft_tokens: int
    new_blocks: tuple[int, ...] = ()
    min_survival: float = 0.0
    deadline: float | None = None
    evaluate: bool = False
    costs: RoundCosts | None = None


class VerifyItem(NamedTuple):
    """Compute `num_scheduled_tokens` known tokens from position `start`, and up to
    `num_draft_tokens` draft positions behind them. Only an item that reaches the last known token
    (`samples`) yields tokens; any other is a chunk of prefill. `ahead_token_ids`: the draft, where
    it was sent ahead, or is forced (then `drafter` is None); any other is with the executor."""

    request_id: str
    epoch: int
    round: int
    start: int
    num_scheduled_tokens: int
    samples: bool
    source: DraftSource = DraftSource.NONE
    drafter: str | None = None
    num_draft_tokens: int = 0
    draft: DraftOrder | None = None
    new_blocks: tuple[int, ...] = ()
    ahead_token_ids: tuple[int, ...] = ()


class DecodeRun(NamedTuple):
    """One more token for `num_requests` requests of which only lengths are known, the members of
    the named groups. `num_kv_tokens` is their context in the first of up to `max_repeats` steps,
    each of which makes it `num_requests` longer; no step may begin at `until` or later."""

    groups: tuple[Hashable, ...]
    num_requests: int
    num_kv_tokens: int
    max_repeats: int = 1
    until: float | None = None


class StepPlan(NamedTuple):
    """What one lane does next. Before the step the executor drops the block tables `released`
    (request, pool), then the requests `forgotten`, then learns of `new_requests`: in this order,
    because an id may come again. `stalled` says why an empty plan will stay empty, if it will."""

    id: int
    lane: str
    created_at: float
    items: tuple[VerifyItem, ...] = ()
    decodes: DecodeRun | None = None
    drafts: tuple[DraftOrder, ...] = ()
    new_requests: tuple[Request, ...] = ()
    released: tuple[tuple[str, str], ...] = ()
    forgotten: tuple[str, ...] = ()
    wake_at: float | None = None
    stalled: str | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing to execute (there may still be updates for the executor)."""
        return not self.items and not self.drafts and self.decodes is None

    @property
    def has_updates(self) -> bool:
        """Something for the executor to note, whether or not there is anything to execute."""
        return bool(self.new_requests or self.released or self.forgotten)

    @property
    def num_rows(self) -> int:
        """Most positions that the target computes in this step."""
        rows = 0 if self.decodes is None else self.decodes.num_requests
        for item in self.items:
            rows += item.num_scheduled_tokens + item.num_draft_tokens
        return rows


# --- results ------------------------------------------------------------------------------------


class PhaseTimes(NamedTuple):
    """Seconds of a step by phase."""

    draft: float = 0.0
    receive: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    other: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target, and the best pairs of (token id,
    value)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Verdict(NamedTuple):
    """What a verify item came to.

    token_ids: the accepted drafts and the recovered or bonus token; empty for a chunk of prefill.
    num_decided: draft positions up to and including the first rejection; evidence: the accepted
    ones among them, or in `ratio` mode the less noisy Σ min(target, draft). evidence_all: Σ min(1,
    target / draft) over all proposed positions (GoodSpeed, eq. 3). prompt_logprobs: once.
    forced_token_ids: what must come next. finish_reason: of an output that has ended; nothing
    behind its end is in the verdict, of which the target computed `num_behind_end` positions.
    num_stop_chars: from where a stop string begins to the end of the text."""

    request_id: str
    epoch: int
    round: int
    token_ids: tuple[int, ...] = ()
    drafter: str | None = None
    num_proposed: int = 0
    num_accepted: int = 0
    num_decided: int = 0
    evidence: float = 0.0
    evidence_all: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    forced_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_stop_chars: int = 0
    num_behind_end: int = 0

    @property
    def num_drafted(self) -> int:
        """Draft positions that took time."""
        return self.num_proposed + self.num_behind_end


@dataclass(frozen=True, slots=True)
class Failure:
    """An item that the executor could not compute, and why."""

    request_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class DraftTime:
    """Seconds that one drafter took in a step, for `batch` requests and `steps` tokens each."""

    drafter: str
    batch: int
    steps: int
    num_catch_up_tokens: int
    seconds: float


class Replayed(NamedTuple):
    """A drafter has read verified text instead of drafting: of `num_tokens` output tokens it would
    have guessed `num_matched`, each behind the true text (0 of 0 where `evaluate` was not set)."""

    request_id: str
    epoch: int
    drafter: str
    num_tokens: int = 0
    num_matched: int = 0


class StepResult(NamedTuple):
    """What a plan came to. `repeats`: how often its decode run was done. `work`: what the target
    computed in the first step, which took it `work_seconds`. `failed_drafters`: of those at work
    inside a target step; their drafts are missing, and nothing is known of their KV. `unread`:
    requests whose draft was made without reading their text: the drafter's KV is as it was."""

    plan_id: int
    lane: str
    started_at: float
    finished_at: float
    verdicts: tuple[Verdict, ...] = ()
    drafts: tuple[DraftReady, ...] = ()
    replays: tuple[Replayed, ...] = ()
    failures: tuple[Failure, ...] = ()
    phases: PhaseTimes = PhaseTimes()
    draft_times: tuple[DraftTime, ...] = ()
    num_rows: int = 0
    repeats: int = 1
    work: StepWork | None = None
    work_seconds: float = 0.0
    failed_drafters: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


class Output(NamedTuple):
    """New tokens of one request, and its end when `finish_reason` is set. Where only lengths are
    known `num_tokens` says how many are new. queued_s: of the first output, from arrival to
    admission. num_preemptions: of a request that ends. num_stop_chars: from where a stop string
    begins."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    drafter: str | None = None
    num_proposed: int = 0
    num_accepted: int = 0
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    queued_s: float = 0.0
    num_preemptions: int = 0
    num_stop_chars: int = 0


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""Sizes by which target steps are counted."""
