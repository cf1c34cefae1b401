"""Loading, digests, chat templates, and text that streams exactly as it would decode at once."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.formats import open_checkpoint
from penstock.engine.tokenizer import Tokenizer, load_tokenizer

TEXT = "Straße, naïve — 東京 and 😀👩‍🚀!  Two  spaces\n\tand\ttabs. "
CORPUS = [TEXT, "The quick brown fox jumps over the lazy dog.", "das ist 東 und 京"]
SPECIAL = ["<s>", "</s>"]
CHAT = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}" + (
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_level() -> Backend:
    """As Llama 3, Qwen and the bundled family have it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece_like() -> Backend:
    """As Llama 2 has it: spaces are part of words, what is unknown is spelled in bytes."""
    words = ["▁", "▁and", "▁Two", "▁spaces", "▁tabs", "a", "n", "d", "t", "S", "T", "e", "!", "."]
    names = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    pieces = [(name, -1.0 - len(names[:i]) / 1000) for i, name in enumerate(names)]
    backend = Backend(models.Unigram(pieces, unk_id=2, byte_fallback=True))
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
    backend.add_special_tokens(SPECIAL)
    return backend


def metaspace() -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=[*SPECIAL, "<unk>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


KINDS = {"byte level": byte_level, "sentencepiece-like": sentencepiece_like, "metaspace": metaspace}


def save(path: Path, backend: Backend, chat_template: str | None = None) -> Path:
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(save(folder, KINDS[request.param]()))


def stream(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


def test_stream_equals_decode(tokenizer: Tokenizer) -> None:
    for text in [TEXT, "", "a", " and  and", "😀😀", *CORPUS]:
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_goes_on_from_a_text_as_they_decode_together(tokenizer: Tokenizer) -> None:
    """A vocabulary that drops the space before a text drops none before its continuation."""
    prompt = [*tokenizer.encode("<s>"), *tokenizer.encode(" and  and")]
    for text in [TEXT, "a", " and  and", *CORPUS]:
        ids = tokenizer.encode(text)
        previous = tokenizer.last_of_text([*prompt, *tokenizer.encode("</s>"), 10**6])
        assert previous == prompt[-1]
        detokenizer = tokenizer.detokenizer(previous=previous)
        added = "".join([*map(detokenizer.add, ids), detokenizer.finish()])
        assert tokenizer.decode(prompt) + added == tokenizer.decode([*prompt, *ids])


def test_special_tokens(tokenizer: Tokenizer) -> None:
    bos, eos = tokenizer.encode("<s></s>", add_special_tokens=False)[-2:]
    assert tokenizer.is_special(bos)
    words = tokenizer.encode("and and", add_special_tokens=False)
    ids = [bos, *words, eos, *words, eos, eos]
    for skip in (True, False):
        assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)
    assert "<s>" in tokenizer.decode(ids, skip_special_tokens=False)
    assert "<s>" not in tokenizer.decode(ids)


def test_random_bytes_stream_as_they_decode(tmp_path: Path) -> None:
    """A bad model's output: mostly not UTF-8."""
    tokenizer = load_tokenizer(save(tmp_path, byte_level()))
    generator = np.random.default_rng(0)
    for length in (1, 2, 3, 5, 40) * 40:
        ids = generator.integers(2, tokenizer.vocab_size, size=length).tolist()
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_broken_character_in_bytes_breaks_only_itself(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, sentencepiece_like()))
    spelled = [3 + byte for byte in "é".encode() + b"\xe2\x82" + "é".encode()]
    assert stream(tokenizer, spelled) == ["", "é", "", "", "\ufffd", "é", ""]
    assert stream(tokenizer, spelled[:3]) == ["", "é", "", "\ufffd"]


def test_digest_is_of_the_content(tmp_path: Path) -> None:
    first = save(tmp_path / "first", byte_level())
    second = save(tmp_path / "second", byte_level(), chat_template=CHAT)
    file = second / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 7,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file.write_text(json.dumps(dict(reversed(content.items())), indent=7))
    digest = load_tokenizer(first).digest
    assert len(digest) == 64
    assert load_tokenizer(second).digest == digest

    content["model"]["merges"] = content["model"]["merges"][:-1]
    file.write_text(json.dumps(content))
    assert load_tokenizer(second).digest != digest
    assert load_tokenizer(save(tmp_path / "third", metaspace())).digest != digest


def test_digest_leaves_out_what_changes_no_id(tmp_path: Path) -> None:
    """The spellings in which publishers' files and those made from GGUF files differ."""
    file = save(tmp_path, byte_level()) / "tokenizer.json"
    content = json.loads(file.read_text())
    digest = load_tokenizer(tmp_path).digest

    def changed(**parts: Any) -> str:
        file.write_text(json.dumps(content | parts))
        return load_tokenizer(tmp_path).digest

    added, model = content["added_tokens"], content["model"]
    vocab = {token: i for token, i in model["vocab"].items() if token not in SPECIAL}
    bare = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    assert changed(post_processor=bare) == digest
    assert changed(decoder=bare) == digest
    assert changed(pre_tokenizer=content["pre_tokenizer"] | {"trim_offsets": False}) == digest
    assert changed(added_tokens=[token | {"special": False} for token in added]) == digest
    unmarked = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    assert changed(model=model | unmarked) == digest
    assert changed(pre_tokenizer=content["pre_tokenizer"] | {"add_prefix_space": True}) != digest
    assert changed(normalizer={"type": "NFC"}) != digest
    swapped = vocab | {"a": vocab["b"], "b": vocab["a"]}
    assert (
        changed(model=model | {"vocab": swapped | dict(zip(SPECIAL, range(2), strict=True))})
        != digest
    )


def test_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path / "chat", byte_level(), CHAT))
    messages = [{"role": "user", "content": "Straße"}]
    ids = tokenizer.apply_chat_template(messages)
    assert tokenizer.decode(ids) == "user:Straße;assistant:"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert tokenizer.decode(ids) == "user:Straße;"

    plain = load_tokenizer(save(tmp_path / "plain", byte_level()))
    with pytest.raises(ValueError, match="no chat template"):
        plain.apply_chat_template(messages)
    refusing = "{{ raise_exception('only\nusers') }}"
    strict = load_tokenizer(save(tmp_path / "strict", byte_level(), refusing))
    with pytest.raises(ValueError, match="refuses the messages: only users"):
        strict.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for m in messages %}\n{{ m.content }}{% endfo %}", "line 2: Encountered unknown tag"),
        ("{{ messages[0].content | upcase }}", "line 1: No filter named 'upcase'"),
        ({"default": CHAT, "tool_use": "{% if"}, "tool_use: line 1: "),
    ],
)
def test_a_broken_chat_template_is_told_of_at_the_start(tmp_path, template, fault, caplog) -> None:
    broken = load_tokenizer(save(tmp_path / "broken", byte_level(), template))
    broken.prepare_chats()
    (message,) = caplog.messages
    assert message.startswith(f"the model's chat template cannot be used: {fault}")
    assert "\n" not in message
    with pytest.raises(ValueError, match="chat template cannot be used") as refused:
        broken.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert message.split(";")[0] == str(refused.value).split(";")[0]


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_transformers_would_read_it_with_the_same_class(tmp_path, name, model_type) -> None:
    save(tmp_path, byte_level(), CHAT)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "tokenizer_class": name}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours = open_checkpoint(tmp_path).tokenizer()
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template


@pytest.mark.slow
def test_a_server_reads_its_chats_without_pytorch() -> None:
    """Which takes longer to import than all the rest of what the front process does."""
    code = (
        "import sys\n"
        "from penstock.api import server\n"
        "from penstock.engine.tokenizer import load_tokenizer\n"
        "from penstock.zoo.registry import DEFAULT_TARGET, model_path\n"
        "load_tokenizer(model_path(DEFAULT_TARGET)).prepare()\n"
        "print({'torch', 'scipy'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "set()"


@pytest.mark.parametrize("text", ["and " * 50, "a" * 300, "Straße € " * 20, "and"])
def test_what_fits_is_encoded_as_ever(tmp_path: Path, text: str) -> None:
    tokenizer = load_tokenizer(save(tmp_path, byte_level()))
    ids = tokenizer.encode(text)
    for special in (True, False):
        assert tokenizer.encode_within(text, len(ids), special) == tokenizer.encode(text, special)
    found = tokenizer.encode_within(text, len(ids) - 1)
    assert isinstance(found, int)
    assert len(ids) - 1 < found <= len(ids)


def test_unusable_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json") as missing:
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match="tokenizer cannot be read") as broken:
        load_tokenizer(tmp_path)
    for error in (missing, broken):
        assert str(tmp_path) in str(error.value)
        assert "\n" not in str(error.value)
