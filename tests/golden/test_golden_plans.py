"""The plans of a fixed set of runs are those of before.

    python -m tests.golden.test_golden_plans          writes them anew
    python -m tests.golden.test_golden_plans NAME     prints a run's lines, to be compared

A change that is meant to decide otherwise writes them anew, and says so.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.golden.record import CHUNK, digests
from tests.golden.scenarios import LITERAL, SCENARIOS

PLANS = Path(__file__).with_name("plans.json")
KNOWN: dict[str, str] = json.loads(PLANS.read_text()) if PLANS.exists() else {}


def cases() -> list[Any]:
    """`make test` runs one scenario of each policy and pipeline, and those that take no time."""
    policy = re.compile(r"(selection|allocation|pipeline) \w+|counted .*, high|goodspeed, .*")
    fast = {name for name in SCENARIOS if policy.fullmatch(name) or name.startswith("real KV")}
    fast |= {f"admission {name}, high" for name in LITERAL}
    fast |= {"admission fluid_guided, targets", "draft servers, goodspeed, async"}
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in fast)) for name in SCENARIOS]


@pytest.mark.parametrize("name", cases())
def test_plans_are_those_of_before(name: str) -> None:
    lines = SCENARIOS[name]()
    known = KNOWN[name].split()
    found = digests(lines)
    first = next((i for i, (a, b) in enumerate(zip(known, found, strict=False)) if a != b), None)
    if first is not None:
        start = first * CHUNK
        pytest.fail(
            f"something from line {start} on is new:\n" + "\n".join(lines[start : start + CHUNK]),
            pytrace=False,
        )
    assert len(found) == len(known)


def test_nothing_is_left_over() -> None:
    assert KNOWN.keys() == SCENARIOS.keys()


def main() -> None:
    if len(sys.argv) > 1:
        print("\n".join(SCENARIOS[sys.argv[1]]()))
        return
    plans = {name: " ".join(digests(scenario())) for name, scenario in SCENARIOS.items()}
    PLANS.write_text(json.dumps(plans, indent=0) + "\n")


if __name__ == "__main__":
    main()
