"""What a plan asks of the target, in the terms of step-time profiles."""

from __future__ import annotations

from penstock.core.types import StepPlan
from penstock.fluid.step_profile import StepWork


def step_work(plan: StepPlan) -> StepWork:
    """Positions and context of a plan's first step. One known token behind some context is a
    decoding request, everything else is prefill."""
    run = plan.decodes
    if run is not None and not plan.items:
        return StepWork(0, 0.0, run.num_requests, run.num_kv_tokens, 0)
    prefill, decodes, kv, drafts, context = 0, 0, 0, 0, 0.0
    for item in plan.items:
        tokens, start = item.num_scheduled_tokens, item.start
        if tokens == 1 and start:
            decodes += 1
            kv += start + 1
            drafts += item.num_draft_tokens
        else:
            prefill += tokens
            context += tokens * (start + 0.5 * tokens)
    if run is not None:
        decodes += run.num_requests
        kv += run.num_kv_tokens
    return StepWork(prefill, context, decodes, kv, drafts)
