"""Tokenizers from GGUF files cut, join and stream texts as those they were written from."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tests.engine import small_gguf
from tests.engine.small_gguf import add_tokenizer, finish
from tests.engine.small_models import CASES
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer, Qwen3_5Tokenizer

from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.fast_tokenizer import FastTokenizer
from penstock.engine.models.formats import open_checkpoint
from penstock.engine.tokenizer import load_tokenizer

CORPUS = [
    "Straße, naïve — 東京 and 😀👩‍🚀!  Two  spaces\n\tand\ttabs. It's THEY'RE we'll don't",
    "def reverse(items: list[int]) -> list[int]:\n    return items[::-1]  # 1234567 89",
    "हिन्दी में हिन्दी की हिन्दी",
    "The quick brown fox jumps over the lazy dog. das ist 東 und 京 2024-11-22",
]
HARD = [
    *CORPUS,
    "",
    " ",
    "   lead and trail   ",
    "\n\n\n  \n\tx\r\n\r\ny",
    "I'll SHE'LL 'tis ''s camelCase HTTPServer //\n///\r\n a/b/",
    "12345678901 3.14159 ½ ² ٣٤",
    "e\u0301 \u00e9 \ufb01 \u1e9b\u0323",
    "한국어 हिन्दी العربية עברית ไทย",
    "👩‍👩‍👧‍👦🇩🇪 ​ \x00 \x7f",
    "<|im_start|>user\nhi<|im_end|> <|im_start|><tool_call>x</tool_call> <tool_ call>",
    "[PAD3] a[PAD3]b",
    "/* ++i */ a_b==c&&!d || (e->f)::g;",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OWN = ["<tool_call>", "</tool_call>"]

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained(cut: Any, normalizer: Any = None) -> Tokenizer:
    """Its merges go across words and digits, so that every cut matters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.pre_tokenizer, backend.normalizer = cut, normalizer
    backend.add_tokens([AddedToken(token, normalized=False) for token in OWN])
    return backend


def split(pattern: str) -> Any:
    cut = pre.Split(Regex(pattern), "isolated")
    return pre.Sequence([cut, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def qwen2() -> Tokenizer:
    """As transformers builds it, with its own cut and normalisation."""
    plain = Qwen2Tokenizer().backend_tokenizer
    return trained(plain.pre_tokenizer, plain.normalizer)


def qwen35() -> Tokenizer:
    plain = Qwen3_5Tokenizer().backend_tokenizer
    return trained(plain.pre_tokenizer, plain.normalizer)


ORIGINALS = {
    "gpt-2": lambda: trained(pre.ByteLevel(add_prefix_space=False)),
    "smollm": lambda: trained(
        pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    ),
    "qwen2": qwen2,
    "qwen35": qwen35,
    "llama-bpe": lambda: trained(split(LLAMA3)),
    "tekken": lambda: trained(split(TEKKEN)),
    "glm4": lambda: trained(split(LLAMA3)),
    "gpt-4o": lambda: trained(split(O200K)),
}


def write(path: Path, original: Tokenizer, pre_name: str, **values: Any) -> Path:
    writer = gguf.GGUFWriter(path / "model.gguf", "llama")
    add_tokenizer(writer, original, pre_name)
    for key, value in values.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_string
        add(f"tokenizer.{key.replace('__', '.')}", value)
    finish(writer)
    return path / "model.gguf"


@pytest.mark.parametrize("name", ORIGINALS)
def test_ids_and_texts_are_the_originals(name: str, tmp_path: Path) -> None:
    original = ORIGINALS[name]()
    tokenizer = load_tokenizer(write(tmp_path, original, name, ggml__add_bos_token=False))
    for text in HARD:
        ids = original.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == original.decode(ids)
        stream = tokenizer.detokenizer()
        streamed = "".join([*map(stream.add, ids), stream.finish()])
        assert streamed == tokenizer.decode(ids)


@pytest.mark.parametrize(("name", "other"), [*pairwise(ORIGINALS), ("llama-bpe", "qwen2")])
def test_another_cut_would_be_seen(name: str, other: str, tmp_path: Path) -> None:
    original = ORIGINALS[name]()
    tokenizer = load_tokenizer(write(tmp_path, original, other, ggml__add_bos_token=False))
    assert any(tokenizer.encode(text) != original.encode(text).ids for text in HARD)


def test_sources_are_equal_where_tokenizers_are(tmp_path: Path) -> None:
    """Whatever the chat template and the rest of the file."""
    sources = []
    for name, cut, said in [("a", "qwen2", "x"), ("b", "qwen2", "y"), ("c", "gpt-2", "x")]:
        (tmp_path / name).mkdir()
        path = write(tmp_path / name, ORIGINALS["qwen2"](), cut, chat_template=said)
        sources.append(open_checkpoint(path).tokenizer_source())
    assert sources[0] == sources[1] != sources[2]


def test_special_tokens_and_the_users_own(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write(tmp_path, ORIGINALS["qwen2"](), "qwen2"))
    ids = tokenizer.encode("<|im_start|>a<tool_call>")
    assert [tokenizer.is_special(i) for i in ids] == [True, False, False]
    assert tokenizer.decode(ids) == "a<tool_call>"


def test_the_users_own_tokens_are_text(tmp_path: Path) -> None:
    """Though the file lists them among those that are written in an alphabet for bytes."""
    original = ORIGINALS["qwen2"]()
    original.add_tokens(["čas", "<číslo>"])
    tokenizer = load_tokenizer(write(tmp_path, original, "qwen2"))
    ids = tokenizer.encode("a čas<číslo>")
    assert tokenizer.strings(ids[-2:]) == ["čas", "<číslo>"]
    assert tokenizer.decode(ids) == "a čas<číslo>"
    assert tokenizer.bytes_of(ids) == "a čas<číslo>".encode()


def test_padding_of_the_vocabulary_is_no_token(tmp_path: Path) -> None:
    original = ORIGINALS["gpt-2"]()
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    size = original.get_vocab_size()
    add_tokenizer(writer, original)
    kinds = writer.kv_data[0]["tokenizer.ggml.token_type"].value
    for index in range(3, 6):
        writer.kv_data[0]["tokenizer.ggml.tokens"].value.append(f"[PAD{index}]")
        kinds.append(gguf.TokenType.UNUSED)
    finish(writer)
    tokenizer = load_tokenizer(tmp_path / "model.gguf")
    assert tokenizer.vocab_size == size
    assert tokenizer.encode("a [PAD3]") == original.encode("a [PAD3]").ids
    assert tokenizer.token_bytes(size, None) == b""


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [("gpt-2", {}, 0), ("llama-bpe", {}, 1), ("gpt-2", {"ggml__add_bos_token": True}, 1)],
)
def test_a_first_token(name: str, said: dict[str, bool], expected: int, tmp_path: Path) -> None:
    original = ORIGINALS[name]()
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, original, name)
    writer.add_bos_token_id(0)
    for value in said.values():
        writer.add_add_bos_token(value)
    finish(writer)
    ids = load_tokenizer(path).encode("abc")
    assert ids == [*[0] * expected, *original.encode("abc").ids]
    assert load_tokenizer(path).encode("abc", add_special_tokens=False) == ids[expected:]


def test_chat_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}"
    path = write(tmp_path, ORIGINALS["qwen2"](), "qwen2", chat_template=template)
    tokenizer = load_tokenizer(path)
    assert tokenizer.chat_text([{"role": "user", "content": "a"}]) == "<|im_start|>a<|im_end|>"


TURN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def test_named_chat_templates(tmp_path: Path) -> None:
    """Chosen as transformers chooses them."""
    named = {"chat_template": TURN, "chat_template__tool_use": "{{ tools[0].name }}" + TURN}
    path = write(tmp_path, ORIGINALS["qwen2"](), "qwen2", **named)
    tokenizer, messages = load_tokenizer(path), [{"role": "user", "content": "a"}]
    assert tokenizer.chat_text(messages) == "[a]"
    assert tokenizer.chat_text(messages, tools=[{"name": "f"}]) == "f[a]"
    assert tokenizer.tool_template == named["chat_template__tool_use"]
    theirs = tokenizer._fast.to_transformers()
    for tools in (None, [{"name": "f"}]):
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert tokenizer.chat_text(messages, tools=tools or ()) == expected
    # A file of named ones alone.
    path = write(tmp_path, ORIGINALS["qwen2"](), "qwen2", chat_template__tool_use="x" + TURN)
    tokenizer = load_tokenizer(path)
    assert tokenizer.chat_text(messages, tools=[{"name": "f"}]) == "x[a]"
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        tokenizer.chat_text(messages)


@pytest.mark.parametrize("name", ["", "tool_use: "])
def test_a_chat_template_with_a_mistake(name: str, tmp_path: Path) -> None:
    key = "chat_template__tool_use" if name else "chat_template"
    path = write(tmp_path, ORIGINALS["qwen2"](), "qwen2", **{"chat_template": TURN, key: "{% if"})
    fault = load_tokenizer(path).template_fault
    assert str(fault).startswith(f"the model's chat template cannot be used: {name}line 1: ")


def sentencepiece() -> Tokenizer:
    """As Llama 2 has it: merges, bytes for what is unknown, a space before the first word."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    # No token goes across words, as in the real ones.
    backend.pre_tokenizer = pre.Split("▁", "merged_with_next")
    backend.train_from_iterator(CORPUS[:1] + CORPUS[2:], trainer)
    backend.pre_tokenizer = None
    return backend


OWN_TEXTS = ["<tool>", "   ", " and more", "▁x", "<0x41>x"]
"""User-defined tokens, which are text in every kind of vocabulary."""


def test_sentencepiece_by_scores(tmp_path: Path) -> None:
    original = sentencepiece()
    vocab = sorted(original.get_vocab().items(), key=lambda item: item[1])
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*(token for token, _ in vocab), *OWN_TEXTS])
    writer.add_token_scores([-float(index) for index in range(len(vocab) + len(OWN_TEXTS))])
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    kinds += [gguf.TokenType.NORMAL] * (len(vocab) - len(kinds))
    kinds += [gguf.TokenType.USER_DEFINED] * len(OWN_TEXTS)
    writer.add_token_types(kinds)
    finish(writer)
    tokenizer = load_tokenizer(path)
    for index, added in enumerate(OWN_TEXTS, len(vocab)):
        assert tokenizer.encode(f"The{added}fox").count(index) == 1
        assert tokenizer.token_bytes(index, None) == added.encode()
        assert tokenizer.decode([index]) == added
        assert not tokenizer.is_special(index)
    # Those of the original's training are no longer found in texts.
    for text in ["The quick fox", " and  東京 naïve", "Zürich 😀\n\t~", "spaces\x00Straße", ""]:
        ids = tokenizer.encode(text)
        assert ids == [1, *original.encode(text).ids]
        stream = tokenizer.detokenizer()
        assert "".join([*map(stream.add, ids), stream.finish()]) == text == tokenizer.decode(ids)


Values = dict[str, gguf.GGUFValue]

DAMAGE: dict[str, Callable[[Values], object]] = {
    "pre is 'klingon'; allowed: gpt-2, ": lambda v: put(v, pre="klingon"),
    "pre is 'default'; allowed: ": lambda v: put(v, pre="default"),
    "pre is 'missing'; allowed: ": lambda v: v.pop("tokenizer.ggml.pre"),
    "model is 'bert'; allowed: gpt2, llama": lambda v: put(v, model="bert"),
    "has no tokenizer.ggml.tokens": lambda v: v.pop("tokenizer.ggml.tokens"),
    "has no tokenizer.ggml.merges": lambda v: v.pop("tokenizer.ggml.merges"),
    "merges holds 'a'; two tokens": lambda v: v["tokenizer.ggml.merges"].value.append("a"),
    "token_type has 0 entries for": lambda v: v.pop("tokenizer.ggml.token_type"),
    "token_type has 4 entries for": lambda v: put(v, token_type=[1] * 4),
    "scores has 0 entries for": lambda v: put(v, model="llama"),
    "tokens: 'a' is given twice": lambda v: [
        v[f"tokenizer.ggml.{n}"].value.append(x)
        for n, x in {"tokens": "a", "token_type": 1}.items()
    ],
    "unknown_token_id is 9999; allowed": lambda v: put(v, unknown_token_id=9999),
    "end a text are (9999, ": lambda v: put(v, eos_token_id=9999),
    ", 9999, ": lambda v: put(v, eot_token_id=9999),
    "are (); one is needed": lambda v: (
        v.pop("tokenizer.ggml.eos_token_id"),
        put(v, token_type=[1] * len(v["tokenizer.ggml.token_type"].value)),
    ),
    "has no tokenizer.ggml.bos_token_id": lambda v: put(v, add_bos_token=1),
    "has no tokenizer.ggml.bos_token_id, ": lambda v: put(v, pre="tekken"),
    "tensor token_embd.weight has 512 rows": lambda v: [
        v[f"tokenizer.ggml.{name}"].value.extend(more)
        for name, more in {"tokens": map(str, range(1000, 1100)), "token_type": [1] * 100}.items()
    ],
}
"""Damages of a tokenizer's metadata, by what is said of them."""


def put(values: Values, **new: Any) -> None:
    for name, value in new.items():
        kind = gguf.GGUFValueType.get_type(value)
        values[f"tokenizer.ggml.{name}"] = gguf.GGUFValue(value, kind)


@pytest.mark.parametrize("told", DAMAGE)
def test_a_tokenizer_whose_texts_would_be_wrong(told, tmp_path, monkeypatch) -> None:
    def damage_and_finish(writer: gguf.GGUFWriter) -> None:
        DAMAGE[told](writer.kv_data[0])
        finish(writer)

    path = tmp_path / "model.gguf"
    monkeypatch.setattr(small_gguf, "finish", damage_and_finish)
    small_gguf.write_gguf(path, CASES["qwen2"], "F32", ORIGINALS["qwen2"](), "qwen2")
    with pytest.raises(CheckpointError, match=re.escape(told)) as caught:
        _ = open_checkpoint(path).description(), load_tokenizer(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("eos", ["<|im_end|>", "the"])
def test_transformers_makes_the_same_of_it(eos: str) -> None:
    """Of a tokenizer with a chat template; "the" ends a text and is no token of its own yet."""
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    special = {"bos_token": "<|endoftext|>", "eos_token": eos}
    theirs = PreTrainedTokenizerFast(tokenizer_object=qwen2(), chat_template=template, **special)
    ours = FastTokenizer(qwen2(), template, special)
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert {i: (t.content, t.special) for i, t in ours.added_tokens_decoder.items()} == {
        i: (t.content, t.special) for i, t in theirs.added_tokens_decoder.items()
    }
    for text in HARD:
        assert ours.encode(text) == theirs.encode(text)
    chat = [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b"}]
    for prompt in (False, True):
        expected = theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
        assert ours.apply_chat_template(chat, add_generation_prompt=prompt) == expected
