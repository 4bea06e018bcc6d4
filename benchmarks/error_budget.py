"""Float32 Soft-DTW against float64 truth, case by case, with a verdict.

    python -m benchmarks.error_budget --device cpu [--quick] [--second-order] [--write] [--resume]

The budget: the value within 1e-6 relative; each gradient within 1e-5 relative in norm or, where that is
larger, ten times what rounding the exact costs to float32 does to a float64 recurrence. Nobody who stores
costs in float32 can do better than that rounding.

Second order: Hessian-vector products along normal tangents of x and y, and gradients of the expected cost
<E, Omega> with Omega = (i / N - j / M)^2, each within 2e-5 relative in norm or ten times what rounding the
exact costs, Omega and shares p to float32 does to equations (12) to (15) in float64: the root mean square of
four roundings, one to nearest and three to either neighbour at random, more often to the nearer. Where one
path has nearly all the weight, the gradient hangs on the rounding of a few numbers, and a single one may be
lucky. Alignment weight below 2^-64 is pruned: what that may leave out of an entry of E-dot,
4 N M 2^-64 (N + M) max|Omega| / gamma, is taken off the difference first. It matters where one path is so
likely that a gradient of the expected cost is next to nothing.

--write keeps every case as soon as it is measured; --resume leaves out what the same command has written
today.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.util
import itertools
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from softdtw_cuda import _reference, softdtw, softdtw_expected_cost
from softdtw_cuda._distances import sqeuclidean, sqeuclidean_gradient, sqeuclidean_tangent

from . import records
from .release import OVER_BUDGET

LENGTHS = (32, 127, 512, 1024, 2048)
FEATURES = (1, 3, 16, 64)
GAMMAS = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
OFFSETS = (0.0, 1000.0)
VALUE_BUDGET = 1e-6
GRADIENT_BUDGET = 1e-5
SECOND_ORDER_BUDGET = 2e-5
ROUNDING_FACTOR = 10.0
PRUNED_WEIGHT = 2.0**-64
ROUNDINGS = 4
"""Of which the root mean square is taken: a single one is now and then lucky."""


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
    def share(self) -> float:
        """Of the budget that the errors take."""
        return max(self.value_error / VALUE_BUDGET, self.gradient_error / self.gradient_budget)

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


def to_nearest(wide: Tensor) -> Tensor:
    """float64 numbers rounded to float32."""
    return wide.float().double()


def at_random(wide: Tensor, generator: torch.Generator) -> Tensor:
    """float64 numbers rounded to one of the two float32 numbers around each, more often the nearer one."""
    nearest = wide.float()
    other = torch.nextafter(nearest, torch.where(wide > nearest, math.inf, -math.inf).float())
    share = (wide - nearest).abs() / (other.double() - nearest).abs()
    drawn = torch.rand(wide.shape, generator=generator, dtype=torch.float64, device=wide.device)
    return torch.where(drawn < share, other, nearest).double()


def roundings(device: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """Ways to round, the same for every case."""
    yield to_nearest
    for seed in range(1, ROUNDINGS):
        yield functools.partial(at_random, generator=torch.Generator(device).manual_seed(seed))


def relative(measured: Tensor, truth: Tensor, pruned: float = 0.0) -> float:
    """Norm of the difference, less what pruning may leave out, over that of the truth; 0 where both are 0."""
    norm: float = torch.linalg.vector_norm(truth).item()
    difference: float = torch.linalg.vector_norm(measured - truth).item()
    if pruned and difference <= pruned:
        return 0.0
    return difference / norm if norm else difference


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


@dataclass(frozen=True)
class SecondErrors:
    """Relative errors of one case of second order; `theirs` is philtorch's, NaN where it is not installed."""

    n: int
    m: int
    d: int
    offset: float
    gamma: float
    what: str
    error: float
    rounding: float
    theirs: float

    @property
    def budget(self) -> float:
        return max(SECOND_ORDER_BUDGET, ROUNDING_FACTOR * self.rounding)

    @property
    def share(self) -> float:
        """Of the budget that the error takes."""
        return self.error / self.budget

    @property
    def passed(self) -> bool:
        # Written so that a NaN fails.
        return self.error <= self.budget


def _series_products(slope: Tensor, alignment: Tensor, sides: list[Tensor], tangents: list[Tensor]) -> Tensor:
    """2 sum_j [slope_ij (x_i - y_j) + alignment_ij (a_i - b_j)] and the same for y, in one vector."""
    return torch.cat(
        [
            first.flatten() + second.flatten()
            for first, second in zip(gradients(slope, *sides), gradients(alignment, *tangents), strict=True)
        ]
    )


def _pruned(shape: Shape, omega: Tensor, gamma: float) -> float:
    """How far pruning may move an entry of E-dot."""
    dropped = shape.n * shape.m * PRUNED_WEIGHT
    return 4 * dropped * (shape.n + shape.m) * omega.abs().max().item() / gamma


def measure_second_order(
    shapes: list[Shape], gamma: float, device: str, seed: int = 0
) -> Iterator[SecondErrors]:
    """Errors of Hessian-vector products and of gradients of the expected cost, case by case."""
    for shape in shapes:
        x, y = (side.to(device).requires_grad_() for side in series(shape, seed))
        a, b = (side.to(device) for side in series(Shape(shape.n, shape.m, shape.d, 0.0), seed + 1))
        wide = [side.detach().double() for side in (x, y)]
        tangents = [a.double(), b.double()]
        exact = sqeuclidean(wide[0], wide[1])
        change = sqeuclidean_tangent(*wide, *tangents)
        i = torch.arange(1, shape.n + 1, device=device, dtype=torch.float64) / shape.n
        j = torch.arange(1, shape.m + 1, device=device, dtype=torch.float64) / shape.m
        position = (i.view(1, -1, 1) - j.view(1, 1, -1)).square()
        # Both directions in one batch: the costs are the same.
        omegas = torch.cat([change, position])
        tables = _reference.dual_from_cost(exact.expand(2, -1, -1), omegas, gamma)[1:]
        rounded_tables = [
            _reference.dual_from_cost(
                rounded(exact).expand(2, -1, -1), rounded(omegas), gamma, rounded=rounded
            )[1:]
            for rounded in roundings(device)
        ]
        for k, what in enumerate(("hvp", "expected")):
            truths = [[table[k : k + 1] for table in each] for each in (tables, *rounded_tables)]
            if what == "hvp":
                slopes = torch.autograd.grad(softdtw(x, y, gamma=gamma).sum(), (x, y), create_graph=True)
                along = (slopes[0] * a).sum() + (slopes[1] * b).sum()
                measured = torch.autograd.grad(along, (x, y))
                results = [_series_products(slope, alignment, wide, tangents) for alignment, slope in truths]
            else:
                value = softdtw_expected_cost(x, y, gamma=gamma)
                measured = torch.autograd.grad(value.sum(), (x, y))
                results = [
                    torch.cat([side.flatten() for side in gradients(slope, *wide)]) for _, slope in truths
                ]
            ours = torch.cat([side.double().flatten() for side in measured])
            theirs = _philtorch_product(x, y, a, b, gamma) if what == "hvp" else None
            yield SecondErrors(
                **asdict(shape),
                gamma=gamma,
                what=what,
                error=relative(ours, results[0], _pruned(shape, omegas[k], gamma)),
                rounding=math.hypot(*(relative(each, results[0]) for each in results[1:])) / ROUNDINGS**0.5,
                theirs=math.nan if theirs is None else relative(theirs, results[0]),
            )


def _philtorch_product(x: Tensor, y: Tensor, a: Tensor, b: Tensor, gamma: float) -> Tensor | None:
    """philtorch's Hessian-vector product in float32, from a cost matrix; None where it cannot be had.

    It runs on CUDA alone.
    """
    if importlib.util.find_spec("philtorch") is None or not x.is_cuda:
        return None
    from philtorch.align import dtw

    value = dtw(sqeuclidean(x, y), gamma)
    slopes = torch.autograd.grad(value.sum(), (x, y), create_graph=True)
    products = torch.autograd.grad((slopes[0] * a).sum() + (slopes[1] * b).sum(), (x, y))
    return torch.cat([side.double().flatten() for side in products])


def grid(quick: bool) -> Iterator[tuple[list[Shape], float]]:
    """The grid in batches of one length and one gamma: N = M, and N > M by a seventh."""
    lengths = LENGTHS[:3] if quick else LENGTHS
    features = FEATURES[::2] if quick else FEATURES
    gammas = GAMMAS[1::2] if quick else GAMMAS
    for length, gamma in itertools.product(lengths, gammas):
        yield [Shape(length, length, d, offset) for d, offset in itertools.product(features, OFFSETS)], gamma
        shorter = length - max(1, length // 7)
        yield [Shape(length, shorter, d, 0.0) for d in features], gamma


HEADERS = (
    f"{'N':>5} {'M':>5} {'D':>3} {'offset':>6} {'gamma':>6}   value    gradient budget   verdict",
    "    N     M   D offset  gamma  what      error    budget   philtorch  verdict",
)


def show(case: Errors | SecondErrors) -> Errors | SecondErrors:
    """Print a case, and hand it on."""
    if isinstance(case, Errors):
        errors = f"  {case.value_error:.1e}  {case.gradient_error:.1e}  {case.gradient_budget:.1e}"
    else:
        theirs = "-" if math.isnan(case.theirs) else f"{case.theirs:.1e}"
        errors = f" {case.what:8s}  {case.error:.1e}  {case.budget:.1e}  {theirs:9s}"
    sizes = f"{case.n:5d} {case.m:5d} {case.d:3d} {case.offset:6.0f} {case.gamma:6g}"
    print(f"{sizes} {errors}  {'PASS' if case.passed else 'FAIL'}", flush=True)
    return case


KEY = ("n", "m", "d", "offset", "gamma", "what")
"""Columns that tell cases apart; `what` only those of second order."""


def origin(device: str, quick: bool, second_order: bool) -> records.Row:
    """Where and when cases of this run come from."""
    cuda = device.startswith("cuda")
    command = ["python -m benchmarks.error_budget", *(["--second-order"] if second_order else [])]
    command += ["--device", device, *(["--quick"] if quick else []), "--write"]
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(command),
    }


def row_of(case: Errors | SecondErrors, about: records.Row) -> records.Row:
    """A case as a row of the CSV file."""
    budget = (
        {"gradient_budget": case.gradient_budget} if isinstance(case, Errors) else {"budget": case.budget}
    )
    numbers = {**asdict(case), **budget, "passed": case.passed}
    return {**{name: str(value) for name, value in numbers.items()}, **about}


def file_of(device: str, second_order: bool, folder: Path = records.RESULTS) -> Path:
    name = "error_budget_second_order" if second_order else "error_budget"
    return folder / f"{name}_{torch.device(device).type}.csv"


def is_measured(
    shape: Shape, gamma: float, rows: Sequence[records.Row], about: records.Row, second_order: bool
) -> bool:
    """Whether the rows have all of this case, of the same day, device, command and torch."""
    key = tuple(map(str, (*asdict(shape).values(), gamma)))
    found = [
        row for row in rows if tuple(row[name] for name in KEY[:5]) == key and row.items() >= about.items()
    ]
    return len(found) == (2 if second_order else 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grid; the exit status says whether every case passed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.error_budget", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="lengths to 512 and every other D and gamma")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write benchmarks/results/error_budget[_second_order]_<device>.csv",
    )
    parser.add_argument(
        "--second-order", action="store_true", help="Hessian-vector products and expected costs"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what this command has written today")
    parser.add_argument("--output", type=Path, default=records.RESULTS, help="another folder for --write")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    about = origin(options.device, options.quick, options.second_order)
    path = file_of(options.device, options.second_order, options.output)
    old = records.read_any(path) if options.resume else []
    verdicts = [row["passed"] == "True" for row in old if row.items() >= about.items()]
    worst = 0.0
    print(HEADERS[options.second_order])
    for shapes, gamma in grid(options.quick):
        left = [shape for shape in shapes if not is_measured(shape, gamma, old, about, options.second_order)]
        if not left:
            continue
        cases = (measure_second_order if options.second_order else measure)(left, gamma, options.device)
        found = list(map(show, cases))
        verdicts += [case.passed for case in found]
        worst = max(worst, *(case.share for case in found))
        if options.write:
            keys = KEY if options.second_order else KEY[:5]
            records.replace(path, [row_of(case, about) for case in found], keys)
    if options.write:
        print(f"written: {path.name}")
    print(
        f"{'PASS' if all(verdicts) else 'FAIL'}: {sum(verdicts)} of {len(verdicts)} cases within the budget "
        f"on {options.device}; largest error {worst:.2f} of its budget; {time.perf_counter() - start:.0f} s"
    )
    return 0 if all(verdicts) else OVER_BUDGET


if __name__ == "__main__":
    sys.exit(main())
