"""`penstock profile`: measuring, fitting and showing step-time profiles."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import options as cli
from penstock.cli.terminal import one_line, print_table, progress, whole_numbers
from penstock.json_text import dumps

if TYPE_CHECKING:
    from penstock.engine.build import Engine
    from penstock.fluid.step_profile import StepProfile
    from penstock.sim.profiles import FitQuality

app = typer.Typer(no_args_is_help=True, help="Measure, fit and show step-time profiles.")

# Points of the printed table, and the KV memory of a profile that is not told another.
_SHOWN_COUNTS = (1, 8, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096)
_DECODE_CONTEXT = 500
_KV_TOKENS = 65_536

ContextsOption = Annotated[
    str, typer.Option(help="Context lengths in tokens, separated by commas.")
]
KvTokensOption = Annotated[
    int | None,
    typer.Option(min=1, help="KV tokens of the profiled machine. [65536]"),
]


@app.command()
def fit(
    measurements: Annotated[
        Path,
        typer.Argument(
            help="CSV of steps: num_prefill_tokens, prefill_context, num_decodes, num_kv_tokens, "
            "num_draft_tokens, seconds."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The profile's file; its stem is the name.")],
    kv_tokens: Annotated[int, typer.Option(min=1, help="KV tokens of the profiled machine.")],
    as_json: cli.JsonOption = False,
) -> None:
    """Fit a profile to measured times, and print the quality of the fit."""
    from penstock.sim.profiles import ProfileError, fit_profile, save_profile

    with one_line(ProfileError, OSError):
        fitted = fit_profile(measurements, name=out.stem, kv_tokens=kv_tokens)
        save_profile(fitted.profile, out)
    if as_json:
        quality = [asdict(q) for q in fitted.quality]
        print(dumps({"profile": fitted.profile.name, "out": str(out), "fit": quality}))
        return
    _print_quality(fitted.quality)
    print(f"{out}: {len(fitted.profile.token_counts)} points")


@app.command()
def measure(
    out: Annotated[Path, typer.Option(help="The profile's file; its stem is the name.")],
    target: cli.TargetArgument = None,
    drafter: cli.DrafterOption = None,
    engine: cli.EngineOption = None,
    dtype: cli.DtypeOption = None,
    device: cli.DeviceOption = None,
    batch: cli.BatchOption = "1,2,4,8,16,32",
    contexts: ContextsOption = "64,512",
    kv_tokens: KvTokensOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Passes; a step's median counts.")] = 8,
    settings: cli.SettingsOption = None,
    as_json: cli.JsonOption = False,
) -> None:
    """Measure the step times of a target and its drafters, alone and together."""
    options = {**locals(), "kv_tokens": None}
    from penstock.cli.settings import engine_with
    from penstock.config import ConfigError
    from penstock.sim.profiles import ProfileError, fit_steps, save_profile, with_served

    with one_line(ConfigError):
        batches = whole_numbers("--batch", batch)
        all_contexts = whole_numbers("--contexts", contexts)
        config = engine_with(options)

    from penstock.engine.build import load_engine
    from penstock.engine.measure import ProfileGrid, num_measurements
    from penstock.engine.measure import measure as measure_engine
    from penstock.engine.models.checkpoint import CheckpointError

    grid = ProfileGrid(batches=batches, contexts=all_contexts, repeats=repeats)
    with one_line(ConfigError, CheckpointError):
        built = load_engine(config.model_copy(update={"kv_tokens": grid.kv_tokens}))
    with progress(num_measurements(built, grid), "measuring") as advance:
        measured = measure_engine(built, grid, lambda: advance(1))
    with one_line(ProfileError, OSError):
        fitted = fit_steps(
            measured.steps,
            name=out.stem,
            kv_tokens=kv_tokens or _KV_TOKENS,
            origin=f"penstock profile measure: {_describe(built, repeats)}",
            is_grid=True,
        )
        profile = replace(fitted.profile, drafters=measured.drafters, state_slots=built.num_slots)
        profile = with_served(profile, measured.served)
        save_profile(profile, out)
    if as_json:
        quality = [asdict(q) for q in fitted.quality]
        print(dumps({**asdict(profile), "out": str(out), "fit": quality}))
        return
    _print_profile(profile)
    _print_quality(fitted.quality)


def _describe(engine: Engine, repeats: int) -> str:
    from penstock.engine.fingerprint import machine_name

    where = machine_name(engine.executor.target.device)
    return (
        f"{engine.target}, {engine.dtype}, {engine.backend} kernels, {engine.num_threads} "
        f"thread{'s' if engine.num_threads > 1 else ''}, on {where}; models and samplers only, "
        f"median of {repeats}"
    )


@app.command()
def show(
    profile: Annotated[str, typer.Argument(help="A profile's name, or a file.")],
    as_json: cli.JsonOption = False,
) -> None:
    """Show a profile's step times."""
    from penstock.sim.profiles import ProfileError, load_profile

    with one_line(ProfileError):
        loaded = load_profile(profile)
    if as_json:
        print(dumps(asdict(loaded)))
        return
    _print_profile(loaded)


def _print_quality(quality: tuple[FitQuality, ...]) -> None:
    print_table(
        None,
        ("fit of", "measurements", "R²", "largest relative error"),
        (
            (q.what, str(q.num_measurements), f"{q.r_squared:.4f}", f"{q.max_relative_error:.1%}")
            for q in quality
        ),
    )


def _print_profile(profile: StepProfile) -> None:
    states = "" if profile.state_slots is None else f", {profile.state_slots} recurrent states"
    columns = ("tokens", "one prompt, ms", f"decodes over {_DECODE_CONTEXT} tokens each, ms")
    curves = zip(_SHOWN_COUNTS, *_curves(profile, _SHOWN_COUNTS), strict=True)
    most = profile.token_counts[-1]
    rows = [(f"{n}{'*' * (n > most)}", f"{pre:.2f}", f"{dec:.2f}") for n, pre, dec in curves]
    print_table(profile.name, columns, rows)
    spread = f"; ±{profile.spread:.1%} from one minute to another" if profile.spread else ""
    if most < _SHOWN_COUNTS[-1]:
        print(f"* extrapolated: measured to {most:,}")
    print(
        f"{profile.kv_tokens:,} KV tokens{states}; token counts in steps of {profile.granularity}; "
        f"{len(profile.token_counts)} points in the table, and beyond it\n"
        f"decoding: {profile.decode_fixed * 1e3:.4g} ms, {profile.per_decode * 1e3:.4g} a request, "
        f"{profile.per_kv_token * 1e3:.4g} a KV token\n"
        f"prefill: {profile.per_prefill_token * 1e3:.4g} ms a token, "
        f"{profile.per_prefill_context * 1e3:.4g} a token pair\n"
        f"served steps: {profile.pace:.3g} times that, and the host's "
        f"{profile.host_fixed * 1e3:.4g} ms, {profile.host_per_decode * 1e3:.4g} a request, "
        f"{profile.host_per_drafting * 1e3:.4g} more with drafts{spread}\n"
        f"{profile.origin}"
    )
    if profile.drafters:
        _print_drafters(profile)


def _print_drafters(profile: StepProfile) -> None:
    batches = (1, 8, 32)
    print_table(
        "drafters: step by batch, time per read token, slowdowns when concurrent",
        ("drafter", *(f"{n}, ms" for n in batches), "read, µs", "slowed", "slows target"),
        (
            (
                f"{known.name}, in the target" if known.of_target else known.name,
                *(f"{known.seconds(n, 1) * 1e3:.3g}" for n in batches),
                f"{known.per_catch_up_token * 1e6:.3g}",
                f"{known.slowdown:.2f} ×",
                f"{known.target_slowdown:.2f} ×",
            )
            for known in profile.drafters
        ),
    )


def _curves(profile: StepProfile, counts: tuple[int, ...]) -> tuple[list[float], list[float]]:
    from penstock.fluid.step_profile import StepWork

    prefill = [StepWork(num_prefill_tokens=n, prefill_context=n * n / 2) for n in counts]
    decode = [StepWork(num_decodes=n, num_kv_tokens=n * _DECODE_CONTEXT) for n in counts]
    return (
        [profile.seconds(work) * 1e3 for work in prefill],
        [profile.seconds(work) * 1e3 for work in decode],
    )
