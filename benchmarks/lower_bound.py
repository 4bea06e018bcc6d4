"""How many pairs a lower bound could leave out of a search for the nearest neighbour, at best.

    python -m benchmarks.lower_bound [--write]

Soft-DTW is at least DTW - gamma ln P, with P the number of paths in the band, and DTW is at least LB_Keogh. A
pair can be left out where that bound is above the query's nearest value. Here that value is known from the
start, which no search has, so the share is the most that any order of the search could leave out.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from softdtw_cuda import softdtw_cdist

from .ucr_data import load

RESULTS = Path(__file__).resolve().parent / "results" / "lower_bound.csv"
SETS = ("ArrowHead", "GunPoint", "ItalyPowerDemand", "Trace")
GAMMAS = (0.001, 0.01, 0.1, 1.0)
MOST_QUERIES = 200


class Row(NamedTuple):
    """`bandwidth` is empty for no band, `left_out` the share of the pairs."""

    set: str
    steps: int
    bandwidth: str
    gamma: str
    left_out: str


def lower_bounds(queries: np.ndarray, database: np.ndarray, radius: int) -> np.ndarray:
    """(Q, K) LB_Keogh of series (Q, N) and (K, N): squared distances to the envelopes of the queries."""
    padded = np.pad(queries, ((0, 0), (radius, radius)), mode="edge")
    windows = sliding_window_view(padded, 2 * radius + 1, axis=1)
    high, low = windows.max(2)[:, None], windows.min(2)[:, None]
    beyond = np.maximum(database - high, 0) + np.maximum(low - database, 0)
    bounds: np.ndarray = (beyond**2).sum(2)
    return bounds


def log_paths(steps: int, radius: int) -> float:
    """The logarithm of the number of paths from corner to corner within the band."""
    before = [1] + [0] * (steps - 1)
    for j in range(1, min(radius, steps - 1) + 1):
        before[j] = 1
    for i in range(1, steps):
        now = [0] * steps
        for j in range(max(0, i - radius), min(steps, i + radius + 1)):
            now[j] = before[j] + (before[j - 1] + now[j - 1] if j else 0)
        before = now
    return math.log(before[-1])


def rows_of(name: str) -> Iterator[Row]:
    data = load(name)
    queries, database = (split.padded(torch.float64).numpy() for split in (data.test, data.train))
    queries = queries[:MOST_QUERIES]
    steps = queries.shape[1]
    for radius in (None, steps // 10):
        reach = steps - 1 if radius is None else radius
        bounds = lower_bounds(queries[:, :, 0], database[:, :, 0], reach)
        paths = log_paths(steps, reach)
        for gamma in GAMMAS:
            values = softdtw_cdist(queries, database, gamma=gamma, bandwidth=radius)
            nearest = values.min(1, keepdims=True)
            assert (bounds - gamma * paths <= values + 1e-9 * abs(values)).all()
            share = float((bounds - gamma * paths > nearest).mean())
            yield Row(name, steps, "" if radius is None else str(radius), f"{gamma:g}", f"{share:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"replace {RESULTS.name}")
    options = parser.parse_args()
    rows = []
    for name in SETS:
        for row in rows_of(name):
            print(*row, flush=True)
            rows.append(row)
    if options.write:
        with RESULTS.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*Row._fields, "date", "command"])
            origin = (datetime.date.today().isoformat(), "python -m benchmarks.lower_bound --write")
            writer.writerows((*row, *origin) for row in rows)


if __name__ == "__main__":
    main()
