"""Which drafter a draft server runs, loaded, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.engine.drafters.load import load_model
from penstock.engine.drafters.proposers import LookupProposer
from penstock.engine.drafters.sessions import DraftingSessions, Proposer, TopWeights
from penstock.engine.models.config import DecoderConfig
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.transport.checks import PROTOCOL_VERSION
from penstock.transport.v1 import drafting_pb2 as pb
from penstock.transport.wire import WEIGHT_SUM, truncate

_NUM_WEIGHTS = 32
"""Tokens of a truncated distribution: 64 would double a draft's bytes for 0.001 of acceptance."""


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """model: a checkpoint folder; its tokenizer is what texts are read with. uses_model: False for
    n-gram look-up, which needs the tokenizer alone."""

    name: str
    model: Path
    uses_model: bool = True
    dtype: str = "auto"
    max_draft_tokens: int = 16
    takes_assignments: bool = True


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    sessions: DraftingSessions
    hello: pb.Hello
    tokenizer: Tokenizer


def load_drafter(options: DrafterOptions) -> LoadedDrafter:
    """Raises: CheckpointError for a folder that cannot be used."""
    tokenizer = load_tokenizer(options.model)
    proposer: Proposer
    if options.uses_model:
        proposer = load_model(options.model, options.dtype, quantise)
    else:
        vocab_size = DecoderConfig.from_pretrained(options.model).vocab_size
        proposer = LookupProposer(vocab_size, WEIGHT_SUM)
    hello = pb.Hello(
        protocol_version=PROTOCOL_VERSION,
        tokenizer_digest=tokenizer.digest,
        model_name=options.name,
        max_draft_tokens=options.max_draft_tokens,
        takes_assignments=options.takes_assignments,
    )
    sessions = DraftingSessions(proposer, options.max_draft_tokens)
    return LoadedDrafter(sessions, hello, tokenizer)


def quantise(draft_probs: torch.Tensor) -> list[TopWeights]:
    """What is sent of distributions [rows, V]; tokens are sampled from this, not from them."""
    token_ids, weights = truncate(draft_probs.cpu().numpy(), _NUM_WEIGHTS)
    rows = []
    for ids, row in zip(token_ids, weights, strict=True):
        kept = row > 0
        rows.append(TopWeights(tuple(ids[kept].tolist()), tuple(row[kept].tolist())))
    return rows
