"""Embeddings: those of transformers, the same to the bit in any batch, chunk and memory."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.small_family import VOCAB
from tests.engine.small_gguf import save_gguf
from tests.engine.small_models import CASES, Checkpoint, write_checkpoint
from tests.engine.test_exactness import make_loop, make_requests
from tests.engine.test_mtp import load as load_with_head
from tests.products import slow
from transformers import PreTrainedModel

from penstock.config import EngineConfig
from penstock.core.loop import Loop
from penstock.core.types import (
    Arrive,
    Cancel,
    FinishReason,
    Output,
    Pooling,
    Request,
    SamplingParams,
)
from penstock.engine.build import Engine, load_engine
from penstock.engine.executor import RunnerExecutor
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.formats import open_checkpoint

GGUF_TYPES = {"mean": 1, "cls": 2, "last": 3}
MODES = {
    "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
}  # fmt: skip
CLOSE = 0.9999
LENGTHS = (1, 3, 17, 40, 90, 151)
_ids = itertools.count()


def name_pooling(folder: Path, *modes: str, kinds: str = "Transformer Pooling Normalize") -> None:
    """Write what sentence-transformers writes beside a model."""
    paths = [f"{i}_{kind}" if i else "" for i, kind in enumerate(kinds.split())]
    types = [f"sentence_transformers.models.{kind}" for kind in kinds.split()]
    parts = [{"path": p, "type": t} for p, t in zip(paths, types, strict=True)]
    (folder / "modules.json").write_text(json.dumps(parts))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    content = dict.fromkeys(MODES.values(), False) | dict.fromkeys(modes, True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(content))


def write(root: Path, kind: str, pooling: Pooling, case: str = "qwen3") -> Checkpoint:
    """A model whose file names its pooling."""
    saved = write_checkpoint(root / "model", CASES[case])
    if kind == "gguf":
        return save_gguf(root / "m.gguf", saved.model, pooling_type=GGUF_TYPES[pooling])
    name_pooling(root / "model", MODES[pooling])
    return saved


def load(path: Path, backend: str = "native") -> Engine:
    given = {"dtype": "float32", "backend": backend, "kv_tokens": 4096, "num_threads": 1}
    return load_engine(EngineConfig(target=path, **given), calibrated=False)


def prompts(vocab: int = 89) -> list[list[int]]:
    return [np.random.default_rng(n).integers(vocab, size=n).tolist() for n in LENGTHS]


def asked(token_ids: Sequence[int], pooling: Pooling) -> Request:
    return Request(
        id=f"e{next(_ids)}",
        prompt_len=len(token_ids),
        max_tokens=0,
        prompt_token_ids=tuple(token_ids),
        drafter="none",
        pooling=pooling,
    )


def mixed(texts: Sequence[Request], others: Sequence[Request]) -> list[Request]:
    return [r for pair in zip(texts, others, strict=True) for r in pair]


def outputs(loop: Loop, requests: Sequence[Request]) -> dict[str, list[Output]]:
    """Run requests until all have ended and their memory is free; outputs by request."""
    found: dict[str, list[Output]] = {r.id: [] for r in requests}
    events = [Arrive(r) for r in requests]
    while events or loop.scheduler.num_unfinished or loop.num_plans_in_flight:
        for output in loop.turn(events).outputs:
            assert output.error is None
            found[output.request_id].append(output)
        events = []
    loop.turn([])
    assert loop.scheduler.pool.num_used_blocks == 0
    return found


def embedded(loop: Loop, requests: Sequence[Request]) -> list[bytes]:
    found = outputs(loop, requests)
    for (output,) in (found[r.id] for r in requests if r.pooling is not None):
        assert output.finish_reason is FinishReason.STOP
        assert output.num_tokens == 0
    return [found[r.id][0].embedding for r in requests if r.pooling is not None]


def loop_of(engine: Engine, **settings: Any) -> Loop:
    return make_loop(engine, **{"kv_tokens": 4096} | settings)


@torch.inference_mode()
def expected(model: PreTrainedModel, token_ids: Sequence[int], pooling: Pooling) -> torch.Tensor:
    states = model.model(input_ids=torch.tensor([token_ids])).last_hidden_state[0].double()
    return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]


def cosine(own: bytes, other: torch.Tensor) -> float:
    vector = torch.from_numpy(np.frombuffer(own, np.float32).copy()).double()
    return torch.cosine_similarity(vector, other, dim=0).item()


def first_fast_of(num: int, *cases: tuple[str, ...]) -> list[Any]:
    slow_ones = [pytest.param(*case, marks=pytest.mark.slow) for case in cases[num:]]
    return [*cases[:num], *slow_ones]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(write(tmp_path_factory.mktemp("m"), "gguf", "last").path)


@pytest.mark.parametrize(
    ("kind", "pooling", "backend"),
    first_fast_of(
        2,
        ("folder", "last", "native"),
        ("gguf", "mean", "native"),
        ("folder", "mean", "eager"),
        ("gguf", "last", "eager"),
        ("folder", "cls", "native"),
    ),
)
def test_those_of_transformers(tmp_path: Path, kind: str, pooling: Pooling, backend: str) -> None:
    saved = write(tmp_path, kind, pooling)
    engine = load(saved.path, backend)
    assert (engine.pooling, engine.generates) == (pooling, False)
    made = embedded(loop_of(engine), [asked(ids, pooling) for ids in prompts()])
    for own, ids in zip(made, prompts(), strict=True):
        assert len(own) == 4 * 48
        assert cosine(own, expected(saved.model, ids, pooling)) >= CLOSE
    other: Pooling = "mean" if pooling == "last" else "last"
    wrong = [expected(saved.model, ids, other) for ids in prompts()[1:]]
    assert max(map(cosine, made[1:], wrong)) < CLOSE, "another pooling would be seen"


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_a_batch_changes_no_bit(engine: Engine, pooling: Pooling) -> None:
    """Together, in chunks, and in little memory beside requests that make text."""
    alone = [embedded(loop_of(engine), [asked(ids, pooling)])[0] for ids in prompts()]
    assert len(set(alone)) == len(alone)
    for settings in ({}, {"max_num_batched_tokens": 33}):
        requests = [asked(ids, pooling) for ids in prompts()]
        assert embedded(loop_of(engine, **settings), requests) == alone
    loop = loop_of(engine, kv_tokens=12 * 16, max_num_batched_tokens=37)
    texts = [
        dataclasses.replace(r, prompt_token_ids=tuple(t % 89 for t in r.prompt_token_ids or ()))
        for r in make_requests(SamplingParams(temperature=0.0), 6, "none", tokens=60)
    ]
    assert embedded(loop, mixed(texts, [asked(ids, pooling) for ids in prompts()])) == alone
    assert loop.scheduler.table.counters.preemptions > 0


def test_a_cached_prefix(engine: Engine) -> None:
    """The last token's state needs no other anew; a mean needs all."""
    ids = prompts()[-1]
    (alone,), (mean,) = (embedded(loop_of(engine), [asked(ids, x)]) for x in ("last", "mean"))
    loop = loop_of(engine)
    for pooling, own, num in (("last", alone, 0), ("last", alone, 144), ("mean", mean, 0)):
        request = asked(ids, pooling)
        (output,) = outputs(loop, [request])[request.id]
        assert (output.embedding, output.num_cached_tokens) == (own, num)


def test_cancelled_between_two_chunks(engine: Engine) -> None:
    loop, gone = loop_of(engine, max_num_batched_tokens=33), asked(prompts()[-1], "mean")
    loop.turn([Arrive(gone)])
    loop.turn([])
    (output,) = loop.turn([Cancel(gone.id)]).outputs
    assert output.finish_reason is FinishReason.CANCELLED
    while loop.num_plans_in_flight:
        loop.turn([])
    loop.turn([])
    assert loop.scheduler.pool.num_used_blocks == 0
    assert isinstance(engine.executor, RunnerExecutor)
    assert not engine.executor._pools._sums


def test_what_is_not_finite_is_an_error(engine: Engine, monkeypatch) -> None:
    forward = engine.executor.target.forward

    def broken(batch: Any) -> torch.Tensor:
        logits = forward(batch)
        batch.carry.after[0, 0] = torch.nan
        return logits

    monkeypatch.setattr(engine.executor.target, "forward", broken)
    (output,) = loop_of(engine).turn([Arrive(asked(prompts()[1], "last"))]).outputs
    assert output.finish_reason is FinishReason.ERROR
    assert "not finite" in str(output.error)


@pytest.mark.parametrize("kind", ["qwen3-5", *slow(["assistant", "eagle3"])])
def test_a_target_with_a_head(tmp_path: Path, kind: str) -> None:
    """In steps with drafts of the head, which has states of its own. EAGLE-3's are of other
    layers."""
    loaded = load_with_head(tmp_path, kind)
    engine = loaded.engine
    assert engine.pooling == (None if kind == "eagle3" else "last")
    assert engine.generates
    if engine.pooling is None:
        return
    ids = prompts(VOCAB)
    texts = make_requests(SamplingParams(temperature=0.0), 6, "mtp")
    both = mixed(texts, [asked(x, "mean") for x in ids])
    found = outputs(make_loop(engine, max_num_batched_tokens=40), both)
    model = loaded.reference._model
    for request, token_ids in zip(both[1::2], ids, strict=True):
        assert cosine(found[request.id][0].embedding, expected(model, token_ids, "mean")) >= CLOSE
    drafted = [o for r in texts for o in found[r.id] if o.num_proposed]
    assert "mtp" in {o.drafter for o in drafted}


# --- files ----------------------------------------------------------------------------------------


def flat(folder: Path) -> None:
    """As Qwen3-Embedding's: names without `model.`, and no output matrix."""
    tensors = load_file(folder / "model.safetensors")
    own = {n.removeprefix("model."): t for n, t in tensors.items() if n != "lm_head.weight"}
    save_file(own, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaModel"])
def test_folders_without_an_output_matrix(tmp_path: Path, architecture: str) -> None:
    """Both as they are published; not tied, as their config.json says."""
    saved = write_checkpoint(tmp_path / "m", CASES["llama"])
    flat(saved.path)
    config = json.loads((saved.path / "config.json").read_text())
    (saved.path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    if architecture == "LlamaForCausalLM":
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
            load(saved.path)
        name_pooling(saved.path, MODES["last"])
    engine = load(saved.path)
    assert (engine.pooling, engine.generates) == ("last", False)
    ids = prompts()[2]
    (made,) = embedded(loop_of(engine), [asked(ids, "last")])
    assert cosine(made, expected(saved.model, ids, "last")) >= CLOSE


def test_other_files(tmp_path: Path) -> None:
    saved = write_checkpoint(tmp_path / "m", CASES["qwen3"])
    folder = saved.path
    assert open_checkpoint(folder).pooling() is None
    for number in (0, 4):
        file = save_gguf(tmp_path / f"{number}.gguf", saved.model, pooling_type=number).path
        assert open_checkpoint(file).pooling() is None
    name_pooling(folder, "pooling_mode_mean_sqrt_len_tokens")
    assert open_checkpoint(folder).pooling() == "mean"
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    assert open_checkpoint(folder).pooling() == "last"
    for modes in (["pooling_mode_max_tokens"], list(MODES.values()), []):
        name_pooling(folder, *modes)
        with pytest.raises(CheckpointError, match=r"pools by .*; allowed: one of lasttoken"):
            open_checkpoint(folder).pooling()
    name_pooling(folder, MODES["mean"], kinds="Transformer Pooling Dense")
    with pytest.raises(CheckpointError, match=r"modules\.json: Dense is not computed"):
        load(folder)
    (folder / "modules.json").write_text("{}")
    assert open_checkpoint(folder).pooling() == "last"
    (folder / "modules.json").write_text('["x"]')
    with pytest.raises(CheckpointError, match="not a list of modules"):
        open_checkpoint(folder).pooling()
