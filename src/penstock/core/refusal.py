"""What can never be served, and why."""

from __future__ import annotations

from collections.abc import Container, Iterable

from penstock.core.blocks import BlockPool
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER, Request


def refusal(
    request: Request,
    running: Container[str],
    max_model_len: int,
    pool: BlockPool,
    drafters: Iterable[str],
) -> str | None:
    """Why a request is refused when it arrives, in one line; None if it is not. running: ids in
    use."""
    total = request.prompt_len + request.max_tokens
    if request.id in running:
        return f"a request with id {request.id!r} is already running"
    if request.prompt_len < 1 or request.max_tokens < 1:
        return "a request needs at least 1 prompt token and at least 1 token to make"
    if total > max_model_len:
        return (
            f"{request.prompt_len} prompt tokens and {request.max_tokens} to make are more "
            f"than the context of {max_model_len} tokens"
        )
    if total > pool.capacity_tokens:
        return (
            f"{request.prompt_len} prompt tokens and {request.max_tokens} to make are more "
            f"than the KV memory of {pool.capacity_tokens} tokens"
        )
    allowed = (AUTO_DRAFTER, NO_DRAFTER, *drafters)
    if request.drafter not in allowed:
        return f"unknown drafter {request.drafter!r}; choose from {', '.join(allowed)}"
    return None
