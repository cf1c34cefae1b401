from __future__ import annotations

from typing import Any

import pytest

from penstock.core.policies.admission.vllm_v1 import VllmV1
from penstock.core.registry import PolicyError, make_policy, policies


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("admission", {"vllm_v1"}),
        ("allocation", {"fixed", "throughput"}),
        ("selection", {"single"}),
    ],
)
def test_policies_are_found_by_their_folder(kind: str, names: set[str]) -> None:
    found = policies(kind)
    assert names <= found.keys()
    assert list(found) == sorted(found)
    assert all(policy.name == name for name, policy in found.items())


@pytest.mark.parametrize("kind", ["admission", "allocation", "selection"])
def test_every_policy_can_be_made_from_its_defaults(kind: str) -> None:
    for name in policies(kind):
        assert make_policy(kind, name).name == name


def test_options_reach_the_policy() -> None:
    policy = make_policy("admission", "vllm_v1", {"max_num_seqs": 3, "watermark": 0})
    assert isinstance(policy, VllmV1)
    assert (policy.options.max_num_seqs, policy.options.watermark) == (3, 0)
    assert make_policy("allocation", "fixed", {"total": None}).options.total is None
    assert make_policy("selection", "single", {"drafter": "d"}).options.drafter == "d"


@pytest.mark.parametrize(
    ("kind", "name", "options", "said"),
    [
        (
            "allocation",
            "fixd",
            {},
            "unknown allocation policy 'fixd'; choose from deadline, fixed, ",
        ),
        (
            "allocation",
            "fixed",
            {"length": 4},
            "allocation policy 'fixed' has no option 'length'; options: k, total",
        ),
        (
            "allocation",
            "fixed",
            {"k": "4"},
            "allocation policy 'fixed': k must be a whole number from 0 to 1024, not '4'",
        ),
        (
            "allocation",
            "fixed",
            {"k": True},
            "allocation policy 'fixed': k must be a whole number from 0 to 1024, not True",
        ),
        (
            "allocation",
            "fixed",
            {"k": 2.5},
            "allocation policy 'fixed': k must be a whole number from 0 to 1024, not 2.5",
        ),
        (
            "allocation",
            "fixed",
            {"total": "all"},
            "allocation policy 'fixed': total must be a whole number from 0 to 1000000000, "
            "or null, not 'all'",
        ),
        (
            "allocation",
            "throughput",
            {"margin": "1"},
            "allocation policy 'throughput': margin must be a finite number of at least 0, not '1'",
        ),
        (
            "selection",
            "single",
            {"drafter": 3},
            "selection policy 'single': drafter must be a text, or null, not 3",
        ),
    ],
)
def test_errors_are_one_clear_line(
    kind: str, name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        make_policy(kind, name, options)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
