"""Models with recurrent layers: the bits of a text alone, whatever was rejected on the way."""

import dataclasses
import itertools
import json
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
    check_cancelled,
    check_many,
    make_loop,
    make_requests,
    predicted,
    run,
    timeless,
)
from tests.products import covering
from typer.testing import CliRunner

from penstock.cli import app
from penstock.config import NGRAM, ConfigError, EngineConfig, read_profile
from penstock.core.loop import Loop
from penstock.core.types import Arrive, Request
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
@pytest.mark.parametrize("family", ["qwen3-5", "lfm2"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_rejected_rows_leave_the_same_bits(checkpoint, family, count) -> None:
    case = family if count % 2 else f"{family}-even"
    if family == "qwen3-5" and count > 3:
        case = "qwen3-5-moe" if count == 5 else "qwen3-next"
    dtype = torch.bfloat16 if count == 3 else torch.float32
    path = checkpoint(case).path
    ids = {f"s{i}": tokens(110 - 11 * i, seed=i) for i in range(count)}
    found = with_rejections(native(path, dtype), ids, seed=count)
    for name, text in ids.items():
        assert torch.equal(found[name], alone(native(path, dtype, threads=1), text)), name


@needs_native
@pytest.mark.parametrize("case", ["qwen3-5", "lfm2"])
@pytest.mark.parametrize("by", [-1, 1])
def test_a_state_that_is_behind_other_rows_is_seen(checkpoint, monkeypatch, case, by) -> None:
    """Negative control: one row too many or too few is taken back."""
    honest = StateSlots.moves

    def wrong(slots: StateSlots, batch: RaggedBatch) -> StateMoves:
        moves = honest(slots, batch)
        replayed = np.where(moves.replayed > 1, moves.replayed + by, moves.replayed)
        return dataclasses.replace(moves, replayed=replayed.astype(np.int32))

    monkeypatch.setattr(StateSlots, "moves", wrong)
    path, text = checkpoint(case).path, tokens(100)
    found = with_rejections(native(path), {"a": text}, seed=0)["a"]
    monkeypatch.undo()
    assert not torch.allclose(found, alone(native(path), text), atol=1e-2)


@pytest.mark.parametrize("case", ["qwen3-5", "lfm2"])
def test_the_eager_decoder_goes_back_too(checkpoint: Checkpoints, case: str) -> None:
    saved, text = checkpoint(case), tokens(100)
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
    slots = StateSlots(3, ())

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


def load(root: Path, backend: str, case: str = "qwen3-5", **settings: Any) -> Engine:
    """A hybrid target, with look-up and a small model that is hardly ever right."""
    changes = CASES[case].changes | {"vocab_size": VOCAB, "max_position_embeddings": 512}
    changes |= {"eos_token_id": None}
    write_checkpoint(root / "target", dataclasses.replace(CASES[case], changes=changes))
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


def test_output_of_short_convolutions_is_the_targets_own(tmp_path: Path) -> None:
    engine = load(tmp_path, "auto", "lfm2")
    expected = Alone(engine, num=8)["coupled"]
    loop = make_loop(engine, pipeline="async", learn=timeless())
    requests = make_requests(SAMPLINGS["coupled"], 8, "auto")
    outputs, accepted = run(loop, predicted(requests, expected))
    assert outputs == expected
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
        engine, pipeline=pipeline, kv_tokens=10 * 16, max_num_batched_tokens=48, learn=timeless()
    )
    check_cancelled(loop, requests, (5, 8), by_itself[sampling])


def test_scores_of_a_prompt(engine: Engine) -> None:
    """A prompt with log-probabilities is computed in passes of its own, also where a chunk of it is
    one row; its output is the same."""
    request = make_requests(SAMPLINGS["greedy"], 5, "none")[4]
    assert request.prompt_len == 33
    scored = dataclasses.replace(
        request, id="scored", sampling=dataclasses.replace(request.sampling, num_prompt_logprobs=1)
    )
    expected = run(make_loop(engine), [request])[0]
    for budget in (2048, 32):
        again = dataclasses.replace(scored, id=f"scored{budget}")
        assert run(make_loop(engine, max_num_batched_tokens=budget), [again])[0] == expected


NUMBERS = itertools.count()


def turns(loop: Loop, first: Request) -> tuple[list[tuple[int, ...]], list[int]]:
    """Outputs of three turns of a conversation, and the tokens that each goes on from."""
    outputs: list[tuple[int, ...]] = []
    cached: list[int] = []
    text = first.prompt_token_ids or ()
    for turn in range(3):
        request = dataclasses.replace(
            first, id=f"{next(NUMBERS)}", prompt_token_ids=text, prompt_len=len(text)
        )
        told = []
        events: list[Arrive] = [Arrive(request)]
        while events or loop.scheduler.num_unfinished:
            told += loop.turn(events).outputs
            events = []
        outputs.append(tuple(t for o in told for t in o.token_ids))
        cached.append(sum(o.num_cached_tokens for o in told))
        # The template writes the end of the last prompt in another way.
        text = (*text[:-2], *outputs[-1], *(tokens(20, seed=turn) % 89).tolist())
    return outputs, cached


def conversation(sampling: str, prompt_len: int = 50) -> Request:
    (request,) = make_requests(SAMPLINGS[sampling], 1, "ngram")
    prompt = tuple((tokens(prompt_len, seed=9) % 89).tolist())
    return dataclasses.replace(request, prompt_token_ids=prompt, max_tokens=30)


@pytest.mark.parametrize("sampling", ["greedy", "coupled"])
@pytest.mark.parametrize("budget", [2048, 40])
def test_the_next_turn_goes_on_from_a_prompts_state(engine, sampling, budget) -> None:
    first, own = conversation(sampling), engine.scheduler.pool
    shared = make_loop(engine, max_num_batched_tokens=budget, learn=timeless())
    outputs, cached = turns(shared, first)
    assert cached == [0, 32, 80]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "prefix_caching", False)
        alone, nothing = turns(make_loop(engine, learn=timeless()), first)
    assert nothing == [0, 0, 0]
    assert outputs == alone


def test_turns_of_the_eager_decoder(tmp_path: Path) -> None:
    engine = load(tmp_path, "eager")
    outputs, cached = turns(make_loop(engine, learn=timeless()), conversation("greedy"))
    assert cached == [0, 32, 80]
    engine.scheduler.pool.prefix_caching = False
    alone, _ = turns(make_loop(engine, learn=timeless()), conversation("greedy"))
    assert outputs == alone


def test_a_state_of_another_text_changes_the_output(engine, monkeypatch) -> None:
    """Negative control."""
    honest = StateSlots._copy

    def wrong(slots: StateSlots, source: int, slot: int, num_tokens: int) -> None:
        honest(slots, source, slot, num_tokens)
        for part in slots._parts:
            part[slot] *= 0.5

    expected, _ = turns(make_loop(engine, learn=timeless()), conversation("greedy"))
    monkeypatch.setattr(StateSlots, "_copy", wrong)
    outputs, _ = turns(make_loop(engine, learn=timeless()), conversation("greedy"))
    assert outputs[0] == expected[0]
    assert outputs != expected


def test_prompts_that_come_again_share_states(engine: Engine, by_itself: Alone) -> None:
    """Those of full blocks, beside others that have no room for a copy."""
    expected, loop = by_itself["coupled"][:8], make_loop(engine)
    loop.scheduler.pool.num_snapshots = 2
    for _ in range(3):
        assert run(loop, make_requests(SAMPLINGS["coupled"], 8, "ngram"))[0] == expected


def test_copies_of_states() -> None:
    """One that was not made, as its step failed, is never used."""
    memory = torch.arange(4.0)
    slots = StateSlots(4, [memory])

    def step(batch: RaggedBatch, *copies: tuple[int, int, int, bool]) -> list[list[int]]:
        batch = dataclasses.replace(batch, copies=copies)
        moves = slots.moves(batch)
        slots.moved(batch, moves)
        return [moves.replayed.tolist(), moves.committed.tolist()]

    assert step(batch_of((1, 0, 40)), (1, ~0, 32, True)) == [[-1], [32]]
    assert memory.tolist() == [0, 1, 2, 1]
    assert step(batch_of((1, 40, 1), (0, 32, 9)), (0, ~0, 32, False)) == [[8, 0], [1, 9]]
    assert memory.tolist() == [1, 1, 2, 1]
    slots.moves(dataclasses.replace(batch_of((2, 0, 40)), copies=[(2, ~0, 32, True)]))
    with pytest.raises(ValueError, match="behind -1 tokens, not 32"):
        step(batch_of((1, 32, 9)), (1, ~0, 32, False))


def test_memory_is_told(engine: Engine, checkpoint: Checkpoints) -> None:
    """Layers of attention alone have keys and values; states have room for 64 requests."""
    config = DecoderConfig.from_pretrained(checkpoint("qwen3-5").path)
    assert kv_bytes_per_token(config, torch.float32) == 2 * 1 * config.kv_size * 4
    state, kept = 4 * 12 * 20, (3 + MOST_KEPT) * (2 * 24 + 80 + 8)
    assert state_bytes(config) == 2 * (state + kept) * 4
    facts = engine.describe()
    assert facts["state_slots"] == 64
    assert facts["state_bytes"] == 2 * 64 * state_bytes(config), "and as many copies"


def test_a_profile_tells_the_states_that_have_room(engine: Engine, tmp_path: Path) -> None:
    out = tmp_path / "hybrid.json"
    options = ("--batch=1", "--contexts=16", "--repeats=1", "--json")
    settings = ("--dtype=float32", "--set=num_threads=1", "--set=policy=vllm")
    target = str(engine.tokenizer_path)
    command = ["profile", "measure", target, "--out", str(out), *options, *settings]
    result = CliRunner().invoke(app, [*command, "--set=admission.options.max_num_seqs=5"])
    assert result.exit_code == 0, result.output
    assert read_profile(out).state_slots == json.loads(result.stdout)["state_slots"] == 5


def test_no_more_requests_run_than_states_have_room(tmp_path: Path, by_itself: Alone) -> None:
    limits = {"name": "vllm_v1", "options": {"max_num_seqs": 3}}
    engine = load(tmp_path, "auto", admission=limits)
    assert engine.describe()["state_slots"] == 3
    assert engine.executor.target.num_slots == 6
    apart = load(tmp_path, "auto", admission=limits, prefix_caching=False)
    assert apart.executor.target.num_slots == apart.describe()["state_slots"] == 3
    assert apart.scheduler.pool.num_snapshots is None
    outputs, _ = run(engine.loop, make_requests(SAMPLINGS["greedy"], 8, "auto"))
    assert outputs == by_itself["greedy"][:8]


def test_a_hybrid_drafter_is_refused_in_one_line(engine: Engine, tmp_path: Path) -> None:
    path = engine.tokenizer_path
    config = EngineConfig(target=path, drafters={"own": str(path)}, kv_tokens=4096, num_threads=1)
    with pytest.raises(ConfigError, match="drafter own: a model with recurrent layers"):
        load_engine(config, calibrated=False)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["greedy", "coupled"])
def test_many_requests(engine: Engine, sampling: str) -> None:
    check_many(engine, sampling)
