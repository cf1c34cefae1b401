"""Declarations of a policy beside its code: its gauges, and which options limit what."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class Gauge(NamedTuple):
    """One of a policy's gauges, with a line of help.

    label: what tells its values apart; None: it has one value."""

    name: str
    help: str
    label: str | None = None


class LimitOptions(NamedTuple):
    """Names of the options that hold a limit; None: the policy has no such limit.

    token_budget: positions of a step. max_num_seqs: running requests. max_draft_tokens: of one
    request. ttft_p99, tpot_p99: targets in seconds."""

    token_budget: str | None = None
    max_num_seqs: str | None = None
    max_draft_tokens: str | None = None
    ttft_p99: str | None = None
    tpot_p99: str | None = None

    def given(self, **limits: Any) -> dict[str, Any]:
        """Return options with these limits, but for those that the policy does not have."""
        options = {name: getattr(self, name) for name in limits}
        return {option: limits[name] for name, option in options.items() if option is not None}


class ThresholdOptions(NamedTuple):
    """Names of the options of an admission policy with thresholds that a plan works out.

    by: one for each type of request, which is an output length, or for each segment of outputs.
    lengths: those of the types, or ends of the segments, rising. gate: true where decoding never
    waits for a threshold."""

    by: Literal["type", "segment"]
    lengths: str
    thresholds: str
    gate: str
