"""What a plan asks of the target, in the terms of step-time profiles."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.types import StepPlan, Verdict
from penstock.fluid.step_profile import StepWork


def step_work(plan: StepPlan, verdicts: Sequence[Verdict] | None = None) -> StepWork:
    """Positions and context of a plan's first step. One known token behind some context is a
    decoding request, everything else is prefill. Drafts are as long as `verdicts` say, or as was
    granted: a look-up often finds less."""
    proposed = {} if verdicts is None else {v.request_id: v.num_proposed for v in verdicts}
    run = plan.decodes
    if run is not None and not plan.items:
        return StepWork(0, 0.0, run.num_requests, run.num_kv_tokens, 0)
    prefill, decodes, kv, drafts, context = 0, 0, 0, 0, 0.0
    for item in plan.items:
        tokens, start = item.num_scheduled_tokens, item.start
        if tokens == 1 and start:
            decodes += 1
            kv += start + 1
            drafts += proposed.get(item.request_id, item.num_draft_tokens)
        else:
            prefill += tokens
            context += tokens * (start + 0.5 * tokens)
    if run is not None:
        decodes += run.num_requests
        kv += run.num_kv_tokens
    return StepWork(prefill, context, decodes, kv, drafts)
