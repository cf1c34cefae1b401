"""The registry: cards, paths, the manifest, and no torch."""

import json
import shutil
import subprocess
import sys

import pytest

from lab.zoo import manifest
from penstock.zoo import registry

MEGABYTE = 1_000_000


def test_registry_imports_no_torch():
    code = "import sys, penstock.zoo.registry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_family_is_complete():
    cards = registry.bundled_models()
    drafters = [c for c in cards.values() if c.role == "drafter"]
    assert [c.name for c in cards.values() if c.role == "target"] == [registry.DEFAULT_TARGET]
    assert len(drafters) == 5
    assert cards[registry.DEFAULT_DRAFTER].role == "drafter"
    assert all(200_000 < c.parameters < 3_000_000 for c in drafters)
    heads = manifest.heads_of(registry.DEFAULT_TARGET)
    assert [c.name for c in heads] == ["target-large-mtp"]


def test_manifest_holds():
    assert manifest.verify_manifest() == []


def test_size_of_all_weights():
    files = registry.WEIGHTS.rglob("*.safetensors")
    assert sum(path.stat().st_size for path in files) <= 50 * MEGABYTE


def test_shapes_suit_the_kernels():
    for card in registry.bundled_models().values():
        config = json.loads((card.path / "config.json").read_text())
        assert config["head_dim"] in (32, 64)
        assert config["hidden_size"] % 32 == 0
        assert config["intermediate_size"] % 32 == 0
        assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
        assert config["max_position_embeddings"] == 2048
        assert config["tie_word_embeddings"] is True
        assert config["vocab_size"] == 4096


def test_unknown_model_names_the_known_ones():
    with pytest.raises(KeyError, match="draft-tiny"):
        registry.model_path("draft-huge")


def test_no_weights_says_how_to_get_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="penstock zoo train"):
        registry.bundled_models(tmp_path)


def test_manifest_notices_changes(tmp_path):
    source = registry.model_path("draft-tiny")
    shutil.copytree(source, tmp_path / "draft-tiny")
    card = {"role": "drafter", "parameters": 1, "description": ""}
    manifest.write_manifest(tmp_path, {"draft-tiny": card})
    assert manifest.verify_manifest(tmp_path) == []
    (tmp_path / "draft-tiny" / "config.json").write_text("{}")
    (tmp_path / "draft-tiny" / "tokenizer.json").unlink()
    wrong = manifest.verify_manifest(tmp_path)
    assert sorted(wrong) == ["draft-tiny/config.json", "draft-tiny/tokenizer.json"]
