"""What a run decided, as lines of text: plans, outputs and ends, in the order in which they came.

Identities that no decision depends on are left out: plan ids, epochs, which blocks of the memory.
"""

from hashlib import blake2s

from penstock.core.types import DraftOrder, Output, StepPlan, StepResult, VerifyItem

CHUNK = 20
_DIGITS = 9
_DIGEST_BYTES = 3


class Recorder:
    """An instrument of the loop."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_plan(self, plan: StepPlan) -> None:
        parts = [f"{plan.lane} at {plan.created_at:.{_DIGITS}g}:"]
        parts += [_item(item) for item in plan.items]
        if plan.decodes is not None:
            run = plan.decodes
            parts.append(f"{run.num_requests} decode with {run.num_kv_tokens}")
        parts += [_order(order) for order in plan.drafts]
        self.lines.append(" ".join(parts))

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """What came of a plan shows in outputs and in later plans."""

    def on_output(self, output: Output) -> None:
        parts = [f"{output.request_id}:", f"{output.num_tokens} new", *map(str, output.token_ids)]
        if output.num_proposed:
            parts.append(f"{output.num_accepted} of {output.num_proposed} by {output.drafter}")
        if output.num_cached_tokens:
            parts.append(f"{output.num_cached_tokens} cached")
        if output.finish_reason is not None:
            parts.append(str(output.finish_reason))
        self.lines.append(" ".join(parts))


def _item(item: VerifyItem) -> str:
    text = f"{item.request_id}[{item.start}+{item.num_scheduled_tokens}"
    if item.num_draft_tokens:
        text += f" {item.source} {item.num_draft_tokens} of {item.drafter}"
    text += f" {len(item.new_blocks)}b]"
    return text if item.draft is None else f"{text} {_order(item.draft)}"


def _order(order: DraftOrder) -> str:
    text = f"{order.drafter}({order.request_id} {order.start}+{order.num_catch_up_tokens}"
    text += f" drafts {order.max_draft_tokens} {len(order.new_blocks)}b"
    if order.min_survival:
        text += f" over {order.min_survival:.{_DIGITS}g}"
    if order.deadline is not None:
        text += f" until {order.deadline:.{_DIGITS}g}"
    return text + (" evaluated)" if order.evaluate else ")")


def digests(lines: list[str]) -> list[str]:
    """A few digits for every `CHUNK` lines: enough to find where the first difference is."""
    chunks = ["\n".join(lines[i : i + CHUNK]) for i in range(0, len(lines), CHUNK)]
    return [blake2s(chunk.encode(), digest_size=_DIGEST_BYTES).hexdigest() for chunk in chunks]
