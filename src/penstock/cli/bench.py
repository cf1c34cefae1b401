"""`penstock bench engine`: target-only and speculative decoding compared in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options as cli
from penstock.cli.terminal import one_line, print_table, progress, whole_numbers
from penstock.json_text import dumps

if TYPE_CHECKING:
    from penstock.engine.build import Engine
    from penstock.serving.bench import BenchPrompt, BenchRun

_LARGEST_BLOCK = 128
"""Largest block size of the engine, in tokens: a request's last block may be nearly empty."""

app = typer.Typer(no_args_is_help=True, help="Measure the engine.")


@app.callback()
def _group() -> None:
    """Measure the engine."""


@app.command("engine")
def bench(
    target: cli.TargetArgument = None,
    drafter: cli.DrafterOption = None,
    domain: Annotated[
        str | None,
        typer.Option(help="Prompts of one bundled domain (math, sql, qa, ...). Default: all."),
    ] = None,
    engine: cli.EngineOption = None,
    dtype: cli.DtypeOption = None,
    batch: cli.BatchOption = "1,8,32",
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Cut or repeat prompts to this many tokens.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each request.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs of every cell.")] = 5,
    device: cli.DeviceOption = None,
    settings: cli.SettingsOption = None,
    as_json: cli.JsonOption = False,
) -> None:
    """Measure the tokens per second of target-only decoding, every drafter and auto, in turn."""
    options = dict(locals())
    from penstock.cli.settings import assembled, put_options
    from penstock.config import ConfigError, Settings
    from penstock.core.types import AUTO_DRAFTER

    # Repeated prompts must be computed again, and their answers not be looked up.
    given = Settings({"engine": {"prefix_caching": False, "look_up": "ngram"}})
    with one_line(ConfigError):
        batches = whole_numbers("--batch", batch)
        put_options(given, options)
        _check_domain(domain)
        made: dict[str, Any] = assembled(given)["engine"]

    from penstock.engine.models.checkpoint import CheckpointError
    from penstock.serving.bench import BenchOptions, bench_engine, cut_prompts

    with one_line(ConfigError, CheckpointError):
        prompts = _prompts(made["target"], domain)
        if prompt_tokens is not None:
            prompts = cut_prompts(prompts, prompt_tokens)
        longest = max(len(p.token_ids) for p in prompts) + new_tokens
        made["kv_tokens"] = max(batches) * (longest + _LARGEST_BLOCK)
        built = _built(made, longest)
    chosen = [AUTO_DRAFTER] if made["drafters"] else []
    cells: list[str | None] = [None, *made["drafters"], *chosen]
    told = BenchOptions(batches, new_tokens, temperature, repeats)
    with progress(len(batches) * len(cells) * (repeats + 1), "measuring") as advance:
        runs = bench_engine(built, prompts, cells, told, lambda *_: advance(1))
    _report(built, runs, as_json)


def _built(settings: dict[str, Any], longest: int) -> Engine:
    """Load an engine for requests of `longest` tokens. Raises: ConfigError, CheckpointError."""
    from penstock.config import ConfigError, parse_config
    from penstock.engine.build import load_engine

    engine = load_engine(parse_config({"engine": settings}).engine)
    if longest > engine.max_model_len:
        raise ConfigError(
            f"prompts and new tokens are up to {longest} tokens, more than the context of "
            f"{engine.max_model_len}"
        )
    return engine


def _check_domain(domain: str | None) -> None:
    from penstock.config import ConfigError
    from penstock.zoo.registry import DOMAINS

    if domain is not None and domain not in DOMAINS:
        raise ConfigError(f"unknown domain {domain!r}; choose from {', '.join(DOMAINS)}")


def _prompts(target: Path, domain: str | None) -> list[BenchPrompt]:
    from penstock.engine.tokenizer import load_tokenizer
    from penstock.serving.bench import BenchPrompt
    from penstock.zoo.registry import DOMAINS, load_prompts

    tokenizer = load_tokenizer(target)
    by_domain = [load_prompts(d) for d in ((domain,) if domain else DOMAINS)]
    return [
        BenchPrompt(tuple(tokenizer.encode(p.prompt)), p.domain)
        for one_of_each in zip(*by_domain, strict=False)
        for p in one_of_each
    ]


def _report(engine: Engine, runs: list[BenchRun], as_json: bool) -> None:
    import statistics

    cpu_share = statistics.mean(r.cpu_share for r in runs) / engine.num_threads
    if as_json:
        rows = [
            {
                "batch": r.batch,
                "mode": r.mode,
                "drafter": r.drafter,
                "tokens_per_s": r.tokens_per_s,
                "best_tokens_per_s": r.best_tokens_per_s,
                "mean_acceptance_length": r.mean_acceptance_length,
                "host_share": r.host_share,
            }
            for r in runs
        ]
        print(dumps({**engine.describe(), "runs": rows, "cpu_share": cpu_share}))
        return
    _print(engine, runs, cpu_share)


def _print(engine: Engine, runs: list[BenchRun], cpu_share: float) -> None:
    facts = engine.describe()
    alone = {r.batch: r.tokens_per_s for r in runs if r.drafter is None}
    print_table(
        ", ".join([facts["target"], facts["dtype"], facts["backend"]]),
        ("drafter", "batch", "tokens/s", "best", "speed-up", "accepted + 1", "host"),
        (
            (
                run.drafter or "(target only)",
                str(run.batch),
                f"{run.tokens_per_s:.1f}",
                f"{run.best_tokens_per_s:.1f}",
                f"{run.tokens_per_s / alone[run.batch]:.2f}",
                f"{run.mean_acceptance_length:.2f}" if run.mean_acceptance_length else "",
                f"{run.host_share:.0%}",
            )
            for run in runs
        ),
    )
    print(f"CPU time over wall time and threads: {cpu_share:.2f}")
    if cpu_share < 0.85:
        print("The cores were not free: do not trust these figures.")
