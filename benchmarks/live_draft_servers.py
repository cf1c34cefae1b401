"""Eight draft servers and a verification server, live: every allocation, near and far.

    python -m benchmarks.live_draft_servers [--quick] [--json] [--delays 0,5,30] [--rounds 600]
        [--total 20] [--temperature 1] [--family DIR] [--out DIR]

Ten processes of one machine: the bundled target, or that of a `--family` which `penstock zoo grow`
has made, behind its own port, a draft server for each domain of the bundled prompts (generalists
and specialists), and this one, which makes the users' requests, one after the other at each draft
server, and delays every byte between draft servers and verification server by half of the round
trip asked for (milliseconds). The policies share what cores there are with everything else; how
much of them was had is in the output.

`goodspeed`'s estimates (eqs. 3 and 4) are replayed over the recorded verdicts. The simulator is
calibrated at one round trip (5 ms, or the first) and asked about the others. `--out` keeps the
records, and those that are there are not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
from benchmarks.live_record import RoundsRecord, calibrate, estimates
from benchmarks.live_rig import CLIENTS, Process, Rig
from rich.console import Console
from rich.progress import Progress
from tests.serving.links import sum_of

from penstock.lab.bench import Results, ResultTable, parser, table, tell
from penstock.lab.claims import ClaimVerdict, bar
from penstock.zoo.registry import WEIGHTS

POLICIES = (
    ("fixed", "off"),
    ("random", "off"),
    ("goodspeed", "off"),
    ("goodspeed_adaptive", "off"),
    ("deadline", "off"),
    ("deadline", "async"),
)
CALIBRATED_MS = 5.0
Job = tuple[float, str, str]
"""Round trip in milliseconds, allocation, pipeline."""
CLOSE = 0.05
_MARGIN = 40
_POLL_S = 0.5


def policy_options(name: str, total: int) -> dict[str, Any]:
    options = {"total": total}
    if name == "fixed":
        options["k"] = total
    return {"name": name, "options": options}


# --- live -----------------------------------------------------------------------------------------


async def play(args: argparse.Namespace, folder: Path, progress: Progress) -> None:
    """Every policy at every round trip; leaves a record and a summary of each in the folder."""
    jobs = [job for job in jobs_of(args) if not summary_of(folder, job).exists()]
    task = progress.add_task("live", total=len(jobs) * (args.rounds + _MARGIN))
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    async with AsyncExitStack() as stack:
        # A request waits in the draft server while there is no verification server.
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=120))
        rig = Rig(folder, http, args.family)
        for link in rig.links.values():
            await stack.enter_async_context(link.running())
        stack.push_async_callback(rig.end_drafters)
        for number, (delay, allocation, pipeline) in enumerate(jobs):
            for link in rig.links.values():
                link.seconds = delay / 2e3
            progress.update(task, description=f"{allocation}, {pipeline}, {delay:g} ms")
            policy = policy_options(allocation, args.total)
            async with rig.verification_server(policy, pipeline) as server:
                if not number:
                    await rig.start_drafters()
                await rig.until_connected()
                summary = await observe(rig, server, args, lambda n: progress.advance(task, n))
            path = summary_of(folder, (delay, allocation, pipeline))
            shutil.copy(rig.record, path.with_suffix(".jsonl"))
            path.write_text(json.dumps(summary))


async def observe(
    rig: Rig, server: Process, args: argparse.Namespace, advance: Any
) -> dict[str, Any]:
    """Let users in until there were enough rounds; returns times and shares of the cores."""
    users = [asyncio.create_task(rig.use(name, args.temperature)) for name in CLIENTS]
    try:
        before = await snapshot(rig, server)
        psutil.cpu_percent()
        rounds = 0.0
        while rounds < args.rounds + _MARGIN:
            await asyncio.sleep(_POLL_S)
            for user in users:
                if user.done():
                    user.result()
            found = sum_of(await rig.metrics(), "target_steps_total")
            advance(min(found, args.rounds + _MARGIN) - rounds)
            rounds = found
        busy = psutil.cpu_percent() / 100
        after = await snapshot(rig, server)
    finally:
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    spent = {key: after[key] - before[key] for key in after}
    cores = (psutil.cpu_count() or 1) * spent["wall"]
    own = {key: spent[key] / cores for key in ("verification", "drafting", "links")}
    return {
        "receive_ms": 1e3 * spent["receive"] / spent["steps"],
        "verify_ms": 1e3 * spent["verify"] / spent["steps"],
        "send_ms": 1e3 * spent["send"] / max(spent["verdicts"], 1),
        "cpu": {**own, "others": max(0.0, busy - sum(own.values())), "busy": busy},
    }


async def snapshot(rig: Rig, server: Process) -> dict[str, float]:
    text = await rig.metrics()
    return {
        "wall": asyncio.get_running_loop().time(),
        "steps": sum_of(text, "target_steps_total"),
        "receive": sum_of(text, "target_step_seconds_total", 'phase="receive"'),
        "verify": sum_of(text, "target_step_seconds_total", 'phase="verify"'),
        "send": sum_of(text, "verdict_send_seconds_total"),
        "verdicts": sum_of(text, "verdicts_sent_total"),
        **rig.cpu_seconds(server),
    }


def jobs_of(args: argparse.Namespace) -> list[Job]:
    return [(delay, *policy) for delay in args.delays for policy in POLICIES]


def summary_of(folder: Path, job: Job) -> Path:
    """Where the summary of a run is; its record has the suffix .jsonl."""
    delay, allocation, pipeline = job
    return folder / f"{allocation}-{pipeline}-{delay:g}ms.json"


# --- what it comes to -----------------------------------------------------------------------------


def analyse(args: argparse.Namespace, folder: Path, progress: Progress) -> list[dict[str, Any]]:
    """A row for each run, with what the simulator says of it."""
    jobs = jobs_of(args)
    records = {
        job: RoundsRecord.read(summary_of(folder, job).with_suffix(".jsonl"), CLIENTS, args.rounds)
        for job in jobs
    }
    at = CALIBRATED_MS if CALIBRATED_MS in args.delays else args.delays[0]
    known = [record for job, record in records.items() if job[0] == at]
    calibration = calibrate(known, records[at, "fixed", "off"], at / 1e3)
    rows = []
    for job in progress.track(jobs, description="simulating"):
        delay, allocation, pipeline = job
        figures = records[job].figures()
        policy = policy_options(allocation, args.total)
        simulated = calibration.predict(policy, pipeline, delay / 1e3, figures["seconds"])
        rows.append(
            {
                "allocation": allocation,
                "pipeline": pipeline,
                "round_trip_ms": delay,
                "calibration": delay == at,
                **figures,
                **json.loads(summary_of(folder, job).read_text()),
                "estimates": estimates(records[job]),
                "simulated_per_second": simulated,
                "simulator_error": simulated["total"] / figures["per_second"]["total"] - 1,
                "simulator_sum_log": simulated["sum_log"] - figures["per_second"]["sum_log"],
            }
        )
    return rows


def verdicts(rows: Sequence[dict[str, Any]]) -> list[ClaimVerdict]:
    told = []
    for row in (r for r in rows if r["allocation"] == "goodspeed"):
        found = row["estimates"]
        text = (
            f"all {found['total']:+.1%}, worst client {found['worst_client']:.1%} (bar {CLOSE:.0%}"
            f"), correlation of ten-round averages {found['correlation']:.2f}; expected from eq. "
            f"3: worst client {found['expected']:.1%}"
        )
        what = f"round trip {row['round_trip_ms']:g} ms, estimated goodput (eq. 4) against real"
        told.append(bar(what, text, found["worst_client"] <= CLOSE))
    for delay in dict.fromkeys(r["round_trip_ms"] for r in rows):
        here = {(r["allocation"], r["pipeline"]): r for r in rows if r["round_trip_ms"] == delay}
        where = f"round trip {delay:g} ms"
        equal = here["fixed", "off"]["per_round"]["sum_log"]
        gains = ", ".join(
            f"{name} {here[name, 'off']['per_round']['sum_log'] - equal:+.2f}"
            for name in ("random", "goodspeed", "goodspeed_adaptive", "deadline")
        )
        told.append(bar(f"{where}, sum of logs a round over fixed", gains, None))
        best = max(here.values(), key=lambda r: r["per_second"]["sum_log"])
        text = f"{best['allocation']}, {best['pipeline']} ({best['per_second']['sum_log']:.2f})"
        told.append(bar(f"{where}, largest sum of logs a second", text, None))
        if not here["fixed", "off"]["calibration"]:
            worst = max(here.values(), key=lambda r: abs(r["simulator_error"]))
            mean = sum(abs(r["simulator_error"]) for r in here.values()) / len(here)
            text = f"{mean:.1%} off in the mean, {worst['simulator_error']:+.1%} at worst "
            text += f"({worst['allocation']}, {worst['pipeline']})"
            told.append(bar(f"{where}, simulator's tokens a second", text, None))
    return told


def tables(rows: Sequence[dict[str, Any]]) -> list[ResultTable]:
    """One for each round trip."""
    columns = {
        "allocation, pipeline": "{allocation}, {pipeline}",
        "round ms": "{round_ms:.1f}",
        "receive": "{receive_ms:.1f}",
        "verify": "{verify_ms:.1f}",
        "send": "{send_ms:.1f}",
        "tokens/round": "{per_round[total]:.2f}",
        "sum log": "{per_round[sum_log]:.2f}",
        "±": "{sum_log_error:.2f}",
        "smallest": "{per_round[smallest]:.2f}",
        "Jain": "{jain:.3f}",
        "tokens/s": "{per_second[total]:.0f}",
        "sum log a second": "{per_second[sum_log]:.2f}",
        "smallest a second": "{per_second[smallest]:.1f}",
        "draft/round": "{draft_tokens_per_round:.1f}",
        "simulated": "{simulator_error:+.1%}",
        "its sum log": "{simulator_sum_log:+.2f}",
        "CPU own": "{own:.0%}",
        "others": "{cpu[others]:.0%}",
    }
    found = []
    for delay in dict.fromkeys(r["round_trip_ms"] for r in rows):
        own = ("verification", "drafting", "links")
        here = [
            {**r, "own": sum(r["cpu"][k] for k in own)} for r in rows if r["round_trip_ms"] == delay
        ]
        simulator = "what it was calibrated on" if here[0]["calibration"] else "predicted"
        title = f"round trip {delay:g} ms (simulator: {simulator})"
        found.append(table(title, here, columns))
    return found


def delays_of(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick="60 rounds, round trips 0 and 5 ms")
    options.add_argument("--delays", type=delays_of, default=[0.0, 5.0, 30.0], help="round trips")
    options.add_argument("--rounds", type=int, default=600)
    options.add_argument("--total", type=int, default=20, help="draft tokens a round (C)")
    options.add_argument("--temperature", type=float, default=1.0, help="of seeded requests")
    options.add_argument("--family", type=Path, default=WEIGHTS, help="folder of the models")
    options.add_argument("--out", type=Path, help="folder for the records")
    args = options.parse_args(arguments)
    if args.quick:
        args.rounds, args.delays = 60, [0.0, 5.0]
    with (
        tempfile.TemporaryDirectory() as scratch,
        Progress(console=Console(file=sys.stderr)) as progress,
    ):
        folder = args.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if any(not summary_of(folder, job).exists() for job in jobs_of(args)):
            asyncio.run(play(args, folder, progress))
        rows = analyse(args, folder, progress)
    return tell(args, Results(rows, verdicts(rows), tables(rows)))


if __name__ == "__main__":
    sys.exit(main())
