"""Plots of simulated runs. Imports matplotlib only to draw."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.core.loop import Instrument
from penstock.core.scheduler import Scheduler
from penstock.core.types import StepPlan, StepResult


class PlotError(ValueError):
    """A plot cannot be drawn. The message is one line."""


@dataclass(slots=True)
class Sampler(Instrument):
    """Samples the scheduler after steps, at most once in `every` seconds.

    ends: output tokens at which a request leaves each class, rising, [classes]; the last class also
    has the longer ones. Samples: `times` in seconds; `kv_tokens` in use; numbers of `waiting`
    requests and of `running` ones by class, [samples][classes]."""

    scheduler: Scheduler
    every: float
    ends: Sequence[int]
    times: list[float] = field(default_factory=list)
    kv_tokens: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    running: list[list[int]] = field(default_factory=list)
    _due: float = 0.0

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        if result.finished_at < self._due:
            return
        self._due = result.finished_at + self.every
        pool = self.scheduler.pool
        classes = [0] * len(self.ends)
        last = len(classes) - 1
        for state in self.scheduler.table.running.values():
            classes[min(bisect.bisect_right(self.ends, state.num_output_tokens), last)] += 1
        self.times.append(result.finished_at)
        self.kv_tokens.append(pool.num_used_blocks * pool.block_size)
        self.waiting.append(len(self.scheduler.table.waiting))
        self.running.append(classes)


class LoadPoint(NamedTuple):
    """Run at one load: offered and completed requests a second, mean latency in seconds."""

    rate: float
    throughput: float
    latency: float


def check_target(path: Path) -> None:
    """Check before a long run that a plot can be written there. Raises: PlotError."""
    pyplot = load_pyplot()
    figure = pyplot.figure()
    known = figure.canvas.get_supported_filetypes()
    pyplot.close(figure)
    if path.suffix.lstrip(".").lower() not in known:
        raise PlotError(f"--plot {path}: choose an ending from {', '.join(sorted(known))}")
    if not path.parent.is_dir():
        raise PlotError(f"--plot {path}: there is no folder {path.parent}")


def plot_run(samples: Sampler, path: Path, title: str) -> None:
    """Plot KV tokens in use and requests by class against time. Raises: PlotError, OSError."""
    pyplot = load_pyplot()
    figure, (memory, queues) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), layout="constrained"
    )
    memory.step(samples.times, samples.kv_tokens, where="post", linewidth=0.8)
    memory.axhline(samples.scheduler.pool.capacity_tokens, color="black", linestyle="--")
    memory.set(ylabel="KV tokens in use (memory dashed)", title=title)
    if samples.times:
        counts = np.array(samples.running).T
        queues.stackplot(samples.times, *counts, labels=_class_names(samples.ends), alpha=0.8)
        queues.plot(samples.times, samples.waiting, color="black", linewidth=0.8, label="waiting")
    queues.set(xlabel="seconds", ylabel="requests, running ones by output so far")
    queues.legend(fontsize="small")
    save_figure(figure, path)


def plot_load(
    points: Sequence[LoadPoint], marks: Mapping[str, float], path: Path, title: str
) -> None:
    """Plot throughput and mean latency against offered load. Raises: PlotError, OSError.

    marks: loads by what they are, which get a line each."""
    pyplot = load_pyplot()
    figure, (throughput, latency) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 6), layout="constrained"
    )
    rates = [p.rate for p in points]
    throughput.plot(rates, rates, color="grey", linewidth=0.8, label="offered")
    throughput.plot(rates, [p.throughput for p in points], marker="o", label="completed")
    latency.plot(rates, [p.latency for p in points], marker="o")
    for axes in (throughput, latency):
        for (label, rate), style in zip(marks.items(), (":", "--"), strict=True):
            axes.axvline(rate, color="black", linestyle=style, label=label)
    throughput.set(ylabel="requests a second", title=title)
    throughput.legend(fontsize="small")
    latency.set(xlabel="offered requests a second", ylabel="mean latency, s", yscale="log")
    latency.yaxis.set_major_formatter(pyplot.LogFormatter())
    latency.yaxis.set_minor_formatter(pyplot.LogFormatter())
    save_figure(figure, path)


def _class_names(ends: Sequence[int]) -> list[str]:
    starts = [0, *ends[:-1]]
    names = [f"{start} to {end - 1}" for start, end in zip(starts, ends, strict=True)]
    return [*names[:-1], f"{starts[-1]} or more"]


def load_pyplot() -> Any:
    """Return matplotlib's pyplot for drawing into files. Raises: PlotError if not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise PlotError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    """Write and close a figure. Raises: OSError."""
    figure.savefig(path, dpi=150)
    load_pyplot().close(figure)
