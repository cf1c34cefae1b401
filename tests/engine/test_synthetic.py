"""Random weights and made-up acceptance: for measuring, marked, and nowhere else."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from penstock.cli import app
from penstock.config import ConfigError, EngineConfig, parse_config
from penstock.core.types import NO_DRAFTER, TARGET, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.measure import ProfileGrid, measure
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.random import random_weights, shape, shape_names
from penstock.engine.models.weights import weight_specs
from penstock.engine.sampling import SamplingRows
from penstock.engine.synthetic import SyntheticAcceptance
from penstock.serving.offline import complete

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
PUBLISHED = {
    "llama-2-7b": 6738.4,
    "llama-3.1-8b": 8030.3,
    "qwen3-0.6b": 596.0,
    "qwen3-1.7b": 1720.6,
    "qwen3-14b": 14768.3,
    "llama-68m": 68.0,
    "llama-160m": 162.4,
    "llama-265m": 266.9,
    "llama-616m": 618.6,
    "llama-1.1b": 1100.0,
}
"""Millions of parameters."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def make_engine(folder: Path, acceptance: float | None, k: int = 3) -> Engine:
    config = EngineConfig(
        target=folder,
        drafters={"d": str(folder)},
        dtype="float32",
        backend="graphs",
        kv_tokens=2048,
        num_threads=1,
        allocation={"name": "fixed", "options": {"k": k}},
    )
    shapes = {TARGET: shape(str(folder)), "d": shape(str(folder))}
    return load_engine(config, shapes, acceptance, calibrated=False)


def accepted_share(engine: Engine) -> tuple[int, int]:
    """Draft tokens accepted, and those decided on: up to and including the first rejection."""
    requests = [
        Request(
            id=f"r{i}",
            prompt_len=5,
            prompt_token_ids=(5, 6, 7, 8, i),
            max_tokens=120,
            sampling=SamplingParams(temperature=0.0, seed=i),
            drafter="d",
        )
        for i in range(8)
    ]
    decided = accepted = 0

    def watch(output: object) -> None:
        nonlocal decided, accepted
        accepted += output.num_accepted  # type: ignore[attr-defined]
        decided += min(output.num_accepted + 1, output.num_proposed)  # type: ignore[attr-defined]

    complete(engine.loop, requests, 8, watch)
    return accepted, decided


def test_shapes_have_the_published_sizes() -> None:
    assert shape_names() == list(PUBLISHED)
    for name, millions in PUBLISHED.items():
        num = sum(math.prod(spec.shape) for spec in weight_specs(shape(name)))
        assert num / 1e6 == pytest.approx(millions, abs=0.1)


def test_another_name_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"'gpt' is neither a checkpoint .*; known are llama-2"
    ):
        shape("gpt")


def test_random_weights_are_those_of_a_checkpoint(folder: Path) -> None:
    config = shape(str(folder))
    weights = random_weights(config, torch.bfloat16, torch.device("cpu"))
    assert {n: tuple(w.shape) for n, w in weights.items()} == {
        s.name: s.shape for s in weight_specs(config)
    }
    assert float(weights["layers.0.o"].float().std()) == pytest.approx(32**-0.5, rel=0.1)


@pytest.mark.parametrize("probability", [0.0, 0.7, 1.0])
def test_drafts_are_accepted_with_the_probability(folder: Path, probability: float) -> None:
    accepted, decided = accepted_share(make_engine(folder, probability))
    assert decided > 200
    spread = 4 * math.sqrt(probability * (1 - probability) / decided)
    assert abs(accepted / decided - probability) <= spread


def test_negative_control_random_drafters_are_not_right_by_themselves(folder: Path) -> None:
    """Target and drafter have the same weights here, and so would always agree."""
    accepted, decided = accepted_share(make_engine(folder, None))
    assert accepted == decided
    accepted, decided = accepted_share(make_engine(folder, 0.5))
    assert accepted < 0.7 * decided


def test_recorded_and_other_steps_make_up_the_same() -> None:
    synthetic = SyntheticAcceptance(0.6, vocab=50)
    rows = SamplingRows(
        np.zeros(64), np.ones(64), np.zeros(64, np.int64), np.arange(64, dtype=np.uint64)
    )
    positions = np.arange(64) + 7
    logits = torch.zeros(64, 80)
    truth = synthetic.samples(drafts=False)(logits, rows, positions)
    guesses = synthetic.samples(drafts=True)(logits, rows, positions)
    assert int(truth.max()) < 50
    assert 20 < int((truth == guesses).sum()) < 55


def test_output_without_drafts_is_the_same(folder: Path) -> None:
    texts = []
    for drafter in (NO_DRAFTER, "d"):
        requests = [
            Request(
                id=f"q{i}",
                prompt_len=20 + i,
                prompt_token_ids=tuple(range(3, 23 + i)),
                max_tokens=30,
                sampling=SamplingParams(temperature=0.0, seed=i),
                drafter=drafter,
            )
            for i in range(3)
        ]
        done = complete(make_engine(folder, 0.7).loop, requests, 3)
        texts.append([c.token_ids for c in done])
    assert texts[0] == texts[1]


def test_a_profile_is_measured_over_recorded_steps(folder: Path) -> None:
    grid = ProfileGrid(
        batches=(1, 3),
        draft_lengths=(0, 2),
        contexts=(16,),
        chunks=(24,),
        repeats=1,
        together_s=0.001,
    )
    measured = measure(make_engine(folder, None), grid)
    assert len(measured.steps) == 2 * 2 + 2
    assert all(seconds > 0 for _, seconds in measured.steps)
    assert measured.drafters[0].batch_counts == (1, 3)


def test_bench_marks_what_is_made_up(folder: Path) -> None:
    arguments = ["bench", "engine", "--random-weights", str(folder), "--drafter", f"d={folder}"]
    arguments += ["--synthetic-acceptance", "0.7", "--batch", "2", "--repeats", "1"]
    arguments += ["--new-tokens", "8", "--prompt-tokens", "12", "--dtype", "float32"]
    found = CliRunner().invoke(app, [*arguments, "--json"])
    facts = json.loads(found.stdout)
    assert facts["random_weights"] is True
    assert facts["synthetic_acceptance"] == 0.7
    found = CliRunner().invoke(app, arguments)
    assert "RANDOM WEIGHTS, SYNTHETIC ACCEPTANCE 0.7" in " ".join(found.stdout.split())


def test_serve_refuses_made_up_acceptance(folder: Path) -> None:
    found = CliRunner().invoke(app, ["serve", "--synthetic-acceptance", "0.7"])
    assert found.exit_code == 2
    with pytest.raises(ConfigError, match="unknown setting 'synthetic_acceptance'"):
        parse_config({"engine": {"target": folder, "synthetic_acceptance": 0.7}})


def test_a_real_model_is_not_marked(folder: Path) -> None:
    facts = make_engine(folder, None).describe()
    assert facts["random_weights"] is True
    assert "synthetic_acceptance" not in facts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "flash"}, "attention is 'flash'; allowed: auto, decomposed"),
        ({"attention": "flashinfer"}, "attention flashinfer cannot be used"),
        (
            {"kv_dtype": "float8"},
            "kv_dtype float8 is not read by attention packed of backend graphs",
        ),
    ],
)
def test_what_cannot_be_had_is_said(folder: Path, settings: dict[str, str], message: str) -> None:
    config = EngineConfig(
        target=folder, dtype="float32", backend="graphs", kv_tokens=64, **settings
    )
    with pytest.raises(ConfigError, match=message) as error:
        load_engine(config, {TARGET: shape(str(folder))})
    assert "\n" not in str(error.value)
