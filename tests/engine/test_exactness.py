"""Speculation changes nothing: token for token equality with target-only decoding, in float32."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency
from tests.core.world import Rotating
from tests.engine.small_family import VOCAB
from tests.products import covering, slow

from penstock.config import NGRAM, EngineConfig
from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators
from penstock.core.lookup import LookUp, TextLookUp
from penstock.core.loop import Loop
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, View
from penstock.core.policies.registry import make_pipeline, make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.state import Grant, RequestState
from penstock.core.types import Arrive, Cancel, Request, SamplingParams
from penstock.engine.attention import decomposed
from penstock.engine.backends import ATTENTION
from penstock.engine.build import Engine, load_engine
from penstock.engine.verifier import Decided, Verifier
from penstock.fluid.step_profile import DrafterProfile, StepProfile

BACKENDS = ("eager", "native")
MODELS = ("same", "near", "far")
DRAFTERS = (*MODELS, "ngram")
DRAFTED = ("none", *DRAFTERS, "rotating")
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(temperature=0.9, verification="coupled"),
    "coupled-filtered": SamplingParams(
        temperature=1.3, top_p=0.9, top_k=40, verification="coupled"
    ),
    "greedy-changed": SamplingParams(
        temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.4, logit_bias=((7, 1.5),)
    ),
    "coupled-changed": SamplingParams(
        temperature=1.1, min_p=0.02, presence_penalty=0.8, frequency_penalty=-0.3
    ),
}


@pytest.fixture(scope="module")
def engines(family: dict[str, Path]) -> Callable[[str], Engine]:
    """Loaded once: pytest sets a parametrised fixture up again whenever its parameter changes."""
    return cache(partial(load, family))


@pytest.fixture(params=["native", *slow(["eager"])])
def engine(request: pytest.FixtureRequest, engines: Callable[[str], Engine]) -> Engine:
    return engines(request.param)


def load(paths: dict[str, Path], backend: str, dtype: str = "float32", **settings: Any) -> Engine:
    return load_engine(
        EngineConfig(
            target=paths["target"],
            drafters={name: str(paths[name]) for name in MODELS} | {"ngram": NGRAM},
            dtype=dtype,
            backend=backend,
            **{"kv_tokens": 32 * 256, "num_threads": 1} | settings,
        ),
        calibrated=False,
    )


def make_loop(
    engine: Engine,
    *,
    k: int = 4,
    rotating: bool = False,
    own_lane: bool | None = None,
    pipeline: str = "off",
    kv_tokens: int = 32 * 256,
    max_num_batched_tokens: int = 2048,
    learn: Estimators | None = None,
    allocation: AllocationPolicy | None = None,
    groups_decodes: bool = False,
    look_up: LookUp | bool = True,
) -> Loop:
    """A fresh scheduler with the engine's own drafters over its executor. They have lanes where
    the pipeline uses them, unless `own_lane` says otherwise. groups_decodes: there are none, and no
    look-up. look_up: True is a fresh one if the engine has one."""
    own_lane = pipeline != "off" if own_lane is None else own_lane
    size = engine.executor.target.block_size
    blocks = kv_tokens // size
    drafters = [
        dataclasses.replace(d, pool=d.pool and BlockPool(blocks, size), has_lane=own_lane)
        for d in engine.scheduler.table.drafters.values()
        if not groups_decodes
    ]
    if isinstance(look_up, bool):
        known = engine.scheduler.look_up if look_up and not groups_decodes else None
        look_up = known and TextLookUp(known.name)
    admission = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": 32}
    pool = BlockPool(blocks, size, prefix_caching=engine.scheduler.pool.prefix_caching)
    pool.num_snapshots = engine.scheduler.pool.num_snapshots
    scheduler = Scheduler(
        pool,
        drafters,
        admission=make_policy("admission", "vllm_v1", admission),
        selection=Rotating() if rotating else make_policy("selection", "single"),
        allocation=allocation or make_policy("allocation", "fixed", {"k": k}),
        pipeline=make_pipeline(pipeline),
        max_model_len=512,
        learn=learn,
        groups_decodes=groups_decodes,
        look_up=look_up,
    )
    return Loop(scheduler, engine.executor, engine.clock)


_ids = itertools.count()


def make_requests(
    sampling: SamplingParams, num: int, drafter: str, tokens: int = 24
) -> list[Request]:
    requests = []
    for i in range(num):
        rng = np.random.default_rng(i)
        prompt = tuple(rng.integers(0, VOCAB, 5 + 7 * i % 60).tolist())
        requests.append(
            Request(
                id=f"r{next(_ids)}",
                prompt_len=len(prompt),
                prompt_token_ids=prompt,
                max_tokens=tokens - i % 5,
                sampling=dataclasses.replace(sampling, seed=100 + i),
                drafter=drafter,
            )
        )
    return requests


def run(loop: Loop, requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], int]:
    """Outputs in order, and the number of accepted draft tokens."""
    texts: dict[str, list[int]] = {r.id: [] for r in requests}
    events = [Arrive(r) for r in requests]
    accepted = 0
    for _ in range(10_000):
        for output in loop.turn(events).outputs:
            texts[output.request_id] += output.token_ids
            accepted += output.num_accepted
            assert output.error is None
        events = []
        if not loop.scheduler.num_unfinished and not loop.num_plans_in_flight:
            break
        if loop.num_plans_in_flight:
            loop.wait(0.01)
    loop.turn([])  # so that the executor hears of the last ends
    for pool in loop.scheduler.table.memory.pools.values():
        pool.check()
        assert pool.num_used_blocks == 0
    return [tuple(texts[r.id]) for r in requests], accepted


class Alone(dict[str, list[tuple[int, ...]]]):
    """Target-only output of each request by itself, by sampling."""

    def __init__(
        self,
        engine: Engine,
        requests_of: Callable[[SamplingParams, int, str], list[Request]] = make_requests,
        num: int = 16,
    ) -> None:
        super().__init__()
        self._engine, self._requests_of, self._num = engine, requests_of, num

    def __missing__(self, sampling: str) -> list[tuple[int, ...]]:
        requests = self._requests_of(SAMPLINGS[sampling], self._num, "none")
        self[sampling] = [run(make_loop(self._engine), [r])[0][0] for r in requests]
        return self[sampling]


def check_cancelled(
    loop: Loop,
    requests: Sequence[Request],
    gone: Sequence[int],
    expected: Sequence[tuple[int, ...]],
) -> None:
    """Outputs are those expected where some requests are cancelled in the middle, of which the
    first comes again as the last, in memory that does not hold all."""
    ids, texts = {requests[i].id for i in gone}, {r.id: list[int]() for r in requests}
    again = dataclasses.replace(requests[-1], id=requests[gone[0]].id)
    events: list[Arrive | Cancel] = [Arrive(r) for r in requests]
    while events or loop.scheduler.num_unfinished or loop.num_plans_in_flight:
        for output in loop.turn(events).outputs:
            assert output.error is None
            texts[output.request_id] += output.token_ids
        events = []
        for request_id in [i for i in ids if len(texts[i]) > 10]:
            ids.discard(request_id)
            texts[request_id].clear()
            events.append(Cancel(request_id))
            if request_id == again.id:
                events.append(Arrive(again))
        if loop.num_plans_in_flight:
            loop.wait(0.01)
    assert loop.scheduler.table.counters.preemptions > 0
    assert not ids
    for i, request in enumerate(requests):
        if i not in gone[1:]:
            assert tuple(texts[request.id]) == expected[-1 if i == gone[0] else i], i


def check_many(engine: Engine, sampling: str, **settings: Any) -> None:
    """500 requests, each by itself, then all in memory that holds a few, in chunks of prompts, by
    any source."""
    expected = Alone(engine, num=500)[sampling]
    requests = predicted(make_requests(SAMPLINGS[sampling], 500, "auto"), expected)
    small = {"kv_tokens": 10 * 16, "max_num_batched_tokens": 48, "pipeline": "async"}
    loop = make_loop(engine, learn=timeless(), **small | settings)
    outputs, accepted = run(loop, requests)
    assert outputs == expected
    assert accepted > 500
    assert loop.scheduler.table.counters.preemptions > 0


@pytest.fixture(scope="module")
def alone(engines: Callable[[str], Engine]) -> Alone:
    """From the plainest backend."""
    return Alone(engines("eager"))


@pytest.mark.parametrize(
    ("engine", "sampling", "drafter", "batch"),
    [
        *covering(BACKENDS, SAMPLINGS, DRAFTED, [1, 8], strength=1),
        *covering(["native"], SAMPLINGS, DRAFTED, [16], strength=1),
        *slow(["eager"], SAMPLINGS, DRAFTED, [16]),
    ],
    indirect=["engine"],
)
def test_output_is_the_targets_own(engine, alone, sampling, drafter, batch) -> None:
    loop = make_loop(engine, rotating=drafter == "rotating")
    name = "auto" if drafter == "rotating" else drafter
    outputs, accepted = run(loop, make_requests(SAMPLINGS[sampling], batch, name))
    assert outputs == alone[sampling][:batch]
    if drafter in ("same", "near"):
        assert accepted > 0


NARROW: dict[str, dict[str, str]] = {"bfloat16": {"dtype": "bfloat16"}, "kv": {"kv_dtype": "int8"}}


@pytest.fixture(scope="module", params=NARROW)
def narrow(request: pytest.FixtureRequest, family: dict[str, Path]) -> Engine:
    """The kernels in bfloat16, with the processor's own products of it where it has them, or with
    keys and values in 8 bits."""
    return load(family, "native", **NARROW[request.param])


@pytest.fixture(scope="module")
def narrow_alone(narrow: Engine) -> Alone:
    return Alone(narrow)


@pytest.mark.parametrize(
    ("narrow", "drafter", "sampling"),
    [
        *covering(["bfloat16"], ["none", *DRAFTERS], ["greedy", "coupled"], strength=1),
        *covering(["kv"], DRAFTED, ["greedy", "coupled"], strength=2),
    ],
    indirect=["narrow"],
)
def test_fewer_bits_are_as_exact(narrow, narrow_alone, sampling, drafter) -> None:
    loop = make_loop(narrow, rotating=drafter == "rotating")
    name = "auto" if drafter == "rotating" else drafter
    outputs, accepted = run(loop, make_requests(SAMPLINGS[sampling], 16, name))
    assert outputs == narrow_alone[sampling]
    if drafter in ("same", "near"):
        assert accepted > 0


def test_a_perfect_drafter_is_always_accepted(engine: Engine) -> None:
    """The coupled draft foresees the sample: same model, same noise, same token."""
    requests = make_requests(SAMPLINGS["coupled"], 8, "same")
    loop = make_loop(engine)
    rounds = 0
    texts: dict[str, int] = {}
    events = [Arrive(r) for r in requests]
    while events or loop.scheduler.num_unfinished:
        for output in loop.turn(events).outputs:
            if output.num_proposed and output.finish_reason is None:
                assert output.num_accepted == output.num_proposed == 4
                rounds += 1
            texts[output.request_id] = texts.get(output.request_id, 0) + len(output.token_ids)
        events = []
    assert rounds >= 8 * 3


@pytest.mark.parametrize("k", [1, 2, 7])
def test_any_draft_length(engine: Engine, alone: Alone, k: int) -> None:
    outputs, _ = run(make_loop(engine, k=k), make_requests(SAMPLINGS["coupled"], 8, "near"))
    assert outputs == alone["coupled"][:8]


class EndingEarly(AllocationPolicy):
    """Long drafts that end where their own confidence falls."""

    name = "ending_early"

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        return [Grant(min(c.limit, 7), 0.2) for c in candidates]

    def reserve(self, state: RequestState) -> int:
        return 7


@pytest.mark.parametrize(
    ("own_lane", "sampling"), covering([False, True], ["greedy", "coupled"], strength=1)
)
def test_drafts_that_end_early(engine: Engine, alone: Alone, sampling: str, own_lane: bool) -> None:
    pipeline = "async" if own_lane else "off"
    loop = make_loop(engine, own_lane=own_lane, pipeline=pipeline, allocation=EndingEarly())
    lengths: Counter[int] = Counter()
    texts: dict[str, list[int]] = {}
    requests = make_requests(SAMPLINGS[sampling], 8, "near")
    events = [Arrive(r) for r in requests]
    while events or loop.scheduler.num_unfinished:
        for output in loop.turn(events).outputs:
            texts.setdefault(output.request_id, []).extend(output.token_ids)
            lengths[output.num_proposed] += output.finish_reason is None
        events = []
    assert [tuple(texts[r.id]) for r in requests] == alone[sampling][:8]
    assert len([n for n in lengths if 0 < n < 7]) > 1, lengths


def test_small_memory_preempts_and_changes_nothing(engine: Engine, alone: Alone) -> None:
    loop = make_loop(engine, rotating=True, kv_tokens=20 * 16)
    outputs, _ = run(loop, make_requests(SAMPLINGS["coupled"], 16, "auto"))
    assert loop.scheduler.table.counters.preemptions > 0
    assert outputs == alone["coupled"][:16]


def test_chunked_prefill_changes_nothing(engine: Engine, alone: Alone) -> None:
    loop = make_loop(engine, rotating=True, max_num_batched_tokens=32)
    outputs, _ = run(loop, make_requests(SAMPLINGS["greedy"], 16, "auto"))
    assert outputs == alone["greedy"][:16]


@pytest.mark.parametrize(
    ("attention", "sampling"), covering(ATTENTION, ["greedy", "coupled"], strength=1)
)
def test_every_attention_backend_gives_the_same_output(family, alone, attention, sampling) -> None:
    """With chunks of prompts beside drafts: the step is small."""
    loop = make_loop(
        load(family, "eager", attention=attention), rotating=True, max_num_batched_tokens=48
    )
    outputs, accepted = run(loop, make_requests(SAMPLINGS[sampling], 8, "auto"))
    assert outputs == alone[sampling][:8]
    assert accepted > 0


def test_negative_control_merging_attention_without_rescaling_is_caught(
    family: dict[str, Path], alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        decomposed, "relative_totals", lambda totals, targets, rows: torch.ones_like(totals)
    )
    loop = make_loop(load(family, "eager", attention="decomposed"))
    assert run(loop, make_requests(SAMPLINGS["greedy"], 8, "near"))[0] != alone["greedy"][:8]


PIPELINES = ("off", "2", "3", "auto", "async")
A_DEVICE_EACH = StepProfile(
    "a device each",
    32 * 256,
    (0, 100),
    (0.0, 0.1),
    drafters=tuple(DrafterProfile(n, (0, 100), (0.0, 0.1)) for n in MODELS),
)
"""Times with which `auto` takes micro-batches as soon as two requests draft, and drops them when
only one is left."""


@pytest.mark.parametrize(
    ("engine", "sampling", "pipeline"),
    covering(BACKENDS, ["greedy", "coupled"], PIPELINES, strength=1),
    indirect=["engine"],
)
def test_drafts_held_from_lanes_of_their_own(engine, alone, sampling, pipeline) -> None:
    """With another drafter in every round."""
    loop = make_loop(
        engine, own_lane=True, pipeline=pipeline, rotating=True, learn=Estimators(A_DEVICE_EACH)
    )
    outputs, accepted = run(loop, make_requests(SAMPLINGS[sampling], 8, "auto"))
    assert accepted > 0
    assert outputs == alone[sampling][:8]


@pytest.mark.parametrize(
    ("engine", "sampling", "pipeline"),
    [
        *covering(BACKENDS, ["greedy", "coupled"], ["2", "auto", "async"], strength=1),
        *slow(BACKENDS, ["greedy", "coupled"], ["off", "3"]),
    ],
    indirect=["engine"],
)
def test_preempted_and_cancelled_in_a_pipeline(engine, alone, sampling, pipeline) -> None:
    """In memory that holds half of them, with some that go away in the middle, and an id of theirs
    that comes again."""
    loop = make_loop(
        engine,
        own_lane=True,
        pipeline=pipeline,
        rotating=True,
        kv_tokens=20 * 16,
        learn=Estimators(A_DEVICE_EACH),
    )
    requests = make_requests(SAMPLINGS[sampling], 16, "auto")
    check_cancelled(loop, requests, (5, 8, 11), alone[sampling])


def test_negative_control_accepting_a_lanes_drafts_is_caught(engine, alone, monkeypatch) -> None:
    """The equalities above must be able to fail: a lane's draft that is taken on trust."""
    monkeypatch.setattr(Verifier, "decide", lenient(Verifier.decide))
    loop = make_loop(engine, own_lane=True, pipeline="2")
    outputs, _ = run(loop, make_requests(SAMPLINGS["coupled"], 8, "near"))
    assert outputs != alone["coupled"][:8]


def timeless() -> Estimators:
    """Without step times, so that predictions are drafted whatever the machine does."""
    learn = Estimators()
    learn.times.target.add_measurement = lambda size, seconds: None  # type: ignore[method-assign]
    return learn


def predicted(requests: Sequence[Request], outputs: Sequence[tuple[int, ...]]) -> list[Request]:
    """With predictions of which every seventh token is wrong, or all of a request are."""
    return [
        dataclasses.replace(
            request, prediction=tuple((t + (j % 7 == i or i == 7)) % VOCAB for j, t in texts)
        )
        for i, (request, texts) in enumerate(
            (r, list(enumerate(o))) for r, o in zip(requests, outputs, strict=True)
        )
    ]


@pytest.mark.parametrize(
    ("engine", "sampling", "drafter", "pipeline"),
    covering(BACKENDS, SAMPLINGS, ["auto", "ngram", "rotating"], ["off", "2", "async"], strength=1),
    indirect=["engine"],
)
def test_predictions_change_nothing(engine, alone, sampling, drafter, pipeline) -> None:
    rotating = drafter == "rotating"
    requests = make_requests(SAMPLINGS[sampling], 8, "auto" if rotating else drafter)
    loop = make_loop(engine, rotating=rotating, pipeline=pipeline, learn=timeless())
    outputs, accepted = run(loop, predicted(requests, alone[sampling][:8]))
    assert outputs == alone[sampling][:8]
    assert accepted > 50


def test_negative_control_accepting_predictions_is_caught(engine, alone, monkeypatch) -> None:
    monkeypatch.setattr(Verifier, "decide", lenient(Verifier.decide))
    requests = make_requests(SAMPLINGS["greedy"], 8, "ngram")
    loop = make_loop(engine, learn=timeless())
    outputs, _ = run(loop, predicted(requests, alone["greedy"][:8]))
    assert outputs != alone["greedy"][:8]


def second_tokens(
    engine: Engine, sampling: SamplingParams, tokens: Sequence[int] = (), first_seed: int = 0
) -> Counter[int]:
    """Counts of 600 outputs, with these tokens predicted."""
    requests = [
        dataclasses.replace(
            make_requests(sampling, 1, "ngram", tokens=3)[0],
            sampling=dataclasses.replace(sampling, seed=seed),
            prediction=tuple(tokens),
        )
        for seed in range(first_seed, first_seed + 600)
    ]
    loop = make_loop(engine, learn=timeless())
    return Counter(text[1] for text in run(loop, requests)[0])


def same_p_value(found: Counter[int], others: Counter[int]) -> float:
    common = [token for token, _ in (found + others).most_common(12)]
    table = [[c[t] for t in common] + [600 - sum(c[t] for t in common)] for c in (found, others)]
    return float(chi2_contingency(np.array(table)).pvalue)


def test_ratio_keeps_the_distribution_with_a_prediction(engine, monkeypatch) -> None:
    """The token behind the likeliest first one has its distribution; the control must fail."""
    sampling = SamplingParams(temperature=0.4, verification="ratio")
    likely = run(make_loop(engine), make_requests(SAMPLINGS["greedy"], 1, "none"))[0][0]
    plain = second_tokens(engine, sampling)
    assert same_p_value(plain, second_tokens(engine, sampling, likely, 600)) > 1e-3
    monkeypatch.setattr(Verifier, "decide", lenient(Verifier.decide))
    assert same_p_value(plain, second_tokens(engine, sampling, likely, 600)) < 1e-6


def test_a_cached_prefix_changes_nothing(engine: Engine, alone: Alone) -> None:
    loop = make_loop(engine)
    for _ in range(2):
        outputs, _ = run(loop, make_requests(SAMPLINGS["coupled"], 8, "near"))
        assert outputs == alone["coupled"][:8]


def lenient(honest: Callable[..., list[Decided]]) -> Callable[..., list[Decided]]:
    """A verifier that keeps one rejected token."""

    def decide(verifier: Verifier, scores: Any, drafted: Any, probs: Any) -> list[Decided]:
        decisions = honest(verifier, scores, drafted, probs)
        for decided, d in zip(decisions, drafted, strict=True):
            if decided.num_accepted < len(d.token_ids):
                decided.token_ids[-1] = d.token_ids[decided.num_accepted]
        return decisions

    return decide


def test_negative_control_accepting_everything_is_caught(engine, alone, monkeypatch) -> None:
    """The equality above must be able to fail."""
    monkeypatch.setattr(Verifier, "decide", lenient(Verifier.decide))
    outputs, _ = run(make_loop(engine), make_requests(SAMPLINGS["coupled"], 8, "near"))
    assert outputs != alone["coupled"][:8]


def test_negative_control_wrong_noise_is_caught(engine: Engine, alone: Alone) -> None:
    requests = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, seed=r.sampling.seed + 1))
        for r in make_requests(SAMPLINGS["coupled"], 8, "near")
    ]
    outputs, _ = run(make_loop(engine), requests)
    assert outputs != alone["coupled"][:8]


def test_ratio_is_reproducible_and_independent_of_the_batch(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.9, verification="ratio")
    outputs, accepted = run(make_loop(engine), make_requests(sampling, 8, "near"))
    singles = [run(make_loop(engine), [r])[0][0] for r in make_requests(sampling, 8, "near")]
    assert accepted > 0
    assert outputs == singles
