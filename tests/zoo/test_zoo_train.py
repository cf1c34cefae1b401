"""Training: it learns, it resumes to the same state, growing and distilling do what they say."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from lab.zoo.data import answer_mask, pack  # noqa: E402
from lab.zoo.distil import overlap, teach  # noqa: E402
from lab.zoo.modeling import build, grow, hidden_states, load_model, save_model  # noqa: E402
from lab.zoo.recipe import EVEN, FULL, ModelSpec, Shape, quick  # noqa: E402
from lab.zoo.template import ASSISTANT_ID, BOS_ID, EOS_ID  # noqa: E402
from lab.zoo.tokenizer import load_tokenizer  # noqa: E402
from lab.zoo.train import Lessons, Pools, TrainingRun, run_to_end  # noqa: E402
from penstock.zoo.registry import DEFAULT_TARGET, DOMAINS, model_path  # noqa: E402

TOY = Shape(hidden=64, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=64)
STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(model_path(DEFAULT_TARGET))


@pytest.fixture(scope="module")
def pools(tokenizer):
    train = {d: pack(tokenizer, d, "train", 6, 0) for d in ("chat", "math")}
    return Pools(train, {d: pack(tokenizer, d, "held_back", 1, 0) for d in train})


@pytest.fixture(scope="module")
def spec():
    mixture = {"chat": 1.0, "math": 1.0}
    return ModelSpec(
        "toy", "drafter", TOY, "", mixture, STEPS, rows_per_step=2, warmup=2, adam_lr=1e-2
    )


def _finish(run):
    run_to_end(run, checkpoint_s=1e9, evaluate_every=10_000)


@pytest.mark.slow
def test_training_lowers_the_loss(spec, pools, tmp_path):
    run = TrainingRun(spec, pools, tmp_path / "toy", seed=0)
    before = run.evaluate()["held"]
    _finish(run)
    after = run.history[-1]["held"]
    assert all(after[d] < before[d] - 1.0 for d in before)


@pytest.mark.slow
def test_resumed_run_ends_in_the_same_state(spec, pools, tmp_path):
    whole = TrainingRun(spec, pools, tmp_path / "whole", seed=0)
    _finish(whole)
    half = TrainingRun(spec, pools, tmp_path / "half", seed=0)
    for _ in range(STEPS // 2):
        half.advance()
    half.save()
    rest = TrainingRun(spec, pools, tmp_path / "half", seed=0)
    with torch.no_grad():
        rest.model.model.norm.weight.zero_()
    assert rest.resume()
    assert rest.step == STEPS // 2
    _finish(rest)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, rest.model.state_dict()[name]), name


@pytest.mark.slow
def test_distillation_raises_overlap(spec, pools, tmp_path):
    schooled = TrainingRun(spec, pools, tmp_path / "teacher", seed=5)
    _finish(schooled)
    train, held = (
        {d: teach(schooled.model, part[d]) for d in part} for part in (pools.train, pools.held)
    )
    lessons = Lessons(train, held)
    student = replace(spec, teacher="teacher", distil_from=0.0, prompt_share=0.0)
    run = TrainingRun(student, pools, tmp_path / "student", seed=0, lessons=lessons)
    before = overlap(run.model, lessons.train["chat"])
    _finish(run)
    assert overlap(run.model, lessons.train["chat"]) > before + 0.1
    with pytest.raises(ValueError, match="teacher"):
        TrainingRun(student, pools, tmp_path / "student", seed=0)


def test_growing_changes_nothing_at_first():
    shape = replace(TOY, layers=2)
    small = build(shape, seed=3)
    large = grow(small, replace(shape, layers=6))
    ids = torch.arange(40)[None] + 7
    torch.testing.assert_close(hidden_states(large, ids), hidden_states(small, ids))
    with pytest.raises(ValueError, match="multiple"):
        grow(small, replace(shape, layers=3))


def test_saved_model_is_bfloat16_and_loads(tmp_path):
    model = build(TOY, seed=1)
    save_model(model, tmp_path)
    half = load_model(tmp_path, torch.bfloat16)
    assert half.model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.model.embed_tokens.weight.dtype == torch.float32
    assert half.lm_head.weight.data_ptr() == half.model.embed_tokens.weight.data_ptr()


def test_answer_mask_covers_answers_and_their_end():
    row = [BOS_ID, 9, 9, ASSISTANT_ID, 7, 8, EOS_ID, BOS_ID, 9, ASSISTANT_ID, 7, 7]
    mask = answer_mask(np.array([row], dtype=np.uint16))[0]
    assert mask.nonzero()[0].tolist() == [3, 4, 5, 9, 10]


def test_recipes_name_known_domains_and_fit_the_limits():
    assert set(EVEN) == set(DOMAINS)
    names = [m.name for m in FULL.models]
    assert [m.name for m in quick().models] == names
    for model in FULL.models:
        assert set(model.mixture) <= set(DOMAINS)
        assert model.teacher in (None, *names)
