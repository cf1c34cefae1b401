"""Workloads of simulated runs: lengths, arrival times and tenants, as columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.sim.arrivals import SYNTAX, ArrivalProcess, check_positive, parse_arrivals
from penstock.sim.traces import MAX_LENGTH, WorkloadError, read_arrivals, read_trace

__all__ = [
    "MIXES",
    "Mix",
    "Workload",
    "WorkloadError",
    "load_workload",
    "make_workload",
    "synthetic",
]


@dataclass(frozen=True, slots=True)
class Mix:
    """Types of requests by decode length, and their relative shares.

    A decode length is the WAIT paper's l': iterations after the prefill, which yields a token too,
    so an output has l' + 1 tokens (eq. 6) and a request as many iterations and stages."""

    decode_lens: tuple[int, ...]
    shares: tuple[float, ...]
    prompt_len: int = 62

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Shape [types], summing to 1."""
        shares = np.array(self.shares)
        return np.asarray(shares / shares.sum())


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests as columns of one length.

    prompt_len, output_len: tokens, int64, 1 or more. arrival_time: seconds, float64, sorted from 0;
    tenants: names; tpot, deadline: of the requests' `LatencyTarget` in seconds, NaN: none; None: no
    such column. mix: source of drawn lengths. Raises: WorkloadError."""

    name: str
    prompt_len: NDArray[np.int64]
    output_len: NDArray[np.int64]
    arrival_time: NDArray[np.float64] | None = None
    tenants: NDArray[np.str_] | None = None
    mix: Mix | None = None
    tpot: NDArray[np.float64] | None = None
    deadline: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        columns = [getattr(self, name) for name in _COLUMNS]
        if len({len(column) for column in columns if column is not None}) != 1:
            raise WorkloadError(f"the columns of workload {self.name!r} differ in length")
        if not len(self):
            raise WorkloadError(f"workload {self.name!r} has no requests")
        for lengths in (self.prompt_len, self.output_len):
            if lengths.min() < 1 or lengths.max() > MAX_LENGTH:
                raise WorkloadError(f"workload {self.name!r}: lengths are from 1 to {MAX_LENGTH}")
        times = self.arrival_time
        if times is not None and not (times[0] == 0 and (np.diff(times) >= 0).all()):
            raise WorkloadError(
                f"arrival times of workload {self.name!r} must be sorted and start at 0"
            )

    def __len__(self) -> int:
        return len(self.prompt_len)

    def select(self, rows: slice | NDArray[np.intp]) -> Workload:
        """Return the requests of those rows."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return replace(self, **{n: c[rows] for n, c in columns.items() if c is not None})

    def shuffled(self, seed: int) -> Workload:
        """Return the requests in random order, at the same times; those of a mix are unchanged."""
        if self.mix is not None:
            return self
        order = _stream(seed, "order").permutation(len(self))
        requests = replace(self, arrival_time=None).select(order)
        return replace(requests, arrival_time=self.arrival_time)


_COLUMNS = ("prompt_len", "output_len", "arrival_time", "tenants", "tpot", "deadline")
_BINS = tuple(range(50, 501, 50))
# WAIT paper, section 5; ten_bins approximates its bins of LMSYS-Chat-1M lengths.
MIXES = {
    "low": Mix((10, 20), (1, 1)),
    "high": Mix((100, 200, 300), (6, 4, 2)),
    "nested": Mix((20, 40, 80, 160), (1, 1, 1, 1)),
    "ten_bins": Mix(_BINS, tuple(float(np.exp(-b / 210)) for b in _BINS)),
}


def synthetic(name: str, num_requests: int, seed: int) -> Workload:
    """Draw requests from `MIXES[name]`; longer draws extend shorter ones. Raises: WorkloadError."""
    if name not in MIXES:
        raise WorkloadError(f"unknown workload {name!r}; choose from {', '.join(MIXES)}")
    _check_num_requests(num_requests)
    mix = MIXES[name]
    rng = _stream(seed, "lengths")
    decode_len = rng.choice(np.array(mix.decode_lens), size=num_requests, p=mix.probabilities)
    return Workload(name, np.full(num_requests, mix.prompt_len), decode_len + 1, mix=mix)


def load_workload(path: str | Path) -> Workload:
    """Load a trace file (`traces.read_trace`) as a workload. Raises: WorkloadError."""
    return Workload(Path(path).name, **read_trace(Path(path))._asdict())


def make_workload(
    spec: str | Path | Workload,
    *,
    num_requests: int | None = None,
    rate: float | None = None,
    arrivals: str | Path | ArrivalProcess | None = None,
    time_scale: float = 1.0,
    seed: int = 0,
) -> Workload:
    """Return requests with lengths and arrival times, the same for the same arguments.

    spec: a name in `MIXES`, a trace file, or a workload. num_requests: to draw, or the first ones
    of a file (None: all). A file with arrival times is played once; one of lengths alone is
    repeated. rate: requests a second, for generated arrivals. arrivals: a process
    (`ArrivalProcess`, or text for `parse_arrivals`; Poisson if only a rate is given), or a file for
    `read_arrivals`, played once. Without arrivals and rate, those of `spec`. time_scale: recorded
    arrivals come so many times faster. seed: lengths and arrivals have separate streams, so another
    rate only scales arrivals. Raises: WorkloadError."""
    if num_requests is not None:
        _check_num_requests(num_requests)
    check_positive("time scale", time_scale)
    lengths = _lengths(spec, num_requests, seed)
    process = _process(arrivals, rate)
    if process is not None:
        if rate is None:
            raise WorkloadError("generated arrivals need a rate, in requests a second")
        if time_scale != 1.0:
            raise WorkloadError("a time scale is for recorded arrivals; give a rate alone")
        times = process.times(len(lengths), rate, _stream(seed, "arrivals"))
        return replace(lengths, arrival_time=times)
    if rate is not None:
        raise WorkloadError("recorded arrivals have their own rate; give a time scale instead")
    if arrivals is None:
        if lengths.arrival_time is None:
            raise WorkloadError(f"workload {lengths.name!r} has no arrival times: give a rate")
        return replace(lengths, arrival_time=lengths.arrival_time / time_scale)
    times = read_arrivals(Path(str(arrivals))) / time_scale
    num = min(len(times), len(lengths))
    return replace(lengths.select(slice(num)), arrival_time=times[:num])


def _lengths(spec: str | Path | Workload, num_requests: int | None, seed: int) -> Workload:
    if isinstance(spec, Workload):
        known = spec
    elif str(spec) in MIXES:
        if num_requests is None:
            raise WorkloadError(f"workload {str(spec)!r} needs a number of requests")
        return synthetic(str(spec), num_requests, seed)
    elif Path(spec).exists():
        known = load_workload(spec)
    else:
        _refuse_missing_file(spec)
        raise WorkloadError(
            f"unknown workload {str(spec)!r}; choose from {', '.join(MIXES)}, or name a trace file"
        )
    if num_requests is None or num_requests == len(known):
        return known
    if known.arrival_time is not None:
        return known.select(slice(num_requests))
    return known.select(np.arange(num_requests) % len(known))


def _refuse_missing_file(given: str | Path) -> None:
    """Raises: WorkloadError where a name that does not exist looks like a file."""
    if isinstance(given, Path) or Path(given).suffix or "/" in given:
        raise WorkloadError(f"there is no file {str(given)!r}")


def _process(
    arrivals: str | Path | ArrivalProcess | None, rate: float | None
) -> ArrivalProcess | None:
    if arrivals is None:
        return None if rate is None else ArrivalProcess()
    if isinstance(arrivals, ArrivalProcess):
        return arrivals
    process = parse_arrivals(str(arrivals))
    if process is None and not Path(arrivals).exists():
        _refuse_missing_file(arrivals)
        raise WorkloadError(f"unknown arrivals {str(arrivals)!r}; choose {SYNTAX}, or name a file")
    return process


def _check_num_requests(num_requests: int) -> None:
    if num_requests < 1:
        raise WorkloadError(f"a run needs 1 request or more, not {num_requests}")


def _stream(seed: int, purpose: str) -> np.random.Generator:
    if seed < 0:
        raise WorkloadError(f"a seed is 0 or more, not {seed}")
    return np.random.default_rng([seed, {"lengths": 0, "arrivals": 1, "order": 2}[purpose]])
