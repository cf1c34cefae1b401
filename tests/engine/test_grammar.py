"""Output that follows a grammar: always valid, and the same with drafts as without."""

import dataclasses
import gc
import json
import re
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tests.engine.schemas import NUM_KINDS
from tests.engine.structured import count_texts
from tests.engine.test_exactness import run
from tests.products import covering

from penstock.config import NGRAM, EngineConfig
from penstock.core.kv import BlockPool
from penstock.core.lookup import TextLookUp
from penstock.core.loop import Loop
from penstock.core.policies.registry import make_pipeline, make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter
from penstock.core.types import Arrive, FinishReason, Output, Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.grammar import GrammarCompiler, GrammarError, GrammarState, grammar_of
from penstock.engine.sequences import TokenBuffer
from penstock.engine.tokenizer import Tokenizer, load_tokenizer
from penstock.zoo.registry import model_path

EOS = 2
DRAFTERS = ("draft-tiny", "draft-code", "ngram")
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "is_member": {"type": "boolean"},
    },
    "required": ["first_name", "age", "colours", "is_member"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json": grammar_of("json", PERSON),
    "regex": grammar_of("regex", r"[A-Z][a-z]{2,8} (is|was) [0-9]{1,3}\."),
    "choice": grammar_of("choice", ["positive", "negative", "neither of them"]),
    "grammar": grammar_of("grammar", 'root ::= num (" + " num){1,4}\nnum ::= [0-9]{1,4}'),
}
MANY = " | ".join(f'"{n:04}"' for n in range(2500))
"""Alternatives: more than llguidance can keep in mind at once."""
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "coupled": SamplingParams(temperature=1.0),
    "coupled-filtered": SamplingParams(temperature=1.2, top_k=50, top_p=0.95, min_p=0.01),
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(
        EngineConfig(
            target=model_path("draft-base"),
            drafters={n: NGRAM if n == "ngram" else str(model_path(n)) for n in DRAFTERS},
            dtype="float32",
            kv_tokens=8192,
            num_threads=1,
        ),
        calibrated=False,
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(model_path("draft-base"))


def make_loop(
    engine: Engine,
    *,
    drafters: Sequence[str] = DRAFTERS,
    pipeline: str = "off",
    num_blocks: int = 512,
) -> Loop:
    has_lane = pipeline != "off"
    size = engine.executor.target.block_size
    known = [Drafter(n, BlockPool(512, size), has_lane) for n in drafters if n != NGRAM]
    scheduler = Scheduler(
        BlockPool(num_blocks, size),
        known,
        admission=make_policy("admission", "vllm_v1", {"max_num_seqs": 32}),
        selection=make_policy("selection", "single"),
        allocation=make_policy("allocation", "fixed", {"k": 4}),
        pipeline=make_pipeline(pipeline),
        max_model_len=512,
        look_up=TextLookUp(NGRAM) if NGRAM in drafters else None,
    )
    return Loop(scheduler, engine.executor, engine.clock)


_num_made = iter(range(10**6))


def make_requests(
    tokenizer: Tokenizer, sampling: SamplingParams, num: int, drafter: str, **fields: Any
) -> list[Request]:
    """Of all kinds of grammars, one after the other."""
    requests = []
    for i in range(num):
        grammar = list(GRAMMARS.values())[i % len(GRAMMARS)]
        prompt = tuple(tokenizer.encode(f"Tell me of number {i}: "))
        requests.append(
            Request(
                id=f"g{next(_num_made)}",
                prompt_len=len(prompt),
                prompt_token_ids=prompt,
                max_tokens=120,
                stop_token_ids=frozenset({EOS}),
                sampling=dataclasses.replace(sampling, seed=i, grammar=grammar),
                drafter=drafter,
                **fields,
            )
        )
    return requests


def check_valid(tokenizer: Tokenizer, texts: Sequence[tuple[int, ...]]) -> None:
    for i, tokens in enumerate(texts):
        assert tokens[-1] == EOS
        text = tokenizer.decode(tokens)
        kind = list(GRAMMARS)[i % len(GRAMMARS)]
        if kind == "json":
            Draft202012Validator(PERSON).validate(json.loads(text))
        elif kind == "choice":
            assert text in ("positive", "negative", "neither of them")
        elif kind == "regex":
            assert re.fullmatch(r"[A-Z][a-z]{2,8} (is|was) [0-9]{1,3}\.", text)
        else:
            assert re.fullmatch(r"[0-9]{1,4}( \+ [0-9]{1,4}){1,4}", text)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_output_is_valid_and_the_same_with_any_drafts(engine, tokenizer, sampling) -> None:
    params = SAMPLINGS[sampling]
    alone, accepted = run(
        make_loop(engine, drafters=()),
        make_requests(tokenizer, params, 8, "none", max_draft_tokens=0),
    )
    check_valid(tokenizer, alone)
    assert not accepted
    for drafter in ("none", *DRAFTERS):
        drafted, accepted = run(make_loop(engine), make_requests(tokenizer, params, 8, drafter))
        assert drafted == alone, drafter
        assert accepted > 8, "forced tokens at least"


@pytest.mark.slow
def test_in_lanes_of_their_own(engine: Engine, tokenizer: Tokenizer) -> None:
    params = SAMPLINGS["coupled"]
    alone, _ = run(make_loop(engine), make_requests(tokenizer, params, 8, "none"))
    for pipeline in ("async", "2"):
        loop = make_loop(engine, pipeline=pipeline)
        drafted, accepted = run(loop, make_requests(tokenizer, params, 8, "draft-tiny"))
        assert drafted == alone
        assert accepted > 8


def test_small_memory_preempts_and_changes_nothing(engine: Engine, tokenizer: Tokenizer) -> None:
    params = SAMPLINGS["coupled"]
    alone, _ = run(make_loop(engine), make_requests(tokenizer, params, 12, "none"))
    loop = make_loop(engine, num_blocks=12)
    drafted, _ = run(loop, make_requests(tokenizer, params, 12, "draft-tiny"))
    assert loop.scheduler.table.counters.preemptions > 0
    assert drafted == alone


def test_forced_tokens_come_in_one_step_without_any_drafter(engine, tokenizer) -> None:
    (request,) = make_requests(tokenizer, SAMPLINGS["greedy"], 1, "none")
    outputs = outputs_of(make_loop(engine, drafters=()), [request])
    jumps = [o for o in outputs if o.num_proposed]
    assert len(jumps) >= 3
    assert all(o.drafter is None for o in jumps)
    assert any('"colours"' in tokenizer.decode(o.token_ids) for o in jumps)


def outputs_of(loop: Loop, requests: Sequence[Request]) -> list[Output]:
    found: list[Output] = []
    events = [Arrive(r) for r in requests]
    while events or loop.scheduler.num_unfinished:
        found += loop.turn(events).outputs
        events = []
    loop.turn([])
    return found


@pytest.mark.parametrize("drafter", ["none", "draft-tiny"])
def test_ratio_is_valid_too(engine: Engine, tokenizer: Tokenizer, drafter: str) -> None:
    params = SamplingParams(temperature=1.0, verification="ratio")
    texts, accepted = run(make_loop(engine), make_requests(tokenizer, params, 16, drafter))
    check_valid(tokenizer, texts)
    assert accepted > 16


def test_masks_that_do_not_see_the_draft_would_be_seen(engine, tokenizer, monkeypatch) -> None:
    params = SAMPLINGS["coupled"]
    alone, _ = run(make_loop(engine), make_requests(tokenizer, params, 8, "none"))
    seeing = GrammarState.fill

    def deaf(
        self: GrammarState, text: TokenBuffer, draft: Any, num_rows: int, place: int, size: int
    ) -> None:
        for row in range(num_rows):
            seeing(self, text, (), 1, place + row * size, size)

    monkeypatch.setattr(GrammarState, "fill", deaf)
    loop = make_loop(engine)
    requests = make_requests(tokenizer, params, 8, "draft-tiny")
    texts: dict[str, list[int]] = {r.id: [] for r in requests}
    for output in outputs_of(loop, requests):
        texts[output.request_id] += output.token_ids
    assert [tuple(t) for t in texts.values()] != alone


def test_the_end_comes_before_min_tokens_where_nothing_else_may(engine, tokenizer) -> None:
    params = SamplingParams(temperature=1.0, min_tokens=100)
    texts, _ = run(make_loop(engine), make_requests(tokenizer, params, 4, "draft-tiny"))
    check_valid(tokenizer, texts)


ENDLESS = {
    "start: <|nothing|>": "unknown special token",
    # More than llguidance can go on with, behind a few tokens.
    'start: /[a-z ]{3}/ "." tail\ntail: ' + MANY: "Current row has 2501 items; max is 2000",
}


@pytest.mark.parametrize(
    ("grammar", "drafter", "kind"), covering(ENDLESS, ["none", "draft-tiny"], SAMPLINGS, strength=1)
)
def test_a_grammar_that_cannot_go_on_ends_its_own_request_alone(
    engine: Engine, tokenizer: Tokenizer, grammar: str, drafter: str, kind: str
) -> None:
    params = SAMPLINGS[kind]
    requests = make_requests(tokenizer, params, 3, drafter)
    broken = dataclasses.replace(
        requests[1], sampling=dataclasses.replace(params, grammar=grammar_of("lark", grammar))
    )
    outputs = outputs_of(make_loop(engine), [requests[0], broken, requests[2]])
    ends = {o.request_id: o for o in outputs if o.finish_reason is not None}
    assert len(ends) == sum(o.finish_reason is not None for o in outputs)
    assert ends[broken.id].finish_reason is FinishReason.ERROR
    assert EOS not in [t for o in outputs if o.request_id == broken.id for t in o.token_ids]
    assert (ends[broken.id].error or "").startswith("the grammar: ")
    assert ENDLESS[grammar] in (ends[broken.id].error or "")
    others, _ = run(make_loop(engine), make_requests(tokenizer, params, 3, "none"))
    for i in (0, 2):
        made = [t for o in outputs if o.request_id == requests[i].id for t in o.token_ids]
        assert tuple(made) == others[i]


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json", {"type": "strng"}, "Invalid type: strng"),
        ("json", "{", "EOF while parsing"),
        ("json", {"$ref": "file:///etc/passwd"}, "does not fetch"),
        ("json", False, "Unsatisfiable schema"),
        ("json", {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "matches no text"),
        ("grammar", "start: start", "it matches no text"),
        ("regex", r"[^\s\S]", "it matches no text"),
        ("json", {"type": "string", "if": {}}, "Unimplemented keys"),
        ("regex", "(", "invalid regex"),
        ("regex", r"(a)\1", "invalid regex"),
        ("regex", "(" * 5000 + ")" * 5000, "invalid regex"),
        ("grammar", "start: nothing", "unknown name"),
        ("lark", f"start: {MANY}", "Current row has 2501 items; max is 2000"),
        ("grammar", "start: " + "(" * 9000 + '"a"' + ")" * 9000, "too deeply nested"),
        ("grammar", "", ""),
        ("json", json.dumps({"enum": ["x" * 300_000]}), "at most 262144 are allowed"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(tokenizer, kind, value, reason) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, 4096, [EOS])
    with pytest.raises(GrammarError) as refused:
        compiler.compile(grammar_of(kind, value)).result()
    assert reason in str(refused.value)
    assert str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("strings", [[f"{n:09}" for n in range(10_000)], ["a" * 260_000]])
def test_a_choice_has_only_the_limit_of_its_length(tokenizer, strings: list[str]) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, 4096, [EOS])
    matcher = compiler.compile(grammar_of("choice", strings)).result().deep_copy()
    token_ids = tokenizer.encode(strings[-1], add_special_tokens=False)
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert matcher.is_accepting()


def test_what_one_request_uses_up_others_have(tokenizer: Tokenizer) -> None:
    """Copies of a compiled grammar share a lexer, whose states are limited."""
    compiler = GrammarCompiler(lambda: tokenizer, 4096, [EOS])
    grammar = grammar_of("regex", "(.*a.{20}|.*b.{21}|.*c.{22})!")
    shared, draw = compiler.compile(grammar), np.random.default_rng(0)
    text = TokenBuffer(Request("r", 1, 9, prompt_token_ids=(5,)), compiler.begin(grammar))
    used, kept = shared.result().deep_copy(), text.grammar
    while not used.is_error():
        mask = np.unpackbits(np.frombuffer(used.compute_bitmask(), np.uint8), bitorder="little")
        used.try_consume_tokens([int(draw.choice(np.flatnonzero(mask)))])
    assert np.unpackbits(kept.masks(text, (), 1).view(np.uint8)).sum() > 1000
    assert text.problem is None
    assert compiler.compile(grammar) is not shared


def test_a_text_that_leaves_its_grammar_is_told_where(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, 4096, [EOS])
    request = Request("r", 1, 60, prompt_token_ids=(5,), stop_token_ids=frozenset({EOS}))
    text = TokenBuffer(request, compiler.begin(GRAMMARS["json"]))
    assert text.grammar is not None
    text.append([*tokenizer.encode("{", add_special_tokens=False), 4000])
    text.grammar.masks(text, (), 1)
    assert text.problem == "the grammar: token 4000 is not allowed at position 1"


def test_a_model_without_an_end_of_text_has_no_grammars(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, 4096, [])
    with pytest.raises(GrammarError, match="no token that ends a text"):
        compiler.compile(GRAMMARS["json"]).result()


def test_who_holds_a_grammar_does_not_have_it_compiled_again(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, 4096, [EOS])
    others = [grammar_of("choice", [f"number {i}"]) for i in range(40)]
    held = compiler.compile(GRAMMARS["choice"])
    dropped = weakref.ref(compiler.compile(GRAMMARS["regex"]))
    for grammar in others:
        compiler.compile(grammar).result()
    assert compiler.compile(GRAMMARS["choice"]) is held
    gc.collect()
    assert dropped() is None, "the others make room"


def test_masks_of_a_draft_are_those_of_its_tokens_one_by_one(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, 4096, [EOS])
    request = Request("r", 1, 60, prompt_token_ids=(5,), stop_token_ids=frozenset({EOS}))
    along = TokenBuffer(request, compiler.begin(GRAMMARS["json"]))
    assert along.grammar is not None
    whole = [*tokenizer.encode('{"first_name": "Ada", "age"', add_special_tokens=False), 4000, 7]
    masks = along.grammar.masks(along, whole, len(whole) + 1)
    again = along.grammar.masks(along, whole, 3)
    assert np.array_equal(again, masks[-3:])
    stepwise = TokenBuffer(request, compiler.begin(GRAMMARS["json"]))
    for token, mask in zip(whole[:-1], masks, strict=False):
        assert np.array_equal(stepwise.grammar.masks(stepwise, (), 1)[0], mask)
        stepwise.append([token])
        if stepwise.problem is not None:
            break
    assert stepwise.problem is None or token == 4000
    assert (masks[-1] == -1).all(), "behind what may not be, everything"


@pytest.mark.parametrize("kind", GRAMMARS)
def test_what_is_drawn_of_all_tokens_and_let_come_is_what_the_masks_give(tokenizer, kind) -> None:
    """Scores at random, the likeliest of all against the likeliest of those that may come."""
    compiler = GrammarCompiler(lambda: tokenizer, 4096, [EOS])
    request = Request("r", 1, 99, prompt_token_ids=(5,), stop_token_ids=frozenset({EOS}))
    rng, counts = np.random.default_rng(3), dict.fromkeys(("let come", "put in", "refused"), 0)
    for _ in range(6):
        settled = TokenBuffer(request, compiler.begin(GRAMMARS[kind]))
        masked = TokenBuffer(request, compiler.begin(GRAMMARS[kind]))
        assert settled.grammar is not None
        while masked.length < 60:
            words = masked.grammar.masks(masked, (), 1)
            may_come = np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)
            scores = rng.random(4096) + np.where(may_come, rng.random(), 0.0)
            expected = int(np.where(may_come, scores, -1.0).argmax())
            of_all = int(scores.argmax())
            found = [of_all, 0]
            refused = settled.grammar.settle(settled, (expected + 1,), found)
            if refused is None:
                assert found == [expected, 0]
                counts["let come" if of_all == expected else "put in"] += 1
            else:
                assert refused == 0
                assert of_all != expected or settled.forced() == ()
                counts["refused"] += 1
            settled.append([expected])
            masked.append([expected])
            assert settled.forced() == masked.forced()
            if expected == EOS:
                break
        assert settled.problem is None
    assert all(counts.values()), counts


def test_before_a_decided_draft_is_appended_masks_are_of_the_text(tokenizer) -> None:
    """A drafter may, in its own thread."""
    compiler = GrammarCompiler(lambda: tokenizer, 4096, [EOS])
    request = Request("r", 1, 60, prompt_token_ids=(5,), stop_token_ids=frozenset({EOS}))
    text = TokenBuffer(request, compiler.begin(GRAMMARS["json"]))
    assert text.grammar is not None
    draft = tokenizer.encode('{"first_name": "Ada', add_special_tokens=False)
    before, behind = text.grammar.masks(text, draft, len(draft) + 1)[[0, -1]]
    samples = [*draft, 7]
    assert text.grammar.settle(text, draft, samples) in (None, len(draft))
    assert samples[:-1] == draft
    assert np.array_equal(text.grammar.masks(text, (), 1)[0], before)
    text.append(draft)
    assert np.array_equal(text.grammar.masks(text, (), 1)[0], behind)
    assert not np.array_equal(before, behind)


@pytest.mark.slow
def test_schemas_of_all_sorts() -> None:
    counts = count_texts(model_path("target-large"), model_path("draft-tiny"), NUM_KINDS)
    # The others are cut off by their length.
    assert counts["valid"] > 0.5 * counts["texts"]
    assert counts["forced"] > NUM_KINDS
    assert not counts["invalid"] + counts["different"]
