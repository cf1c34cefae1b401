"""Commands that take the options of another one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def with_options_of(command: Callable[..., Any], **flags: Any) -> inspect.Signature:
    """The signature of a command that takes the same options, and these flags besides, all by their
    names."""
    known = inspect.signature(command, eval_str=True).parameters.values()
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in flags.items()
    ]
    return inspect.Signature([*(p.replace(kind=p.KEYWORD_ONLY) for p in known), *own])
