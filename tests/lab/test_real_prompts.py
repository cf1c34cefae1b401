"""Prompts for real models: how many, from what, and apart."""

import pytest

from lab.bench.real_prompts import real_prompts, token_ids

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts():
    return real_prompts()


class Letters:
    """A tokenizer of one token a letter whose chat template marks the turns."""

    def encode(self, text):
        return [ord(c) for c in text]

    def apply_chat_template(self, messages):
        return self.encode(
            "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"
        )


def test_no_prompt_comes_twice_and_the_parts_share_no_source(prompts):
    assert len({p.text or p.message for p in prompts}) == len(prompts)
    learn, held = (
        {p.origin.split(".")[0] for p in prompts if p.part == x} for x in ("learn", "held")
    )
    assert not learn & held


def test_prompts_are_neither_long_nor_short(prompts):
    assert max(len(p.text or p.message) for p in prompts) < 1400
    assert min(len(p.text or p.message) for p in prompts) > 40


def test_messages_go_through_the_chat_template_and_text_does_not(prompts):
    by_kind = {p.kind: "".join(map(chr, token_ids(p, Letters()))) for p in prompts}
    assert not by_kind.pop("completion").endswith("<assistant>")
    assert all(t.startswith("<user>") and t.endswith("<assistant>") for t in by_kind.values())
