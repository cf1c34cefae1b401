"""Gemma 4's assistants: logits beside transformers', where they are found, what is refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.small_family import write_tokenizer
from tests.engine.small_gguf import save_gguf
from tests.engine.small_heads import ReferenceAssistant, add_assistant
from tests.engine.small_models import CASES, Checkpoint, Paging, tokens, write_checkpoint
from transformers import PreTrainedModel

from penstock.cli import drafters as cli_drafters
from penstock.cli.models import with_models
from penstock.config import EngineConfig
from penstock.engine.eager import EagerRunner
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.weights import load_weights
from penstock.engine.native.runner import NativeRunner
from penstock.engine.runner import Carry, ModelRunner


@pytest.mark.parametrize("case", ["gemma4", "gemma4-shared"])
@pytest.mark.parametrize("backend", ["native", "eager"])
def test_logits_of_an_assistant_are_transformers(tmp_path: Path, case, backend) -> None:
    """Row by row: of texts shorter and longer than a window, and behind looked-up tokens."""
    saved = write_checkpoint(tmp_path / "target", CASES[case])
    reference = ReferenceAssistant(saved, add_assistant(saved, head := tmp_path / "head"))
    runner: ModelRunner
    if backend == "eager":
        where = (saved.path, torch.float32, torch.device("cpu"))
        runner = EagerRunner.load(*where, 64, 8, head=head)
    else:
        runner = NativeRunner.load(saved.path, torch.float32, 64, 8, 1, head=head)
    for length, front in ((2, 0), (17, 2), (22, 0), (23, 1), (90, 5)):
        text, place = tokens(length + 9, seed=length), Paging(64, 8)
        batch = place.batch(("a", text, 0, length - 1), logits="last")
        carry = Carry(torch.zeros(1, 48), batch.query_start[1:] - 1)
        runner.forward(dataclasses.replace(batch, carry=carry))
        own = text[length : length + front].tolist()
        rows = reference.rows(text[:length].tolist(), front + 4, own)
        own += [int(logits.argmax()) for logits, _ in rows[front:]]
        before = carry.after
        for i, (token, (logits, state)) in enumerate(
            zip([int(text[length - 1]), *own], rows, strict=False)
        ):
            row = place.batch(("a", text, length - 1 + i, length + i))
            anchors = np.array([length - 1], dtype=np.int32)
            carry = Carry(before, row.logits_rows, anchors=anchors)
            row = dataclasses.replace(row, token_ids=np.array([token], np.int32), carry=carry)
            found = runner.forward_head(row)[0]
            assert (found - logits).abs().max() <= 1e-3 * logits.std()
            assert (carry.after - state).abs().max() <= 1e-3 * state.std()
            before = state


@pytest.fixture
def gemma(tmp_path: Path) -> tuple[Checkpoint, PreTrainedModel]:
    """A target and its assistant, in folders `gemma` and `gemma-assistant`."""
    saved = write_checkpoint(tmp_path / "gemma", CASES["gemma4"])
    write_tokenizer(saved.path)
    return saved, add_assistant(saved, tmp_path / "gemma-assistant")


def test_an_assistant_of_a_gguf_file_is_that_of_a_folder(gemma, tmp_path: Path) -> None:
    """One with centroids, too, which all tokens are computed without."""
    saved, model = gemma
    file, size = tmp_path / "mtp-gemma.gguf", saved.model.config.hidden_size
    more = {"embedding_length_out": size, "nextn_predict_layers": 3}
    centroids = {"masked_embd_centroids.weight": np.zeros((4, 40), np.float32)}
    save_gguf(file, model, architecture="gemma4-assistant", tensors=centroids, **more)
    found = []
    for path in (tmp_path / "gemma-assistant", file):
        own = DecoderConfig.from_pretrained(saved.path).within(None, path).assistant
        assert own is not None
        found.append((own, load_weights(path, own, torch.float32)))
    (shapes, weights), (others, stored) = found
    assert shapes.variant == others.variant
    assert [x.kv_layer for x in shapes.variant.shapes] == [~2, ~2, ~3]
    assert weights.keys() == stored.keys()
    for name, values in weights.items():
        torch.testing.assert_close(stored[name], values, rtol=0, atol=1e-6)
    with pytest.raises(CheckpointError, match="Gemma4AssistantForCausalLM"):
        DecoderConfig.from_pretrained(file)


def test_assistants_are_found_where_publishers_put_them(gemma, tmp_path: Path, monkeypatch) -> None:
    saved, model = gemma
    beside = str(tmp_path / "gemma-assistant")
    found = with_models({"target": str(saved.path)})
    assert found["drafters"] == {"assistant": beside}
    assert EngineConfig(**found).head == ("assistant", Path(beside))
    named = {"target": str(saved.path), "drafters": {"assistant": {"path": "assistant"}}}
    assert with_models(named)["drafters"] == {"assistant": beside}
    monkeypatch.setattr(cli_drafters, "cached", {"google/gemma-assistant": Path(beside)}.get)
    monkeypatch.setattr(
        cli_drafters.HubName, "parse", lambda text: text if text.startswith("google/") else None
    )
    assert cli_drafters.own_head(saved.path, "google/gemma@main") == {"assistant": beside}

    file, sidecar = tmp_path / "gemma.gguf", tmp_path / "mtp-gemma.gguf"
    save_gguf(file, saved.model)
    more = {"embedding_length_out": saved.model.config.hidden_size, "nextn_predict_layers": 3}
    save_gguf(sidecar, model, architecture="gemma4-assistant", **more)
    assert with_models({"target": str(file)})["drafters"] == {"assistant": str(sidecar)}
    more["embedding_length_out"] = 64
    save_gguf(sidecar, model, architecture="gemma4-assistant", **more)
    assert "assistant" not in with_models({"target": str(file)})["drafters"], "it does not fit"


@pytest.mark.parametrize(
    ("case", "changes", "told"),
    [
        ("llama", {}, "it assists a Gemma 4 of hidden_size 48 with 89 tokens; this is Llama"),
        ("gemma4", {"vocab_size": 90}, "hidden_size 48 with 90 tokens"),
        ("gemma4", {"head_dim": 24}, "layer 0 reads 2 heads of 24; the target has LayerShape"),
        ("gemma4", {"hidden_size_per_layer_input": 8}, "per-layer embeddings and experts"),
    ],
)
def test_an_assistant_of_another_target_is_refused(gemma, tmp_path, case, changes, told) -> None:
    write_checkpoint(tmp_path / "gemma", CASES[case])
    file = tmp_path / "gemma-assistant" / "config.json"
    content = json.loads(file.read_text())
    content["text_config"] |= {"vocab_size_per_layer_input": 89, **changes}
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=told):
        DecoderConfig.from_pretrained(tmp_path / "gemma").within(None, file.parent)
