"""`penstock doctor --exact`: what it compares, the faults that it finds, and its receipt."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import Cli
from tests.engine.small_family import VOCAB, small_llama, write_tokenizer
from tests.engine.small_heads import add_assistant, add_head
from tests.engine.small_models import CASES, write_checkpoint

from penstock.engine.native.runner import NativeRunner
from penstock.engine.runner import IntArray, RaggedBatch
from penstock.serving import exact

CONTROL = "control: a changed row"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock"


@pytest.fixture
def small(family: dict[str, Path]) -> tuple[object, ...]:
    """A target with a drafter that is often right, and look-up."""
    drafters = ("--drafter", f"near={family['near']}", "--drafter", "ngram")
    return (family["target"], *drafters, "--set", "num_threads=1")


def checked(cli: Cli, *arguments: object, tokens: int = 16) -> tuple[int, dict[str, Any]]:
    code, out, _ = cli("doctor", "--exact", "--json", "--tokens", tokens, *arguments)
    return code, json.loads(out)


def verdicts(receipt: dict[str, Any]) -> dict[str, str]:
    return {part["part"]: part["verdict"] for part in receipt["parts"]}


def test_everything_is_the_same(cli: Cli, cache: Path, small: tuple[object, ...]) -> None:
    code, receipt = checked(cli, *small, tokens=60)
    found = verdicts(receipt)
    assert (code, receipt["verdict"], found.pop(CONTROL)) == (0, "same", "found")
    assert found.pop("drafter ngram") in ("same", "not tested"), "a random text hardly repeats"
    assert set(found.values()) == {"same"}
    assert [*found] == [
        "alone",
        *(f"{n} at once" for n in (2, 3, 4, 6, 9, 33)),
        *("drafter near", "predictions", "prompts in chunks"),
        *("drafters beside", "little memory", "auto, as served"),
    ]
    parts = {part["part"]: part for part in receipt["parts"]}
    assert parts["33 at once"]["at_once"] == 33
    assert parts["little memory"]["preemptions"] > 0
    assert all(parts[n]["accepted"] > 0 for n in ("drafter near", "predictions", "little memory"))
    assert receipt["engine"]["num_threads"] == receipt["fingerprint"]["threads"] == 1
    assert len(receipt["fingerprint"]["target"]) == 64
    assert json.loads((cache / "exact-target.json").read_text()) == receipt


def test_a_kernel_whose_rows_depend_on_the_batch(cli, monkeypatch, small) -> None:
    """One bit of one logit where nine requests run."""
    honest = NativeRunner.forward_sampled

    def wrong(
        runner: NativeRunner, batch: RaggedBatch, *given: Any
    ) -> tuple[IntArray, torch.Tensor]:
        samples, logits = honest(runner, batch, *given)
        if batch.num_seqs == 9:
            logits.view(torch.int32)[0, 0] ^= 1
        return samples, logits

    monkeypatch.setattr(NativeRunner, "forward_sampled", wrong)
    code, out, _ = cli("doctor", "--exact", "--tokens", 16, *small)
    assert code == 1
    lines = out.splitlines()
    assert "9 at once/0: token 0 has other logits, in a step of 9 requests" in lines
    assert not any(line.startswith(("2 at once/", "6 at once/")) for line in lines)
    assert lines[-1].startswith("differs; for a report: ")


@pytest.mark.slow
def test_memory_that_no_kernel_has_written(cli, monkeypatch, small) -> None:
    """In steps of six the first tokens are read from a block that is nobody's."""
    honest = NativeRunner.forward_sampled

    def wrong(
        runner: NativeRunner, batch: RaggedBatch, *given: Any
    ) -> tuple[IntArray, torch.Tensor]:
        if batch.num_seqs == 6 and batch.seq_lens.min() > 16:
            tables = batch.block_tables.copy()
            tables[:, 0] = runner.num_blocks - 1
            batch = dataclasses.replace(batch, block_tables=tables)
        return honest(runner, batch, *given)

    monkeypatch.setattr(NativeRunner, "forward_sampled", wrong)
    code, receipt = checked(cli, *small, tokens=40)
    assert code == 1
    (part,) = [p for p in receipt["parts"] if p["part"] == "6 at once"]
    assert any("not finite" in line for line in part["differing"]), part


@pytest.mark.slow
def test_a_comparison_that_sees_nothing(cli, monkeypatch, small) -> None:
    monkeypatch.setattr(exact, "_difference", lambda *_: None)
    code, receipt = checked(cli, *small)
    assert (code, receipt["verdict"], verdicts(receipt)[CONTROL]) == (1, "differs", "missed")


def write_with_head(root: Path, case: str) -> str:
    """A target with recurrent layers and a head, or with an assistant beside it, whose name comes
    back, and a drafter that is hardly ever right."""
    changes = CASES[case].changes | {"vocab_size": VOCAB, "max_position_embeddings": 512}
    changes |= {"eos_token_id": None}
    saved = write_checkpoint(root / "target", dataclasses.replace(CASES[case], changes=changes))
    small_llama(1, seed=3).save_pretrained(root / "far")
    for name in ("target", "far"):
        write_tokenizer(root / name)
    if case == "gemma4":
        add_assistant(saved, root / "target-assistant")
        return "assistant"
    add_head(root / "target")
    return "mtp"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3-5", "gemma4"])
def test_a_head_and_recurrent_layers(cli: Cli, tmp_path: Path, case: str) -> None:
    head = write_with_head(tmp_path, case)
    torch.set_num_threads(2)
    drafters = ("--drafter", f"far={tmp_path / 'far'}", "--drafter", head, "--drafter", "ngram")
    code, receipt = checked(cli, tmp_path / "target", *drafters, tokens=40)
    found = verdicts(receipt)
    assert found[f"drafter {head}"] == "same"
    assert (code, found.pop("drafter ngram") in ("same", "not tested")) == (0, True)
    assert {*found.values()} == {"same", "found"}
    if head == "mtp":
        assert receipt["engine"]["state_slots"] >= 33
    assert receipt["engine"]["num_threads"] == receipt["fingerprint"]["threads"] == 2


@pytest.mark.slow
def test_pytorch_compares_tokens(cli: Cli, family: dict[str, Path]) -> None:
    given = ("--no-speculation", "--set", "backend=eager", "--dtype", "float32")
    code, receipt = checked(cli, family["target"], *given, tokens=40)
    assert (code, {*verdicts(receipt).values()}) == (0, {"same", "found"})
    assert "drafters beside" not in verdicts(receipt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("target-large", "--tokens", "99999"),
            "--tokens 99999 leaves no room in the model's cont",
        ),
        (("no-such-model",), "target 'no-such-model' does not exist"),
        (("target-large", "--set", "selection=best"), "unknown selection policy 'best'"),
        (
            ("target-large", "--tokens", "3"),
            "'--tokens': Input should be greater than or equal to 16",
        ),
    ],
)
def test_wrong_input(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = cli("doctor", "--exact", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    code, _, err = cli("doctor", "target-large", "--tokens", 40)
    assert (code, err) == (2, "penstock: Invalid value: --tokens is for --exact\n")


def test_runner_poisons_what_no_pass_has_written(tmp_path: Path) -> None:
    small_llama(1, seed=3).save_pretrained(tmp_path / "far")
    runner = NativeRunner.load(tmp_path / "far", torch.float32, 4, 16, 1)
    ids, none = np.arange(8, dtype=np.int32), np.zeros((1, 1), dtype=np.int32)

    def logits(start: int) -> torch.Tensor:
        rows = np.arange(8 - start, dtype=np.int32)
        ends = np.array([0, len(rows)], dtype=np.int32)
        length = np.array([8], dtype=np.int32)
        return runner.forward(RaggedBatch(ids[start:], start + rows, ends, length, none, rows[-1:]))

    whole = logits(0)
    runner.poison(True)
    assert logits(5).isnan().all()
    assert torch.equal(logits(0), whole)
    assert torch.equal(logits(5), whole)
    runner.poison(False)
    assert torch.equal(logits(0), whole)
