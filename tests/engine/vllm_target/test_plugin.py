"""vLLM's scheduler does what Penstock's policies plan, and every request gets its own tokens."""

from typing import Any

import pytest
from tests.engine.small_family import write_family
from tests.engine.vllm_target.programs import run, skip_if_it_computes_nothing

pytest.importorskip("vllm")

POLICIES = (
    "vllm_v1",
    "sarathi",
    "wait",
    "nested_wait",
    "fluid_guided",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    family = tmp_path_factory.mktemp("family")
    write_family(family)
    return run("plugin_runs", family / "target")


def test_every_request_gets_its_tokens_under_every_policy(runs: Any) -> None:
    """In memory for a few of them, synchronous and not, with drafts, prefixes and cancels."""
    facts = runs["facts"]
    assert {f"{p}, {kind}" for p in POLICIES for kind in ("Guided", "AsyncGuided")} < set(facts)
    assert {name for name, fact in facts.items() if not fact["equal"]} == set()
    assert {name for name, fact in facts.items() if fact["left_over"]} == set()
    for kind in ("Guided", "AsyncGuided"):
        assert facts[f"vllm_v1, {kind}"]["preemptions"] > 0
        assert facts[f"vllm_v1, {kind}, drafts"]["accepted"] > 0
        assert facts[f"fluid_guided, {kind}, roomy"]["cancelled"] == 2


def test_steps_come_out_as_planned(runs: Any) -> None:
    """Synchronous ones without a prefix cache to the token."""
    cases = [f"{p}, Guided{c}" for p in POLICIES for c in ("", ", drafts", ", roomy")]
    for case in (*cases, "small steps"):
        fact = runs["facts"][case]
        assert fact["planned"] > 300
        assert fact["otherwise"] == 0, case
        assert fact["most_running"] <= 8


def test_decoding_requests_are_planned_together(runs: Any) -> None:
    """Where no step is scheduled while another is computed, and nobody drafts."""
    facts = runs["facts"]
    for policy in POLICIES:
        for case in ("", ", prefixes", ", roomy"):
            fact = facts[f"{policy}, Guided{case}"]
            assert fact["counted"] > 100, policy
        again = facts[f"{policy}, Guided, roomy"]["again"]
        assert again == 0 if policy == "wait" else again > 5, policy
        for case in ("AsyncGuided", "Guided, drafts"):
            assert facts[f"{policy}, {case}"]["counted"] == 0
            assert facts[f"{policy}, {case}"]["again"] == 0


def test_decoding_requests_are_advanced_together(runs: Any) -> None:
    """Beside vLLM's own scheduler, which shares the same blocks then as it would alone."""
    facts = runs["facts"]
    for policy in POLICIES:
        for case in ("", ", prefixes", ", roomy"):
            assert facts[f"{policy}, Guided{case}"]["together"] > 100, policy
        for case in ("AsyncGuided", "Guided, drafts"):
            assert facts[f"{policy}, {case}"]["together"] == 0
    assert facts["shares"]["together"] > 100
    assert facts["shares"]["cached"] == facts["stock, shares"]["cached"] > 50


@pytest.mark.parametrize("case", ["strangers", "strangers, async"])
def test_requests_that_the_policies_do_not_know_are_served(runs: Any, case: str) -> None:
    """Their texts are compared with the others'; the steps are not all as planned."""
    fact = runs["facts"][case]
    assert fact["longest"] > 23 * 16  # tokens that memory holds
    assert fact["otherwise"] > 0


def test_negative_control_vllm_alone_would_do_otherwise(runs: Any) -> None:
    assert runs["facts"]["control"]["otherwise"] > 0


def test_negative_control_lost_kv_is_found(runs: Any) -> None:
    assert "is not there" in runs["lost"]


@pytest.mark.parametrize(("kind", "stock"), [("Guided", "stock"), ("AsyncGuided", "stock, async")])
def test_its_own_rule_takes_the_steps_that_vllm_takes(runs: Any, kind: str, stock: str) -> None:
    facts = runs["facts"]
    for case in ("", ", drafts"):
        own, theirs = facts[f"vllm_v1, {kind}{case}"], facts[f"{stock}{case}"]
        assert own["steps"] == pytest.approx(theirs["steps"], rel=0.1)
        assert own["preemptions"] <= theirs["preemptions"] + 3


@pytest.mark.parametrize(
    ("case", "longest"), [("short drafts", 1), ("no drafts", 0), ("two each", 2), ("priced", 3)]
)
def test_drafts_are_as_long_as_requests_and_the_policy_say(runs, case, longest) -> None:
    fact = runs["facts"][case]
    assert fact["longest_draft"] == longest
    assert (fact["accepted"] > 0) == (longest > 0)


def test_tenants_are_served_by_weight(runs: Any) -> None:
    even, weighted = runs["shares"]["1"], runs["shares"]["3"]
    assert even["a"] / even["b"] == pytest.approx(1, rel=0.25)
    assert weighted["a"] / weighted["b"] > 1.7


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("setting", "unknown setting 'admision' (did you mean 'admission'?); settings: admission"),
        ("policy", "unknown admission policy 'magic'; choose from fluid_guided"),
        ("whole", "'nested_wait' computes whole prompts only"),
        ("option", "has no option 'budget'; options: token_budget"),
        ("limit", "at most 64, which is vLLM's --max-num-batched-tokens, not 65"),
        ("profile", "profile: cannot read /nowhere.json"),
        ("weight", "tenants.a.weight: Input should be greater than 0"),
        ("mapping", "Input should be a valid dictionary"),
        ("order", "--scheduling-policy fcfs"),
        ("cadence", "--prefill-schedule-interval"),
        ("adaptive", "does not go with enable_adaptive_verification"),
        ("second runner", "engine vllm needs vLLM's first model runner"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(runs: Any, case: str, named: str) -> None:
    said = runs["refusals"][case]
    assert said.startswith("ConfigError: ")
    assert named in said
    assert "\n" not in said


@pytest.fixture(
    scope="module", params=[8, pytest.param(64, marks=pytest.mark.slow)], ids="{}-requests".format
)
def scenes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """With vLLM's look-up and without, on a model of its own."""
    skip_if_it_computes_nothing()
    family = tmp_path_factory.mktemp("family")
    write_family(family)
    num = request.param
    return {
        "plain": run("plugin_scenes", family / "target", num),
        "drafts": run("plugin_scenes", family / "target", num, "--drafts"),
    }


def test_a_model_makes_the_tokens_that_it_makes_without_the_plug_in(scenes: Any) -> None:
    """Greedy, in float32."""
    stock = scenes["plain"]["outputs"]["stock"]
    for played in scenes.values():
        outputs = {n: made for n, made in played["outputs"].items() if n != "control"}
        assert {n: made == stock for n, made in outputs.items()} == dict.fromkeys(outputs, True)
        for name in ("default, preemption", "fluid_guided, preemption"):
            assert played["facts"][name]["preemptions"] > 0, name
    drafts = {n: fact["longest_draft"] for n, fact in scenes["drafts"]["facts"].items()}
    assert drafts["fluid_guided"] == 4
    assert drafts["short drafts"] == 2
    assert {fact["longest_draft"] for fact in scenes["plain"]["facts"].values()} == {0}


def test_negative_control_of_the_model(scenes: Any) -> None:
    assert scenes["plain"]["outputs"]["control"] != scenes["plain"]["outputs"]["stock"]
