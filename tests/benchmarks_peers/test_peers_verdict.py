"""The bars of the comparison with other programs."""

from pathlib import Path
from typing import Any

from lab.bench.peers.checkpoints import PeerCheckpoint
from lab.bench.peers.engines import PEERS
from lab.bench.peers.verdict import BARS, Bar, gguf_bars, judge

MODES = {"target": ("target",), "speculative": ("speculative",), "any": ("target", "speculative")}


def run(engine: str, bar: Bar, rate: float | None, mode: str) -> dict[str, Any]:
    return {
        "model": bar.model,
        "batch": bar.batch,
        "engine": engine,
        "mode": mode,
        "draft_tokens": 4,
        "tokens_per_s": rate,
        "flag": "",
    }


def field(factor: float) -> list[dict[str, Any]]:
    """Penstock at `factor` times every bar, the peers behind each other."""
    runs = []
    for bar in BARS:
        for mode in MODES[bar.mode]:
            runs.append(run("penstock", bar, 100 * bar.wanted * factor, mode))
            runs += [run(peer, bar, 100.0 - i, mode) for i, peer in enumerate(PEERS)]
    return runs


def test_met_where_every_bar_is_reached() -> None:
    verdict = judge(field(1.001), {})
    assert verdict["met"]
    assert len(verdict["lines"]) == len(BARS)
    assert all(line.endswith(": met") for line in verdict["lines"])


def test_missed_just_under_the_bars() -> None:
    verdict = judge(field(0.999), {})
    assert not verdict["met"]
    assert all(line.endswith(": missed") for line in verdict["lines"])


def test_one_fast_peer_misses_one_bar() -> None:
    runs = field(1.001)
    runs.append(run("vllm", BARS[1], 1000.0, "target"))
    verdict = judge(runs, {})
    assert not verdict["met"]
    assert [line.endswith("missed") for line in verdict["lines"]].count(True) == 1
    assert "vllm 1000" in verdict["lines"][1]


def test_a_missing_peer_is_said_on_every_line_and_leaves_the_verdict_unmet() -> None:
    verdict = judge(field(1.001), {"llamacpp": "no compiler"})
    assert not verdict["met"]
    assert all("(without llamacpp)" in line for line in verdict["lines"][: len(BARS)])
    assert verdict["lines"][-1] == "missing: llamacpp: no compiler"


def test_real_models_have_bars_of_their_own() -> None:
    names = ("real mixed", "real code")
    bars = gguf_bars([PeerCheckpoint(name, "real", Path("real.gguf")) for name in names])
    runs = [
        run(engine, bar, rate, mode)
        for bar in bars
        for engine, rate in (("penstock", 149.0), ("llamacpp", 100.0))
        for mode in ("target", "speculative")
    ]
    verdict = judge(runs, {}, bars)
    missed = [line for line in verdict["lines"] if line.endswith("missed")]
    assert len(verdict["lines"]) == len(bars)
    assert [line.split(":")[0] for line in missed] == [
        "real mixed, batch 1, best mode",
        "real code, batch 1, best mode",
    ]
