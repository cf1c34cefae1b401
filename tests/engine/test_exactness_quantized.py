"""Speculation changes nothing with quantised weights either, whatever the drafters' formats.

What a target makes alone is compared with the same target's, on the same kernels: its activations
are rounded, so that no other arithmetic makes the same tokens everywhere.
"""

import copy
import json
from pathlib import Path

import pytest
from tests.engine.small_family import VOCAB, add_noise, byte_tokenizer, small_llama, write_tokenizer
from tests.engine.small_gguf import save_gguf
from tests.engine.test_exactness import (
    DRAFTERS,
    SAMPLINGS,
    Alone,
    lenient,
    load,
    make_loop,
    make_requests,
    run,
)
from tests.products import covering, first_fast
from transformers import LlamaForCausalLM

from lab.common.quantize import quantize_folder
from penstock.engine.build import Engine
from penstock.engine.verifier import Verifier

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8}
"""Rows of whole blocks of K-quants."""


def save_folder(path: Path, model: LlamaForCausalLM, weights: str) -> Path:
    """In int8 or int4; "w8a8": int8 with activations rounded by tokens."""
    floats = path.with_suffix(".floats")
    model.save_pretrained(floats)
    write_tokenizer(floats)
    quantize_folder(floats, path, "int4" if weights == "int4" else "int8")
    if weights == "w8a8":
        file = path / "config.json"
        content = json.loads(file.read_text())
        group = content["quantization_config"]["config_groups"]["group_0"]
        group["input_activations"] = {
            "num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token",
        }  # fmt: skip
        file.write_text(json.dumps(content))
    return path


def q4_k_m(name: str) -> str:
    """As such files have it, more or less."""
    return "Q6_K" if "embed" in name or "down" in name else "Q4_K"


def save(root: Path, name: str, model: LlamaForCausalLM, kind: str) -> Path:
    """In a ggml format, and `model` becomes what was stored; or as `save_folder` has it."""
    if kind.startswith(("int", "w8")):
        return save_folder(root / name, model, kind)
    file = root / f"{name}.gguf"
    save_gguf(file, model, q4_k_m if kind == "Q4_K_M" else kind, byte_tokenizer())
    return file


PAIRS = {
    "gguf": ("Q8_0", "Q4_0", "int4"),
    "k-quants": ("Q4_K_M", "Q5_1", "Q5_K"),
    "folder": ("int4", "int8", "Q8_0"),
    "w8a8": ("w8a8", "w8a8", "Q4_1"),
    "rounded": ("Q8_0", "F32", "Q6_K"),
}
"""Formats of the target and its copy, of the drafter that is near, of the one that is not. Rounded:
all drafters, the target's copy, too, to 4 bits as they are loaded."""


@pytest.fixture(scope="module", params=first_fast(PAIRS))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    root = tmp_path_factory.mktemp("quantised")
    formats = PAIRS[request.param]
    # Rows of 128 are whole blocks of every other format's.
    sizes = (
        WIDE
        if request.param in ("k-quants", "rounded")
        else {"hidden_size": 128, "intermediate_size": 128}
    )
    target = small_llama(2, seed=1, **sizes)
    paths = {"target": save(root, "target", target, formats[0])}
    paths["same"] = paths["target"]
    paths["near"] = save(root, "near", add_noise(copy.deepcopy(target)), formats[1])
    paths["far"] = save(root, "far", small_llama(1, seed=3, **sizes), formats[2])
    weights = "int4" if request.param == "rounded" else "stored"
    dtype = "bfloat16" if request.param == "folder" else "float32"
    return load(paths, "native", dtype, drafter_weights=weights)


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Alone:
    return Alone(engine, num=8)


@pytest.mark.parametrize(
    ("engine", "drafter", "sampling"),
    covering(PAIRS, ["none", *DRAFTERS, "rotating"], ["greedy", "coupled"], strength=1),
    indirect=["engine"],
)
def test_output_is_the_targets_own(engine, alone, sampling, drafter) -> None:
    loop = make_loop(engine, rotating=drafter == "rotating")
    name = "auto" if drafter == "rotating" else drafter
    outputs, accepted = run(loop, make_requests(SAMPLINGS[sampling], 8, name))
    assert outputs == alone[sampling][:8]
    assert len({token for output in outputs for token in output}) > VOCAB // 16
    if drafter in ("same", "near"):
        assert accepted > 0


def test_negative_control_accepting_everything_is_caught(engine, alone, monkeypatch) -> None:
    monkeypatch.setattr(Verifier, "decide", lenient(Verifier.decide))
    outputs, _ = run(make_loop(engine), make_requests(SAMPLINGS["coupled"], 8, "near"))
    assert outputs != alone["coupled"][:8]
