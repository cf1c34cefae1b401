"""Models with recurrent layers: the bits of a text alone, whatever was rejected on the way."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.small_family import VOCAB, small_llama, write_tokenizer
from tests.engine.small_models import CASES, Checkpoints, Paging, tokens, write_checkpoint
from tests.engine.test_exactness import (
    SAMPLINGS,
    Alone,
    make_loop,
    make_requests,
    predicted,
    run,
    timeless,
)
from tests.products import covering

from penstock.config import NGRAM, ConfigError, EngineConfig
from penstock.core.types import Arrive, Cancel
from penstock.engine.backends import why_not_native
from penstock.engine.build import Engine, load_engine
from penstock.engine.eager import EagerRunner
from penstock.engine.kv_cache import kv_bytes_per_token, state_bytes
from penstock.engine.models.config import DecoderConfig
from penstock.engine.native.runner import NativeRunner
from penstock.engine.runner import ModelRunner, RaggedBatch
from penstock.engine.states import MOST_KEPT, StateMoves, StateSlots

needs_native = pytest.mark.skipif(why_not_native() is not None, reason="no native kernels")


def native(
    path: Path, dtype: torch.dtype = torch.float32, threads: int = 2, slots: int = 9
) -> NativeRunner:
    return NativeRunner.load(path, dtype, 200, 8, threads, num_slots=slots)


def with_rejections(
    runner: ModelRunner, ids: dict[str, np.ndarray], seed: int
) -> dict[str, torch.Tensor]:
    """Logits of every sequence's rows, in steps of all of them together: chunks of the prompt, then
    drafts of any length of which any part is wrong."""
    rng = np.random.default_rng(seed)
    place = Paging(runner.num_blocks, runner.block_size)
    done = dict.fromkeys(ids, 0)
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in ids}
    while any(done[name] < len(ids[name]) for name in ids):
        spans, accepted = [], {}
        for name, text in ids.items():
            start, left = done[name], len(text) - done[name]
            if left:
                count = int(min(left, rng.choice([1, 2, 3, 5, 9, 30])))
                accepted[name] = int(rng.integers(1, count + 1))
                wrong = text.copy()
                wrong[start + accepted[name] : start + count] += 1
                spans.append((name, wrong % 89, start, start + count))
        logits = runner.forward(place.batch(*spans))
        counts = [stop - start for *_, start, stop in spans]
        for (name, *_), own in zip(spans, logits.split(counts), strict=True):
            rows[name].append(own[: accepted[name]])
            done[name] += accepted[name]
    return {name: torch.cat(own) for name, own in rows.items()}


def alone(runner: ModelRunner, text: np.ndarray) -> torch.Tensor:
    return runner.forward(
        Paging(runner.num_blocks, runner.block_size).batch(("a", text, 0, len(text)))
    )


@needs_native
@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_rejected_rows_leave_the_same_bits(checkpoint: Checkpoints, count: int) -> None:
    case = "qwen3-5" if count % 2 else "qwen3-5-even"
    dtype = torch.bfloat16 if count == 3 else torch.float32
    path = checkpoint(case).path
    ids = {f"s{i}": tokens(110 - 11 * i, seed=i) for i in range(count)}
    found = with_rejections(native(path, dtype), ids, seed=count)
    for name, text in ids.items():
        assert torch.equal(found[name], alone(native(path, dtype, threads=1), text)), name


@needs_native
@pytest.mark.parametrize("by", [-1, 1])
def test_a_state_that_is_behind_other_rows_is_seen(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, by: int
) -> None:
    """Negative control: one row too many or too few is taken back."""
    honest = StateSlots.moves

    def wrong(slots: StateSlots, batch: RaggedBatch) -> StateMoves:
        moves = honest(slots, batch)
        replayed = np.where(moves.replayed > 1, moves.replayed + by, moves.replayed)
        return dataclasses.replace(moves, replayed=replayed.astype(np.int32))

    monkeypatch.setattr(StateSlots, "moves", wrong)
    path, text = checkpoint("qwen3-5").path, tokens(100)
    found = with_rejections(native(path), {"a": text}, seed=0)["a"]
    monkeypatch.undo()
    assert not torch.allclose(found, alone(native(path), text), atol=1e-2)


def test_the_eager_decoder_goes_back_too(checkpoint: Checkpoints) -> None:
    saved, text = checkpoint("qwen3-5"), tokens(100)
    runner = EagerRunner.load(saved.path, torch.float32, torch.device("cpu"), 64, 8)
    found = with_rejections(runner, {"a": text, "b": text[:60]}, seed=1)
    expected = saved.logits(text)
    torch.testing.assert_close(found["a"], expected, rtol=0, atol=3e-4)
    torch.testing.assert_close(found["b"], expected[:60], rtol=0, atol=3e-4)


def batch_of(*rows: tuple[int, int, int], logits: int = 1) -> RaggedBatch:
    """rows: slot, start and number; the last `logits` of each have logits."""
    counts = [n for *_, n in rows]
    ends = np.cumsum(counts)
    wanted = [range(end - min(n, logits), end) for end, n in zip(ends, counts, strict=True)]
    none = np.zeros(sum(counts), dtype=np.int32)
    return RaggedBatch(
        token_ids=none,
        positions=none,
        query_start=np.array([0, *ends], dtype=np.int32),
        seq_lens=np.array([start + n for _, start, n in rows], dtype=np.int32),
        block_tables=np.zeros((len(rows), 1), dtype=np.int32),
        logits_rows=np.array([r for rows_ in wanted for r in rows_], dtype=np.int32),
        slots=np.array([slot for slot, *_ in rows], dtype=np.int32),
    )


def test_moves_of_states() -> None:
    slots = StateSlots(3)

    def step(batch: RaggedBatch) -> list[list[int]]:
        moves = slots.moves(batch)
        slots.moved(batch, moves)
        return [moves.replayed.tolist(), moves.committed.tolist()]

    assert step(batch_of((2, 0, 40), (0, 0, 7), logits=0)) == [[-1, -1], [40, 7]]
    assert step(batch_of((0, 7, 5), (2, 40, 4), logits=4)) == [[0, 0], [2, 1]]
    # Two of three were rejected; of the other's, none.
    assert step(batch_of((2, 42, 1), (0, 12, 200), logits=200)) == [[1, 3], [1, 200 - MOST_KEPT]]
    for start in (42, 44):
        with pytest.raises(ValueError, match=f"begins at {start}; its state is behind 43 tokens"):
            slots.moves(batch_of((2, start, 1)))
    assert step(batch_of((2, 0, 1))) == [[-1], [1]]
    assert step(dataclasses.replace(batch_of((2, 1, 1)), again=True)) == [[0], [0]]
    assert step(batch_of((2, 1, 1))) == [[0], [1]]
    for wrong in ((0, 0), (0, 3), (-1, 1)):
        with pytest.raises(ValueError, match=r"must differ, within 0\.\.2"):
            slots.moves(batch_of(*((slot, 0, 1) for slot in wrong)))


@needs_native
def test_a_batch_that_the_kernels_refuse_moves_nothing(checkpoint: Checkpoints) -> None:
    path, text = checkpoint("qwen3-5").path, tokens(60)
    runner, place = native(path), Paging(200, 8)
    first = runner.forward(place.batch(("a", text, 0, 40)))
    broken = dataclasses.replace(
        place.batch(("a", text, 30, 50)), token_ids=np.full(20, 1000, dtype=np.int32)
    )
    with pytest.raises(ValueError, match="token_ids"):
        runner.forward(broken)
    rest = runner.forward(place.batch(("a", text, 40, 60)))
    assert torch.equal(torch.cat((first, rest)), alone(native(path), text))


# --- through the engine ---------------------------------------------------------------------------


def load(root: Path, backend: str, **settings: Any) -> Engine:
    """A hybrid target, with look-up and a small model that is hardly ever right."""
    changes = CASES["qwen3-5"].changes | {"vocab_size": VOCAB, "max_position_embeddings": 512}
    changes |= {"eos_token_id": None}
    write_checkpoint(root / "target", dataclasses.replace(CASES["qwen3-5"], changes=changes))
    small_llama(1, seed=3).save_pretrained(root / "far")
    for name in ("target", "far"):
        write_tokenizer(root / name)
    return load_engine(
        EngineConfig(
            target=root / "target",
            drafters={"far": str(root / "far"), "ngram": NGRAM},
            dtype="float32",
            backend=backend,
            kv_tokens=32 * 256,
            num_threads=1,
            **settings,
        ),
        calibrated=False,
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(tmp_path_factory.mktemp("hybrid"), "auto")


@pytest.fixture(scope="module")
def by_itself(engine: Engine) -> Alone:
    return Alone(engine, num=16)


@pytest.mark.parametrize(
    ("sampling", "drafter", "pipeline"),
    covering(SAMPLINGS, ["auto", "ngram", "far", "none"], ["off", "2", "async"], strength=1),
)
def test_output_is_the_targets_own(engine, by_itself, sampling, drafter, pipeline) -> None:
    """With predictions of which every seventh token is wrong."""
    requests = make_requests(SAMPLINGS[sampling], 16, drafter)
    loop = make_loop(engine, pipeline=pipeline, learn=timeless())
    outputs, accepted = run(loop, predicted(requests, by_itself[sampling]))
    assert outputs == by_itself[sampling]
    if drafter != "none":
        assert accepted > 50


def test_a_state_taken_back_too_little_changes_the_output(engine, by_itself, monkeypatch) -> None:
    """Negative control."""
    honest = StateSlots.moves

    def wrong(slots: StateSlots, batch: RaggedBatch) -> StateMoves:
        moves = honest(slots, batch)
        kept = slots._kept[moves.slots]
        more = np.where((moves.replayed > 0) & (moves.replayed < kept), 1, 0)
        return dataclasses.replace(moves, replayed=(moves.replayed + more).astype(np.int32))

    monkeypatch.setattr(StateSlots, "moves", wrong)
    requests = make_requests(SAMPLINGS["greedy"], 16, "ngram")
    outputs, _ = run(make_loop(engine, learn=timeless()), predicted(requests, by_itself["greedy"]))
    assert outputs != by_itself["greedy"]


@pytest.mark.parametrize("pipeline", ["off", "2", "async"])
def test_preempted_cancelled_and_chunked(engine, by_itself, pipeline) -> None:
    sampling = "coupled"
    requests = predicted(make_requests(SAMPLINGS[sampling], 16, "auto"), by_itself[sampling])
    loop = make_loop(
        engine,
        pipeline=pipeline,
        kv_tokens=10 * 16,
        max_num_batched_tokens=48,
        learn=timeless(),
    )
    gone = {requests[5].id, requests[8].id}
    again = dataclasses.replace(requests[15], id=requests[5].id)
    texts: dict[str, list[int]] = {r.id: [] for r in requests}
    events: list[Arrive | Cancel] = [Arrive(r) for r in requests]
    while events or loop.scheduler.num_unfinished or loop.num_plans_in_flight:
        for output in loop.turn(events).outputs:
            assert output.error is None
            texts[output.request_id] += output.token_ids
        events = []
        for request_id in [i for i in gone if len(texts[i]) > 10]:
            gone.discard(request_id)
            texts[request_id].clear()
            events.append(Cancel(request_id))
            if request_id == again.id:
                events.append(Arrive(again))
        if loop.num_plans_in_flight:
            loop.wait(0.01)
    assert loop.scheduler.table.counters.preemptions > 0
    for i, request in enumerate(requests):
        if i != 8:
            assert tuple(texts[request.id]) == by_itself[sampling][15 if i == 5 else i], i


def test_scores_of_a_prompt(engine: Engine) -> None:
    """A prompt with log-probabilities is computed in passes of its own, also where a chunk of it is
    one row; its output is the same."""
    request = make_requests(SAMPLINGS["greedy"], 5, "none")[4]
    assert request.prompt_len == 33
    scored = dataclasses.replace(
        request,
        id="scored",
        sampling=dataclasses.replace(request.sampling, num_prompt_logprobs=1),
    )
    expected = run(make_loop(engine), [request])[0]
    for budget in (2048, 32):
        again = dataclasses.replace(scored, id=f"scored{budget}")
        assert run(make_loop(engine, max_num_batched_tokens=budget), [again])[0] == expected


def test_prefixes_are_not_shared(engine: Engine, by_itself: Alone) -> None:
    assert not engine.scheduler.pool.prefix_caching
    loop = make_loop(engine)
    for _ in range(2):
        outputs, _ = run(loop, make_requests(SAMPLINGS["coupled"], 8, "ngram"))
        assert outputs == by_itself["coupled"][:8]


def test_memory_is_told(engine: Engine, checkpoint: Checkpoints) -> None:
    """Layers of attention alone have keys and values; states have room for 64 requests."""
    config = DecoderConfig.from_pretrained(checkpoint("qwen3-5").path)
    assert kv_bytes_per_token(config, torch.float32) == 2 * 1 * config.kv_size * 4
    state, kept = 4 * 12 * 20, (3 + MOST_KEPT) * (2 * 24 + 80 + 8)
    assert state_bytes(config) == 2 * (state + kept) * 4
    facts = engine.describe()
    assert facts["state_slots"] == 64
    assert facts["state_bytes"] == 64 * state_bytes(config)


def test_no_more_requests_run_than_states_have_room(tmp_path: Path, by_itself: Alone) -> None:
    limits = {"name": "vllm_v1", "options": {"max_num_seqs": 3}}
    engine = load(tmp_path, "auto", admission=limits)
    assert engine.describe()["state_slots"] == engine.executor.target.num_slots == 3
    outputs, _ = run(engine.loop, make_requests(SAMPLINGS["greedy"], 8, "auto"))
    assert outputs == by_itself["greedy"][:8]


def test_a_hybrid_drafter_is_refused_in_one_line(engine: Engine, tmp_path: Path) -> None:
    path = engine.tokenizer_path
    config = EngineConfig(target=path, drafters={"own": str(path)}, kv_tokens=4096, num_threads=1)
    with pytest.raises(ConfigError, match="drafter own: a model with recurrent layers"):
        load_engine(config, calibrated=False)


EAGER = partial(EagerRunner.load, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["greedy", "coupled"])
def test_many_requests(engine: Engine, sampling: str) -> None:
    """Each by itself, then all in memory that holds a few, in chunks of prompts, by any source."""
    expected = Alone(engine, num=500)[sampling]
    requests = make_requests(SAMPLINGS[sampling], 500, "auto")
    loop = make_loop(
        engine, kv_tokens=10 * 16, max_num_batched_tokens=48, pipeline="async", learn=timeless()
    )
    outputs, accepted = run(loop, predicted(requests, expected))
    assert outputs == expected
    assert accepted > 500
    assert loop.scheduler.table.counters.preemptions > 0


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("case", ["qwen3-5", "gemma4", "gemma4-shared"])
def test_greedy_text_is_that_of_transformers(tmp_path: Path, case: str) -> None:
    """A prompt of 300, then 100 tokens one by one."""
    changes = CASES[case].changes | {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 6,
        "layer_types": [CASES[case].changes["layer_types"][0]] * 2 + ["full_attention"],
        "head_dim": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "eos_token_id": None,
    }
    changes["layer_types"] *= 2
    if case.startswith("gemma4"):
        changes |= {"global_head_dim": 128, "vocab_size_per_layer_input": 2048}
    saved = write_checkpoint(tmp_path, dataclasses.replace(CASES[case], changes=changes))
    prompt = np.random.default_rng(0).integers(2048, size=300)
    theirs = saved.model.generate(
        torch.from_numpy(prompt)[None], max_new_tokens=100, do_sample=False
    )[0].numpy()
    expected = saved.logits(theirs)
    for load_one in (native, lambda path: EAGER(path, num_blocks=200, block_size=8)):
        runner, place = load_one(tmp_path), Paging(200, 8)
        text, logits = list(prompt), [runner.forward(place.batch(("a", prompt, 0, 300)))]
        for _ in range(100):
            text.append(int(logits[-1][-1].argmax()))
            size = len(text)
            logits.append(runner.forward(place.batch(("a", np.array(text), size - 1, size))))
        assert text == theirs.tolist()
        assert (torch.cat(logits) - expected).abs().max() < 1e-3 * expected.std()
