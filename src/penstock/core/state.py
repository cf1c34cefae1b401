"""State of requests and drafters in the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from penstock.core.ahead import LinesAhead, Text
from penstock.core.kv import BlockPool, CountedKV, SequenceKV
from penstock.core.predicted import Prediction
from penstock.core.types import (
    NO_DRAFTER,
    TARGET,
    DraftOrder,
    Match,
    Request,
    Status,
    Tenant,
    Verdict,
)


class DraftStage(Enum):
    """Stage of a request in its round, which ends with a verification."""

    OPEN = "no drafter was chosen for this round yet"
    CHOSEN = "a drafter, or none, was chosen"
    ORDERED = "a draft was ordered beside the target"
    HELD = "that draft has come, and waits for its verification"
    SKIPPED = "none has come: the target verifies without"


class DraftRound(NamedTuple):
    """A stage with its data.

    order, ordered_at: the order and when it was given. num_draft_tokens: of a held draft.
    token_ids: the first of them, if known: sent ahead, forced by a grammar, or the first
    `num_looked_up` looked up. drafter: of the others, or those sent ahead."""

    stage: DraftStage
    order: DraftOrder | None = None
    ordered_at: float = 0.0
    num_draft_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    drafter: str | None = None
    num_looked_up: int = 0


OPEN = DraftRound(DraftStage.OPEN)
CHOSEN = DraftRound(DraftStage.CHOSEN)
SKIPPED = DraftRound(DraftStage.SKIPPED)


class DrafterKind(Enum):
    """Where a drafter is, and what it can do."""

    LOCAL = "drafts as many tokens as it is asked for"
    ENDING = "the same, but ends a draft where the rest does not pay (`Grant.min_survival`)"
    HEAD = "the same, but a part of the target: inside its step, with its KV"
    SERVER = "a draft server, known while it is connected"
    COMPLETIONS = "a server that completes text, known while it is down, too"


class DrafterStatus(Enum):
    """Readiness of a drafter to take orders."""

    UP = "it does"
    SILENT = "it has missed a deadline, and has not answered since"
    DOWN = "it is gone"


@dataclass(slots=True)
class Drafter:
    """A drafter as the scheduler sees it.

    has_lane: a local one can draft beside the target, and does where the pipeline wants that.
    tenant: the only one whose prompts it may see (None: every tenant's). takes_assignments: False:
    only of requests that name it. model: its model, if not named like it: instances of one model
    share acceptance rates. max_num_seqs: requests that it drafts for at once (Spin's B_j); None is
    no limit. max_len: tokens of a text that it can read; vocab_size: token ids that it knows, from
    0 on; None: as the target."""

    name: str
    pool: BlockPool | None = None
    has_lane: bool = False
    max_draft_tokens: int = 16
    kind: DrafterKind = DrafterKind.LOCAL
    status: DrafterStatus = DrafterStatus.UP
    tenant: str | None = None
    takes_assignments: bool = True
    model: str | None = None
    max_num_seqs: int | None = None
    max_len: int | None = None
    vocab_size: int | None = None
    is_remote: bool = field(init=False)
    """True if it always drafts beside the target, and answers orders one by one."""
    ends_early: bool = field(init=False)
    """True if it ends a draft where the rest does not pay."""

    def __post_init__(self) -> None:
        self.is_remote = self.kind in (DrafterKind.SERVER, DrafterKind.COMPLETIONS)
        self.ends_early = self.kind in (DrafterKind.ENDING, DrafterKind.HEAD)
        self.has_lane = self.has_lane and self.kind is not DrafterKind.HEAD

    @property
    def is_up(self) -> bool:
        """True if it takes orders."""
        return self.status is DrafterStatus.UP

    @property
    def can_replay(self) -> bool:
        """True if it can guess verified text; a head has no hidden states of it any more."""
        return not self.is_remote and self.kind is not DrafterKind.HEAD

    @property
    def is_limited(self) -> bool:
        """True if there may be texts that it cannot read."""
        return self.max_len is not None or self.vocab_size is not None

    def answered(self) -> None:
        """Note that it lives."""
        if self.status is DrafterStatus.SILENT:
            self.status = DrafterStatus.UP

    def can_read(self, state: RequestState) -> bool:
        """Return True if it can read a request's known tokens, and then draft.

        Requests of which only lengths are known have no unknown tokens."""
        if self.max_len is not None and state.num_known_tokens > self.max_len:
            return False
        return self.vocab_size is None or state.highest_token_id() < self.vocab_size

    def longest_draft(self, state: RequestState) -> int:
        """Return the longest draft of its own that could still be of use.

        It reads all of its draft but the last token."""
        most = min(state.most_draft_tokens, self.max_draft_tokens)
        if self.max_len is not None:
            most = max(0, min(most, self.max_len - state.num_known_tokens + 1))
        return most

    def may_serve(self, tenant: Tenant) -> bool:
        """Return True if the tenant may use the drafter and its prompts may go there.

        The streams of a draft server have its name and a number, as in `edge#2`."""
        if not (self.tenant is None or self.tenant == tenant.name or tenant.shares_prompts):
            return False
        allowed = tenant.drafters
        return allowed is None or self.name in allowed or self.name.partition("#")[0] in allowed


class Grant(NamedTuple):
    """Tokens of a request's draft: the first `num_looked_up` from look-up, then its drafter's.

    num_draft_tokens: of the drafter, which stops once the predicted probability that all of them
    are accepted falls below `min_survival`."""

    num_draft_tokens: int
    min_survival: float = 0.0
    num_looked_up: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_looked_up + self.num_draft_tokens

    def cut(self, most: int) -> Grant:
        """Return the grant with at most so many tokens."""
        if self.num_looked_up + self.num_draft_tokens <= most:
            return self
        num_looked_up = min(self.num_looked_up, most)
        return self._replace(
            num_draft_tokens=min(self.num_draft_tokens, most - num_looked_up),
            num_looked_up=num_looked_up,
        )


NO_DRAFT = Grant(0)


class Outcome(NamedTuple):
    """Verdict of a target step on one request; `verdict.drafter` is None without a draft."""

    state: RequestState
    verdict: Verdict


class TokenGroup(Protocol):
    """A group that counts its members' tokens (`groups.DecodeGroup`)."""

    ticks: int
    plan_id: int | None

    def leave(self, state: RequestState) -> None:
        """Let a member go, with its counters."""
        ...


class RequestState:
    """Mutable state of a request.

    may_group: its next tokens need nothing but the last one, so that it may decode in a group,
    which counts its tokens then. is_counted: of such a request only lengths are known."""

    __slots__ = (
        "_num_output",
        "admitted_at",
        "ahead",
        "block_hashes",
        "decode_group",
        "draft",
        "drafter",
        "epoch",
        "first_token_at",
        "in_flight",
        "is_counted",
        "kv",
        "leaves_at",
        "match",
        "matched_at",
        "may_group",
        "num_announced",
        "num_preemptions",
        "order",
        "output_token_ids",
        "plans",
        "prediction",
        "request",
        "round",
        "seen_token_ids",
        "status",
        "until",
    )

    def __init__(
        self, request: Request, order: int, epoch: int = 0, *, may_group: bool = False
    ) -> None:
        self.request = request
        self.order = order
        self.may_group = may_group
        self.is_counted = may_group and request.prompt_token_ids is None
        self.decode_group: TokenGroup | None = None
        self.leaves_at = 0
        """Tick of the group at which it leaves."""
        self.until: int | None = None
        """Output tokens at which it leaves the group."""
        self.status = Status.WAITING
        self.epoch = epoch
        self.round = 0
        self.output_token_ids: list[int] = []
        # Of a member less than those of its group's ticks.
        self._num_output = 0
        self.num_announced = 0
        """Output tokens of which outputs have told, where only lengths are known."""
        self.num_preemptions = 0
        self.admitted_at = 0.0
        self.first_token_at = 0.0
        self.block_hashes: list[bytes] = list(request.block_hashes)
        self.kv: dict[str, SequenceKV] = {}
        self.plans: dict[int, tuple[str, ...]] = {}
        """Unfinished plans that read or write this request's KV, and in which pools."""
        self.in_flight = False
        self.drafter: str | None = None
        self.draft = OPEN
        self.ahead: LinesAhead | None = None
        """Continuations that a draft server has sent without an order."""
        is_predicted = bool(request.prediction) and request.drafter != NO_DRAFTER
        self.prediction = Prediction(request.prediction) if is_predicted else None
        self.match: Match | None = None
        """Match that look-up found behind the text of `matched_at` tokens."""
        self.matched_at = -1
        self.seen_token_ids = (0, -1)
        """Output tokens examined by `highest_token_id`, and its result."""

    @property
    def num_output_tokens(self) -> int:
        group = self.decode_group
        return self._num_output if group is None else self._num_output + group.ticks

    @num_output_tokens.setter
    def num_output_tokens(self, value: int) -> None:
        self._num_output = value

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens so far."""
        group, num = self.decode_group, self.request.prompt_len + self._num_output
        return num if group is None else num + group.ticks

    @property
    def num_computed_tokens(self) -> int:
        """Positions whose KV the target holds."""
        if self.decode_group is not None:
            return self.num_known_tokens - 1
        kv = self.kv.get(TARGET)
        return kv.num_computed_tokens if kv else 0

    @property
    def num_due_tokens(self) -> int:
        """Known tokens that the target has yet to compute: 1 while decoding."""
        return self.num_known_tokens - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        if self.decode_group is not None:
            return True
        num_output = self._num_output
        if not num_output:
            return False
        kv = self.kv.get(TARGET)
        computed = kv.num_computed_tokens if kv else 0
        return computed + 1 == self.request.prompt_len + num_output

    def enter(self, group: TokenGroup) -> None:
        """Let a group count its tokens."""
        self.decode_group = group
        self._num_output -= group.ticks
        # Also between two steps of the group: nobody drafts for it.
        self.in_flight = not self.is_counted

    def exit(self, num_computed_tokens: int, num_blocks: int) -> None:
        """Take the counters back from the group. num_blocks: that it holds."""
        self.decode_group = None
        self.in_flight = False
        self._num_output = num_computed_tokens + 1 - self.request.prompt_len
        if self.is_counted:
            self.kv[TARGET] = CountedKV(num_computed_tokens, num_blocks=num_blocks)
        else:
            self.kv[TARGET].num_computed_tokens = num_computed_tokens

    @property
    def text(self) -> Text:
        """The output with its position."""
        return Text(self.request.prompt_len, self.output_token_ids)

    def at_hand(self, drafter: str) -> tuple[int, ...]:
        """Return the draft that was sent ahead for the next tokens, if any."""
        if self.ahead is None or self.ahead.drafter != drafter:
            return ()
        return self.ahead.path(self.num_known_tokens)

    def num_unread(self, pool: str) -> int:
        """Return the known tokens that a drafter's KV does not hold."""
        kv = self.kv.get(pool)
        return self.num_known_tokens - (0 if kv is None else kv.num_computed_tokens)

    @property
    def num_remaining_tokens(self) -> int:
        return self.request.max_tokens - self.num_output_tokens

    def highest_token_id(self) -> int:
        """Return the highest id of prompt and output; -1 where only lengths are known.

        Each token is examined once."""
        num_seen, highest = self.seen_token_ids
        if highest < 0:
            highest = max(self.request.prompt_token_ids or (-1,))
        highest = max(highest, *self.output_token_ids[num_seen:], -1)
        self.seen_token_ids = (len(self.output_token_ids), highest)
        return highest

    def next_round(self) -> None:
        """Begin a round after a verification that yielded tokens."""
        self.round += 1
        self.draft = OPEN

    def looked_up(self, num_tokens: int) -> tuple[int, ...]:
        """Return the first tokens that look-up has found behind the known text."""
        is_due = self.match is not None and self.matched_at == self.num_known_tokens
        return self.match.token_ids[:num_tokens] if self.match is not None and is_due else ()

    @property
    def most_draft_tokens(self) -> int:
        """Longest draft that could be of use: the target adds one token itself."""
        request = self.request
        most, asked = request.max_tokens - self.num_output_tokens - 1, request.max_draft_tokens
        if asked is not None and asked < most:
            most = asked
        return most if most > 0 else 0

    def hold(self, grant: Grant, token_ids: tuple[int, ...], drafter: str | None = None) -> None:
        """Hold a draft, of which the first tokens are known.

        drafter: of tokens that were not looked up; None if they must come next."""
        self.draft = DraftRound(
            DraftStage.HELD,
            num_draft_tokens=grant.num_tokens,
            token_ids=token_ids,
            drafter=drafter,
            num_looked_up=grant.num_looked_up,
        )

    def append(self, token_ids: Sequence[int]) -> None:
        """Add verified output."""
        self._num_output += len(token_ids)
        if self.is_counted:
            return
        self.output_token_ids += token_ids
        if self.ahead is not None:
            self.ahead.follow(self.text)
        if self.prediction is not None:
            self.prediction.follow(self.output_token_ids, len(token_ids))

    def announce(self) -> int:
        """Return how many output tokens no output has told of; this one does."""
        num_new = self.num_output_tokens - self.num_announced
        self.num_announced += num_new
        return num_new

    def kv_of(self, pool: str) -> SequenceKV:
        kv = self.kv.get(pool)
        if kv is None:
            kv = self.kv[pool] = CountedKV() if self.is_counted else SequenceKV()
        return kv
