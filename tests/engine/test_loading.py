"""Configurations, rotary tables, weights and dtypes; a bad checkpoint is one clear line."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine.small_models import (
    CASES,
    SHAPE,
    Checkpoint,
    Checkpoints,
    Paging,
    write_checkpoint,
)
from transformers import LlamaForCausalLM

from penstock.engine.eager import EagerRunner
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.dtypes import resolve_dtype
from penstock.engine.models.rope_table import RopeTable
from penstock.engine.models.weight_specs import weight_specs
from penstock.engine.models.weights import load_weights

CPU = torch.device("cpu")
Broken = Callable[[str], Path]


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def load(path: Path) -> dict[str, torch.Tensor]:
    return load_weights(path, DecoderConfig.from_pretrained(path))


def refusal(path: Path, *parts: str) -> None:
    """Loading must fail with one line that names the folder and has all `parts`."""
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(path), *parts):
        assert part in message


@pytest.mark.parametrize(
    ("case", "key"), [("qwen2", "attention_bias"), ("qwen2", "mlp_bias"), ("qwen3", "mlp_bias")]
)
def test_keys_that_an_architecture_does_not_have_mean_nothing(broken, case, key) -> None:
    path = broken(case)
    before = DecoderConfig.from_pretrained(path)
    edit_json(path / "config.json", **{key: True})
    assert DecoderConfig.from_pretrained(path) == before
    assert load(path)


def test_eos_of_both_files(broken: Broken) -> None:
    path = broken("llama")
    edit_json(path / "config.json", eos_token_id=[5, 2])
    edit_json(path / "generation_config.json", eos_token_id=[7, 5])
    assert DecoderConfig.from_pretrained(path).eos_token_ids == (5, 2, 7)


@pytest.mark.parametrize("case", ["llama", "llama-llama3", "llama-linear", "llama-yarn"])
def test_both_rope_spellings(broken: Broken, case: str) -> None:
    path = broken(case)
    newer = DecoderConfig.from_pretrained(path)
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    scaling = None if case == "llama" else rope
    edit_json(path / "config.json", rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    assert DecoderConfig.from_pretrained(path) == newer
    if scaling is not None:
        scaling["type"] = scaling.pop("rope_type")
        edit_json(path / "config.json", rope_scaling=scaling)
        assert DecoderConfig.from_pretrained(path) == newer


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"granite-unrotated"}))
def test_rope_tables_are_transformers_own(checkpoint: Checkpoints, case: str) -> None:
    saved = checkpoint(case)
    config = DecoderConfig.from_pretrained(saved.path)
    count, theirs = config.max_position_embeddings, saved.model.model.rotary_emb
    if theirs is None:
        assert config.layer_rope(0) is None
        return
    kinds = {(): config}
    if case.startswith("gemma"):
        types = saved.model.config.layer_types
        kinds = {(kind,): config.at(types.index(kind)) for kind in types}
        assert len(kinds) == 2
    for layer_type, config in kinds.items():
        table = RopeTable.build(config, count)
        pairs = config.rope.rotary_dim(config.head_dim) // 2
        for ours, expected in zip(
            (table.cos, table.sin),
            theirs(torch.zeros(1), torch.arange(count)[None], *layer_type),
            strict=True,
        ):
            half = ours[:, : config.head_dim // 2]
            assert torch.equal(ours, torch.cat((half, half), dim=1))
            torch.testing.assert_close(half[:, :pairs], expected[0, :, :pairs], rtol=0, atol=0)
        assert (table.cos[:, pairs : config.head_dim // 2] == 1).all()
        assert (table.sin[:, pairs : config.head_dim // 2] == 0).all()


@pytest.mark.parametrize("case", ["llama-llama3", "llama-yarn"])
@pytest.mark.parametrize("inside", [None, 128])
def test_original_positions_at_the_top_come_first(broken, case, inside) -> None:
    path = broken(case)
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    rope["original_max_position_embeddings"] = inside
    rope = {k: v for k, v in rope.items() if v is not None}
    edit_json(path / "config.json", rope_parameters=rope, original_max_position_embeddings=16)
    config = DecoderConfig.from_pretrained(path)
    assert config.rope.original_max_position_embeddings == 16
    theirs = LlamaForCausalLM.from_pretrained(path).model.rotary_emb
    cos, sin = theirs(torch.zeros(1), torch.arange(256)[None])
    table = RopeTable.build(config, 256)
    torch.testing.assert_close(table.cos, cos[0], rtol=0, atol=0)
    torch.testing.assert_close(table.sin, sin[0], rtol=0, atol=0)


def test_rope_table_ends_with_the_positions(checkpoint: Checkpoints) -> None:
    config = DecoderConfig.from_pretrained(checkpoint("llama-dynamic").path)
    with pytest.raises(ValueError, match=r"allowed: 1\.\.256"):
        RopeTable.build(config, 257)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architectures is None", "LlamaForCausalLM"]),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, ["DeepseekV3ForCausalLM", "MLA"]),
        ({"model_type": "qwen2"}, ["model_type is 'qwen2'", "needs 'llama'"]),
        ({"hidden_act": "gelu"}, ["gelu", "allowed: silu"]),
        ({"num_key_value_heads": 4}, ["num_heads 6", "num_kv_heads 4"]),
        (
            {"num_hidden_layers": "two"},
            ["num_hidden_layers is 'two'; must be a whole number above 0"],
        ),
        (
            {"num_attention_heads": 7, "num_key_value_heads": 7},
            ["hidden_size 48 is not a multiple of num_attention_heads 7"],
        ),
        ({"hidden_size": -4}, ["hidden_size is -4; must be a whole number above 0"]),
        ({"rms_norm_eps": "x"}, ["rms_norm_eps is 'x'; must be a number above 0"]),
        ({"rms_norm_eps": 1}, ["cannot be used: ", "rms_norm_eps"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings is 'yes'; must be true or false"]),
        ({"hidden_act": 5}, ["hidden_act is 5; must be a string"]),
        ({"eos_token_id": [1, "x"]}, ["eos_token_id is [1, 'x']; must be a token id or a list"]),
        ({"layer_types": 5}, ["layer_types is 5; must be a list of strings"]),
        ({"layer_types": ["x"]}, ["cannot be used: ", "layer_types"]),
        ({"rope_parameters": [1]}, ["rope_parameters is [1]; must be an object"]),
        ({"rope_parameters": {"rope_type": ["x"]}}, ["rope_parameters.rope_type is ['x']"]),
        ({"rope_parameters": {"rope_theta": "x"}}, ["rope_parameters.rope_theta is 'x'"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["cannot be used: ", "factor"]),
        ({"quantization_config": 5}, ["quantization_config is 5; must be an object"]),
        ({"dtype": "float3"}, ["dtype is 'float3'; must be float32 or bfloat16 or float16"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"is_causal": False}, ["is_causal is false", "allowed: true"]),
        ({"dtype": "float64"}, ["float64", "bfloat16"]),
        ({"quantization_config": {"bits": 4}}, ["quant_method is None", "gptq, awq"]),
        (
            {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}},
            ["ntk", "allowed: default, linear, dynamic, llama3, yarn, longrope"],
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5}},
            ["factor", "at least 1"],
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            ["partial_rotary_factor"],
        ),
    ],
)
def test_unusable_configs(broken: Broken, changes: dict[str, Any], parts: list[str]) -> None:
    path = broken("llama")
    edit_json(path / "config.json", **changes)
    refusal(path, "config.json", *parts)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert not re.search("alidat|Error|<class", str(caught.value)), "a library's voice"


def test_ends_of_text_that_are_no_ids(broken: Broken) -> None:
    path = broken("llama")
    (path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    refusal(path, "token ids that end a text are ('x',)")


@pytest.mark.parametrize("content", ["{", "[]", "", '{"a":' * 100_000])
def test_broken_config_json(broken: Broken, content: str) -> None:
    path = broken("llama")
    (path / "config.json").write_text(content)
    refusal(path, "config.json", "JSON")


def test_missing_files(broken: Broken, tmp_path: Path) -> None:
    path = broken("llama")
    (path / "config.json").unlink()
    refusal(path, "config.json", "No such file")
    refusal(tmp_path / "nowhere", "no such folder")


@pytest.mark.parametrize("case", ["phi3", "phi3-partial", "gemma3", "qwen3-moe"])
def test_every_tensor_has_the_shape_that_is_said(checkpoint: Checkpoints, case: str) -> None:
    saved = checkpoint(case)
    config = DecoderConfig.from_pretrained(saved.path)
    weights = load_weights(saved.path, config, torch.bfloat16)
    specs = {spec.name: spec for spec in weight_specs(config)}
    assert {n: tuple(w.shape) for n, w in weights.items()} == {
        name: spec.shape for name, spec in specs.items()
    }
    for name, weight in weights.items():
        assert weight.dtype == (torch.float32 if specs[name].stays_float32 else torch.bfloat16)
    sources = [source for spec in specs.values() for source, _ in spec.sources]
    assert sorted(sources) == sorted(load_file(saved.path / "model.safetensors"))


@pytest.mark.parametrize("sharded", [False, True])
def test_tied_embeddings_and_yet_a_head(tmp_path: Path, sharded: bool) -> None:
    """transformers goes by the tensors, not by the configuration: so do we."""
    saved = write_checkpoint(tmp_path, CASES["llama-tied"])
    embeddings = saved.model.model.embed_tokens.weight.detach()
    others = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for head, is_own in ((embeddings.clone(), False), (embeddings.flip(0).contiguous(), True)):
        parts = {"a.safetensors": others, "b.safetensors": {"lm_head.weight": head}}
        if not sharded:
            parts = {"model.safetensors": others | {"lm_head.weight": head}}
        for file, tensors in parts.items():
            save_file(tensors, tmp_path / file, {"format": "pt"})
        if sharded:
            names = {name: file for file, tensors in parts.items() for name in tensors}
            index = tmp_path / "model.safetensors.index.json"
            index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
        weights = load(tmp_path)
        assert ("lm_head" in weights) == is_own
        theirs = LlamaForCausalLM.from_pretrained(tmp_path)
        ids = np.arange(30)
        batch = Paging(8, 8).batch(("a", ids, 0, 30))
        ours = EagerRunner.load(tmp_path, torch.float32, CPU, 8, 8).forward(batch)
        expected = Checkpoint(tmp_path, theirs).logits(ids)
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-4)


def test_shards_are_one_checkpoint(checkpoint: Checkpoints, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["llama"], max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    whole, sharded = load(checkpoint("llama").path), load(tmp_path)
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)

    (last := max(tmp_path.glob("*.safetensors"))).unlink()
    refusal(tmp_path, last.name)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refusal(tmp_path, "index.json", "weight_map")


def test_dtype_is_the_checkpoints_unless_given(checkpoint: Checkpoints, tmp_path: Path) -> None:
    saved = checkpoint("llama")
    # A copy: the checkpoint's own model is every other test's reference.
    copy.deepcopy(saved.model).to(torch.bfloat16).save_pretrained(tmp_path)
    config = DecoderConfig.from_pretrained(tmp_path)
    assert config.dtype == torch.bfloat16
    loaded = load(tmp_path)
    assert {w.dtype for w in loaded.values() if w.dim() > 1} == {torch.bfloat16}
    assert {w.dtype for w in loaded.values() if w.dim() == 1} == {torch.float32}  # norms
    wider = load_weights(tmp_path, config, torch.float32)
    assert {w.dtype for w in wider.values()} == {torch.float32}


def test_no_safetensors(broken: Broken) -> None:
    path = broken("llama")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refusal(path, "neither model.safetensors nor", "safetensors only")


@pytest.mark.parametrize("size", [0, 5, 400, 20_000])
def test_truncated_file(broken: Broken, size: int) -> None:
    file = broken("llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refusal(file.parent, "model.safetensors", "not a whole safetensors file")


def test_not_safetensors(broken: Broken) -> None:
    file = broken("llama") / "model.safetensors"
    torch.save({"x": torch.zeros(3)}, file)
    refusal(file.parent, "model.safetensors", "not a whole safetensors file")


def test_missing_misshapen_and_mistyped_tensors(broken: Broken) -> None:
    file = broken("llama") / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    right = tensors.pop(name)
    save_file(tensors, file)
    refusal(file.parent, name, "missing", "(80, 48)")
    save_file(tensors | {name: right.t().contiguous()}, file)
    refusal(file.parent, name, "(48, 80)", "(80, 48)")
    save_file(tensors | {name: right.to(torch.int8)}, file)
    refusal(file.parent, name, "int8", "bfloat16")


def test_config_and_weights_of_two_models(broken: Broken) -> None:
    path = broken("llama")
    edit_json(path / "config.json", vocab_size=SHAPE["vocab_size"] + 1)
    refusal(path, "model.embed_tokens.weight", "(89, 48)", "(90, 48)")


def test_resolve_dtype() -> None:
    assert resolve_dtype("float16", CPU) == torch.float16
    with pytest.raises(ValueError, match="allowed: auto, float32, bfloat16, float16"):
        resolve_dtype("int8", CPU)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ],
)
def test_auto_asks_the_processor(monkeypatch, capabilities, expected) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert resolve_dtype("auto", CPU) == expected
