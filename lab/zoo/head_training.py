"""Training of heads along text, over several chained drafts, on the target's distributions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from lab.bench.perplexity import texts
from lab.zoo.data import Ids, Mixture, answer_mask, batch_of, fill
from lab.zoo.distil import KEPT, as_tensor, distil_loss, divergences
from lab.zoo.heads import Head, embed, read, save_head
from lab.zoo.recipe import HeadSpec
from lab.zoo.run import Run, run_to_end
from penstock.config import ConfigError
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.dtypes import resolve_dtype
from penstock.engine.models.formats import open_checkpoint
from penstock.engine.models.variant import LLAMA
from penstock.engine.models.weight_specs import weight_specs
from penstock.engine.models.weights import load_weights
from penstock.engine.tokenizer import load_tokenizer

COMPARED = 8192
"""The commonest tokens of a large vocabulary, of which a head learns the target's distribution."""

FIRST_ROWS = 8
"""Of each source, from which a head's first weights are fitted."""

HELD_ROWS = 2
"""Of each source, on which a head is measured while it is trained."""


class HeadRun(Run):
    """The training of a head beside its target, which stays as it is.

    train, held: rows of text by source"""

    model: Head

    def __init__(
        self,
        spec: HeadSpec,
        target: LlamaForCausalLM,
        train: dict[str, Ids],
        held: dict[str, Ids],
        folder: Path,
    ) -> None:
        self.spec, self.target, self.train, self.held = spec, target, train, held
        tokens = self._commonest(spec.tokens or target.config.vocab_size)
        self._lm_head = target.lm_head.weight[tokens].detach().float()
        config = copy.deepcopy(target.config)
        config.intermediate_size = spec.ffn or config.intermediate_size
        head = Head(config, spec.reads, tokens if spec.reads else None)
        head.begin_like(target)
        super().__init__(spec, head, folder)
        mixture = Mixture({name: float(len(ids)) for name, ids in train.items()})
        self.plan = mixture.plan(spec.steps, spec.rows_per_step, seed=0)

    def _drafted(self, ids: Ids) -> Tensor:
        """[rows, ROW] whether the token behind this one is drafted."""
        mask = torch.from_numpy(answer_mask(ids))
        if self.spec.answers_alone:
            return mask
        mask[:, :-1] = True
        return mask

    def _starts(self, keep: Tensor) -> Tensor:
        """[rows, ROW] where a chain can start: its first token is the target's own, too."""
        starts = keep & keep.roll(1, dims=1)
        starts[:, 0] = False
        return starts

    def _commonest(self, num: int) -> Tensor:
        """The numbers of the `num` commonest drafted tokens, ascending."""
        ids = np.concatenate([*self.train.values()])
        drafted = torch.from_numpy(ids[:, 1:][self._drafted(ids)[:, :-1].numpy()].astype(np.int64))
        counts = torch.bincount(drafted, minlength=self.target.config.vocab_size)
        return counts.sort(descending=True, stable=True).indices[:num].sort().values

    def resume(self) -> bool:
        """Continue from the checkpoint; without one begin with what some rows tell."""
        if super().resume():
            return True
        ids = np.concatenate([ids[:FIRST_ROWS] for ids in self.train.values()])
        tokens, places = as_tensor(ids), self._starts(self._drafted(ids))
        parts = [read(self.target, some) for some in torch.split(tokens, HELD_ROWS)]
        states = [torch.cat(state) for state in zip(*parts, strict=True)]
        self.model.fit(embed(self.target, tokens), states, places)
        return False

    def drafts(self, ids: Ids) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Read `ids`, [rows, ROW], and draft from everywhere in it, step by step.

        Yields logits [chains, tokens], whether this draft and all before it are of drafted tokens
        [chains], and the target's likeliest tokens in its place, numbered as the logits, with their
        probabilities [chains, KEPT]."""
        tokens, keep, steps = as_tensor(ids), self._drafted(ids), self.spec.chained
        states = read(self.target, tokens)
        top = functional.linear(states[-1][keep], self._lm_head).softmax(-1).topk(KEPT, dim=-1)
        number = torch.zeros(keep.shape, dtype=torch.int64)
        number[keep] = torch.arange(len(top.indices))
        starts = self._starts(keep)
        starts[:, -steps:] = False
        row, place = starts.nonzero(as_tuple=True)
        own = self.model.lm_head.weight if self.model.reads else self._lm_head
        dtype, is_there = self.target.dtype, torch.ones_like(row, dtype=torch.bool)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            chain = self.model.chain(embed(self.target, tokens), states, starts, steps)
            told = [functional.linear(final, own) for final in chain]
        for step, logits in enumerate(told):
            is_there = is_there & keep[row, place + step]
            at = number[row, place + step]
            yield logits.float(), is_there, top.indices[at], top.values[at]

    def loss(self) -> Tensor:
        """Return the loss of all drafts, each less than the one before it."""
        share = min(0.8, 1.6 * self.step / self.steps)
        losses, weights = [], []
        drafts = self.drafts(batch_of(self.train, self.plan[self.step]))
        for step, (logits, is_there, tokens, probs) in enumerate(drafts):
            logits, tokens, probs = (x[is_there] for x in (logits, tokens, probs))
            weights.append(self.spec.fading**step)
            losses.append(weights[-1] * distil_loss(logits, tokens, probs, share))
        return torch.stack(losses).sum() / sum(weights)

    @torch.no_grad()
    def measured(self) -> dict[str, Any]:
        """On held-back text, by source and chained draft: the share of drafts that are the
        target's likeliest token, all before them too, and the overlap with its distribution."""
        found: dict[str, Any] = {"accepted": {}, "overlap": {}}
        for source, ids in self.held.items():
            accepted, overlaps, right = [], [], torch.tensor(True)
            for logits, is_there, tokens, probs in self.drafts(ids[:HELD_ROWS]):
                right = right & (logits.argmax(-1) == tokens[:, 0])
                accepted.append(round(float(right[is_there].float().mean()), 4))
                apart = divergences(logits[is_there], tokens[is_there], probs[is_there])[1]
                overlaps.append(round(1 - float(apart), 4))
            found["accepted"][source], found["overlap"][source] = accepted, overlaps
        return found

    def finish(self, folder: Path, target: dict[str, Any]) -> None:
        """Write the trained head; `target` is the target's config.json."""
        save_head(folder, self.model.checkpoint(), self.model.description(target))
        self.tell_done()


def _dense(path: Path, config: DecoderConfig, shape: LlamaConfig) -> LlamaForCausalLM:
    """A folder's or a GGUF file's model for transformers, with no matrix quantised."""
    dtype = resolve_dtype("auto", torch.device("cpu"))
    weights, state = load_weights(path, config, dtype), dict[str, Tensor]()
    for spec in weight_specs(config):
        rows = [source_shape[0] for _, source_shape in spec.sources]
        parts = torch.split(weights[spec.name], rows)
        state |= {name: part for (name, _), part in zip(spec.sources, parts, strict=True)}
    state["lm_head.weight"] = weights.get("lm_head", weights["embed_tokens"])
    model: LlamaForCausalLM = LlamaForCausalLM(shape)
    model.to(dtype=dtype)  # type: ignore[call-arg]
    model.load_state_dict(state)
    return model


def train_head(target: Path, out: Path, steps: int, threads: int | None = None) -> list[float]:
    """Train an MTP head beside any Llama and write it to `out`; an interrupted run continues.

    It learns the target's distributions along Python's own files and reference
    (`texts` of `lab.bench.perplexity`), of which the last rows are held back. Its checkpoints are
    in `out`, too. Returns the shares of drafts in a row that are right on the held-back rows.

    Raises: ConfigError, CheckpointError."""
    config = DecoderConfig.from_pretrained(target)
    if config.variant != LLAMA:
        raise ConfigError(f"{target}: heads are trained for Llamas; this is {config.architecture}")
    torch.set_num_threads(threads or torch.get_num_threads())
    content = open_checkpoint(target).description().content
    model = _dense(target, config, LlamaConfig(**content))
    spec = HeadSpec(out.name, "", "", steps, tokens=COMPARED, answers_alone=False)
    tokenizer = load_tokenizer(target)
    pieces = (tokenizer.encode(text, add_special_tokens=False) for text in texts())
    rows = fill(pieces, steps * spec.rows_per_step + HELD_ROWS)
    parts = {"text": rows[:-HELD_ROWS]}, {"text": rows[-HELD_ROWS:]}
    run = HeadRun(spec, model.train(False), *parts, out)
    run.resume()
    run_to_end(run, checkpoint_s=120.0, evaluate_every=steps)
    run.finish(out, content)
    accepted: list[float] = run.history[-1]["accepted"]["text"]
    return accepted
