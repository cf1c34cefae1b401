"""`penstock profile`: step-time profiles, fitted to measurements and looked at."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.failures import one_line

if TYPE_CHECKING:
    from penstock.fluid.step_profile import StepProfile
    from penstock.sim.profiles import FitQuality

app = typer.Typer(no_args_is_help=True, help="Step-time profiles for the simulator.")

_SHOWN_COUNTS = (1, 8, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096)
_DECODE_CONTEXT = 500


@app.command()
def fit(
    measurements: Annotated[
        Path,
        typer.Argument(
            help="CSV of whole steps (num_prefill_tokens, prefill_context, num_decodes, "
            "num_kv_tokens, num_draft_tokens, seconds), or of linear operators as Vidur writes it."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The profile's file; its stem is the name.")],
    kv_tokens: Annotated[int, typer.Option(min=1, help="KV tokens that the memory holds.")],
    attention: Annotated[
        str | None,
        typer.Option(
            help="For operators: CSV of attention times, or the name of a profile that lends them."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="For operators: layers.")] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="For operators: which number of workers.")
    ] = 1,
    granularity: Annotated[
        int, typer.Option(min=1, help="Round token counts up to a multiple of it.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Fit a profile to measured times, and say how well it fits."""
    from penstock.sim.profiles import (
        ProfileError,
        fit_profile,
        load_profile,
        profile_names,
        save_profile,
    )

    with one_line(ProfileError, OSError):
        lent = load_profile(attention) if attention in profile_names() else None
        fitted = fit_profile(
            measurements,
            name=out.stem,
            kv_tokens=kv_tokens,
            attention=lent or (Path(attention) if attention else None),
            num_layers=layers,
            tensor_parallel=tensor_parallel,
            granularity=granularity,
        )
        save_profile(fitted.profile, out)
    if as_json:
        quality = [asdict(q) for q in fitted.quality]
        print(json.dumps({"profile": fitted.profile.name, "out": str(out), "fit": quality}))
        return
    _print_quality(fitted.quality)
    print(f"{out}: {len(fitted.profile.token_counts)} points")


@app.command()
def show(
    profile: Annotated[str, typer.Argument(help="A profile's name, or a file.")],
    plot: Annotated[
        Path | None, typer.Option(help="Draw it into this file, such as profile.png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """What a step takes, by what is in it."""
    from penstock.sim.profiles import ProfileError, load_profile

    with one_line(ProfileError):
        loaded = load_profile(profile)
    if plot is not None:
        with one_line(OSError, ValueError, ModuleNotFoundError):
            _plot(loaded, plot)
    if as_json:
        print(json.dumps(asdict(loaded)))
        return
    _print_profile(loaded)


def _print_quality(quality: tuple[FitQuality, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("fit of")
    for column in ("measurements", "R²", "largest relative error"):
        table.add_column(column, justify="right")
    for part in quality:
        table.add_row(
            part.what,
            str(part.num_measurements),
            f"{part.r_squared:.4f}",
            f"{part.max_relative_error:.1%}",
        )
    Console().print(table)


def _print_profile(profile: StepProfile) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=profile.name)
    for column in ("tokens", "one prompt, ms", f"decodes over {_DECODE_CONTEXT} tokens each, ms"):
        table.add_column(column, justify="right")
    for count, prefill, decode in zip(_SHOWN_COUNTS, *_curves(profile, _SHOWN_COUNTS), strict=True):
        table.add_row(str(count), f"{prefill:.2f}", f"{decode:.2f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{profile.kv_tokens:,} KV tokens; token counts in steps of {profile.granularity}; "
        f"{len(profile.token_counts)} points in the table"
    )
    console.print(
        f"decoding: {profile.decode_fixed * 1e3:.4g} ms, {profile.per_decode * 1e3:.4g} a request, "
        f"{profile.per_kv_token * 1e3:.4g} a KV token"
    )
    console.print(
        f"prefill: {profile.per_prefill_token * 1e3:.4g} ms a token, "
        f"{profile.per_prefill_context * 1e3:.4g} a token pair"
    )
    console.print(profile.origin)


def _curves(profile: StepProfile, counts: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Milliseconds of one prompt of so many tokens, and of so many decoding requests."""
    from penstock.fluid.step_profile import StepWork

    prefill = [StepWork(num_prefill_tokens=n, prefill_context=n * n / 2) for n in counts]
    decode = [StepWork(num_decodes=n, num_kv_tokens=n * _DECODE_CONTEXT) for n in counts]
    return (
        [profile.seconds(work) * 1e3 for work in prefill],
        [profile.seconds(work) * 1e3 for work in decode],
    )


def _plot(profile: StepProfile, path: Path) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "--plot needs matplotlib: pip install 'penstock[plot]'"
        ) from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    counts = tuple(range(1, 1025))
    prefill, decode = _curves(profile, counts)
    figure: Any
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(counts, [profile.linear(n) * 1e3 for n in counts], label="all but attention")
    axes.plot(counts, prefill, label="one prompt")
    axes.plot(counts, decode, label=f"decodes over {_DECODE_CONTEXT} tokens each")
    axes.set(xlabel="tokens in the step", ylabel="ms", title=profile.name)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
