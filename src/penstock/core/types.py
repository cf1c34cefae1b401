"""Data that the loop exchanges: requests, events, plans, results, outputs.

A plan never holds a tensor; tensors stay with the executor under (request, epoch, round).
Per-request data of every step is a named tuple, which is made faster than a frozen dataclass."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Self

from penstock.core.ahead import LinePiece
from penstock.fluid.step_profile import StepWork

TARGET: Final = "target"
"""Name of the lane, and of the KV pool, of the target model."""

AUTO_DRAFTER: Final = "auto"
NO_DRAFTER: Final = "none"
PREDICTION: Final = "prediction"
"""Name, as of a drafter, of drafts from a request's prediction."""
LOOK_UP: Final = "look-up"
"""The same of drafts that were looked up in texts."""


class Status(StrEnum):
    """Scheduling state of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Reason why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    ERROR = "error"


MAX_LOGPROBS = 20
"""Limit of alternatives reported per token."""
MIN_TEMPERATURE = 1e-5
"""Lowest temperature that is not greedy."""
MOST_EVALUATED = 256
"""Most tokens of one replay that are evaluated, the latest ones: each needs a row of logits."""
MAX_STOP_STRINGS = 16
"""Limit of stop strings per request."""
MAX_STOP_CHARS = 1024
"""Limit of their characters together: the engine compares as many for each token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request, and the verification that keeps the target's distribution.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. `coupled` verification makes the
    output a function of (prompt, seed) alone. num_logprobs, num_prompt_logprobs: alternatives to
    report per token; None reports nothing. presence_penalty and frequency_penalty are subtracted
    from the logits of output tokens, once and per occurrence; repetition_penalty divides the logits
    of prompt and output tokens (multiplies negative ones); logit_bias: pairs of a token id
    (ascending) and a value to add; min_tokens: no stop token before; grammar: the only text
    allowed."""

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
        """True if logits change with the text so far or by token id."""
        return self.reads_tokens or self.grammar is not None

    @property
    def reads_tokens(self) -> bool:
        """True if they change by anything but a grammar."""
        return bool(self.min_tokens or self.logit_bias) or self.has_penalties

    @property
    def is_ratio(self) -> bool:
        """True if drafts are verified by rejection sampling; greedy ones never are."""
        return self.verification == "ratio" and self.temperature > 0


class LatencyTarget(NamedTuple):
    """Latency that a client requests, in seconds; None is no target.

    tpot: mean time per token after the first. deadline: from arrival to the last token."""

    tpot: float | None = None
    deadline: float | None = None

    def is_met(self, tpot: float, latency: float) -> bool:
        """Compare with the measured times of a request, in seconds."""
        asked = ((self.tpot, tpot), (self.deadline, latency))
        return all(most is None or taken <= most for most, taken in asked)

    @classmethod
    def from_ms(cls, tpot: float | None, deadline: float | None) -> Self:
        return cls(*[None if ms is None else ms / 1000 for ms in (tpot, deadline)])


NO_TARGET: Final = LatencyTarget()


Pooling = Literal["last", "mean", "cls"]
"""Prompt tokens whose hidden states are an embedding: the last one, their mean, the first one."""


class StopStrings(NamedTuple):
    """Stop strings of a request, which the executor finds in its text.

    previous: the prompt's token that the text continues (None: a text of its own). shown: special
    tokens that are part of the text. num_made: tokens at the end of the prompt that are already
    output."""

    strings: tuple[str, ...]
    previous: int | None = None
    shown: frozenset[int] = frozenset()
    num_made: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to generate, or an embedding to compute.

    block_hashes: of the prompt's full blocks; empty: nothing is shared. prompt_token_ids: None
    where only lengths are known. expected_output_tokens: the client's estimate. stop: None without
    stop strings. prediction: tokens that the client expects as output. pooling: of an embedding,
    which has no output."""

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
    prediction: tuple[int, ...] = ()
    pooling: Pooling | None = None

    @property
    def needs_whole_prompt(self) -> bool:
        """True if no part of the prompt may come from the prefix cache."""
        return self.sampling.num_prompt_logprobs is not None or self.pooling in ("mean", "cls")


FairnessRule = Literal["strict"] | bool
"""True: tenants share by weight; strict: at any cost to throughput (`core.fairness`)."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A unit of fairness.

    shares_prompts: draft servers of other tenants may see its prompts. max_running_requests: None
    is no limit. drafters: names of those allowed; None: all. saves_outputs: to the state folder."""

    name: str
    weight: float = 1.0
    shares_prompts: bool = False
    max_running_requests: int | None = None
    drafters: frozenset[str] | None = None
    saves_outputs: bool = False


# --- events: everything that comes from outside -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request has arrived."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request was cancelled."""

    request_id: str


@dataclass(frozen=True, slots=True)
class DraftReady:
    """A lane has a draft of `num_draft_tokens` tokens, which the executor holds.

    is_reading: it has none yet, as it reads the text. waited_s: seconds that are no part of the
    link's, as the drafter ended other work of its own first."""

    request_id: str
    epoch: int
    round: int
    drafter: str
    num_draft_tokens: int
    is_reading: bool = False
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DrafterUp:
    """A drafter can be used; an unknown name is a new draft server.

    tenant: the only one whose prompts it may see; None: every tenant's. takes_assignments: False:
    it drafts only for requests that name it. round_trip_s: of the link, where it was measured."""

    drafter: str
    max_draft_tokens: int = 16
    tenant: str | None = None
    takes_assignments: bool = True
    round_trip_s: float | None = None
    max_num_seqs: int | None = None


@dataclass(frozen=True, slots=True)
class DrafterDown:
    """A drafter is gone, with its KV and drafts."""

    drafter: str


@dataclass(frozen=True, slots=True)
class DraftAhead:
    """A draft server has sent likely continuations of a request without an order."""

    request_id: str
    drafter: str
    pieces: tuple[LinePiece, ...]


@dataclass(frozen=True, slots=True)
class Reconfigure:
    """Settings of tenants from now on. One that is not named keeps its own."""

    tenants: tuple[Tenant, ...]


Event = Arrive | Cancel | DraftReady | DraftAhead | DrafterUp | DrafterDown | Reconfigure


# --- plans --------------------------------------------------------------------------------------


class Match(NamedTuple):
    """Tokens that followed the same words elsewhere.

    length: equal tokens before them. source: the text's "own", "tenant" or "prediction"."""

    token_ids: tuple[int, ...]
    length: int
    source: str


class DraftSource(StrEnum):
    """Origin of the draft of a verify item, or of its tokens that the scheduler does not know."""

    NONE = "none"
    KNOWN = "known"
    INLINE = "inline"
    HELD = "held"


class DraftOrder(NamedTuple):
    """An order to catch up and to draft.

    `drafter` reads tokens `start..start + num_catch_up_tokens - 1` into its KV, of which the last
    are `front_token_ids`: looked-up tokens that come before its own in the draft. Then it drafts up
    to `max_draft_tokens` (0: only read), stopping once the predicted survival of its tokens falls
    below `min_survival`. deadline: an answer after it is too late. new_blocks: of the drafter's KV.
    evaluate: count the tokens that it would have predicted (`Replayed`)."""

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
    front_token_ids: tuple[int, ...] = ()


class VerifyItem(NamedTuple):
    """The target's work for one request in a step.

    It computes `num_scheduled_tokens` known tokens from `start` on, then up to `num_draft_tokens`
    draft positions. samples: the last known token is included, so that the item yields tokens; any
    other item is a chunk of prefill, or of a prompt to embed. token_ids: the first tokens of the
    draft, if the scheduler knows them: sent ahead, forced (then `drafter` is None), or the first
    `num_looked_up` looked up; others are with the executor."""

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
    token_ids: tuple[int, ...] = ()
    num_looked_up: int = 0


class GroupChange(NamedTuple):
    """Members of the decode group with texts that have left or joined since its last step.

    new_blocks: of members that begin one in this step."""

    left: Sequence[str] = ()
    joined: Sequence[str] = ()
    new_blocks: Mapping[str, int] = MappingProxyType({})


class DecodeRun(NamedTuple):
    """One more token for each member of the named groups.

    num_kv_tokens: their context in the first of up to `max_repeats` steps, each of which adds
    `num_requests`; no step may begin at `until` or later. change: of the one group, if its members
    have texts; then each step has a plan of its own."""

    groups: tuple[Hashable, ...]
    num_requests: int
    num_kv_tokens: int
    max_repeats: int = 1
    until: float | None = None
    change: GroupChange | None = None


class StateCopy(NamedTuple):
    """A request's recurrent state behind its first tokens: saved after a step, else begun with."""

    request_id: str
    place: int
    num_tokens: int
    is_saved: bool


class StepPlan(NamedTuple):
    """The next step of one lane.

    Before it, the executor drops the block tables `released` (request, pool), then the requests
    `forgotten`, then takes in `new_requests`: in this order, because an id may come again. stalled:
    reason why an empty plan will stay empty, if so."""

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
    copies: tuple[StateCopy, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to execute; updates for the executor may be left."""
        return not self.items and not self.drafts and self.decodes is None

    @property
    def has_updates(self) -> bool:
        """True if the executor has something to note."""
        return bool(self.new_requests or self.released or self.forgotten)

    @property
    def num_rows(self) -> int:
        """Largest number of positions that the target computes in this step."""
        rows = 0 if self.decodes is None else self.decodes.num_requests
        return rows + sum(i.num_scheduled_tokens + i.num_draft_tokens for i in self.items)


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
    """Log-probability of an emitted token, and the best pairs of (token id, value)."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Verdict(NamedTuple):
    """Result of a verify item.

    token_ids: accepted draft tokens and the recovered or bonus token; empty for a chunk of prefill.
    num_decided: draft positions up to and including the first rejection, without the first
    `num_looked_up`, which are not the drafter's; evidence: the accepted ones among them,
    or in `ratio` mode the less noisy Σ min(target, draft). evidence_all: Σ min(1,
    target / draft) over all proposed positions (GoodSpeed, eq. 3). prompt_logprobs: given once.
    forced_token_ids: tokens that must come next. finish_reason: of an output that has ended;
    positions behind the end are left out, of which the target computed `num_behind_end`.
    num_stop_chars: characters from the start of a stop string to the end of the text. embedding:
    float32, of a prompt that is wholly computed."""

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
    num_looked_up: int = 0
    embedding: bytes = b""

    @property
    def num_drafted(self) -> int:
        """Draft positions that took time."""
        return self.num_proposed + self.num_behind_end


class GroupTokens(NamedTuple):
    """Next tokens of the decode group with texts, by member.

    stopped: ids of outputs that end with a stop token; failures: reasons, by id."""

    token_ids: Sequence[int]
    stopped: Sequence[str] = ()
    failures: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Failure:
    """An item that the executor could not compute, and the reason."""

    request_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class DraftTime:
    """Seconds of one drafter in a step, for `batch` requests and `steps` tokens each."""

    drafter: str
    batch: int
    steps: int
    num_catch_up_tokens: int
    seconds: float


class Replayed(NamedTuple):
    """Result of a drafter's reading of verified text.

    It would have predicted `num_matched` of `num_tokens` output tokens, each after the true text (0
    of 0 where `evaluate` was not set)."""

    request_id: str
    epoch: int
    drafter: str
    num_tokens: int = 0
    num_matched: int = 0


class AuditFinding(NamedTuple):
    """Result of recomputing a draft server's draft by the same model.

    num_false_draws: tokens that differ from the draw of the reported distribution, or, without one
    (`weighted`), from the model's guess. distance: mean total variation of the distributions; 0
    without any."""

    drafter: str
    weighted: bool
    num_tokens: int
    num_false_draws: int
    distance: float


class StepResult(NamedTuple):
    """Result of a plan.

    repeats: executions of its decode run. decoded: tokens of its group, if that has texts. work:
    the target's in the first step, which took `work_seconds`. failed_drafters: of those inside a
    target step; their drafts are missing and their KV is unknown. unread: requests whose draft was
    made without reading their text: the drafter's KV is unchanged."""

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
    decoded: GroupTokens | None = None


class Output(NamedTuple):
    """New tokens of one request, and its end when `finish_reason` is set.

    num_tokens: new tokens, also where only lengths are known. queued_s: from arrival to admission,
    with the first output. num_preemptions: with the last one. num_stop_chars: characters from the
    start of a stop string. drafter: the last proposer; num_looked_up: of the proposed tokens, the
    first ones, from `look_up` (`LOOK_UP` or `PREDICTION`). embedding: float32."""

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
    num_looked_up: int = 0
    look_up: str | None = None
    embedding: bytes = b""

    @property
    def drafts(self) -> list[tuple[str, int, int]]:
        """Proposed and accepted tokens by proposer: look-up, then the drafter."""
        front = self.num_looked_up
        parts = []
        if self.look_up is not None and front:
            parts.append((self.look_up, front, min(self.num_accepted, front)))
        if self.drafter is not None and self.num_proposed > front:
            accepted = max(0, self.num_accepted - front)
            parts.append((self.drafter, self.num_proposed - front, accepted))
        return parts


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
"""Upper bounds of the histogram of target steps by tokens."""
