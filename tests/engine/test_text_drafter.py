"""Drafters with another tokenizer: whatever text they draft, the output is the target's own."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.other_vocabulary import TARGET, finer, reordered, write
from tests.engine.sampling_toys import joint_p_value, sampling_rows
from tests.engine.small_family import make_unreliable
from tests.engine.test_exactness import SAMPLINGS, Alone, lenient, make_loop, run
from tests.engine.test_look_up import ToyRunner, decide, first_order
from tests.engine.test_spelling import num_equal
from tests.products import covering, first_fast, slow
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from penstock.config import EngineConfig
from penstock.core.kv import BlockPool
from penstock.core.types import DraftOrder, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.drafters.drafts import Draft, Drafts
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.drafters.spelling import Vocabularies
from penstock.engine.drafters.text import TextDrafter
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.fast_tokenizer import FastTokenizer
from penstock.engine.sequences import TokenBuffer
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.engine.verifier import Verifier
from penstock.zoo.registry import DOMAINS, load_prompts, model_path

DRAFTERS = ("twin", "finer")
RATIO = SamplingParams(temperature=0.9, verification="ratio")
NUM = 4


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The target with its tokens under other ids, and a smaller model that has fewer, too."""
    root = tmp_path_factory.mktemp("vocabularies")
    return {
        "twin": write(root / "twin", TARGET, reordered),
        "finer": write(root / "finer", "draft-base", finer),
    }


@pytest.fixture(scope="module")
def engines(paths: dict[str, Path]) -> Iterator[Callable[[str], Engine]]:
    before = torch.get_num_threads()
    yield cache(partial(load, paths))
    torch.set_num_threads(before)


@pytest.fixture(params=["native", *slow(["eager"])])
def engine(request: pytest.FixtureRequest, engines: Callable[[str], Engine]) -> Engine:
    return engines(request.param)


def load(paths: dict[str, Path], backend: str) -> Engine:
    return load_engine(
        EngineConfig(
            target=model_path(TARGET),
            drafters={"twin": str(paths["twin"]), "finer": str(paths["finer"]), "suffix": "suffix"},
            dtype="float32",
            backend=backend,
            kv_tokens=32 * 256,
            max_model_len=512,
            num_threads=1,
        ),
        calibrated=False,
    )


_ids = itertools.count()


def make_requests(sampling: SamplingParams, num: int, drafter: str) -> list[Request]:
    """One of each domain in turn, cut anywhere."""
    tokenizer = load_tokenizer(model_path(TARGET))
    requests = []
    for i in range(num):
        prompt = tokenizer.encode(load_prompts(DOMAINS[i % len(DOMAINS)])[i].prompt)
        kept = tuple(prompt[: len(prompt) - 7 * (i % 2)][-120:])
        requests.append(
            Request(
                id=f"text-{next(_ids)}",
                prompt_len=len(kept),
                prompt_token_ids=kept,
                max_tokens=24 - i % 5,
                sampling=dataclasses.replace(sampling, seed=100 + i),
                drafter=drafter,
            )
        )
    return requests


@pytest.fixture(scope="module")
def alones(engines: Callable[[str], Engine]) -> Callable[[str], Alone]:
    return cache(lambda backend: Alone(engines(backend), make_requests, NUM))


@pytest.fixture
def alone(engine: Engine, alones: Callable[[str], Alone]) -> Alone:
    return alones(engine.backend)


@pytest.mark.parametrize(
    ("engine", "sampling", "drafter", "batch"),
    [
        *covering(["native"], SAMPLINGS, [*DRAFTERS, "auto"], [1, NUM], strength=1),
        *slow(["eager"], SAMPLINGS, [*DRAFTERS, "auto"], [1, NUM]),
    ],
    indirect=["engine"],
)
def test_output_is_the_targets_own(engine, alone, sampling, drafter, batch, caplog) -> None:
    loop = make_loop(engine, rotating=drafter == "auto")
    outputs, accepted = run(loop, make_requests(SAMPLINGS[sampling], batch, drafter))
    assert outputs == alone[sampling][:batch]
    assert accepted > 0
    assert " failed: " not in caplog.text


@pytest.mark.parametrize(
    ("engine", "pipeline", "drafter"),
    [
        *covering(["native"], ["2", "async"], [*DRAFTERS, "auto"], strength=1),
        *slow(["eager"], ["2", "async"], [*DRAFTERS, "auto"]),
    ],
    indirect=["engine"],
)
def test_output_beside_the_target_is_its_own(engine, alone, pipeline, drafter) -> None:
    loop = make_loop(engine, pipeline=pipeline, rotating=drafter == "auto")
    outputs, accepted = run(loop, make_requests(SAMPLINGS["coupled"], NUM, drafter))
    assert outputs == alone["coupled"]
    assert accepted > 0


def test_the_targets_twin_is_right(engine: Engine, alone: Alone) -> None:
    """Nothing is lost on the way through the text."""
    outputs, accepted = run(make_loop(engine), make_requests(SAMPLINGS["greedy"], NUM, "twin"))
    assert outputs == alone["greedy"]
    assert accepted > 0.6 * sum(len(output) for output in outputs)


def test_negative_control_accepting_everything_is_caught(engine, alone, monkeypatch) -> None:
    """The equalities above must be able to fail."""
    monkeypatch.setattr(Verifier, "decide", lenient(Verifier.decide))
    outputs, _ = run(make_loop(engine), make_requests(SAMPLINGS["coupled"], NUM, "finer"))
    assert outputs != alone["coupled"]


def test_a_model_that_fails_midway_changes_nothing(engine, alone, monkeypatch) -> None:
    drafter = engine.executor.drafters["twin"]
    calls = make_unreliable(monkeypatch, drafter.timed, ["draft"], {1, 4, 5})
    requests = make_requests(SAMPLINGS["greedy"], NUM, "twin")
    outputs, accepted = run(make_loop(engine), requests)
    assert next(calls) > 5
    assert outputs == alone["greedy"]
    assert accepted > 0


def test_memory_that_does_not_hold_all_texts(engine: Engine, alone: Alone, paths: Any) -> None:
    """Texts take turns in the model's memory, which the scheduler does not count."""
    drafter = engine.executor.drafters["twin"]
    assert isinstance(drafter, TextDrafter)
    pool = drafter._kv.pool
    drafter._kv.pool = BlockPool(12, 16, prefix_caching=False)
    try:
        requests = make_requests(SAMPLINGS["coupled"], NUM, "twin")
        outputs, accepted = run(make_loop(engine), requests)
        assert drafter._kv.pool.num_used_blocks == 0
    finally:
        drafter._kv.pool = pool
    assert outputs == alone["coupled"]
    assert accepted > 0


def fresh_text(request: Request, token_ids: Sequence[int]) -> TokenBuffer:
    text = TokenBuffer(dataclasses.replace(request, id=f"fresh-{next(_ids)}"))
    text.append(token_ids)
    return text


def drafted(drafter: TextDrafter, text: TokenBuffer, most: int) -> list[int]:
    order = DraftOrder(text.request.id, 0, 0, drafter.name, 0, text.length, most)
    with torch.inference_mode():
        return drafter.draft([order], [text]).drafts[0].token_ids


@pytest.mark.parametrize("name", ["twin", "finer"])
def test_a_draft_is_a_function_of_the_text_alone(engine: Engine, alone: Alone, name: str) -> None:
    """Whatever was read and drafted before; it may only be longer for it."""
    drafter: Any = engine.executor.drafters[name]
    for request, output in zip(
        make_requests(SAMPLINGS["coupled"], NUM, name), alone["coupled"], strict=True
    ):
        text, done = TokenBuffer(request), 0
        while done < len(output) - 1:
            grown = drafted(drafter, text, 5)
            anew = fresh_text(request, output[:done])
            other = drafted(drafter, anew, 5)
            drafter.release_request(anew.request.id)
            assert num_equal(grown, other) == min(len(grown), len(other))
            new = output[done:][: num_equal(grown, output[done:]) + 1]
            text.append(new)
            done += len(new)
        drafter.release_request(request.id)


def test_replays_count_what_would_have_been_drafted(engine: Engine, alone: Alone) -> None:
    shares = {}
    for name in ("twin", "finer"):
        drafter: Any = engine.executor.drafters[name]
        found = []
        for request, output in zip(
            make_requests(SAMPLINGS["greedy"], NUM, name), alone["greedy"], strict=True
        ):
            text = fresh_text(request, output)
            half, key = text.length - len(output) // 2, text.request.id
            for start, end in ((0, half), (half, text.length)):
                order = DraftOrder(key, 0, 0, name, start, end - start, 0, evaluate=True)
                with torch.inference_mode():
                    found += drafter.replay([order], [text])
            drafter.release_request(key)
        num = sum(r.num_tokens for r in found)
        assert num > 0.75 * sum(map(len, alone["greedy"]))
        shares[name] = sum(r.num_matched for r in found) / num
    assert shares["twin"] > 0.97
    assert 0.05 < shares["finer"] < 0.95


NUM_SAMPLES = 20_000
LETTERS = ("a", "b", "c", "d", "ab", "cd")
"""The target's tokens: the same text may be spelt in several ways."""
OWN_LETTERS = ("d", "bc", "a", "c", "b", "abc")
TOY_PROMPT = (0, 1)


def letters(tokens: Sequence[str], merges: list[tuple[str, str]]) -> Tokenizer:
    backend = Backend(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(FastTokenizer(backend, None, {}))


def toy_drafter() -> TextDrafter:
    vocabularies = Vocabularies(
        letters(LETTERS, [("a", "b"), ("c", "d")]),
        letters(OWN_LETTERS, [("b", "c"), ("a", "bc")]),
        (),
        (),
    )
    runner: Any = ToyRunner(first_order(3))
    return TextDrafter(ModelDrafter("toy", runner, 64), vocabularies, 64)


def test_what_its_tokenizer_was_not_made_for_is_not_read() -> None:
    """As of a language of which it has no words, where a token of the target takes several of its
    own. Where the text goes on in what it knows it drafts again."""
    drafter, known, strange = toy_drafter(), (0, 2) * 7, (4,) * 20

    def num_drafted(prompt: tuple[int, ...]) -> int:
        request = Request(f"r{len(prompt)}", len(prompt), 9, prompt_token_ids=prompt)
        return len(drafted(drafter, TokenBuffer(request), 3))

    assert num_drafted(known) > 0
    assert num_drafted(strange) == 0
    assert num_drafted(strange + known) > 0


def generate(*, falsify: bool) -> np.ndarray[Any, Any]:
    """Three tokens of every request. falsify: drafts are passed off as samples of a distribution"""
    target, drafter = first_order(0), toy_drafter()
    begin, seen = len(TOY_PROMPT), dict[tuple[int, ...], list[int]]()
    texts = [
        TokenBuffer(
            Request(
                f"{i}",
                begin,
                3,
                prompt_token_ids=TOY_PROMPT,
                sampling=SamplingParams(seed=i, verification="ratio"),
            )
        )
        for i in range(NUM_SAMPLES)
    ]
    rows, num_drafted = sampling_rows(NUM_SAMPLES), 0
    while active := [i for i, t in enumerate(texts) if t.length < begin + 3]:
        mine = [texts[i] for i in active]
        drafts = []
        for text in mine:
            known = tuple(text.tokens(0, text.length))
            if known not in seen:
                seen[known] = drafted(drafter, text, 3)
            drafts.append(Draft(seen[known], [0 if falsify else -1] * len(seen[known])))
            num_drafted += len(seen[known])
        probs = torch.full((1, len(LETTERS)), 1 / len(LETTERS)) if falsify else None
        decide(target, mine, Drafts(drafts, probs), rows.select(np.array(active)))
    assert num_drafted > NUM_SAMPLES, "else this shows nothing"
    return np.array([t.tokens(begin, begin + 3) for t in texts])


@pytest.mark.parametrize("falsify", first_fast([False, True]))
def test_joint_of_three_positions_is_the_targets(falsify: bool) -> None:
    """And would not be, were a draft not a point mass."""
    size = len(LETTERS)
    joint = first_order(0).expand(size, size, size).contiguous()
    p_value = joint_p_value(generate(falsify=falsify), joint, sampling_rows(NUM_SAMPLES))
    assert p_value < 1e-9 if falsify else p_value > 1e-3


def test_a_drafter_without_a_tokenizer_is_refused(paths: dict[str, Path], tmp_path: Path) -> None:
    for file in paths["twin"].iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = EngineConfig(target=model_path(TARGET), drafters={"bare": str(tmp_path)})
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load_engine(config, calibrated=False)
