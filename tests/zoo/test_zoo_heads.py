"""Heads: chains as a drafter makes them, both layouts, training, and growth with the target."""

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from torch.nn import functional  # noqa: E402

from lab.zoo.data import pack  # noqa: E402
from lab.zoo.evidence import head_logits, head_runs  # noqa: E402
from lab.zoo.head_training import HeadRun, HeadText, build_head, commonest  # noqa: E402
from lab.zoo.heads import Reader, load_head, save_head  # noqa: E402
from lab.zoo.modeling import build, load_model, save_model  # noqa: E402
from lab.zoo.recipe import HeadSpec, Shape  # noqa: E402
from lab.zoo.run import run_to_end  # noqa: E402
from lab.zoo.tokenizer import load_tokenizer  # noqa: E402
from penstock.zoo.registry import DEFAULT_TARGET, model_path  # noqa: E402

TOY = Shape(hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, ffn=96)
SPECS = {
    "mtp": HeadSpec("toy-mtp", "toy", "", steps=12, rows_per_step=2, warmup=2),
    "eagle3": HeadSpec(
        "toy-eagle3",
        "toy",
        "",
        steps=12,
        ffn=64,
        tokens=700,
        reads=(0, 1, 2),
        rows_per_step=2,
        warmup=2,
    ),
}
KINDS = pytest.mark.parametrize("kind", SPECS)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("toy")
    save_model(build(TOY, seed=4), path)
    return path


@pytest.fixture(scope="module")
def target(folder):
    return Reader(folder)


@pytest.fixture(scope="module")
def text():
    tokenizer = load_tokenizer(model_path(DEFAULT_TARGET))
    rows = {d: pack(tokenizer, d, "train", 4, 0) for d in ("chat", "math")}
    return HeadText(rows, {d: ids[:1] for d, ids in rows.items()})


def shaken(kind, target, tokens=None):
    """A head whose weights are all its own."""
    tokens = torch.arange(5, 4096, 6) if tokens is None else tokens
    head = build_head(SPECS[kind], target, tokens)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return head


def test_the_reader_computes_what_transformers_does(folder, target):
    ids = torch.arange(80).view(2, 40) * 7 + 6
    with torch.no_grad():
        made = load_model(folder)(ids, output_hidden_states=True)
    states = target.read(ids)
    for own, theirs in zip(states.inputs, made.hidden_states, strict=False):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states.final, made.hidden_states[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states.final @ target.lm_head, made.logits, rtol=1e-4, atol=1e-4)


def drafted_step_by_step(head, target, ids, start, steps):
    """One chain, row after row, as a drafter computes it from the layouts' description."""
    states, embedded = target.read(ids[None]), target.embed(ids[None])
    before = head.before(states)[0]
    attention, config = head.layer.self_attn, head.config
    kept, told, passed = [], [], None
    for place in range(start + steps):
        reads, base = head.enter(embedded[0, place], passed if place > start else before[place])
        at = torch.tensor([place])
        kept.append(attention.keys_values(reads[None], at))
        q = attention.queries(reads[None], at).reshape(1, config.num_heads, 1, config.head_dim)
        k, v = (torch.cat(x).transpose(0, 1)[None] for x in zip(*kept, strict=True))
        out = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).flatten()
        hidden = base + attention.o_proj(out)
        hidden = hidden + head.layer.mlp(head.layer.post_attention_layernorm(hidden))
        told.append(head.norm(hidden))
        passed = hidden if head.reads else told[-1]
    return told[start:]


@torch.no_grad()
def test_a_row_takes_the_state_before_it(target):
    states = target.read(torch.arange(12)[None] + 6)
    before = shaken("mtp", target).before(states)
    assert torch.equal(before[:, 1:], states.final[:, :-1])
    assert not before[:, 0].any()
    joined = shaken("eagle3", target).before(states)
    assert not joined[:, 0].any()
    assert joined[:, 1:].any()


@KINDS
@torch.no_grad()
def test_a_chain_is_what_a_drafter_computes_step_by_step(kind, target):
    head = shaken(kind, target)
    ids = torch.stack([torch.arange(30) * 3 + 6, torch.arange(30) * 5 + 9])
    starts = torch.zeros(2, 30, dtype=torch.bool)
    chains = [(0, 0), (0, 13), (1, 2), (1, 20)]
    for row, place in chains:
        starts[row, place] = True
    told = head.chain(target.embed(ids), target.read(ids), starts, 4)
    for number, (row, place) in enumerate(chains):
        expected = drafted_step_by_step(head, target, ids[row], place, 4)
        torch.testing.assert_close(torch.stack([t[number] for t in told]), torch.stack(expected))


@KINDS
def test_a_saved_head_is_the_same_head(kind, target, tmp_path):
    head = shaken(kind, target)
    save_head(tmp_path, head.checkpoint(), head.description(target.content))
    loaded = load_head(tmp_path, target.config)
    assert type(loaded) is type(head)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, head.checkpoint()[head.prefix + name].to(tensor)), name
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    if kind == "mtp":
        assert config["mtp_num_hidden_layers"] == 1
        assert {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"} <= {
            *tensors
        }
        assert tensors["mtp.fc.weight"].shape == (64, 128)
    else:
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["draft_vocab_size"] == tensors["t2d"].sum() == len(tensors["d2t"])
        numbers = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        assert numbers.tolist() == tensors["t2d"].nonzero().flatten().tolist()
        assert tensors["fc.weight"].shape == (64, 3 * 64)
        assert tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 2 * 64)
        assert {"midlayer.hidden_norm.weight", "lm_head.weight"} <= {*tensors}


@torch.no_grad()
def test_what_a_head_cannot_tell_is_never_drafted(target):
    tokens = torch.tensor([7, 9, 4000])
    head = shaken("eagle3", target, tokens)
    logits = head.logits(torch.randn(5, 64), target.lm_head)
    assert logits.shape == (5, 4096)
    assert logits.isfinite().nonzero()[:, 1].view(5, 3).tolist() == [[7, 9, 4000]] * 5


@pytest.mark.slow
@KINDS
def test_training_raises_what_is_accepted_and_goes_on_where_it_was_cut(
    kind, target, text, tmp_path
):
    spec = replace(SPECS[kind], steps=30)
    runs = [HeadRun(spec, target, text, tmp_path / name, seed=0) for name in ("whole", "cut")]
    before = runs[0].measured()["overlap"]
    run_to_end(runs[0], checkpoint_s=1e9, evaluate_every=10_000, show=False)
    for _ in range(7):
        runs[1].advance()
    runs[1].save()
    rest = HeadRun(spec, target, text, tmp_path / "cut", seed=0)
    assert rest.resume()
    run_to_end(rest, checkpoint_s=1e9, evaluate_every=10_000, show=False)
    for name, tensor in runs[0].model.state_dict().items():
        assert torch.equal(tensor, rest.model.state_dict()[name]), name
    after = runs[0].history[-1]["overlap"]
    for domain, overlaps in after.items():
        assert all(new > old for new, old in zip(overlaps, before[domain], strict=True))


def test_commonest_counts_drafted_tokens_alone():
    ids = np.array([[5, 5, 5, 9, 9, 8]], dtype=np.uint16)
    text = HeadText({"a": ids}, {}, lambda rows: np.arange(rows.shape[1])[None] >= 2)
    assert commonest(text, 2).tolist() == [8, 9]


@KINDS
def test_runs_of_a_head_end_at_its_first_wrong_draft(kind, target):
    head, prompt, text = shaken(kind, target), [6, 9, 11, 14], [20, 31, 40, 22, 17]
    told = head_logits(head, target, prompt, text, 3)
    assert [t.shape for t in told] == [(5, 4096)] * 3
    first = told[0].argmax(-1).tolist()
    assert (head_runs(told, first, None) > 0).sum() >= 5
    # With the second step always wrong no run is longer than one.
    told[1] = torch.zeros_like(told[1]).index_fill(-1, torch.tensor([0]), 1.0)
    assert head_runs(told, first, None).tolist() == [1] * 5
