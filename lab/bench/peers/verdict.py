"""The bars, and whether they are met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.bench.peers.checkpoints import MIXED, PeerCheckpoint
from lab.bench.peers.engines import PEERS
from lab.bench.peers.passes import shown

Run = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """`wanted` times the tokens per second of the best peer. mode: target, speculative, or any."""

    model: str
    batch: int
    mode: str
    wanted: float

    def __str__(self) -> str:
        how = {"target": "target only", "speculative": "best draft length", "any": "best mode"}
        return f"{self.model}, batch {self.batch}, {how[self.mode]}"


BARS = (
    Bar("random", 1, "target", 0.85),
    Bar("random", 8, "target", 1.0),
    Bar("random", 32, "target", 1.2),
    Bar("right", 1, "speculative", 1.2),
    Bar("right", 8, "speculative", 1.2),
    Bar("zoo", 1, "any", 1.3),
    Bar("zoo", 8, "any", 1.2),
    Bar("zoo", 32, "any", 1.0),
)


_GGUF_TARGET_BARS = ((1, "target", 1.0), (8, "target", 1.2), (32, "target", 1.2))
_GGUF_BARS = ((1, "any", 1.5), (4, "any", 1.3), (8, "any", 1.1))


def gguf_bars(models: Sequence[PeerCheckpoint]) -> list[Bar]:
    """The bars of real models, which are the same for all; target-only with mixed prompts."""
    bars = []
    for model in (model for model in models if model.is_gguf):
        of_target = _GGUF_TARGET_BARS if model.name.endswith(MIXED) else ()
        bars += [Bar(model.name, *bar) for bar in (*of_target, *_GGUF_BARS)]
    return bars


def judge(
    runs: Sequence[Run], missing: Mapping[str, str], bars: Sequence[Bar] = BARS
) -> dict[str, Any]:
    """The verdict: one line for each bar, and one for each peer that was not measured.

    missing: why, by the peer's name. With any peer missing the verdict is not met, because the
    missing one might have been the best.
    """
    lines, met = [], not missing
    for bar in bars:
        line, is_met = _line(bar, runs)
        without = [p for p in PEERS if p in missing]
        lines.append(line + (f" (without {', '.join(without)})" if without else ""))
        met = met and is_met
    lines += [f"missing: {peer}: {why}" for peer, why in missing.items()]
    return {"met": met, "lines": lines}


def _line(bar: Bar, runs: Sequence[Run]) -> tuple[str, bool]:
    fitting = [
        run
        for run in runs
        if (run["model"], run["batch"]) == (bar.model, bar.batch)
        and bar.mode in (run["mode"], "any")
        and run["tokens_per_s"] is not None
    ]
    ours = [run for run in fitting if run["engine"] == "penstock"]
    theirs = [run for run in fitting if run["engine"] != "penstock"]
    if not ours or not theirs:
        return f"{bar}: not measured, wanted {bar.wanted:.2f}x", False
    us, them = (max(some, key=lambda run: run["tokens_per_s"]) for some in (ours, theirs))
    ratio = us["tokens_per_s"] / them["tokens_per_s"]
    is_met = ratio >= bar.wanted
    line = (
        f"{bar}: {_figure(us)} against {_figure(them)}: {ratio:.2f}x, wanted {bar.wanted:.2f}x: "
        f"{'met' if is_met else 'missed'}"
    )
    return line, is_met


def _figure(run: Run) -> str:
    draft = f", k {run['draft_tokens']}" if run["mode"] == "speculative" else ""
    flag = f", {run['flag']}" if run["flag"] else ""
    return f"{run['engine']} {shown(run['tokens_per_s'])} ({run['mode']}{draft}{flag})"
