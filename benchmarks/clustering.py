"""All pairs and k-means beside aeon and tslearn on the CPU, in one run on the same data.

    python -m benchmarks.clustering [--only pairs] [--write]

Large jobs on a GPU are those of benchmarks/scale.py.

The other libraries come with `pip install 'softdtw-cuda-torch[compare]'`, in an environment of its own; where
one is missing its rows say so. k-means starts from the same centers everywhere and takes the same number of
rounds; centers are compared by the same inertia, the sum of Soft-DTW to the nearest one in float64.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from softdtw_cuda import softdtw_cdist
from softdtw_cuda.estimators import SoftDTWKMeans

from .worker import cpu_name

RESULTS = Path(__file__).resolve().parent / "results" / "clustering-cpu.csv"
KINDS = {"pairs": "all pairs", "k-means": "k-means"}
"""What names of jobs begin with."""
OWN = "softdtw_cuda"
REPEATS = 10
ENOUGH_S = 20.0
"""A call is repeated until its runs have taken so long together, or so often."""


class Row(NamedTuple):
    """One result: the least of some repeats, after a small problem that compiles.

    `seconds` is the time of the call, `cpu_seconds` that of all its threads, which depends less on what else
    the machine does.
    """

    job: str
    method: str
    seconds: str
    cpu_seconds: str
    inertia: str
    status: str


class Measured(NamedTuple):
    """The least of some calls, and what the last one returned."""

    seconds: float
    cpu_seconds: float
    result: Any


class KMeansJob(NamedTuple):
    """Series of `clusters` kinds."""

    series: int
    steps: int
    clusters: int
    rounds: int

    @property
    def name(self) -> str:
        return f"k-means, {self.series:,} of {self.steps} steps, k={self.clusters}, {self.rounds} rounds"

    def data(self) -> np.ndarray:
        return kinds(self.series, self.steps, self.clusters)


PAIRS = (500, 140)
K_MEANS = KMeansJob(*PAIRS, 5, 5)
SMALL = KMeansJob(12, 10, 2, 1)


def kinds(count: int, steps: int, clusters: int, seed: int = 0) -> np.ndarray:
    """(count, steps) float32: sums of three sines that a kind has in common, warped in time, with noise."""
    random = np.random.default_rng(seed)
    phases = random.uniform(0, 2 * np.pi, (clusters, 3))
    kind = random.integers(clusters, size=count)
    time_axis = np.linspace(0, 1, steps) ** random.uniform(0.8, 1.25, (count, 1))
    waves = np.sin(2 * np.pi * time_axis[:, :, None] * np.array([1, 2, 3]) + phases[kind][:, None])
    noisy: np.ndarray = waves.sum(2) + 0.2 * random.standard_normal((count, steps))
    return noisy.astype(np.float32)


def measure(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Measured]:
    """Calls in turns, so that what else the machine does meets all of them."""
    found: dict[str, Measured] = {}
    spent = dict.fromkeys(calls, 0.0)
    for _ in range(REPEATS):
        for name in [name for name, seconds in spent.items() if seconds < ENOUGH_S]:
            start, cpu_start = time.perf_counter(), time.process_time()
            result = calls[name]()
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            spent[name] += seconds
            before = found.get(name, Measured(math.inf, math.inf, None))
            found[name] = Measured(min(before.seconds, seconds), min(before.cpu_seconds, cpu_seconds), result)
    return found


def rows_of(
    job: str,
    calls: Mapping[str, Callable[[], Any]],
    missing: Mapping[str, str],
    inertia: Callable[[Any], str],
) -> Iterator[Row]:
    """Rows of calls that were tried on a small problem, and of those that are not installed."""
    for method, (seconds, cpu_seconds, result) in measure(calls).items():
        yield Row(job, method, f"{seconds:.4g}", f"{cpu_seconds:.4g}", inertia(result), "ok")
    for method, reason in missing.items():
        yield Row(job, method, "", "", "", reason)


def tried(calls: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Calls each of the small problems, so that everything is compiled; those that cannot be imported."""
    missing = {}
    for method, call in calls.items():
        try:
            call()
        except ImportError as error:
            missing[method] = f"not installed: {error.name}"
    return missing


def pair_rows(shape: tuple[int, int]) -> Iterator[Row]:
    """All pairs of one set, gamma = 1."""
    x = kinds(*shape, clusters=5)
    job = f"all pairs of {shape[0]:,} of {shape[1]} steps"
    methods: dict[str, Callable[[np.ndarray], Any]] = {
        f"{OWN}, float32": lambda x: softdtw_cdist(x[:, :, None]),
        f"{OWN}, float64": lambda x: softdtw_cdist(x[:, :, None].astype(np.float64)),
        "tslearn, Soft-DTW": _tslearn_pairs,
        "aeon, Soft-DTW": lambda x: _aeon_pairs(x, "soft_dtw_pairwise_distance"),
        "aeon, DTW": lambda x: _aeon_pairs(x, "dtw_pairwise_distance"),
    }
    missing = tried({name: partial(method, x[:8, :10]) for name, method in methods.items()})
    calls = {name: partial(method, x) for name, method in methods.items() if name not in missing}
    yield from rows_of(job, calls, missing, lambda _: "")


def _tslearn_pairs(x: np.ndarray) -> Any:
    from tslearn.metrics import cdist_soft_dtw

    return cdist_soft_dtw(x[:, :, None].astype(np.float64), gamma=1.0, n_jobs=2)


def _aeon_pairs(x: np.ndarray, name: str) -> Any:
    import aeon.distances

    return getattr(aeon.distances, name)(x[:, None].astype(np.float64), n_jobs=2)


def k_means_rows(job: KMeansJob) -> Iterator[Row]:
    """Plain Soft-DTW beside tslearn, which has no other."""
    x = job.data()
    fits: dict[str, Callable[[np.ndarray, KMeansJob], Any]] = {OWN: _own_k_means, "tslearn": _tslearn_k_means}
    missing = tried({name: partial(each, SMALL.data(), SMALL) for name, each in fits.items()})
    calls = {name: partial(each, x, job) for name, each in fits.items() if name not in missing}
    series = x[:, :, None].astype(np.float64)
    yield from rows_of(
        job.name,
        calls,
        missing,
        lambda centers: f"{softdtw_cdist(series, centers.astype(np.float64)).min(1).sum():.8g}",
    )


def _own_k_means(x: np.ndarray, job: KMeansJob) -> np.ndarray:
    model = SoftDTWKMeans(
        job.clusters,
        init=x[: job.clusters],
        max_iter=job.rounds,
        max_iter_barycenter=10,  # tslearn takes 100 at most
        tol=0,
        normalize=False,
        device="cpu",
    )
    centers: np.ndarray = model.fit(x).cluster_centers_[:, :, None]
    return centers


def _tslearn_k_means(x: np.ndarray, job: KMeansJob) -> np.ndarray:
    from tslearn.clustering import TimeSeriesKMeans

    series = x[:, :, None].astype(np.float64)
    model = TimeSeriesKMeans(
        job.clusters, metric="softdtw", init=series[: job.clusters], max_iter=job.rounds, tol=0, n_jobs=2
    )
    centers: np.ndarray = model.fit(series).cluster_centers_
    return centers


def write(rows: list[Row], kind: str | None, path: Path = RESULTS) -> None:
    """Replace the results of the kind of job that was measured, of whatever sizes, or of all."""
    versions = [f"python {platform.python_version()}"]
    for package in ("torch", "numba", "aeon", "tslearn"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    origin = {
        "date": datetime.date.today().isoformat(),
        "device": f"{cpu_name()}, {torch.get_num_threads()} threads",
        "versions": "; ".join(versions),
        "command": f"python -m benchmarks.clustering{f' --only {kind}' if kind else ''} --write",
    }
    old = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            old = list(csv.DictReader(file))
    kept = [row for row in old if kind is not None and not row["job"].startswith(KINDS[kind])]
    merged = sorted([*kept, *(row._asdict() | origin for row in rows)], key=lambda row: row["job"])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*Row._fields, *origin], lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged)
    print(f"{len(rows)} rows written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=KINDS, help="one kind of job")
    parser.add_argument("--write", action="store_true", help=f"replace these jobs in {RESULTS.name}")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", "h5py not installed")
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        times = f"{row.seconds:>8} s, CPU {row.cpu_seconds:>8} s"
        result = f"{times}  inertia {row.inertia or '-'}" if row.seconds else ""
        print(f"{row.job:48} {row.method:24} {result} {row.status}", flush=True)

    if options.only != "k-means":
        for row in pair_rows(PAIRS):
            show(row)
    if options.only != "pairs":
        for row in k_means_rows(K_MEANS):
            show(row)
    if options.write:
        write(rows, options.only)


if __name__ == "__main__":
    main()
