"""What a policy declares beside its code: its gauges, and the options that limits go to."""

from __future__ import annotations

from typing import NamedTuple


class Gauge(NamedTuple):
    """One of a policy's gauges, with a line of help.

    label: what tells its values apart; None: it has one value."""

    name: str
    help: str
    label: str | None = None
