"""Float32 Soft-DTW against float64 truth, case by case, with a verdict.

    python -m benchmarks.error_budget --device cpu [--quick] [--write]

The budget: the value within 1e-6 relative; each gradient within 1e-5 relative in norm or, where that is
larger, ten times what rounding the exact costs to float32 does to a float64 recurrence. Nobody who stores
costs in float32 can do better than that rounding.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from softdtw_cuda import _reference, softdtw
from softdtw_cuda._distances import sqeuclidean, sqeuclidean_gradient

LENGTHS = (32, 127, 512, 1024, 2048)
FEATURES = (1, 3, 16, 64)
GAMMAS = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
OFFSETS = (0.0, 1000.0)
VALUE_BUDGET = 1e-6
GRADIENT_BUDGET = 1e-5
ROUNDING_FACTOR = 10.0


@dataclass(frozen=True)
class Shape:
    """Series of n and m steps with d features, normal with mean `offset` and standard deviation 1."""

    n: int
    m: int
    d: int
    offset: float


@dataclass(frozen=True)
class Errors:
    """Relative errors of one case; `rounding` is what rounding the exact costs does to the gradients."""

    n: int
    m: int
    d: int
    offset: float
    gamma: float
    value_error: float
    gradient_error: float
    rounding: float

    @property
    def gradient_budget(self) -> float:
        return max(GRADIENT_BUDGET, ROUNDING_FACTOR * self.rounding)

    @property
    def passed(self) -> bool:
        # Written so that a NaN fails.
        return self.value_error <= VALUE_BUDGET and self.gradient_error <= self.gradient_budget


def series(shape: Shape, seed: int = 0) -> tuple[Tensor, Tensor]:
    """float32 x (1, n, d) and y (1, m, d) on the CPU, the same on every machine."""
    generator = torch.Generator().manual_seed(hash((seed, shape.n, shape.m, shape.d)) & 0xFFFFFFFF)
    x = torch.randn(1, shape.n, shape.d, generator=generator) + shape.offset
    y = torch.randn(1, shape.m, shape.d, generator=generator) + shape.offset
    return x, y


def relative(measured: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    return float(torch.linalg.vector_norm(measured - truth) / torch.linalg.vector_norm(truth))


def gradients(alignment: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients wrt x and y of Soft-DTW with this alignment."""
    return sqeuclidean_gradient(alignment, x, y), sqeuclidean_gradient(alignment.transpose(1, 2), y, x)


def measure(shapes: list[Shape], gamma: float, device: str, seed: int = 0) -> Iterator[Errors]:
    """Errors of cases that differ in d and offset only, so that their truths are computed in one batch."""
    data = [tuple(side.to(device) for side in series(shape, seed)) for shape in shapes]
    exact = torch.cat([sqeuclidean(x.double(), y.double()) for x, y in data])
    values = _reference.softdtw_from_cost(exact, gamma)
    truths = _reference.alignment_from_cost(exact, gamma)
    rounded = _reference.alignment_from_cost(exact.float().double(), gamma)
    for (x, y), shape, value, truth, blurred in zip(
        data, shapes, values, truths.split(1), rounded.split(1), strict=True
    ):
        true_gradients = gradients(truth, x.double(), y.double())
        blurred_gradients = gradients(blurred, x.double(), y.double())
        x, y = x.requires_grad_(), y.requires_grad_()
        measured = softdtw(x, y, gamma=gamma)
        grads = torch.autograd.grad(measured.sum(), (x, y))
        yield Errors(
            **asdict(shape),
            gamma=gamma,
            value_error=relative(measured.detach().double(), value.unsqueeze(0)),
            gradient_error=max(relative(g.double(), t) for g, t in zip(grads, true_gradients, strict=True)),
            rounding=max(relative(b, t) for b, t in zip(blurred_gradients, true_gradients, strict=True)),
        )


def grid(quick: bool) -> Iterator[tuple[list[Shape], float]]:
    """The grid in batches of one length and one gamma: N = M, and N > M by a seventh."""
    lengths = LENGTHS[:3] if quick else LENGTHS
    features = FEATURES[::2] if quick else FEATURES
    gammas = GAMMAS[1::2] if quick else GAMMAS
    for length, gamma in itertools.product(lengths, gammas):
        yield [Shape(length, length, d, offset) for d, offset in itertools.product(features, OFFSETS)], gamma
        shorter = length - max(1, length // 7)
        yield [Shape(length, shorter, d, 0.0) for d in features], gamma


def report(results: Iterable[Errors]) -> list[Errors]:
    """Print each case as it comes; all of them."""
    print(f"{'N':>5} {'M':>5} {'D':>3} {'offset':>6} {'gamma':>6}   value    gradient budget   verdict")
    collected = []
    for case in results:
        verdict = "PASS" if case.passed else "FAIL"
        print(
            f"{case.n:5d} {case.m:5d} {case.d:3d} {case.offset:6.0f} {case.gamma:6g}   "
            f"{case.value_error:.1e}  {case.gradient_error:.1e}  {case.gradient_budget:.1e}  {verdict}",
            flush=True,
        )
        collected.append(case)
    return collected


def write(results: list[Errors], device: str) -> Path:
    """All cases as CSV in benchmarks/results."""
    path = Path(__file__).parent / "results" / f"error_budget_{torch.device(device).type}.csv"
    path.parent.mkdir(exist_ok=True)
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "CPU"
    about = {
        "device": name,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m benchmarks.error_budget", *sys.argv[1:]]),
    }
    with path.open("w", newline="") as file:
        rows = [
            {**asdict(case), "gradient_budget": case.gradient_budget, "passed": case.passed, **about}
            for case in results
        ]
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def main() -> int:
    """Run the grid; the exit status says whether every case passed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.error_budget", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="lengths to 512 and every other D and gamma")
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/error_budget_<device>.csv"
    )
    arguments = parser.parse_args()
    start = time.perf_counter()
    results = report(
        case for shapes, gamma in grid(arguments.quick) for case in measure(shapes, gamma, arguments.device)
    )
    passed = sum(case.passed for case in results)
    worst_value = max(case.value_error for case in results)
    worst_share = max(case.gradient_error / case.gradient_budget for case in results)
    print(
        f"{'PASS' if passed == len(results) else 'FAIL'}: {passed} of {len(results)} cases within the budget "
        f"on {arguments.device}; largest value error {worst_value:.1e}, largest gradient error "
        f"{worst_share:.2f} of its budget; {time.perf_counter() - start:.0f} s"
    )
    if arguments.write:
        print(f"written: {write(results, arguments.device)}")
    return 0 if passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
