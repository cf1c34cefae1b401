"""Logits that are not finite end their own request, or a drafter's draft, and nothing else."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tests.engine.small_family import write_family
from tests.engine.small_gguf import QUANTIZED, WIDE, write_gguf
from tests.engine.small_models import CASES
from tests.engine.test_exactness import load, make_loop, make_requests, run
from tests.products import covering

from penstock.core.loop import Loop
from penstock.core.types import Arrive, FinishReason, Output, Request, SamplingParams
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.gguf.file import GgufFile
from penstock.engine.models.quantized import is_finite
from penstock.engine.models.weights import stored_weights
from penstock.engine.native.packing import BLOCK_FORMATS
from penstock.engine.sampling import SamplingRows, sample_coupled

BAD = 7
"""The token whose embedding is not finite: a text is broken from where it has it."""
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(temperature=0.9, verification="coupled"),
    "ratio": SamplingParams(temperature=0.9, verification="ratio"),
    "filtered": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, verification="ratio"),
    "logprobs": SamplingParams(temperature=0.0, num_logprobs=2),
}


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are not looked at when they are loaded."""
    monkeypatch.setattr("penstock.engine.models.folder_tensors.is_finite", lambda values: True)


def poison(folder: Path, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    weights.setdefault("lm_head.weight", embeddings.clone())  # of tied ones every logit would be
    embeddings[BAD] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def requests_of(sampling: SamplingParams, drafter: str) -> list[Request]:
    """Five, of which only the third has the token, in its prompt; none may make it."""
    params = dataclasses.replace(sampling, logit_bias=((BAD, -100.0),))
    made = make_requests(params, 5, drafter)
    for i, request in enumerate(made):
        prompt = [t if t != BAD else 1 for t in request.prompt_token_ids or ()]
        if i == 2:
            prompt[3] = BAD
        made[i] = dataclasses.replace(request, prompt_token_ids=tuple(prompt))
    return made


def outputs_of(loop: Loop, requests: Sequence[Request]) -> list[Output]:
    outputs: list[Output] = []
    events = [Arrive(r) for r in requests]
    for _ in range(1000):
        outputs += loop.turn(events).outputs
        events = []
        if not loop.scheduler.num_unfinished and not loop.num_plans_in_flight:
            return outputs
        if loop.num_plans_in_flight:
            loop.wait(0.01)
    raise AssertionError("requests have not ended")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("backend", "name", "value"),
    covering(["eager", "native"], SAMPLINGS, [float("nan"), float("inf")], strength=1),
)
def test_the_targets_end_their_own_request_alone(tmp_path, backend, name, value) -> None:
    family = write_family(tmp_path)
    whole = load(family, backend)
    asked = requests_of(SAMPLINGS[name], "near")
    expected, _ = run(make_loop(whole), [asked[i] for i in (0, 1, 3, 4)])
    poison(family["target"], value)
    outputs = outputs_of(make_loop(load(family, backend)), asked)
    ends = {o.request_id: o for o in outputs if o.finish_reason is not None}
    failed = ends[asked[2].id]
    assert failed.finish_reason is FinishReason.ERROR
    assert "logits are not finite" in (failed.error or "")
    assert not [o for o in outputs if o.request_id == asked[2].id and o.token_ids]
    for i, tokens in zip((0, 1, 3, 4), expected, strict=True):
        made = [t for o in outputs if o.request_id == asked[i].id for t in o.token_ids]
        assert tuple(made) == tokens


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("backend", "name"),
    covering(["eager", "native"], ["greedy", "coupled", "ratio", "filtered"], strength=1),
)
def test_a_drafters_end_its_draft(tmp_path: Path, backend: str, name: str) -> None:
    family = write_family(tmp_path)
    asked = requests_of(SAMPLINGS[name], "near")
    alone = [dataclasses.replace(r, drafter="none") for r in asked]
    expected, _ = run(make_loop(load(family, backend)), alone)
    poison(family["near"], float("nan"))
    outputs = outputs_of(make_loop(load(family, backend)), asked)
    assert all(o.error is None for o in outputs)
    own = [o for o in outputs if o.request_id == asked[2].id]
    assert sum(o.num_proposed for o in own) == 0
    assert sum(o.num_proposed for o in outputs if o not in own) > 0
    made = {r.id: [t for o in outputs if o.request_id == r.id for t in o.token_ids] for r in asked}
    assert tuple(made[asked[2].id]) == expected[2]
    if SAMPLINGS[name].verification != "ratio":
        assert [tuple(made[r.id]) for r in asked] == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("place", [0, 37, 99])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_samplers_tell_of_every_row(temperature: float, place: int, value: float) -> None:
    from penstock.engine.native.sampler import sample_natively

    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    logits[:, 5] = -torch.inf
    logits[1, place] = value
    rows = SamplingRows.from_params(
        [SamplingParams(temperature=temperature, seed=i) for i in range(3)]
    )
    positions = np.arange(3, dtype=np.int64)
    for sample in (sample_coupled, sample_natively):
        found = sample(logits.clone(), rows, positions).tolist()
        assert [token < 0 for token in found] == [False, True, False]
    none = torch.full((3, 100), -torch.inf)
    for sample in (sample_coupled, sample_natively):
        assert sample(none.clone(), rows, positions).tolist() == [-1, -1, -1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_of_a_folder_are_looked_at(tmp_path: Path, value: float) -> None:
    family = write_family(tmp_path)
    poison(family["target"], value)
    said = f"{family['target']}/model.safetensors: tensor model.embed_tokens.weight has values that"
    for backend in ("eager", "native"):
        with pytest.raises(CheckpointError, match=said):
            load(family, backend)


def test_sums_that_overflow_are_no_fault() -> None:
    assert is_finite(torch.full((8,), 3e38))
    assert is_finite(torch.full((8, 9000), 6e4, dtype=torch.float16))
    assert not is_finite(torch.tensor([3e38, 3e38, -torch.inf]))
    assert not is_finite(torch.tensor([1.0, torch.nan], dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["F32", "F16", *QUANTIZED])
def test_weights_of_a_gguf_file_are_looked_at(tmp_path: Path, kind: str) -> None:
    case = dataclasses.replace(CASES["qwen2"], changes=CASES["qwen2"].changes | WIDE)
    path = write_gguf(tmp_path / "model.gguf", case, kind).path
    config = DecoderConfig.from_pretrained(path)

    def look() -> None:
        with stored_weights(path, config, torch.float32, BLOCK_FORMATS) as weights:
            assert weights

    look()
    entry = GgufFile(path).tensors["blk.1.ffn_down.weight"]
    assert entry.kind == kind
    whole = bytearray(path.read_bytes())
    width = {"F32": 4, "F16": 2}.get(kind) or GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    offset = width - 2 if kind in ("Q6_K", "F32") else 0
    place = entry.start + entry.num_bytes // width // 2 * width + offset
    infinite = {"F32": b"\x80\x7f", "MXFP4": b"\xfd\x00"}.get(kind, b"\x00\x7c")
    whole[place : place + 2] = infinite
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight has values that are not"):
        look()
