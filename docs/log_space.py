"""Measures what float32 costs a log-space Soft-DTW gradient, beside this library's, against float64.

    python docs/log_space.py [--quick] [--write]

Two log-space gradients, both from R in float32 by log-sum-exp. "differences" is the backward pass as the
published GPU codes have it, exp((R_later - R_here - d_later) / gamma). "shares" takes a softmax over the
neighbours instead, as automatic differentiation of the forward pass does: eq. (7), out of rounded R.
The table goes to docs/data/log_space.csv, from where the page on accuracy takes it.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import math
from pathlib import Path

import torch
from torch import Tensor

from softdtw_cuda import _reference, softdtw
from softdtw_cuda._distances import sqeuclidean, sqeuclidean_gradient

TABLE = Path(__file__).parent / "data" / "log_space.csv"
COLUMNS = (
    "N", "M", "D", "gamma", "value", "differences", "shares", "this_library", "rounded_costs", "torch", "date"
)  # fmt: skip


def log_space_alignment(cost: Tensor, gamma: float, shares: bool) -> Tensor:
    """(N, M) alignment of a cost matrix (N, M) in log space and in the matrix's own precision.

    Args:
        cost: (N, M).
        gamma: temperature.
        shares: weigh neighbours by a softmax of their R; False weighs them by differences of R.
    """
    n, m = cost.shape
    # Bordered tables: cell (i, j) of the matrix is (i + 1, j + 1) here.
    R = cost.new_full((n + 2, m + 2), math.inf)
    R[0, 0] = 0.0
    padded = torch.nn.functional.pad(cost, (1, 1, 1, 1))
    weights = cost.new_zeros(3, n + 2, m + 2)  # up, left, diagonal: from where each cell came
    for s in range(2, n + m + 1):
        i = torch.arange(max(1, s - m), min(n, s - 1) + 1)
        j = s - i
        before = torch.stack((R[i - 1, j], R[i, j - 1], R[i - 1, j - 1]))
        R[i, j] = padded[i, j] - gamma * torch.logsumexp(-before / gamma, 0)
        if shares:
            weights[:, i, j] = torch.softmax(-before / gamma, 0)
        else:
            # A small difference of large numbers over a small gamma.
            weights[:, i, j] = torch.exp((R[i, j] - before - padded[i, j]) / gamma)
    E = torch.zeros_like(R)
    E[n, m] = 1.0
    for s in range(n + m - 1, 1, -1):
        i = torch.arange(max(1, s - m), min(n, s - 1) + 1)
        j = s - i
        E[i, j] = (
            E[i + 1, j] * weights[0, i + 1, j]
            + E[i, j + 1] * weights[1, i, j + 1]
            + E[i + 1, j + 1] * weights[2, i + 1, j + 1]
        )
    return E[1 : n + 1, 1 : m + 1]


def relative(measured: Tensor, truth: Tensor) -> float:
    return (torch.linalg.vector_norm(measured - truth) / torch.linalg.vector_norm(truth)).item()


def measure(n: int, m: int, d: int, gamma: float) -> dict[str, float]:
    """Value of a pair of normal series, and the relative errors of float32 gradients wrt x."""
    generator = torch.Generator().manual_seed(n + 31 * d)
    x, y = torch.randn(1, n, d, generator=generator), torch.randn(1, m, d, generator=generator)
    wide_x, wide_y = x.double(), y.double()
    exact = sqeuclidean(wide_x, wide_y)
    truth = sqeuclidean_gradient(_reference.alignment_from_cost(exact, gamma), wide_x, wide_y)
    x.requires_grad_()
    value = softdtw(x, y, gamma=gamma).sum()
    value.backward()
    assert x.grad is not None
    costs = exact.float()

    def error_of(alignment: Tensor) -> float:
        return relative(sqeuclidean_gradient(alignment.double(), wide_x, wide_y), truth)

    return {
        "value": value.item(),
        "differences": error_of(log_space_alignment(costs[0], gamma, shares=False).unsqueeze(0)),
        "shares": error_of(log_space_alignment(costs[0], gamma, shares=True).unsqueeze(0)),
        "this_library": relative(x.grad.double(), truth),
        "rounded_costs": error_of(_reference.alignment_from_cost(costs.double(), gamma)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the shortest length alone")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.parent.name}/{TABLE.name}")
    arguments = parser.parse_args()
    lengths = ((128, 120),) if arguments.quick else ((128, 120), (512, 500), (1024, 1000))
    torch.set_num_threads(1)  # operations this small only wait for other threads
    rows = []
    names = ("differences", "shares", "this_library", "rounded_costs")
    print(f"{'N':>5} {'M':>5} {'D':>3} {'gamma':>6} {'value':>10}", *(f"{name:>13}" for name in names))
    for (n, m), d, gamma in itertools.product(lengths, (1, 64), (0.01, 0.1, 1.0, 10.0)):
        errors = measure(n, m, d, gamma)
        print(
            f"{n:5d} {m:5d} {d:3d} {gamma:6g} {errors['value']:10.1f}",
            *(f"{errors[name]:13.1e}" for name in names),
            flush=True,
        )
        shown = {name: f"{number:.6g}" for name, number in errors.items()}
        about = {"torch": torch.__version__, "date": datetime.date.today().isoformat()}
        rows.append({"N": n, "M": m, "D": d, "gamma": gamma, **shown, **about})
    if arguments.write:
        TABLE.parent.mkdir(exist_ok=True)
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(f"written: {TABLE}")


if __name__ == "__main__":
    main()
