"""The corpora: deterministic, varied, and split so that nothing leaks."""

from itertools import islice

import pytest
from tests.products import first_fast

from lab.zoo.corpora import examples
from lab.zoo.template import ASSISTANT, BOS, EOS
from penstock.zoo.registry import DOMAINS, load_prompts


@pytest.mark.slow
@pytest.mark.parametrize("domain", first_fast(DOMAINS))
def test_same_seed_same_text(domain):
    first = [e.text for e in islice(examples(domain, "train", 3), 12)]
    again = [e.text for e in islice(examples(domain, "train", 3), 12)]
    other = [e.text for e in islice(examples(domain, "train", 4), 12)]
    assert first == again
    assert first != other


@pytest.mark.parametrize("domain", first_fast(DOMAINS))
@pytest.mark.slow
def test_parts_share_no_prompt(domain):
    def prompts(split, seed):
        return {e.prompt for e in islice(examples(domain, split, seed), 300)}

    train = prompts("train", 0) | prompts("train", 1)
    held, shipped = prompts("held_back", 0), {p.prompt for p in load_prompts(domain)}
    assert not train & held
    assert not train & shipped
    assert not held & shipped
    assert len(train) > 150


@pytest.mark.parametrize("domain", DOMAINS)
def test_shipped_prompts_are_in_template_form(domain):
    prompts = load_prompts(domain)
    assert len({p.prompt for p in prompts}) == len(prompts) >= 64
    for prompt in prompts:
        assert prompt.domain == domain
        assert prompt.prompt.startswith(BOS)
        assert prompt.prompt.endswith(ASSISTANT)
        assert prompt.reference
        assert EOS not in prompt.reference


def test_unknown_domain_is_an_error():
    with pytest.raises(KeyError):
        next(examples("poetry", "train"))
    with pytest.raises(KeyError, match="poetry"):
        load_prompts("poetry")
