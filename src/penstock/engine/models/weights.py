"""Weights of a checkpoint, under common names of all backends."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from penstock.engine.models.checkpoint import LM_HEAD, Tensors
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.formats import open_checkpoint
from penstock.engine.models.quantized import QuantizedMatrix, Stored, Weight
from penstock.engine.models.weight_specs import (
    EMBEDDINGS,
    WeightSpec,
    head_specs,
    lm_head_spec,
    weight_specs,
)

_log = logging.getLogger(__name__)


def load_weights(
    path: Path, config: DecoderConfig, dtype: torch.dtype | None = None, head: Path | None = None
) -> dict[str, torch.Tensor]:
    """Read a checkpoint's tensors on the CPU. head: the checkpoint that holds the model's head.

    Returns the contiguous tensors of `weight_specs`, in `dtype` (default: config.dtype), norms and
    routers in float32. Query and key rows of partly rotated heads lie as in `Rope.spread_pairs`.
    With tied embeddings there is no "lm_head", except where the checkpoint has a different head, as
    in transformers. Raises CheckpointError where a file is missing or truncated, or a tensor is
    missing, misshapen or of an unsupported type."""
    with opened(path, config, head) as found:
        return {
            spec.name: _assemble(tensors, spec, dtype or config.dtype) for tensors, spec in found
        }


@contextmanager
def stored_weights(
    path: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    kinds: Collection[str],
    head: Path | None = None,
) -> Iterator[dict[str, Weight]]:
    """Yield `load_weights`, but with matrices of the block formats `kinds` as stored.

    They stay in the mapped file, except for reordered rows; the pages read are released at the end.
    A tensor stacked from several of which one is quantised is a tuple. Other formats are widened,
    with a warning, and so are experts' matrices that do not share one. Raises as
    `load_weights`."""
    widened: set[str] = set()
    with opened(path, config, head) as specs:
        found = {s.name: _stored(tensors, s, dtype, kinds, widened) for tensors, s in specs}
        if widened:
            _log.warning(
                "%s: %s matrices are widened to %s, as the kernels do not read them",
                path,
                ", ".join(sorted(widened)),
                str(dtype).removeprefix("torch."),
            )
        yield found


@contextmanager
def opened(
    path: Path, config: DecoderConfig, head: Path | None
) -> Iterator[list[tuple[Tensors, WeightSpec]]]:
    """Yield all specs of a model and its head, checked, each with the tensors it is read from.

    Raises CheckpointError."""
    with ExitStack() as stack:
        own = other = stack.enter_context(open_checkpoint(path).tensors())
        found = [(own, spec) for spec in specs_in(own, config)]
        if config.head is not None and head not in (None, path):
            other = stack.enter_context(open_checkpoint(head).tensors())
        yield found + [(other, spec) for spec in _checked(other, head_specs(config))]


def _checked(tensors: Tensors, specs: Iterable[WeightSpec]) -> Iterator[WeightSpec]:
    """Yield specs whose tensors are there. Raises CheckpointError."""
    # Checked one by one: a description may ask for any number of layers.
    for spec in specs:
        for source in spec.sources:
            tensors.check(*source)
        yield spec


def specs_in(tensors: Tensors, config: DecoderConfig) -> list[WeightSpec]:
    """Return `weight_specs`, with a separate head if the checkpoint has one after all.

    All tensors are checked. Raises CheckpointError."""
    specs = list(_checked(tensors, weight_specs(config)))
    if config.tie_word_embeddings and _has_own_head(tensors, config):
        specs.append(lm_head_spec(config))
    return specs


def _has_own_head(tensors: Tensors, config: DecoderConfig) -> bool:
    """Return whether there is a head that differs from the embeddings."""
    if not tensors.has(LM_HEAD):
        return False
    tensors.check(LM_HEAD, (config.vocab_size, config.hidden_size))
    head, embeddings = (torch.empty(config.vocab_size, config.hidden_size) for _ in range(2))
    tensors.read(LM_HEAD, head)
    tensors.read(EMBEDDINGS, embeddings)
    return not torch.equal(head, embeddings)


def _assemble(tensors: Tensors, spec: WeightSpec, dtype: torch.dtype) -> torch.Tensor:
    dtype = torch.float32 if spec.stays_float32 else dtype
    out = torch.empty(spec.shape, dtype=torch.int64 if spec.name.endswith(".d2t") else dtype)
    rows = out.view(-1, *spec.sources[0][1][1:])
    start = 0
    for index, (name, shape) in enumerate(spec.sources):
        order = spec.orders[index] if spec.orders else None
        own = rows[start : start + (shape[0] if order is None else len(order))]
        if order is None:
            tensors.read(name, own)
        else:
            every = own.new_empty(shape)
            tensors.read(name, every)
            torch.index_select(every, 0, order, out=own)
        start += len(own)
    out = out if spec.offset == 0 else out.add_(spec.offset)
    return out if spec.factor == 1 else out.mul_(spec.factor)


def _stored(
    tensors: Tensors,
    spec: WeightSpec,
    dtype: torch.dtype,
    kinds: Collection[str],
    widened: set[str],
) -> Weight:
    """widened: receives the formats that the kernels do not read."""
    plain = len(spec.shape) > 1 and not spec.stays_float32
    found = [tensors.quantized(*source) for source in spec.sources] if plain else []
    widened.update(part.kind for part in found if part is not None and part.kind not in kinds)
    parts = [part if part is not None and part.kind in kinds else None for part in found]
    if len(spec.shape) > 2:
        _widen_mixed(parts, len(parts) // spec.shape[0], widened)
    if not any(parts):
        return _assemble(tensors, spec, dtype)
    stored: list[Stored] = []
    orders = spec.orders or [None] * len(parts)
    for (name, shape), part, order in zip(spec.sources, parts, orders, strict=True):
        if part is None:
            values = torch.empty(shape, dtype=dtype)
            tensors.read(name, values)
            stored.append(values if order is None else values[order])
        else:
            rows = part.rows if order is None else len(order)
            data = part.data if order is None else part.data[order]
            stored.append(replace(part, rows=rows, data=data))
    return tuple(stored) if len(stored) > 1 else stored[0]


def _widen_mixed(
    parts: list[QuantizedMatrix | None], num_per_expert: int, widened: set[str]
) -> None:
    """Set to None the matrices of the same use whose format is not the same in all experts.

    The kernels read one matrix of all experts, in one format."""
    for use in range(num_per_expert):
        kinds = {"float" if part is None else part.kind for part in parts[use::num_per_expert]}
        if len(kinds) > 1:
            widened.add(" with ".join(sorted(kinds)))
            parts[use::num_per_expert] = [None] * (len(parts) // num_per_expert)
