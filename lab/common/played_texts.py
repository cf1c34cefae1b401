"""Real texts on the virtual clock: look-up and acceptance of what is known beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from penstock.config import SUFFIX
from penstock.core.lookup import TextLookUp
from penstock.core.state import RequestState
from penstock.core.types import DraftOrder, Match, Request, SamplingParams, VerifyItem


@dataclass(frozen=True, slots=True)
class KnownText:
    """A prompt and the target's answer, in its tokens.

    right: by drafter and position, the tokens that it would have right."""

    prompt_ids: tuple[int, ...]
    output: tuple[int, ...]
    right: Mapping[str, Sequence[int]]

    def request(self, name: str) -> Request:
        return Request(
            id=name,
            prompt_len=len(self.prompt_ids),
            prompt_token_ids=self.prompt_ids,
            max_tokens=len(self.output),
            sampling=SamplingParams(temperature=0.0),
        )


@dataclass(frozen=True)
class PlayedTexts:
    """Look-up and acceptance of texts that are known; request i plays text i.

    Look-up is the engine's own: it remembers an output when its request has ended."""

    texts: Sequence[KnownText]
    look_up: TextLookUp
    states: dict[str, RequestState]
    name: str = SUFFIX

    @classmethod
    def new(cls, texts: Sequence[KnownText]) -> Self:
        return cls(texts, TextLookUp(SUFFIX), {})

    def match(self, state: RequestState, num_tokens: int) -> Match | None:
        found = self.look_up.match(self._known(state), num_tokens)
        if found is None:
            return None
        truth = self.texts[int(state.request.id)].output[state.num_output_tokens :]
        pairs = enumerate(zip(found.token_ids, truth, strict=False))
        right = next((i for i, (a, b) in pairs if a != b), min(len(found.token_ids), len(truth)))
        first = state.num_known_tokens
        wrong = [-1] * (len(found.token_ids) - right)
        return found._replace(token_ids=(*range(first, first + right), *wrong))

    def release_request(self, state: RequestState) -> None:
        self.look_up.release_request(self._known(state))
        self.states.pop(state.request.id, None)

    def _known(self, state: RequestState) -> RequestState:
        """The same request with its tokens."""
        name = state.request.id
        text = self.texts[int(name)]
        if name not in self.states:
            self.states[name] = RequestState(text.request(name), 0)
        known = self.states[name]
        known.output_token_ids += text.output[len(known.output_token_ids) : state.num_output_tokens]
        return known

    def _right(self, drafter: str, request_id: str, position: int) -> int:
        right = self.texts[int(request_id)].right[drafter]
        return right[position] if position < len(right) else 0

    def num_accepted(self, item: VerifyItem, position: int) -> int:
        if not item.num_draft_tokens or item.drafter is None:
            return 0
        return min(item.num_draft_tokens, self._right(item.drafter, item.request_id, position))

    def num_right_behind(self, item: VerifyItem, position: int, num_accepted: int) -> int:
        return 0

    def num_matched(self, order: DraftOrder, positions: range) -> int:
        return sum(self._right(order.drafter, order.request_id, p) > 0 for p in positions)

    def tokens_per_step(self, drafter: str, num_draft_tokens: int) -> float:
        raise NotImplementedError
