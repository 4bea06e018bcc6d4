"""Accuracy, Rand index and time on real series: Soft-DTW's measures beside the DTW of aeon and tslearn.

    python -m benchmarks.ucr [--sets GunPoint Trace] [--write]

1-NN and nearest centroid learn from the archive's training series and are scored by their accuracy on its
test series; k-means clusters the training series and is scored by its Rand index against the classes. The
other libraries come with `pip install 'softdtw-cuda-torch[compare]'`, in an environment of its own. `--write`
replaces the rows of the sets that were measured.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from . import ucr_methods as methods
from . import ucr_rivals
from .ucr_data import SETS, TimeSeriesSet, load
from .worker import cpu_name

RESULTS = Path(__file__).resolve().parent / "results" / "ucr.csv"
GAMMAS = (0.01, 0.1, 1.0)
ALMOST_DTW = 1e-6
"""A gamma at which Soft-DTW in float64 orders neighbours as DTW does."""
SUBSAMPLES = {"OSULeaf": (60, 60), "ACSF1": (30, 20)}
"""Series for training and for testing, of the sets that take longest: even steps through the archive."""
K_MEANS = {"n_init": 2, "max_iter": 8}
RIVAL_LIMIT = 180.0
"""Seconds for the tasks of a library on one set, its compilation included."""


class Row(NamedTuple):
    """One result; score is the accuracy, or for k-means the Rand index."""

    set: str
    sizes: str
    task: str
    method: str
    gamma: str
    score: str
    seconds: str
    status: str


def part_of(name: str) -> TimeSeriesSet:
    """A set, or that part of a large one that this benchmark uses."""
    data = load(name)
    if name not in SUBSAMPLES:
        return data
    train, test = (
        split.take(torch.linspace(0, len(split) - 1, count).long())
        for split, count in zip((data.train, data.test), SUBSAMPLES[name], strict=True)
    )
    return TimeSeriesSet(name, data.classes, train, test)


def own_rows(data: TimeSeriesSet) -> Iterator[Row]:
    """This library's tasks under every measure and gamma."""

    def near_dtw() -> Tensor:
        distances = methods.soft(data.test, data.train, ALMOST_DTW, torch.float64)
        return data.train.labels[distances.argmin(1)]

    yield _row(data, "1-NN", "Soft-DTW", ALMOST_DTW, near_dtw)
    for gamma in GAMMAS:
        for measure in methods.MEASURES:
            answers = methods.answers(data.train, data.test, measure, gamma, **K_MEANS)
            for task, answer in answers.items():
                yield _row(data, task, measure, gamma, answer)


def rival_rows(data: TimeSeriesSet) -> Iterator[Row]:
    """The same tasks with the DTW of the other libraries."""
    for rival in ucr_rivals.RIVALS:
        for task, answer in ucr_rivals.measure(rival, data.name, RIVAL_LIMIT).items():
            score, seconds = (f"{answer[key]:.4g}" if key in answer else "" for key in ("score", "seconds"))
            yield Row(data.name, data.sizes, task, f"DTW, {rival}", "", score, seconds, answer["status"])


def _row(data: TimeSeriesSet, task: str, method: str, gamma: float, answer: Callable[[], Tensor]) -> Row:
    start = time.perf_counter()
    labels = answer()
    seconds = time.perf_counter() - start
    if task == "k-means":
        score = methods.rand_index(labels, data.train.labels)
    else:
        score = methods.accuracy(labels, data.test.labels)
    return Row(data.name, data.sizes, task, method, f"{gamma:g}", f"{score:.4g}", f"{seconds:.4g}", "ok")


def write(rows: list[Row], command: str, path: Path = RESULTS) -> None:
    """Replace the rows of these sets; sets are in the order of the archive's list."""
    packages = ("torch", "numba", "aeon", "tslearn")
    versions = "; ".join(
        [f"python {platform.python_version()}", *(f"{each} {version(each)}" for each in packages)]
    )
    origin = {
        "date": datetime.date.today().isoformat(),
        "device": f"{cpu_name()}, {torch.get_num_threads()} threads",
        "versions": versions,
        "command": command,
    }
    old = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            old = list(csv.DictReader(file))
    measured = {row.set for row in rows}
    kept = [row for row in old if row["set"] not in measured]
    merged = [*kept, *(row._asdict() | origin for row in rows)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*Row._fields, *origin], lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(merged, key=lambda row: SETS.index(row["set"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"replace these sets in {RESULTS.name}")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    small = part_of("ItalyPowerDemand").train.take(slice(4))
    for measure in methods.MEASURES:  # kernels are loaded, or compiled, on first use
        for answer in methods.answers(small, small, measure, 1.0, n_init=1, max_iter=1).values():
            answer()
    methods.soft(small, small, ALMOST_DTW, torch.float64)
    start, count = time.perf_counter(), 0
    for name in options.sets:
        data = part_of(name)
        print(f"{name}: {data.sizes}")
        rows = []
        for row in (*rival_rows(data), *own_rows(data)):
            rows.append(row)
            result = f"{row.score:>7} {row.seconds:>8} s" if row.status == "ok" else row.status
            print(f"  {row.task:17} {row.method:17} {row.gamma:>6} {result}", flush=True)
        if options.write:  # after each set: a run that is stopped keeps what it has
            write(rows, "python -m benchmarks.ucr --write")
        count += len(rows)
    print(f"{count} rows in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
