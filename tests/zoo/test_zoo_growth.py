"""Grown models: their sizes, what their weights do, and that they make the original's tokens."""

import json
from dataclasses import replace

import numpy as np
import pytest
from tests.products import first_fast

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engine.small_models import Paging  # noqa: E402

from lab.zoo.growth import (  # noqa: E402
    TOLERANCE,
    Growth,
    count_parameters,
    grown_shape,
    plan_family,
    widened,
    write_family,
    write_grown,
    write_grown_head,
)
from lab.zoo.heads import Head, embed, load_head, read, save_head  # noqa: E402
from lab.zoo.manifest import heads_of, verify_manifest  # noqa: E402
from lab.zoo.modeling import load_model, parameter_count  # noqa: E402
from lab.zoo.recipe import FULL  # noqa: E402
from penstock.engine.models.config import DecoderConfig  # noqa: E402
from penstock.engine.models.weight_specs import weight_bytes  # noqa: E402
from penstock.engine.native.runner import NativeRunner  # noqa: E402
from penstock.engine.tokenizer import load_tokenizer  # noqa: E402
from penstock.zoo.registry import bundled_models, load_prompts  # noqa: E402


def growth(name, width, layers=1, channels=32):
    """The bundled model, wider, with so many more layers and MLP channels."""
    card = bundled_models()[name]
    small = DecoderConfig.from_pretrained(card.path)
    large = replace(
        widened(small, width),
        num_layers=small.num_layers + layers,
        intermediate_size=small.intermediate_size + channels,
    )
    return Growth(card, count_parameters(large), width, small, large)


def grown_head(folder, spec, target):
    """A bundled target's head with random parts, small and grown."""
    small = load_model(target.card.path)
    head = Head(small.config, spec.reads, torch.arange(1, 4096, 4) if spec.reads else None)
    head.begin_like(small)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    save_head(folder / "small", head.checkpoint(), head.description(small.config.to_dict()))
    size = write_grown_head(folder / "grown", folder / "small", target)
    return load_head(folder / "small"), load_head(folder / "grown"), size


@torch.no_grad()
def chained(head, path, ids, steps=4):
    """The head's logits at chained steps along a text, from every place on."""
    target = load_model(path)
    starts = torch.zeros(ids.shape, dtype=torch.bool)
    starts[:, 3:-steps] = True
    finals = head.chain(embed(target, ids), read(target, ids), starts, steps)
    return torch.stack([head.logits(final, target.lm_head.weight) for final in finals])


@pytest.mark.slow
@pytest.mark.parametrize("spec", FULL.heads, ids=lambda spec: spec.name)
def test_a_grown_head_drafts_the_same_beside_the_grown_target(tmp_path, spec):
    made = growth("target-large", 4)
    write_grown(tmp_path / "target", made)
    small, large, size = grown_head(tmp_path, spec, made)
    assert size == parameter_count(large) > 4 * parameter_count(small)
    ids = torch.tensor([prompt_ids(made.card.path)])
    old = chained(small, made.card.path, ids)
    new = chained(large, tmp_path / "target", ids)
    torch.testing.assert_close(new, old, rtol=0, atol=2e-4)
    # The control: with a norm that is not rescaled it drafts otherwise.
    large.norm.weight.data.mul_(1.01)
    assert (chained(large, tmp_path / "target", ids) - old).abs().nan_to_num(0).max() > 1e-3


def prompt_ids(path, domain="instruction"):
    return load_tokenizer(path).encode(load_prompts(domain)[0].prompt)


MODELS = [card.name for card in bundled_models().values() if card.role != "head"]


@pytest.mark.parametrize("name", first_fast(MODELS))
def test_sizes_are_met_at_every_scale(name):
    small = DecoderConfig.from_pretrained(bundled_models()[name].path)
    for asked in np.geomspace(count_parameters(small), 4e9, 25):
        width, large = grown_shape(small, int(asked))
        parameters = weight_bytes(large, large.dtype) // large.dtype.itemsize
        assert parameters == count_parameters(large)
        assert abs(parameters / asked - 1) <= TOLERANCE
        assert large.num_layers >= small.num_layers
        assert large.intermediate_size >= small.intermediate_size
        assert large.intermediate_size % 32 == 0
        assert large.hidden_size == small.hidden_size * width
        assert large.hidden_size % large.num_heads == 0
        assert (large.head_dim, large.vocab_size) == (small.head_dim, small.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "width", "dtype"),
    [("draft-base", 4, torch.bfloat16), ("draft-tiny", 16, torch.float32)],
)
def test_native_logits_are_the_originals_bits(tmp_path, name, width, dtype):
    made = growth(name, width, layers=2)
    write_grown(tmp_path / name, made)
    ids = np.array(prompt_ids(made.card.path))
    logits = []
    for path in (made.card.path, tmp_path / name):
        runner = NativeRunner.load(path, dtype, 32, 16, 2)
        batch = Paging(32, 16).batch(("a", ids, 0, len(ids)))
        logits.append(runner.forward(batch))
    assert logits[0].std() > 1
    assert torch.equal(*logits)


def test_a_norm_that_is_not_rescaled_changes_the_logits(tmp_path):
    """The control of the test above: what growth does to eps and to norms is needed."""
    made = growth("draft-tiny", 4)
    write_grown(tmp_path / "grown", made)
    config_file = tmp_path / "grown" / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"rms_norm_eps": 1e-5}))
    ids = torch.tensor([prompt_ids(made.card.path)])
    with torch.inference_mode():
        old, new = (load_model(p)(ids).logits for p in (made.card.path, tmp_path / "grown"))
    assert (old - new).abs().max() > 1e-3


@pytest.mark.slow
def test_transformers_makes_the_same_tokens(tmp_path):
    name = "draft-base"
    made = growth(name, 4)
    write_grown(tmp_path / name, made)
    ids = torch.tensor([prompt_ids(made.card.path)])
    texts, logits = [], []
    for path in (made.card.path, tmp_path / name):
        model = load_model(path)
        assert sum(p.numel() for p in model.parameters()) in (made.card.parameters, made.parameters)
        with torch.inference_mode():
            texts.append(model.generate(ids, max_new_tokens=48, do_sample=False))
            logits.append(model(ids).logits)
    assert texts[0].shape[1] > ids.shape[1]
    assert torch.equal(*texts)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_command_grows_a_family_that_speculates_as_before(tmp_path, cli):
    out = tmp_path / "family"
    code, stdout, stderr = cli(
        "zoo", "grow", out, "--target-params", "16M", "--drafter-share", "0.1..0.25", "--json"
    )
    assert code == 0, stderr
    models = {row["name"]: row for row in json.loads(stdout)["models"]}
    assert models.keys() == {*MODELS}
    heads = {name for name, card in bundled_models(out).items() if card.role == "head"}
    assert heads == {head.name for head in heads_of("target-large")}
    for name, row in models.items():
        on_disk = sum(f.stat().st_size for f in (out / name).glob("*.safetensors"))
        assert 0 <= on_disk - row["bytes"] < 20_000
        assert abs(row["parameters"] / row["asked_parameters"] - 1) <= TOLERANCE
        assert bundled_models(out)[name].parameters == row["parameters"]
    assert verify_manifest(out) == []

    prompt = load_prompts("sql")[0].prompt
    made = {}
    for name, models_of in {
        "original": (),
        "grown": ("--target", out / "target-large", "--no-speculation"),
        "drafted": ("--target", out / "target-large", "--drafter", f"d={out / 'draft-base'}"),
    }.items():
        options = ("--raw", "--max-tokens", 48, "--dtype", "float32", "--json", *models_of)
        code, stdout, stderr = cli("generate", prompt, *options)
        assert code == 0, stderr
        made[name] = json.loads(stdout)
    assert made["original"]["token_ids"] == made["grown"]["token_ids"]
    assert made["original"]["token_ids"] == made["drafted"]["token_ids"]
    assert made["drafted"]["mean_acceptance_length"] > 1.5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--target-params", "5M"), "target-large has 11,899,776 parameters and can only grow"),
        (("--target-params", "lots"), "500M or 1.5B"),
        (("--target-params", "0"), "500M or 1.5B"),
        (("--target-params", "900B"), "the disk has"),
        (("--target-params", "50M", "--drafter-share", "0.1..0.01"), "the smaller first"),
        (("--target-params", "50M", "--drafter-share", "nan"), "at most 1"),
        (("--target-params", "50M", "--drafter-share", "0.01"), "must be at least 0.0143"),
    ],
)
def test_bad_sizes_end_with_one_line(tmp_path, cli, options, says):
    code, _, stderr = cli("zoo", "grow", tmp_path / "out", *options)
    assert code == 2
    assert says in stderr
    assert stderr.count("\n") == 1


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, cli):
    (tmp_path / "mine").write_text("kept")
    code, _, stderr = cli("zoo", "grow", tmp_path, "--target-params", "100M")
    assert (code, list(tmp_path.iterdir())) == (2, [tmp_path / "mine"])
    assert "not an empty folder" in stderr


def test_what_is_unfinished_goes_again(tmp_path):
    def stop(num_bytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_family(tmp_path, plan_family(14_000_000, (0.2, 0.3)), stop)
    assert list(tmp_path.iterdir()) == []
