"""vLLM's limits and Penstock's policies, without vLLM."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config import ConfigError, PolicyConfig
from penstock.engine.vllm.guide import Limits, _allocation, _within

LIMITS = Limits(max_model_len=512, max_num_seqs=16, max_num_batched_tokens=64)
OWN = """
from dataclasses import dataclass
from penstock.core.policies.admission.parts.token_budget import TokenBudget
from penstock.core.policies.declared import LimitOptions

class Own(TokenBudget):
    name = "own"
    limits = LimitOptions(token_budget="tokens", max_num_seqs="requests")

    @dataclass(frozen=True, slots=True)
    class Options:
        tokens: int = 100
        requests: int = 8

    def __init__(self, options):
        super().__init__(TokenBudget.Options(options.tokens, options.requests))
        self.options = options

POLICY = Own
"""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vllm_v1", {"max_num_batched_tokens": 64, "max_num_seqs": 16}),
        ("sarathi", {"token_budget": 64, "max_num_seqs": 16}),
        ("fluid_guided", {"max_num_batched_tokens": 64}),
        ("own", {"tokens": 64}),
    ],
)
def test_the_limits_that_a_policy_declares_are_vllms(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if name == "own":
        path = tmp_path / "own.py"
        path.write_text(OWN)
        name = str(path)
    assert _within(PolicyConfig.from_name(name), LIMITS).options == options
    for option in options:
        with pytest.raises(ConfigError, match=f"{option} may be at most (64|16), which is vLLM's"):
            _within(PolicyConfig.from_name(name, **{option: 300}), LIMITS)


def test_drafts_are_as_long_as_vllms() -> None:
    assert _allocation(7) == PolicyConfig.from_name("fixed", k=7)
