"""Configurations that are read without transformers, against what it makes of them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.small_models import CASES, SHAPE

from penstock.engine.models import config as config_module
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.ordinary import ordinary_config
from penstock.zoo.registry import DEFAULT_TARGET, model_path

_QWEN_2_5: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As its publisher wrote it."""

_LLAMA: dict[str, Any] = {
    **{k: v for k, v in _QWEN_2_5.items() if "window" not in k},
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}
_QWEN_3 = {
    **_QWEN_2_5,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 64,
}
_CONTENTS = {"llama": _LLAMA, "qwen2": _QWEN_2_5, "qwen3": _QWEN_3}

_CHANGES: list[dict[str, Any]] = [
    {},
    {"attention_bias": True},
    {"head_dim": 64},
    {"eos_token_id": [1, 2]},
    {"eos_token_id": None},
    {"dtype": "float32"},
    {"rope_theta": 10000},
    {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    {"layer_types": ["full_attention"] * 28},
    {"partial_rotary_factor": 1.0},
    {"rope_scaling": None},
]

_OTHERS: list[dict[str, Any]] = [
    {"hidden_size": "1536"},
    {"hidden_size": 1537},
    {"hidden_size": None},
    {"num_attention_heads": 0},
    {"num_key_value_heads": None},
    {"attention_bias": "false"},
    {"eos_token_id": "2"},
    {"eos_token_id": ["2"]},
    {"rms_norm_eps": "1e-6"},
    {"dtype": "float64"},
    {"use_sliding_window": True},
    {"layer_types": ["sliding_attention"] * 28},
    {"partial_rotary_factor": 0.5},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}},
    {"original_max_position_embeddings": 4096},
    {"is_causal": False},
]


def read(folder: Path, content: dict[str, Any]) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(content))
    return DecoderConfig.from_pretrained(folder)


def by_transformers(monkeypatch: pytest.MonkeyPatch, act: Callable[[], DecoderConfig]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(config_module, "ordinary_config", lambda architecture, content: None)
        return act()


@pytest.mark.parametrize("content", _CONTENTS.values(), ids=_CONTENTS)
@pytest.mark.parametrize("changes", _CHANGES, ids=str)
def test_ordinary_ones_are_as_transformers_says(tmp_path, monkeypatch, content, changes) -> None:
    whole = content | changes
    assert ordinary_config(whole["architectures"][0], whole) is not None
    ours = read(tmp_path, whole)
    assert ours == by_transformers(monkeypatch, lambda: read(tmp_path, whole))


@pytest.mark.parametrize("content", _CONTENTS.values(), ids=_CONTENTS)
@pytest.mark.parametrize("changes", _OTHERS, ids=str)
def test_others_are_left_to_transformers(content: dict[str, Any], changes: Any) -> None:
    whole = content | changes
    assert ordinary_config(whole["architectures"][0], whole) is None


def test_a_head_of_another_size_than_qwen3s_default_is_said(tmp_path: Path) -> None:
    content = {k: v for k, v in _QWEN_3.items() if k != "head_dim"}
    assert ordinary_config("Qwen3ForCausalLM", content) is None
    assert read(tmp_path, content).head_dim == 128


@pytest.mark.parametrize("case", CASES)
def test_every_architecture(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As transformers itself writes its configurations."""
    kind = CASES[case]
    kind.config(**SHAPE | kind.changes).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["architectures"] = [kind.model.__name__]
    theirs = by_transformers(monkeypatch, lambda: read(tmp_path, content))
    assert read(tmp_path, content) == theirs


@pytest.mark.slow
def test_the_bundled_family_needs_no_transformers() -> None:
    """Nor does the engine before it knows its models."""
    path = str(model_path(DEFAULT_TARGET))
    code = (
        "import sys, pathlib, penstock.engine.build\n"
        "from penstock.engine.models.config import DecoderConfig\n"
        "from penstock.engine.models.rope_table import RopeTable\n"
        f"found = DecoderConfig.from_pretrained(pathlib.Path({path!r}))\n"
        "RopeTable.build(found, 8)\n"
        "print('transformers' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "False"
