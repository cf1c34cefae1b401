"""One text in the tokens of two vocabularies."""

import itertools
import unicodedata
from collections.abc import Sequence

import numpy as np
import pytest
from tests.engine.test_gguf_tokenizer import CORPUS, HARD, ORIGINALS
from tests.engine.test_tokenizer import sentencepiece_like
from tests.products import covering
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from penstock.engine.drafters.spelling import OwnText, Vocabularies
from penstock.engine.models.fast_tokenizer import FastTokenizer
from penstock.engine.tokenizer import Tokenizer

KINDS = {**ORIGINALS, "sentencepiece": sentencepiece_like}
PROSE = "The quick brown fox jumps over the lazy dog, and 12 more. It's late:\n\n    go home!\n"
PAIRS = list(itertools.permutations(["qwen2", "smollm", "llama-bpe", "sentencepiece"], 2))


def num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(tokens, others, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def tokenizer_of(backend: Backend) -> Tokenizer:
    return Tokenizer(FastTokenizer(backend, None, {}))


def pair(target: str, own: str, **ends: Sequence[int]) -> Vocabularies:
    return Vocabularies(
        tokenizer_of(KINDS[target]()),
        tokenizer_of(KINDS[own]()),
        ends.get("target_ends", ()),
        ends.get("own_ends", ()),
    )


def read(text: OwnText, token_ids: Sequence[int], seed: int) -> None:
    """In pieces of up to five tokens."""
    rng = np.random.default_rng(seed)
    done = 0
    while done < len(token_ids):
        size = int(rng.integers(1, 6))
        text.read(token_ids[done : done + size])
        done += size


@pytest.mark.parametrize(
    ("kinds", "seed"), covering(PAIRS, range(4), strength=1, fast=[(PAIRS[0], 0)])
)
def test_what_is_read_in_pieces_is_the_text(kinds: tuple[str, str], seed: int) -> None:
    vocabularies = pair(*kinds)
    target, own = vocabularies.target, vocabularies.own
    for whole in [*HARD, PROSE]:
        if "<" in whole or "[PAD" in whole:
            continue  # special tokens are not text
        ids = target.encode(whole, add_special_tokens=False)
        text = OwnText(vocabularies)
        read(text, ids, seed)
        expected = target.decode(ids)
        if kinds[1] == "qwen2":
            expected = unicodedata.normalize("NFC", expected)
        assert own.decode(text.token_ids) == expected


@pytest.mark.parametrize(("kinds", "whole"), covering(PAIRS, [PROSE, CORPUS[1]], strength=1))
def test_what_is_foreseen_rightly_is_the_targets_own(kinds: tuple[str, str], whole: str) -> None:
    """A drafter that puts down the rest of the text drafts the target's tokens of it."""
    vocabularies = pair(*kinds)
    target, own = vocabularies.target, vocabularies.own
    ids = target.encode(whole, add_special_tokens=False)
    text, num_drafted, num_right = OwnText(vocabularies), 0, 0
    for i, token in enumerate(ids[:-4]):
        text.read([token])
        # Where it ends within a character there is no text to go on from.
        rest = target.bytes_of(ids[i + 1 :], token)
        try:
            drafted = own.encode_behind(text.token_ids[-8:], rest.decode())
        except UnicodeDecodeError:
            continue
        for num in (2, 5, 9) if text.token_ids else ():
            respelt = text.respelt((drafted or [])[:num])
            num_right += num_equal(respelt, ids[i + 1 :])
            num_drafted += len(respelt)
    assert num_drafted > (2 if kinds[1] == "sentencepiece" else 4) * len(ids)
    assert num_right >= (0.9 if kinds[1] == "sentencepiece" else 1) * num_drafted


def test_nothing_is_drafted_within_a_character() -> None:
    vocabularies = pair("qwen2", "smollm")
    ids = vocabularies.target.encode("a 🜁 b")
    cut = next(
        i for i in range(2, len(ids)) if vocabularies.target.decode(ids[:i]).endswith("\ufffd")
    )
    text, drafted = OwnText(vocabularies), vocabularies.own.encode(" and so on and on")
    text.read(ids[:cut])
    assert text.respelt(drafted) == []
    assert vocabularies.own.decode(text.token_ids) == "a "
    text.read(ids[cut:])
    assert text.respelt(drafted)
    assert vocabularies.own.decode(text.token_ids) == "a 🜁 b"


def test_nothing_is_drafted_that_would_change_the_last_token() -> None:
    vocabularies = pair("qwen2", "smollm")
    target, own = vocabularies.target, vocabularies.own
    whole = "def reverse"
    cut = next(
        i
        for i in range(len(whole) - 1, 4, -1)
        if target.encode(whole)[: len(target.encode(whole[:i]))] != target.encode(whole[:i])
    )
    text = OwnText(vocabularies)
    text.read(target.encode(whole[:cut]))
    assert text.respelt(own.encode(f"{whole[cut:]} jumps over")) == []
    assert text.respelt(own.encode(" fox jumps over"))


def marked(kind: str, special: Sequence[str], opening: str | None = None) -> Backend:
    backend = KINDS[kind]()
    backend.add_special_tokens([AddedToken(s, special=True) for s in special])
    if opening is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[opening, "$A"], special_tokens=[(opening, backend.token_to_id(opening))]
        )
    return backend


def test_special_tokens_become_those_that_mean_the_same() -> None:
    target = tokenizer_of(marked("qwen2", ["<|im_start|>", "<turn>", "<|pic|>"]))
    own = tokenizer_of(marked("smollm", ["<|im_start|>", "<s>", "</s>"], opening="<s>"))
    known = {spelling: token for token, spelling in target.special_tokens.items()}
    mine = {spelling: token for token, spelling in own.special_tokens.items()}
    vocabularies = Vocabularies(target, own, [known["<turn>"]], [mine["</s>"]])
    text = OwnText(vocabularies)
    text.read(target.encode("<|im_start|>fox<turn>\nthe<|pic|> dog", add_special_tokens=False))
    spelt = [own.special_tokens.get(t) or own.decode([t]) for t in text.token_ids]
    assert "".join(spelt) == "<s><|im_start|>fox</s>\nthe dog"
    drafted = [*own.encode(" and", add_special_tokens=False), mine["</s>"], *own.encode("x")]
    ended = [*target.encode(" and", add_special_tokens=False), known["<turn>"]]
    assert text.respelt(drafted) == ended, "its end is the target's, and nothing follows"
    unknown = [*own.encode(" and", add_special_tokens=False), mine["<s>"]]
    assert text.respelt(unknown) == ended[:-1]


def test_a_text_may_be_read_on_apart() -> None:
    vocabularies = pair("qwen2", "smollm")
    ids = vocabularies.target.encode(PROSE)
    text = OwnText(vocabularies)
    text.read(ids[:20])
    known = text.token_ids[:]
    other = text.copy()
    other.read(vocabularies.target.encode(" otherwise 🜁")[:-1])
    assert text.token_ids == known
    read(text, ids[20:], 0)
    assert text.token_ids == vocabularies.own.encode(PROSE)


def test_guesses_are_counted_by_the_targets_tokens() -> None:
    vocabularies = pair("qwen2", "smollm")
    target, own = vocabularies.target, vocabularies.own
    text, ids = OwnText(vocabularies), target.encode(PROSE)
    text.read(ids)
    num = text.num_covering(ids[-9:])
    assert own.bytes_of(text.token_ids[-num:]).endswith(target.bytes_of(ids[-9:]))
    guesses = text.token_ids[-num:]
    assert text.compare(ids[-9:], guesses) == (9, 9)
    held = spans(own, guesses, len(own.bytes_of(guesses)))
    wanted = spans(target, ids[-9:], len(target.bytes_of(ids[-9:])))
    for i, (begin, end) in enumerate(held):
        wrong = [*guesses[:i], guesses[i] ^ 1, *guesses[i + 1 :]]
        num_hit = sum(first < end and begin < last for first, last in wanted)
        assert text.compare(ids[-9:], wrong) == (9, 9 - num_hit)


def spans(tokenizer: Tokenizer, token_ids: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Bytes of tokens, counted from the text's end."""
    ends = list(itertools.accumulate(len(tokenizer.token_bytes(t, 0)) for t in token_ids))
    return [(a - size, b - size) for a, b in itertools.pairwise([0, *ends])]
