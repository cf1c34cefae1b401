"""Bundles: the choices of all four policies that `--policy` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.policies.registry import PolicyError


@dataclass(frozen=True, slots=True)
class Bundle:
    """Policies with their default options but for those given here, and other engine settings."""

    admission: str = "vllm_v1"
    selection: str = "single"
    allocation: str = "fixed"
    pipeline: str = "off"
    admission_options: Mapping[str, Any] = field(default_factory=dict)
    selection_options: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


AUTO = "auto"
"""The default bundle."""

BUNDLES = {
    AUTO: Bundle(
        admission="fluid_guided",
        selection="auto",
        allocation="priced",
        pipeline="auto",
    ),
    "vllm": Bundle(),
    "sarathi": Bundle(admission="sarathi"),
    # Rounds of the paper wait for all draft servers.
    "goodspeed": Bundle(allocation="goodspeed", engine={"verification": "ratio"}),
    # As printed; lanes, and micro-batches by the paper's heuristic.
    "spin": Bundle(
        selection="lbss",
        selection_options={"corrections": ()},
        pipeline="5%",
        engine={"attention": "decomposed"},
    ),
    # To the letter it may never answer a client that is alone.
    "wait": Bundle(admission="nested_wait", admission_options={"gated": True, "thresholds": ()}),
}


def bundle(name: str) -> Bundle:
    """Return the bundle of a name. Raises: PolicyError."""
    if name not in BUNDLES:
        raise PolicyError(f"unknown policy {name!r}; choose from {', '.join(BUNDLES)}")
    return BUNDLES[name]
