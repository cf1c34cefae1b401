"""One request that a draft server drafts for, and what is said of it on the present stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.core.types import SamplingParams
from penstock.engine.drafters.sessions import SessionDraft
from penstock.serving.verified_text import Piece, VerifiedText
from penstock.transport.v1 import drafting_pb2 as pb

Listener = Callable[[Piece, int], None]
"""Gets the pieces of a text as they are verified, with the number of tokens drafted for each."""


@dataclass(slots=True, eq=False)
class Tracked:
    """One request.

    key:              of its drafting session
    listener:         of a request of edge ingress
    max_draft_tokens: longest draft that is wanted; 0 for none at all
    drafted_as:       sampling that its session knows, which depends on the link

    wire_id:    its name on the present stream
    is_taken:   the other side has it; what is refused now is something else
    asked:      the assignment that has no answer yet; `is_ordered` when it is being drafted for
    newest:     (epoch, round) of the last assignment
    sent:       prefix and length of the last draft
    """

    key: str
    text: VerifiedText
    sampling: SamplingParams
    listener: Listener | None = None
    max_draft_tokens: int | None = None
    drafted_as: SamplingParams | None = None
    wire_id: str = ""
    is_taken: bool = False
    asked: pb.Assign | None = None
    is_ordered: bool = False
    newest: tuple[int, int] = (-1, -1)
    sent: tuple[int, int] = (-1, 0)

    @property
    def tag(self) -> tuple[str, int, int]:
        """Names the last assignment among all of this process."""
        return (self.wire_id, *self.newest)

    def begin_stream(self, wire_id: str) -> None:
        """What the last stream has said about the future is void."""
        self.wire_id = wire_id
        self.is_taken = self.is_ordered = False
        self.asked, self.newest = None, (-1, -1)
        self.text.forget_ahead()

    def is_news(self, assign: pb.Assign) -> bool:
        return (assign.epoch, assign.round) > self.newest

    def num_proposed(self, piece: Piece) -> int:
        """Tokens that were drafted for a piece."""
        prefix_len, size = self.sent
        return size if prefix_len == piece.start else 0

    def answer(self, draft: SessionDraft | None) -> pb.Draft | None:
        """The answer to the assignment that is open, which it then is no more."""
        assign, self.asked, self.is_ordered = self.asked, None, False
        if assign is None:
            return None
        message = pb.Draft(
            request_id=self.wire_id,
            epoch=assign.epoch,
            round=assign.round,
            prefix_len=assign.prefix_len,
            prefix_digest=self.text.digest.digest(),
        )
        if draft is not None:
            self.sent = (assign.prefix_len, len(draft.token_ids))
            message.token_ids.extend(draft.token_ids)
            message.weights.extend(
                pb.TopWeights(token_ids=s.token_ids, weights=s.weights) for s in draft.sources
            )
        return message

    def opening(self, max_tokens: int, stop_token_ids: Iterable[int]) -> pb.Open:
        """Asks for up to `max_tokens` tokens behind the text; the id is still to be set."""
        params = self.sampling
        return pb.Open(
            prompt_token_ids=self.text.token_ids,
            max_tokens=max_tokens,
            stop_token_ids=sorted(stop_token_ids),
            num_logprobs=params.num_logprobs,
            sampling=pb.Sampling(
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                seed=params.seed,
                ratio=params.verification == "ratio",
            ),
        )
