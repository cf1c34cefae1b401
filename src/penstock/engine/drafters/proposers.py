"""Proposers of draft servers' sessions: drafters with their own KV blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from penstock.core.drafting.lines import Guess, Session, TopWeights
from penstock.core.lookup import TextIndex
from penstock.core.types import DraftOrder
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.drafters.recent import RecentKv
from penstock.engine.sampling import SamplingRows, draw_draft
from penstock.engine.sampling.filters import NO_TOKEN, filtered_probs
from penstock.engine.sampling.params import IntArray

_CHUNK = 256
_CHUNK_AHEAD = 64
"""Tokens of one text that are read in a step, so that a long one does not delay the others."""

_NEVER = -1e30
"""Logit of a barred token; stays finite at any temperature."""

Quantise = Callable[[torch.Tensor], list[TopWeights]]
"""Maps probabilities [rows, V] float32 to truncated integer distributions."""


class ModelProposer:
    """Proposer with a small model, whose KV cache evicts the least recently used sessions.

    quantise: makes the distributions that `ratio` drafts are sampled from
    """

    def __init__(self, drafter: ModelDrafter, quantise: Quantise) -> None:
        self._drafter = drafter
        self._quantise = quantise
        self._kv = RecentKv(drafter)

    @property
    def max_length(self) -> int:
        config = self._drafter.runner.config
        return min(config.max_position_embeddings, self._kv.pool.capacity_tokens)

    @property
    def vocab_size(self) -> int:
        return self._drafter.runner.config.vocab_size

    def limit_vocab(self, size: int) -> None:
        self._drafter.limit_vocab(size)

    def cut(self, session: Session, length: int) -> None:
        self._kv.cut(session.kv_key, length)

    def release_session(self, session: Session) -> None:
        self._kv.evict(session.kv_key)

    @property
    def has_runner_up(self) -> bool:
        return True

    def fork(self, session: Session, branch: Session) -> None:
        self._kv.fork(session.kv_key, branch.kv_key, len(branch.text))

    def propose(self, sessions: Sequence[Session], *, ahead: bool) -> None:
        taken = self._take_blocks(sessions, ahead)
        if not taken:
            return
        readers, orders = zip(*taken, strict=True)
        ends = [o.start + o.num_catch_up_tokens for o in orders]
        at_end = [int(end == s.length) for s, end in zip(readers, ends, strict=True)]
        logits = self._drafter.read(orders, readers, at_end)
        for session, end in zip(readers, ends, strict=True):
            self._kv.text_of(session.kv_key).num_computed = end
        sampling = [s for s, is_at_end in zip(readers, at_end, strict=True) if is_at_end]
        if sampling:
            for session, guess in zip(sampling, self._guess(sampling, logits), strict=True):
                if guess is None:
                    session.is_stuck = True
                else:
                    session.guesses.append(guess)

    # --- memory ---------------------------------------------------------------------------------

    def _take_blocks(
        self, sessions: Sequence[Session], ahead: bool
    ) -> list[tuple[Session, DraftOrder]]:
        """Return the sessions that have KV memory, with their orders."""
        taken: list[tuple[Session, DraftOrder]] = []
        spared: set[str] = set()
        for session in sessions:
            cached = self._kv.text_of(session.kv_key)
            cached.is_branch = session.line.barred is not None
            start = min(cached.num_computed, session.length - 1)
            end = min(start + (_CHUNK_AHEAD if ahead else _CHUNK), session.length)
            spared.add(session.kv_key)
            blocks = self._kv.grow(session.kv_key, end, None if ahead else spared)
            if blocks is None:
                # Retried after this step's sessions; stuck if it is alone.
                session.is_stuck = ahead or not taken
                continue
            name, num_tokens = self._drafter.name, end - start
            order = DraftOrder(
                request_id=session.kv_key,
                epoch=0,
                round=0,
                drafter=name,
                start=start,
                num_catch_up_tokens=num_tokens,
                max_draft_tokens=0,
                new_blocks=blocks,
            )
            taken.append((session, order))
        return taken

    # --- sampling -------------------------------------------------------------------------------

    def _guess(self, sessions: Sequence[Session], logits: torch.Tensor) -> list[Guess | None]:
        """Guess a token per session; None if its logits are not finite."""
        rows = SamplingRows.from_params([s.sampling for s in sessions])
        positions = np.array([s.length for s in sessions], dtype=np.int64)
        starts = np.array([s.draft_start for s in sessions], dtype=np.int64)
        drawn = np.array([s.samples_next for s in sessions])
        barred = [(i, s.barred) for i, s in enumerate(sessions) if s.barred is not None]
        if barred:
            logits = logits.clone()
            for row, token in barred:
                logits[row, token] = _NEVER
        guesses: list[Guess | None] = [None] * len(sessions)
        for draw, chosen in ((True, np.flatnonzero(drawn)), (False, np.flatnonzero(~drawn))):
            if chosen.size:
                part = logits[torch.from_numpy(chosen).to(logits.device)]
                own, at = rows.select(chosen), positions[chosen]
                if draw:
                    made = self._draw(part, own, at, starts[chosen])
                else:
                    made = self._foresee(part, own, at)
                for i, guess in zip(chosen, made, strict=True):
                    guesses[i] = guess
        return guesses

    def _foresee(
        self, logits: torch.Tensor, rows: SamplingRows, positions: IntArray
    ) -> list[Guess | None]:
        tokens = self._drafter.runner.sample(logits, rows, positions)
        divisor = torch.from_numpy(np.where(rows.greedy, 1.0, rows.temperature)).float()
        scores = logits / divisor.to(logits.device).unsqueeze(-1)
        chosen = scores.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        confidence = (chosen - scores.logsumexp(dim=-1)).exp()
        return [
            None if t == NO_TOKEN else Guess(t, c)
            for t, c in zip(tokens.tolist(), confidence.tolist(), strict=True)
        ]

    def _draw(
        self, logits: torch.Tensor, rows: SamplingRows, positions: IntArray, starts: IntArray
    ) -> list[Guess | None]:
        """Sample from truncated distributions.

        The confidence is the likeliest token's, as it must not depend on the sample."""
        probs = filtered_probs(logits, rows)
        finite = probs.sum(dim=-1).isfinite().cpu().numpy()
        if not finite.all():
            own = logits[torch.from_numpy(finite).to(logits.device)]
            made = iter(self._draw(own, rows.select(finite), positions[finite], starts[finite]))
            return [next(made) if is_finite else None for is_finite in finite]
        sources = self._quantise(probs)
        scores = torch.full(logits.shape, -torch.inf)
        for row, source in zip(scores, sources, strict=True):
            row[list(source.token_ids)] = torch.tensor(source.weights, dtype=torch.float32).log()
        tokens = draw_draft(scores, rows, positions, starts).tolist()
        return [
            Guess(token, max(source.weights) / sum(source.weights), source)
            for token, source in zip(tokens, sources, strict=True)
        ]


class LookupProposer:
    """Proposer by look-up in the text. weight_sum: of a distribution, all on one token."""

    def __init__(self, vocab_size: int, weight_sum: int) -> None:
        self._vocab_size = vocab_size
        self._weight_sum = weight_sum
        self._indices: dict[str, TextIndex] = {}

    @property
    def max_length(self) -> int:
        return 1 << 31

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def limit_vocab(self, size: int) -> None:
        """Do nothing: guesses come from the text."""

    def cut(self, session: Session, length: int) -> None:
        """Do nothing: the index has verified text only."""

    def release_session(self, session: Session) -> None:
        self._indices.pop(session.key, None)

    @property
    def has_runner_up(self) -> bool:
        return False

    def fork(self, session: Session, branch: Session) -> None:
        """Do nothing: there are no branches."""

    def propose(self, sessions: Sequence[Session], *, ahead: bool) -> None:
        for session in sessions:
            index = self._indices.setdefault(session.key, TextIndex(self.max_length))
            index.append(session.text[len(index) :])
            proposed, _ = index.continued(len(session.guesses) + 1)
            if not proposed:
                session.is_stuck = True
                continue
            token = proposed[-1]
            point = TopWeights((token,), (self._weight_sum,))
            session.guesses.append(Guess(token, 0.5, point if session.samples_next else None))
