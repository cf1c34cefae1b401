"""The tokenizer: its size, its round trips, its chat template, and one for all models."""

from itertools import islice

import pytest

from lab.zoo.corpora import examples
from lab.zoo.template import ASSISTANT_ID, EOS_ID, SPECIAL_TOKENS
from lab.zoo.tokenizer import VOCAB_SIZE, load_tokenizer
from penstock.zoo.registry import DEFAULT_TARGET, DOMAINS, bundled_models, model_path

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(model_path(DEFAULT_TARGET))


@pytest.fixture(scope="module")
def auto():
    return transformers.AutoTokenizer.from_pretrained(model_path(DEFAULT_TARGET))


def test_size_and_special_tokens(tokenizer, auto):
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == 4096 == len(auto)
    assert [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert auto.eos_token_id == EOS_ID


@pytest.mark.parametrize(
    "text", ["", " a  b\n\n\tc ", "naïve café 北京 🚀", "0123456789", "\x00\x7f"]
)
def test_round_trip_of_any_text(tokenizer, auto, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert auto.decode(auto(text)["input_ids"]) == text


@pytest.mark.slow
@pytest.mark.parametrize("domain", DOMAINS)
def test_chat_template_equals_our_own(auto, domain):
    for example in islice(examples(domain, "held_back", 0), 5):
        turns = [{"role": m.role, "content": m.content} for m in example.messages]
        prompt = auto.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
        assert prompt == example.prompt
        assert auto.apply_chat_template(turns, tokenize=False) == example.text
        ids = auto.apply_chat_template(
            turns[:-1], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        assert ids[-1] == ASSISTANT_ID


def test_every_model_ships_the_same_tokenizer():
    models = [card for card in bundled_models().values() if card.role != "head"]
    files = [card.path / "tokenizer.json" for card in models]
    assert len({path.read_bytes() for path in files}) == 1
