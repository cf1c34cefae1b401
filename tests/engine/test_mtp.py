"""Heads inside the target: drafts as the reference's, and the target's own text."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH
from tests.engine.small_family import VOCAB, small_llama, write_tokenizer
from tests.engine.small_gguf import save_gguf
from tests.engine.small_heads import (
    EAGLE,
    ReferenceAssistant,
    ReferenceHead,
    add_assistant,
    add_head,
    in_gguf,
)
from tests.engine.small_models import CASES, Paging, tokens, write_checkpoint
from tests.engine.test_exactness import (
    SAMPLINGS,
    Alone,
    EndingEarly,
    check_cancelled,
    check_many,
    make_loop,
    make_requests,
    predicted,
    run,
    timeless,
)
from tests.products import covering

from penstock.cli.models import with_models
from penstock.config import NGRAM, ConfigError, EngineConfig
from penstock.core.learn import Estimators
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, View
from penstock.core.state import DrafterKind, Grant, RequestState
from penstock.core.types import DraftOrder, SamplingParams
from penstock.engine import verifier
from penstock.engine.build import Engine, load_engine
from penstock.engine.calibrate import calibrate
from penstock.engine.carried import CarriedStates
from penstock.engine.drafters.drafts import Drafts
from penstock.engine.drafters.head import CommonTokens, HeadDrafter
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.formats import open_checkpoint
from penstock.engine.models.weight_specs import head_specs
from penstock.engine.models.weights import load_weights
from penstock.engine.native.runner import NativeRunner
from penstock.engine.runner import Carry, RaggedBatch
from penstock.engine.sequences import TokenBuffer
from penstock.engine.verifier import Decided

HEADS = ("qwen3-5", "llama")
INSIDE = {"qwen3-5": MODEL_ARCH.QWEN35, "glm4-moe": MODEL_ARCH.GLM4_MOE}
"""Heads in the target's own folder or file."""
GATED = {
    "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
"""A hybrid target of four layers whose heads are rotated as EAGLE-3's."""
KINDS = (*HEADS, "glm4-moe", "eagle3", "eagle3-gated", "assistant")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """An engine with a head, and what that drafts."""

    engine: Engine
    reference: ReferenceHead | ReferenceAssistant


def load(root: Path, kind: str, backend: str = "auto", **settings: Any) -> Loaded:
    """A hybrid target or a GLM with a head in its folder, a Llama with one of either kind beside
    it, or a Gemma with an assistant, and look-up and a small model that is hardly ever right."""
    is_eagle, is_assistant = kind.startswith("eagle3"), kind == "assistant"
    others = {"eagle3": "llama", "eagle3-gated": "qwen3-5", "assistant": "gemma4-shared"}
    case = CASES[others.get(kind, kind)]
    changes = case.changes | {"vocab_size": VOCAB, "max_position_embeddings": 512}
    changes |= {"eos_token_id": None} | ({"num_hidden_layers": 4} if is_eagle else {})
    changes |= {"vocab_size_per_layer_input": VOCAB} if is_assistant else {}
    changes |= GATED if kind == "eagle3-gated" else {}
    saved = write_checkpoint(root / "target", dataclasses.replace(case, changes=changes))
    beside = None if kind in INSIDE else root / "head"
    reference: ReferenceHead | ReferenceAssistant
    if is_assistant:
        reference = ReferenceAssistant(saved, add_assistant(saved, root / "head"))
    else:
        tensors = add_head(root / "target", beside=beside, shape=EAGLE if is_eagle else None)
        reference = ReferenceHead(saved, tensors)
    small_llama(1, seed=3).save_pretrained(root / "far")
    for name in ("target", "far"):
        write_tokenizer(root / name)
    drafters = {"mtp": str(beside or "mtp"), "far": str(root / "far"), "ngram": NGRAM}
    config = EngineConfig(
        target=root / "target",
        drafters=drafters,
        dtype="float32",
        backend=backend,
        **{"kv_tokens": 32 * 256, "num_threads": 1} | settings,
    )
    return Loaded(load_engine(config, calibrated=False), reference)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Loaded]:
    @cache
    def one(kind: str, backend: str = "auto") -> Loaded:
        return load(tmp_path_factory.mktemp(f"{kind}-{backend}"), kind, backend)

    return one


@pytest.fixture(scope="module")
def by_itself(loaded: Callable[..., Loaded]) -> Callable[[str], Alone]:
    return cache(lambda kind: Alone(loaded(kind).engine, num=16))


def recorded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Any, Any]]:
    """Texts, looked-up fronts and drafts of all that the head drafts from now on."""
    head = engine.executor.drafters["mtp"]
    found, honest = [], HeadDrafter.draft

    def draft(self: HeadDrafter, orders: list[DraftOrder], texts: list[TokenBuffer]) -> Drafts:
        drafts = honest(self, orders, texts)
        for order, text, one in zip(orders, texts, drafts.drafts, strict=True):
            found.append((text.tokens(0, text.length), order.front_token_ids, one.token_ids))
        return drafts

    assert isinstance(head, HeadDrafter)
    monkeypatch.setattr(HeadDrafter, "draft", draft)
    return found


@pytest.mark.parametrize(
    ("kind", "backend", "small"),
    covering(KINDS, ["native", "eager"], [False, True], strength=1),
)
def test_drafts_are_those_of_the_reference(loaded, monkeypatch, kind, backend, small) -> None:
    """In batches, behind rejected drafts, chunks of prompts and preemptions (then from zeros)."""
    one = loaded(kind, backend)
    found = recorded(one.engine, monkeypatch)
    memory = {"kv_tokens": 12 * 16, "max_num_batched_tokens": 48} if small else {}
    loop = make_loop(one.engine, learn=timeless(), look_up=False, **memory)
    run(loop, make_requests(SAMPLINGS["greedy"], 9, "mtp"))
    reference = one.reference
    assert len(found) > 60
    right = [reference.draft(text, len(d), front) == d for text, front, d in found]
    if small:
        assert loop.scheduler.table.counters.preemptions > 0
        assert np.mean(right) > 0.5
    else:
        assert all(right)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_go_on_behind_looked_up_tokens(loaded, by_itself, monkeypatch, kind) -> None:
    one = loaded(kind)
    found = recorded(one.engine, monkeypatch)
    alone = by_itself(kind)["greedy"]
    requests = predicted(make_requests(SAMPLINGS["greedy"], 16, "mtp"), alone)
    run(make_loop(one.engine, learn=timeless(), allocation=Both()), requests)
    reference = one.reference
    fronts = [len(front) for _, front, _ in found]
    assert max(fronts) > 2
    assert all(reference.draft(text, len(d), front) == d for text, front, d in found)


class Both(AllocationPolicy):
    """Two looked-up tokens, or as many as there are, and three of the drafter."""

    name = "both"

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        fronts = [min(len(c.survival), 3) for c in candidates]
        pairs = zip(candidates, fronts, strict=True)
        return [Grant(min(c.limit, 3), num_looked_up=n).cut(c.most) for c, n in pairs]

    def reserve(self, state: RequestState) -> int:
        return 6


# --- the text is the target's ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sampling", "drafter", "pipeline"),
    covering(KINDS, SAMPLINGS, ["mtp", "rotating"], ["off", "2", "async"], strength=1),
)
def test_output_is_the_targets_own(loaded, by_itself, kind, sampling, drafter, pipeline) -> None:
    """With look-up, predictions of which every seventh token is wrong, and another drafter."""
    engine, expected = loaded(kind).engine, by_itself(kind)[sampling]
    name = "auto" if drafter == "rotating" else drafter
    requests = predicted(make_requests(SAMPLINGS[sampling], 16, name), expected)
    rotating = drafter == "rotating"
    loop = make_loop(engine, pipeline=pipeline, learn=timeless(), rotating=rotating)
    outputs, accepted = run(loop, requests)
    assert outputs == expected
    assert accepted > 50


def test_a_draft_that_is_taken_unseen_changes_the_output(loaded, by_itself, monkeypatch) -> None:
    """Negative control: the head's drafts differ from the target's text."""

    def all_of_it(samples: list[int], first: int, draft: list[int]) -> Decided:
        return Decided([*draft, samples[first + len(draft)]], len(draft), len(draft))

    monkeypatch.setattr(verifier, "_compare", all_of_it)
    engine = loaded("llama").engine
    requests = make_requests(SAMPLINGS["greedy"], 8, "mtp")
    outputs, _ = run(make_loop(engine, learn=timeless(), look_up=False), requests)
    assert outputs != by_itself("llama")["greedy"][:8]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", ["greedy", "coupled"])
def test_drafts_that_end_early(loaded, by_itself, kind, sampling) -> None:
    engine = loaded(kind).engine
    loop = make_loop(engine, allocation=EndingEarly(), learn=timeless(), look_up=False)
    requests = make_requests(SAMPLINGS[sampling], 8, "mtp")
    outputs, _ = run(loop, requests)
    assert outputs == by_itself(kind)[sampling][:8]


@pytest.mark.parametrize(("kind", "pipeline"), covering(KINDS, ["off", "async"], strength=2))
def test_preempted_cancelled_and_chunked(loaded, by_itself, kind, pipeline) -> None:
    """Beside another drafter, and prefixes that Llamas share."""
    engine, sampling = loaded(kind).engine, "coupled"
    requests = make_requests(SAMPLINGS[sampling], 16, "auto")
    loop = make_loop(
        engine,
        pipeline=pipeline,
        kv_tokens=10 * 16,
        max_num_batched_tokens=48,
        learn=timeless(),
        rotating=True,
    )
    check_cancelled(loop, requests, (5, 8), by_itself(kind)[sampling])
    carried = engine.executor._carried
    loop.turn([])
    assert not carried._known


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_policies_leave_the_text_as_it_is(loaded, by_itself, kind) -> None:
    """They choose among the head, another drafter and look-up, by measured times."""
    engine, sampling = loaded(kind).engine, "coupled"
    calibrate(engine.executor, engine.scheduler.learn, engine.clock, budget_s=0.05)
    requests = make_requests(SAMPLINGS[sampling], 16, "auto")
    outputs, _ = run(engine.loop, predicted(requests, by_itself(kind)[sampling]))
    assert outputs == by_itself(kind)[sampling]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sampling"), covering(KINDS, ["greedy", "coupled"], strength=2))
def test_many_requests(loaded, kind, sampling) -> None:
    check_many(loaded(kind).engine, sampling, rotating=True)


# --- drafting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_both_backends_draft_alike(loaded, monkeypatch, kind) -> None:
    """Samples of the head's own distribution as well, with the same probabilities."""
    drafts = []
    for backend in ("native", "eager"):
        one = loaded(kind, backend)
        found = recorded(one.engine, monkeypatch)
        for verification in ("coupled", "ratio"):
            sampling = SamplingParams(temperature=0.9, verification=verification)
            loop = make_loop(one.engine, learn=timeless(), look_up=False)
            run(loop, make_requests(sampling, 8, "mtp"))
        drafts.append([(text, draft) for text, _, draft in found])
        monkeypatch.undo()
    assert len(drafts[0]) > 100
    assert drafts[0] == drafts[1]


def head_rows(runner: NativeRunner, count: int, seed: int = 0) -> tuple[RaggedBatch, torch.Tensor]:
    """One row of the head of each of `count` sequences, whose blocks hold zeros before it."""
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, 60, size=count).astype(np.int32)
    tables = np.arange(count * 8, dtype=np.int32).reshape(count, 8)
    states = torch.from_numpy(rng.standard_normal((count, runner.config.hidden_size))).float()
    rows = np.arange(count + 1, dtype=np.int32)
    tokens = rng.integers(VOCAB, size=count).astype(np.int32)
    batch = RaggedBatch(tokens, positions, rows, positions + 1, tables, rows[:-1])
    carry = Carry(states, rows[:-1], anchors=np.maximum(positions - 2, 0))
    return dataclasses.replace(batch, carry=carry), states


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_rows_of_the_head_have_the_same_bits_alone(loaded, kind, count) -> None:
    runner = loaded(kind, "native").engine.executor.target
    batch, states = head_rows(runner, count)
    together = runner.forward_head(batch)
    for i in range(count):
        one = np.arange(2, dtype=np.int32)
        alone = RaggedBatch(
            batch.token_ids[i : i + 1],
            batch.positions[i : i + 1],
            one,
            batch.seq_lens[i : i + 1],
            batch.block_tables[i : i + 1],
            one[:1],
            carry=Carry(states[i : i + 1], one[:1], anchors=batch.carry.anchors[i : i + 1]),
        )
        assert torch.equal(runner.forward_head(alone)[0], together[i])
        assert torch.equal(alone.carry.after[0], batch.carry.after[i])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_chunks_change_no_bit(loaded, kind) -> None:
    """Of what passes write for the head, and of what it drafts by it."""
    engine = loaded(kind, "native").engine
    path, ids = engine.tokenizer_path, {f"s{i}": tokens(60 + i, seed=i) for i in range(9)}
    head = path.parent / "head" if (path.parent / "head").is_dir() else path
    found = []
    for threads, cuts in ((1, (0, 60)), (2, (0, 60)), (2, (0, 7, 50, 60))):
        runner = NativeRunner.load(path, torch.float32, 200, 8, threads, num_slots=9, head=head)
        place, before = Paging(200, 8), torch.zeros(9, runner.config.hidden_size)
        for start, stop in pairwise(cuts):
            batch = place.batch(*((n, x, start, stop) for n, x in ids.items()), logits="last")
            carry = Carry(before, batch.query_start[1:] - 1)
            runner.forward(dataclasses.replace(batch, carry=carry))
            before = carry.after
        rows = np.arange(10, dtype=np.int32)
        table = place.batch(*((n, x, 60, 65) for n, x in ids.items())).block_tables
        first = RaggedBatch(
            np.array([x[59] for x in ids.values()], dtype=np.int32),
            np.full(9, 60, dtype=np.int32),
            rows,
            np.full(9, 61, dtype=np.int32),
            table,
            rows[:-1],
            carry=Carry(before, rows[:-1], anchors=np.full(9, 60, dtype=np.int32)),
        )
        none = np.zeros(9)
        steps = np.full(9, 5, dtype=np.int32)
        seeds, salts = np.zeros(9, dtype=np.uint64), np.zeros(9, dtype=np.int32)
        drafted = runner.draft(first, steps, none, seeds, salts, return_logits=True)
        assert drafted.logits is not None
        found.append((before, drafted.logits))
    for states, logits in found[1:]:
        assert torch.equal(states, found[0][0])
        assert torch.equal(logits, found[0][1])
        assert logits.isfinite().any()


def test_a_head_refuses_what_it_cannot_compute(loaded) -> None:
    runner = loaded("llama", "native").engine.executor.target
    batch, _ = head_rows(runner, 2)
    with pytest.raises(ValueError, match="states before"):
        runner.forward_head(dataclasses.replace(batch, carry=None))
    ends = np.array([0, 2, 2], dtype=np.int32)
    at = {"positions": np.array([3, 4], dtype=np.int32), "seq_lens": np.full(2, 5, dtype=np.int32)}
    with pytest.raises(ValueError, match="sequence 0 has not one row"):
        runner.forward_head(dataclasses.replace(batch, query_start=ends, **at))
    batch.carry.rows = np.array([0, 7], dtype=np.int32)
    with pytest.raises(ValueError, match=r"kept_rows\[1\] is 7"):
        runner.forward_head(batch)


def test_common_tokens_follow_the_outputs() -> None:
    common = CommonTokens(100_000)
    common.note([99_999] * 1000)
    assert common.limit == 100_000  # too little is known
    common = CommonTokens(100_000)
    for _ in range(100):
        common.note([*range(0, 4000, 40)])
    assert common.limit == 4096
    common.note([50_000] * 40)
    assert common.limit == 4096
    common.note([50_000] * 400)
    assert common.limit == 50_176
    assert CommonTokens(700).limit == 700


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*HEADS, "assistant"])
def test_common_tokens_alone_are_drafted(loaded, by_itself, monkeypatch, kind) -> None:
    """By both backends alike, at any temperature; other tokens have probability 0."""
    monkeypatch.setattr(CommonTokens, "limit", 70)
    drafts = []
    for backend in ("native", "eager"):
        one = loaded(kind, backend)
        found = recorded(one.engine, monkeypatch)
        for sampling in (*SAMPLINGS.values(), SamplingParams(temperature=0.9)):
            loop = make_loop(one.engine, learn=timeless(), look_up=False)
            outputs, _ = run(loop, make_requests(sampling, 8, "mtp"))
            if sampling == SAMPLINGS["greedy"]:
                assert outputs == by_itself(kind)["greedy"][:8]
        drafts.append([(text, draft) for text, _, draft in found])
        monkeypatch.undo()
        monkeypatch.setattr(CommonTokens, "limit", 70)
    assert drafts[0] == drafts[1]
    tokens = {token for _, draft in drafts[0] for token in draft}
    assert len(tokens) > 40
    assert max(tokens) < 70


# --- carried states -------------------------------------------------------------------------------


def rows_of(*spans: tuple[int, int, int]) -> RaggedBatch:
    """spans: start, number of rows, and of these at the end with logits."""
    counts = [n for _, n, _ in spans]
    ends = np.cumsum(counts)
    logits = [range(e - k, e) for e, (_, _, k) in zip(ends, spans, strict=True)]
    none = np.zeros(sum(counts), dtype=np.int32)
    positions = np.concatenate([np.arange(s, s + n) for s, n, _ in spans]).astype(np.int32)
    return RaggedBatch(
        none,
        positions,
        np.array([0, *ends], dtype=np.int32),
        np.array([s + n for s, n, _ in spans], dtype=np.int32),
        np.zeros((len(spans), 1), dtype=np.int32),
        np.array([r for rows in logits for r in rows], dtype=np.int32),
    )


def test_the_next_step_says_which_state_it_begins_with() -> None:
    carried = CarriedStates(2, torch.device("cpu"))

    def step(ids: list[str], batch: RaggedBatch) -> tuple[list[float], list[int]]:
        carry = carried.carry(ids, batch, batch.logits_rows[:0])
        batch = dataclasses.replace(batch, carry=carry)
        carry.after = torch.from_numpy(batch.positions[carry.rows]).float()[:, None].repeat(1, 2)
        carried.keep(ids, batch)
        return carry.before[:, 0].tolist(), carry.rows.tolist()

    # A chunk of a prompt keeps its last row, a draft all from the first with logits on.
    assert step(["a", "b"], rows_of((0, 4, 0), (0, 3, 1))) == ([0, 0], [3, 6])
    assert step(["b", "a"], rows_of((3, 4, 4), (4, 3, 1))) == ([2, 3], [0, 1, 2, 3, 6])
    # Two of three draft tokens were rejected.
    assert step(["b"], rows_of((5, 1, 1))) == ([4], [0])
    # Not known: behind a prefix that another has computed, or after a preemption.
    assert step(["c"], rows_of((8, 2, 1))) == ([0], [1])
    assert carried.before(["c", "c", "b", "d"], [10, 9, 6, 3])[:, 0].tolist() == [9, 0, 5, 0]
    carried.drop("c")
    assert carried.before(["c"], [10])[0].tolist() == [0, 0]


# --- where heads are found ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "target", CASES["qwen3-5"])
    return tmp_path / "target"


@pytest.mark.parametrize("kind", INSIDE)
def test_a_gguf_file_has_the_same_head_as_a_folder(kind: str, tmp_path: Path) -> None:
    saved = write_checkpoint(folder := tmp_path / "target", CASES[kind])
    tensors, file = add_head(folder), tmp_path / "model.gguf"
    stored = in_gguf(tensors, 3, INSIDE[kind])
    more = {"tensors": stored, "block_count": 4, "nextn_predict_layers": 1}
    save_gguf(file, saved.model, **more)
    assert open_checkpoint(folder).head() == {}
    assert open_checkpoint(file).head() == {}
    heads = []
    for path in (folder, file):
        config = DecoderConfig.from_pretrained(path).within(None, path)
        specs = [spec.name for spec in head_specs(config)]
        found = load_weights(path, config, torch.float32, path)
        heads.append({name: found[name] for name in specs})
    assert len(heads[0]) > 10
    for name, values in heads[0].items():
        torch.testing.assert_close(heads[1][name], values, rtol=0, atol=1e-6)


def test_a_target_with_a_head_drafts_with_it_and_with_look_up(folder: Path) -> None:
    assert "mtp" not in with_models({"target": str(folder)})["drafters"]
    add_head(folder)
    found = with_models({"target": str(folder)})
    assert found["drafters"] == {"mtp": "mtp"}
    config = EngineConfig(**found)
    assert config.head == ("mtp", folder)
    assert config.text_look_up == ("suffix", "suffix")
    assert config.drafter_models == {}
    assert with_models({"target": str(folder), "drafters": {}})["drafters"] == {}
    named = with_models({"target": str(folder), "drafters": {"mtp": {"path": "mtp"}}})
    assert named["drafters"] == {"mtp": "mtp"}
    beside = with_models({"target": "target-large", "drafters": {"mtp": {"path": str(folder)}}})
    assert EngineConfig(**beside).head == ("mtp", folder)


def test_what_is_no_head_is_refused_in_one_line(folder: Path) -> None:
    config = EngineConfig(target=folder, drafters={"mtp": "mtp"}, kv_tokens=256, num_threads=1)
    with pytest.raises(CheckpointError, match=r"has no head \(mtp\.fc\.weight, LlamaFor"):
        load_engine(config, calibrated=False)
    for settings, told in (
        ({"drafters": {"mtp": {"path": "mtp", "device": "cpu:0"}}}, "it takes no device"),
        ({"drafters": {"mtp": "ngram+mtp"}}, "'mtp' is a part of the target"),
        ({"drafters": {"mtp": "mtp", "eagle3": "x"}}, "a target has one head at most"),
        ({"drafters": {"mtp": "mtp"}, "vllm": {}}, "is a part of the target, not with vLLM"),
    ):
        with pytest.raises(ValueError, match=told):
            EngineConfig(target=folder, **settings)


def test_a_head_of_another_size_is_refused(folder: Path, tmp_path: Path) -> None:
    add_head(folder, beside=tmp_path / "head")
    changes = CASES["llama"].changes | {"vocab_size": VOCAB}
    other = dataclasses.replace(CASES["llama"], changes=changes | {"hidden_size": 96})
    write_checkpoint(tmp_path / "other", other)
    write_tokenizer(tmp_path / "other")
    drafters = {"mtp": str(tmp_path / "head")}
    config = EngineConfig(target=tmp_path / "other", drafters=drafters, kv_tokens=256)
    with pytest.raises(CheckpointError, match=r"tensor mtp\.fc\.weight has shape \(48, 96\)"):
        load_engine(config, calibrated=False)


def test_calibration_measures_a_head_by_itself(loaded) -> None:
    """Its steps by batch, and its rows of looked-up tokens; replays are not ordered."""
    engine = loaded("qwen3-5").engine
    learn = Estimators()
    calibrate(engine.executor, learn, engine.clock, budget_s=0.05)
    assert not learn.times.curve_of("mtp").is_empty
    assert learn.times.catch_up_of("mtp") > 0
    drafter = engine.scheduler.table.drafters["mtp"]
    assert drafter.kind is DrafterKind.HEAD
    assert drafter.pool is None
    assert not drafter.can_replay
    assert not dataclasses.replace(drafter, has_lane=True).has_lane
    assert engine.describe()["drafters"][0] == "mtp"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, r"the inputs of layers \[0, 1, 4\] of 4"),
        ({"draft_vocab_size": None}, "tells None tokens"),
        ({"draft_vocab_size": 59}, r"tensor lm_head\.weight has shape \(60, 48\)"),
        ({"vocab": 40}, r"d2t: ids of tokens must differ, within 0\.\.39"),
    ],
)
def test_other_eagle_heads_are_refused(tmp_path: Path, changes, told) -> None:
    own = CASES["llama"].changes | {"num_hidden_layers": 4}
    write_checkpoint(tmp_path / "target", dataclasses.replace(CASES["llama"], changes=own))
    head = tmp_path / "head"
    add_head(tmp_path / "target", beside=head, shape=dataclasses.replace(EAGLE, vocab_size=60))
    if (vocab := changes.pop("vocab", None)) is not None:
        own |= {"vocab_size": vocab}
        write_checkpoint(tmp_path / "target", dataclasses.replace(CASES["llama"], changes=own))
    file = head / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    config = EngineConfig(
        target=tmp_path / "target", drafters={"eagle3": str(head)}, kv_tokens=256, num_threads=1
    )
    with pytest.raises(CheckpointError, match=told):
        load_engine(config, calibrated=False)


def test_the_bundled_head_has_names() -> None:
    """Beside the target that it was trained with, and by its own."""
    for given in ("mtp", "target-large-mtp"):
        found = with_models({"target": "target-large", "drafters": {"mtp": given}})
        assert Path(found["drafters"]["mtp"]).name == "target-large-mtp"
    with pytest.raises(ConfigError, match="bundled heads are target-large-mtp"):
        with_models({"target": "target-large", "drafters": {"mtp": "nosuch"}}, download=False)
