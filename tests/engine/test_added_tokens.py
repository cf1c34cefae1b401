"""Added tokens are text, whatever alphabet the vocabulary writes its own in; what is spelt like an
added or special token can be asked for; and no drafter changes any of it."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.engine import other_vocabulary
from tests.engine.added_tokens import ADDED, with_added_tokens, write
from tests.engine.test_exactness import make_loop, run
from tests.engine.test_tokenizer import KINDS, save, stream
from tests.products import covering, first_fast
from tokenizers import AddedToken, normalizers

from penstock.config import SUFFIX, EngineConfig
from penstock.core.types import Request, SamplingParams
from penstock.engine.build import Engine, load_engine
from penstock.engine.grammar import GrammarCompiler, grammar_of
from penstock.engine.sequences import TokenBuffer
from penstock.engine.tokenizer import Tokenizer, load_tokenizer

EOS = 2
ODD = (*ADDED, "two words", "▁x", "Ġy")
"""What other vocabularies would take for an alphabet of theirs, too."""
DRAFTERS = ("model", "suffix", "text")
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.9, verification="coupled"),
}


def tokenizer_of(folder: Path, kind: str, *, composes: bool = False) -> Tokenizer:
    """composes: it changes what is written in several code points into one."""
    backend = KINDS[kind]()
    backend.add_tokens([AddedToken(text, normalized=False) for text in ODD])
    if composes:
        steps = [n for n in (normalizers.NFC(), backend.normalizer) if n is not None]
        backend.normalizer = normalizers.Sequence(steps)
    return load_tokenizer(save(folder, backend))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", ODD)
def test_an_added_token_is_the_text_that_it_is_found_in(tmp_path, kind, added) -> None:
    tokenizer = tokenizer_of(tmp_path, kind)
    token = tokenizer.encode(added, add_special_tokens=False)[-1]
    words = tokenizer.encode("and", add_special_tokens=False)
    assert tokenizer.strings([token]) == [added]
    assert tokenizer.token_bytes(token, words[-1]) == added.encode()
    for ids in ([token], [*words, token], [token, *words, token, token]):
        text = tokenizer.decode(ids)
        assert text.count(added) == ids.count(token)
        assert "".join(stream(tokenizer, ids)) == text


def written(tokenizer: Tokenizer, grammar: str, prefers: str = "") -> str:
    """What comes of a grammar, by what must come and else by its masks. prefers: an added token."""
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size + 3, [1])
    request = Request("r", 1, 400, prompt_token_ids=(5,), stop_token_ids=frozenset({1}))
    text = TokenBuffer(request, compiler.begin(grammar))
    assert text.grammar is not None
    preferred = tokenizer.encode(prefers, add_special_tokens=False)[-1:]
    made: list[int] = []
    while made[-1:] != [1]:
        words = text.grammar.masks(text, (), 1)
        may_come = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        forced = text.grammar.forced(text)
        assert text.problem is None, text.problem
        assert may_come[:1] == [*forced[:1]] or not forced
        made += [token for token in (*preferred, *may_come) if token in may_come][:1]
        text.append(made[-1:])
    behind = tokenizer.encode("a")[-1]
    return tokenizer.bytes_of(made[:-1], behind).decode()


@pytest.mark.parametrize(
    ("kind", "mark"),
    covering(
        ["byte level", "sentencepiece-like"],
        [*ODD, "<s>", "</s>", "<s></s>", "e\u0301"],
        strength=1,
    ),
)
def test_what_is_spelt_like_a_token_can_be_asked_for(tmp_path: Path, kind: str, mark: str) -> None:
    tokenizer = tokenizer_of(tmp_path, kind, composes=True)
    for wanted in (mark, f"and {mark}and{mark}{mark} d", f"\n {mark}", f" {mark}!"):
        for prefers in ("", mark):
            text = written(tokenizer, grammar_of("json", {"const": wanted}), prefers)
            assert json.loads(text) == wanted
            assert written(tokenizer, grammar_of("choice", [wanted]), prefers) == wanted
            pattern = grammar_of("regex", f"{re.escape(wanted)}[!]{{2,3}}")
            assert re.fullmatch(f"{re.escape(wanted)}!!!?", written(tokenizer, pattern, prefers))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    root = tmp_path_factory.mktemp("models")
    model = write(root / "model", "draft-tiny")
    other = other_vocabulary.write(root / "text", "draft-base", other_vocabulary.finer)
    return load_engine(
        EngineConfig(
            target=write(root / "target", "target-large"),
            drafters={"model": str(model), "suffix": SUFFIX, "text": str(with_added_tokens(other))},
            dtype="float32",
            kv_tokens=16384,
            max_model_len=512,
            num_threads=1,
        ),
        calibrated=False,
    )


SAID = "<tool_call> čas 日本 <|eos|><číslo> </tool_call>"
GRAMMARS = {
    None: r"(?s:.*)",
    grammar_of("json", {"const": SAID}): re.escape(json.dumps(SAID, ensure_ascii=False)),
    grammar_of("choice", [f"a {SAID}", f"čas {SAID}", f"<číslo>{SAID}"]): rf".+{re.escape(SAID)}",
    grammar_of("regex", rf"([a-z ]|čas|日本){{20,60}}({SAID}!){{2}}"): rf"(?s:.*)({SAID}!){{2}}",
    grammar_of("json", {"type": "string", "minLength": 20, "maxLength": 60}): '"(?s:.*)"',
}
"""With what their texts match."""


_num_made = itertools.count()


def requests_of(tokenizer: Tokenizer, sampling: SamplingParams, drafter: str) -> list[Request]:
    """Two by each grammar."""
    made = []
    for seed, grammar in enumerate([*GRAMMARS] * 2):
        prompt = tuple(tokenizer.encode(f"<|user|>Say: {SAID} and 日本 čas<|assistant|>"))
        made.append(
            Request(
                id=f"a{next(_num_made)}",
                prompt_len=len(prompt),
                max_tokens=100 if grammar else 40,
                prompt_token_ids=prompt,
                stop_token_ids=frozenset({EOS}),
                sampling=dataclasses.replace(sampling, seed=seed, grammar=grammar),
                drafter=drafter,
            )
        )
    return made


@pytest.mark.parametrize("sampling", first_fast(SAMPLINGS))
def test_no_drafter_changes_a_text_with_added_tokens(engine: Engine, sampling: str) -> None:
    params, tokenizer = SAMPLINGS[sampling], load_tokenizer(engine.tokenizer_path)
    alone, _ = run(make_loop(engine), requests_of(tokenizer, params, "none"))
    added = {tokenizer.encode(text)[-1] for text in ADDED}
    for ids, pattern in zip(alone, [*GRAMMARS.values()] * 2, strict=True):
        assert re.fullmatch(pattern, tokenizer.decode(ids))
    assert added <= {token for ids in alone for token in ids}
    for drafter in DRAFTERS:
        drafted, accepted = run(make_loop(engine), requests_of(tokenizer, params, drafter))
        assert drafted == alone, drafter
        assert accepted > 20
