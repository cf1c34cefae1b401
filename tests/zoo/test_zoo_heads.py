"""Heads: chains as a drafter makes them, both layouts, training, and growth with the target."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from torch.nn import functional  # noqa: E402

from lab.zoo.data import answer_mask, pack  # noqa: E402
from lab.zoo.evidence import HEAD_DRAFT, head_logits, head_runs  # noqa: E402
from lab.zoo.head_training import HeadRun  # noqa: E402
from lab.zoo.heads import Head, embed, load_head, read, save_head  # noqa: E402
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
    return load_model(folder)


@pytest.fixture(scope="module")
def rows():
    tokenizer = load_tokenizer(model_path(DEFAULT_TARGET))
    return {d: pack(tokenizer, d, "train", 4, 0) for d in ("chat", "math")}


def run_of(spec, target, rows, folder):
    return HeadRun(spec, target, rows, {d: ids[:1] for d, ids in rows.items()}, folder)


def shaken(kind, target, tokens=None):
    """A head whose weights are all its own."""
    tokens = torch.arange(5, 4096, 6) if tokens is None else tokens
    spec = SPECS[kind]
    head = Head(target.config, spec.reads, tokens if spec.reads else None)
    head.begin_like(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return head


def drafted_step_by_step(head, target, ids, start, steps):
    """One chain, row after row, as a drafter computes it from the layouts' description."""
    states, embedded = read(target, ids[None]), embed(target, ids[None])
    before = head.before(states)[0]
    config = head.config
    kept, told, passed = [], [], None
    for place in range(start + steps):
        reads, base = head.enter(embedded[0, place], passed if place > start else before[place])
        at = torch.tensor([place])
        kept.append(head.keys_values(reads[None], at))
        q = head.queries(reads[None], at).reshape(1, config.num_attention_heads, 1, -1)
        k, v = (torch.cat(x).transpose(0, 1)[None] for x in zip(*kept, strict=True))
        out = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).flatten()
        passed, final = head.leave(base, out)
        told.append(final)
    return told[start:]


@torch.no_grad()
def test_a_row_takes_the_state_before_it(target):
    states = read(target, torch.arange(12)[None] + 6)
    before = shaken("mtp", target).before(states)
    assert torch.equal(before[:, 1:], states[-1][:, :-1])
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
    told = head.chain(embed(target, ids), read(target, ids), starts, 4)
    for number, (row, place) in enumerate(chains):
        expected = drafted_step_by_step(head, target, ids[row], place, 4)
        torch.testing.assert_close(torch.stack([t[number] for t in told]), torch.stack(expected))


@KINDS
def test_a_saved_head_is_the_same_head(kind, target, tmp_path):
    head = shaken(kind, target)
    save_head(tmp_path, head.checkpoint(), head.description(target.config.to_dict()))
    loaded = load_head(tmp_path)
    assert type(loaded) is type(head)
    for name, tensor in loaded.checkpoint().items():
        assert torch.equal(tensor, head.checkpoint()[name]), name
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


@KINDS
@torch.no_grad()
def test_first_weights_tell_the_next_state_better_than_any_near_them(kind, target):
    spec = SPECS[kind]
    head = Head(target.config, spec.reads, torch.arange(5, 4096, 6) if spec.reads else None)
    head.begin_like(target)
    ids = torch.randint(6, 4096, (2, 250), generator=torch.Generator().manual_seed(3))
    embedded, states = embed(target, ids), read(target, ids)
    places = torch.ones(ids.shape, dtype=torch.bool)
    places[:, 0] = False
    head.fit(embedded, states, places)

    def error():
        # The layer adds nothing yet: what is passed through is what `fc` makes.
        _, told = head.enter(embedded, head.before(states))
        wanted = states[-1] / target.model.norm.weight
        return (told - wanted)[:, 1:].square().mean().item()

    best = error()
    assert best < (states[-1] / target.model.norm.weight)[:, 1:].square().mean()
    for seed in range(4):
        nudge = torch.randn(head.fc.weight.shape, generator=torch.Generator().manual_seed(seed))
        head.fc.weight.add_(nudge * 0.01)
        assert error() > best
        head.fc.weight.sub_(nudge * 0.01)


@torch.no_grad()
def test_what_a_head_cannot_tell_is_never_drafted(target):
    tokens = torch.tensor([7, 9, 4000])
    head = shaken("eagle3", target, tokens)
    logits = head.logits(torch.randn(5, 64), target.lm_head.weight)
    assert logits.shape == (5, 4096)
    assert logits.isfinite().nonzero()[:, 1].view(5, 3).tolist() == [[7, 9, 4000]] * 5


@pytest.mark.slow
@KINDS
def test_training_raises_what_is_accepted_and_goes_on_where_it_was_cut(
    kind, target, rows, tmp_path
):
    spec = replace(SPECS[kind], steps=30)
    whole, cut = (run_of(spec, target, rows, tmp_path / name) for name in ("whole", "cut"))
    assert not whole.resume()
    before = whole.measured()["overlap"]
    run_to_end(whole, checkpoint_s=1e9, evaluate_every=10_000)
    assert not cut.resume()
    for _ in range(7):
        cut.advance()
    cut.save()
    rest = run_of(spec, target, rows, tmp_path / "cut")
    assert rest.resume()
    run_to_end(rest, checkpoint_s=1e9, evaluate_every=10_000)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, rest.model.state_dict()[name]), name
    after = whole.history[-1]["overlap"]
    for domain, overlaps in after.items():
        assert all(new > old for new, old in zip(overlaps, before[domain], strict=True))
    whole.finish(tmp_path / "made", target.config.to_dict())
    assert load_head(tmp_path / "made").reads == spec.reads


@KINDS
def test_drafts_are_compared_with_what_the_target_says_in_their_place(kind, target, rows, tmp_path):
    run = run_of(SPECS[kind], target, rows, tmp_path)
    ids = rows["chat"][:1]
    tokens = torch.from_numpy(ids.astype(np.int64))
    answers = answer_mask(ids)[0]
    known = run._commonest(SPECS[kind].tokens or 4096)
    logits = read(target, tokens)[-1][0] @ target.lm_head.weight[known].t()
    places = [p for p in range(1, 509) if answers[p] and answers[p - 1]]
    with torch.no_grad():
        drafts = list(run.drafts(ids))
    assert len(drafts) == SPECS[kind].chained
    for step, (made, is_there, likeliest, _) in enumerate(drafts):
        assert len(made) == len(places)
        for number, place in enumerate(places):
            there = all(answers[place : place + step + 1])
            assert is_there[number] == there
            if there:
                assert likeliest[number, 0] == logits[place + step].argmax()


@KINDS
def test_runs_of_a_head_end_at_its_first_wrong_draft(kind, target):
    head, prompt, text = shaken(kind, target), [6, 9, 11, 14], [20, 31, 40, 22, 17]
    told = head_logits(head, target, prompt, text)
    assert [t.shape for t in told] == [(5, 4096)] * HEAD_DRAFT
    first = told[0].argmax(-1).tolist()
    assert all(head_runs(told, first, 0.0) > 0)
    # With the second step always wrong no run is longer than one; noise is of a draft's place.
    told[1] = torch.zeros_like(told[1]).index_fill(-1, torch.tensor([0]), 1.0)
    assert head_runs(told, first, 0.0).tolist() == [1] * 5
    noise = torch.zeros(5, 4096)
    noise[3, first[3]] = 9.0
    assert head_runs(told, first, noise).tolist()[2:4] == [2, 1]


@pytest.mark.slow
def test_command_trains_a_head_beside_any_llama(folder, tmp_path, cli):
    for path in model_path(DEFAULT_TARGET).glob("*token*"):
        shutil.copy(path, folder)
    code, stdout, stderr = cli("zoo", "head", folder, tmp_path / "head", "--steps", "2")
    assert code == 0, stderr
    assert "in a row" in stdout
    head = load_head(tmp_path / "head")
    assert head.fc.weight.shape == (64, 128)


def test_other_models_are_refused(tmp_path, cli):
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64}
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 64)
    counts = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    config |= sizes | counts | {"head_dim": 32, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, stderr = cli("zoo", "head", tmp_path, tmp_path / "out")
    assert (code, stderr.count("\n")) == (2, 1)
    assert "heads are trained for Llamas; this is Qwen3ForCausalLM" in stderr
