"""One step of the target: forward pass, verification of drafts, log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch

from penstock.core.types import SamplingParams, TokenLogprob
from penstock.engine.runner import BatchWriter, IntArray, ModelRunner, RaggedBatch
from penstock.engine.sampling import (
    Changed,
    SamplingRows,
    TextSoFar,
    TokenSampler,
    VerifyBatch,
    change_logits,
    forbidden_by,
    token_logprobs,
    verify,
)
from penstock.engine.sampling.filters import NO_TOKEN
from penstock.engine.sampling.params import BoolArray
from penstock.engine.sequences import SamplingTable, TokenBuffer


class Proposal(Protocol):
    """A draft behind a request's known tokens, as verification reads it.

    It is a `Drafted`, or its description in another process."""

    @property
    def position(self) -> int: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def prob_rows(self) -> list[int]: ...
    @property
    def so_far(self) -> TextSoFar | None: ...


class Drafted(NamedTuple):
    """A request whose next token is sampled in this step, and its draft.

    position: of the first token that is decided; prob_rows: per draft token its row of the joined
    distributions, or as in `Draft`."""

    text: TokenBuffer
    position: int
    token_ids: list[int]
    prob_rows: list[int]

    @property
    def sampling(self) -> SamplingParams:
        return self.text.request.sampling

    @property
    def so_far(self) -> TextSoFar | None:
        """Return the text as `TokenBuffer.so_far`."""
        return self.text.so_far(self.token_ids)


class Decided(NamedTuple):
    """Result of verification for one request (`core.types.Verdict`).

    The last token is NO_TOKEN where its logits are not finite. evidence, evidence_all: per draft
    position, so that positions behind the end of the output can be left out."""

    token_ids: list[int]
    num_accepted: int
    num_decided: int
    evidence: Sequence[float] = ()
    evidence_all: Sequence[float] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Samples(NamedTuple):
    """The target's samples of a batch's rows, and the logits of some requests, concatenated.

    kept: places of those requests, rising; by_logits: those that samples alone cannot decide."""

    token_ids: list[int]
    by_logits: Sequence[int] = ()
    kept: Sequence[int] = ()
    logits: torch.Tensor = torch.empty(0, 0)


class Verifier:
    """Forward passes of the target, and verification by them.

    Samples of requests that take the target's own (`coupled`, or without a draft) may be drawn in
    the pass itself, unless the distribution is filtered or changed, or log-probabilities are
    requested: the accepted draft is then the common prefix, and no logits come back. A grammar
    checks the samples afterwards: only a forbidden one is drawn again from the permitted tokens.
    With a grammar, samples behind the first mismatch are of all tokens: `evidence_all` may be lower
    than over the permitted ones. keeps_logits: all logits come back, also where none is needed."""

    keeps_logits = False

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._sampling = SamplingTable()
        self._sampling_by_logits = SamplingTable()

    def forward(self, batch: RaggedBatch, drafted: Sequence[Drafted]) -> torch.Tensor | Samples:
        """Return logits of the batch's rows, [num_logits, V], or the samples drawn from them."""
        if drafted:
            params, ratio = self._sampling.rows_of([d.text for d in drafted])
            by_logits = _by_logits(drafted, params, ratio)
            if len(by_logits) < len(drafted):
                starts = _row_start(drafted)
                kept = list(range(len(drafted))) if self.keeps_logits else by_logits
                if params.reads_text:
                    others = (i for i, d in enumerate(drafted) if d.text.grammar is not None)
                    kept = sorted({*kept, *others})
                rows = [row for i in kept for row in range(starts[i], starts[i + 1])]
                answer = self.runner.verify(
                    batch, np.array(starts, dtype=np.int32), params, np.array(rows, dtype=np.int32)
                )
                if answer is not None:
                    token_ids, logits = answer
                    return Samples(token_ids, by_logits, kept, logits)
        return self.runner.forward(batch)

    def decide(
        self,
        scores: torch.Tensor | Samples,
        drafted: Sequence[Drafted],
        draft_probs: torch.Tensor | None,
    ) -> list[Decided]:
        """Verify by the result of `forward`. draft_probs: [rows, V], as in `VerifyBatch`."""
        if not drafted:
            return []
        if isinstance(scores, torch.Tensor):
            params, ratio = self._sampling.rows_of([d.text for d in drafted])
            return decide(scores, drafted, params, ratio, draft_probs, self.runner.sample)
        starts = _row_start(drafted)
        if len(scores.kept) > len(scores.by_logits):
            self._settle(scores, drafted, starts)
        decided = [
            _compare(scores.token_ids, first, d.token_ids)
            for first, d in zip(starts, drafted, strict=False)
        ]
        if scores.by_logits:
            others = [drafted[i] for i in scores.by_logits]
            params, ratio = self._sampling_by_logits.rows_of([d.text for d in others])
            logits = scores.logits
            if len(scores.kept) > len(scores.by_logits):
                rows = _rows_kept(scores, starts)
                logits = logits[[row for i in scores.by_logits for row in rows[i]]]
            found = decide(logits, others, params, ratio, draft_probs, self.runner.sample)
            for i, one in zip(scores.by_logits, found, strict=True):
                decided[i] = one
        return decided

    def _settle(self, scores: Samples, drafted: Sequence[Drafted], starts: Sequence[int]) -> None:
        """Replace samples that a grammar forbids, as far as they count."""
        samples = scores.token_ids
        refused: list[tuple[int, int]] = []
        for i in scores.kept:
            text, draft, own = drafted[i].text, drafted[i].token_ids, slice(*starts[i : i + 2])
            if text.grammar is None or i in scores.by_logits:
                continue
            of_text = samples[own]
            # Up to where logits are not finite.
            num = of_text.index(NO_TOKEN) if NO_TOKEN in of_text else len(of_text)
            settled = of_text[:num]
            first = text.grammar.settle(text, draft, settled) if num else None
            samples[own] = settled + of_text[num:]
            if first is not None:
                refused.append((i, first))
        if refused:
            self._sample_again(scores, drafted, starts, refused)

    def _sample_again(
        self,
        scores: Samples,
        drafted: Sequence[Drafted],
        starts: Sequence[int],
        refused: Sequence[tuple[int, int]],
    ) -> None:
        """Draw from the permitted tokens.

        refused: places of requests, and the first of their samples to be drawn again."""
        kept, vocab_size = _rows_kept(scores, starts), self.runner.vocab_size
        places = [(i, n) for i, first in refused for n in range(first, len(kept[i]))]
        masks = np.full((len(places), -(-vocab_size // 32)), -1, dtype=np.int32)
        place, row_bytes = masks.ctypes.data, masks.strides[0]
        for i, first in refused:
            text, count = drafted[i].text, len(kept[i]) - first
            assert text.grammar is not None
            text.grammar.fill(text, drafted[i].token_ids, count, place, row_bytes)
            place += count * row_bytes
        # A few rows: PyTorch's operators take several times as long to begin.
        logits = scores.logits.numpy()[[kept[i][n] for i, n in places]]
        np.putmask(logits, forbidden_by(masks, vocab_size), -np.inf)
        params, _ = self._sampling.rows_of([d.text for d in drafted])
        found = self.runner.sample(
            torch.from_numpy(logits),
            params.select(np.array([i for i, _ in places])),
            np.array([drafted[i].position + n for i, n in places]),
        )
        for (i, n), token in zip(places, found.tolist(), strict=True):
            scores.token_ids[starts[i] + n] = token


def decide(
    logits: torch.Tensor,
    drafted: Sequence[Proposal],
    params: SamplingRows,
    ratio: BoolArray,
    draft_probs: torch.Tensor | None,
    sample: TokenSampler,
) -> list[Decided]:
    """Verify any batch.

    logits: [rows, V] float32, per request one row more than it has draft tokens; may be
    overwritten. params, ratio: one entry per request; draft_probs: as in `VerifyBatch`"""
    row_start = _row_start(drafted)
    changed = _changed(logits, drafted, row_start) if params.reads_text else logits
    has_drafts = row_start[-1] > len(drafted)
    if not (has_drafts or any(d.sampling.num_logprobs is not None for d in drafted)):
        # Most steps of most servers: the samples are all there is to it.
        positions = np.array([d.position for d in drafted])
        samples = sample(changed, params, positions).tolist()
        return [Decided([token], 0, 0) for token in samples]
    result = verify(
        VerifyBatch(
            logits=changed,
            row_start=np.array(row_start),
            positions=np.array([d.position for d in drafted]),
            params=params,
            ratio=ratio,
            draft_tokens=np.array([t for d in drafted for t in d.token_ids], dtype=np.int64),
            draft_probs=draft_probs,
            draft_prob_row=np.array([max(r, -1) for d in drafted for r in d.prob_rows], np.int64),
        ),
        sample,
    )
    decided = []
    evidence, evidence_all = result.evidence.tolist(), result.evidence_all.tolist()
    draft_start = result.draft_start.tolist()
    for n, d in enumerate(drafted):
        tokens, drafts = result.tokens(n), slice(draft_start[n], draft_start[n + 1])
        num = d.sampling.num_logprobs
        rows = logits[row_start[n] : row_start[n] + len(tokens)]
        logprobs = () if num is None or NO_TOKEN in tokens else token_logprobs(rows, tokens, num)
        decided.append(
            Decided(
                token_ids=tokens,
                num_accepted=int(result.num_accepted[n]),
                num_decided=int(result.num_decided[n]),
                evidence=evidence[drafts],
                evidence_all=evidence_all[drafts],
                logprobs=logprobs,
            )
        )
    return decided


def _by_logits(drafted: Sequence[Drafted], params: SamplingRows, ratio: BoolArray) -> list[int]:
    """Return places of requests that the target's samples alone cannot decide."""
    wanted = [d.sampling.num_logprobs is not None for d in drafted]
    if params.is_masked_at_most and not any(wanted) and not ratio.any():
        return []
    cut = params.filtered
    return [
        i
        for i, d in enumerate(drafted)
        if wanted[i] or cut[i] or d.sampling.reads_tokens or (d.token_ids and ratio[i])
    ]


def _changed(
    logits: torch.Tensor, drafted: Sequence[Proposal], row_start: Sequence[int]
) -> torch.Tensor:
    """Return logits changed by the text before each row."""
    if any(d.sampling.num_logprobs is not None for d in drafted):
        logits = logits.clone()  # what is reported is the model's own
    change_logits(
        logits,
        [
            Changed(end - begin, d.sampling, d.so_far)
            for d, (begin, end) in zip(drafted, pairwise(row_start), strict=True)
        ],
    )
    return logits


def _rows_kept(scores: Samples, starts: Sequence[int]) -> dict[int, range]:
    """Return the rows of each request whose logits came back."""
    rows, end = {}, 0
    for i in scores.kept:
        begin, end = end, end + starts[i + 1] - starts[i]
        rows[i] = range(begin, end)
    return rows


def _row_start(drafted: Sequence[Proposal]) -> list[int]:
    return [0, *accumulate(len(d.token_ids) + 1 for d in drafted)]


def _compare(samples: list[int], first: int, draft: list[int]) -> Decided:
    """Accept while the draft equals the target's samples; the sample itself follows."""
    num_accepted = 0
    for token in draft:
        if samples[first + num_accepted] != token:
            break
        num_accepted += 1
    return Decided(
        token_ids=samples[first : first + num_accepted + 1],
        num_accepted=num_accepted,
        num_decided=min(num_accepted + 1, len(draft)),
        evidence=[float(n < num_accepted) for n in range(len(draft))],
        evidence_all=[float(samples[first + n] == token) for n, token in enumerate(draft)],
    )


_MOST_ROWS = 64
"""Limit of logits rows at a time: one may be half a megabyte."""


class PromptScores:
    """Computes the prompts of requests that ask for it, in passes of their own."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._found: dict[str, list[TokenLogprob]] = {}

    @property
    def num_requests(self) -> int:
        """Requests with scores that were not taken yet."""
        return len(self._found)

    def wants(self, text: TokenBuffer) -> bool:
        """Return True if a request's prompt is still to be scored, or is being scored."""
        request = text.request
        return request.sampling.num_prompt_logprobs is not None and (
            text.length == request.prompt_len
        )

    def read(
        self, text: TokenBuffer, start: int, end: int, tables: IntArray, slots: IntArray | None
    ) -> None:
        """Compute known tokens start..end - 1, before which all are computed.

        tables: [1, blocks], of the request; slots: likewise (`RaggedBatch`)."""
        request = text.request
        num_top = request.sampling.num_prompt_logprobs
        assert num_top is not None
        found = self._found.setdefault(request.id, [])
        del found[start:]  # from before a preemption
        for begin in range(start, end, _MOST_ROWS):
            stop = min(end, begin + _MOST_ROWS)
            writer = BatchWriter()
            writer.add(begin, text.tokens(begin, stop), stop - begin)
            # The step itself computes the last row once more.
            batch = replace(writer.batch(tables, slots), again=True)
            logits = self._runner.forward(batch)
            following = text.tokens(begin + 1, min(stop + 1, request.prompt_len))
            if following:
                found += token_logprobs(logits[: len(following)], following, num_top)

    def pop(self, request_id: str) -> tuple[TokenLogprob, ...]:
        """Return the scores of a request that samples, once."""
        return tuple(self._found.pop(request_id, ()))

    def release_request(self, request_id: str) -> None:
        """Drop the state of a request."""
        self._found.pop(request_id, None)
