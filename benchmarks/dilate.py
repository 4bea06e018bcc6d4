"""DILATE's loss step against its authors' code, which loops over the samples with Numba.

    git clone https://github.com/vincent-leguen/DILATE
    python -m benchmarks.dilate DILATE [--batch 100] [--length 100] [--threads 2]

A step is the loss of a batch of univariate forecasts and its backward. Both are timed in turns, in the same
process; the gradients, which are B times as large in the authors' code, are compared as well.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from softdtw_cuda import DilateLoss

ALPHA, GAMMA = 0.5, 0.01


def authors_loss(checkout: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a checkout of the authors' repository."""
    if not (checkout / "loss" / "dilate_loss.py").is_file():
        raise SystemExit(f"{checkout} has no loss/dilate_loss.py; clone github.com/vincent-leguen/DILATE.")
    sys.path.insert(0, str(checkout))
    from loss.dilate_loss import dilate_loss  # type: ignore[import-not-found]

    def loss(forecast: Tensor, truth: Tensor) -> Tensor:
        value: Tensor = dilate_loss(forecast, truth, ALPHA, GAMMA, "cpu")[0]
        return value

    return loss


def step(loss: Callable[[Tensor, Tensor], Tensor], forecast: Tensor, truth: Tensor) -> tuple[float, Tensor]:
    """Seconds of a loss step, and the gradient."""
    start = time.perf_counter()
    (gradient,) = torch.autograd.grad(loss(forecast, truth), forecast)
    return time.perf_counter() - start, gradient


def main() -> int:
    """Print the medians of both, and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dilate", description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of the authors' repository")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")  # torch.range, which the authors' code calls, is deprecated
    torch.manual_seed(0)
    forecast = torch.randn(arguments.batch, arguments.length, 1, requires_grad=True)
    truth = torch.randn(arguments.batch, arguments.length, 1)
    theirs, ours = authors_loss(arguments.checkout), DilateLoss(ALPHA, GAMMA)
    their_gradient, our_gradient = (step(loss, forecast, truth)[1] for loss in (theirs, ours))
    difference = (their_gradient / arguments.batch - our_gradient).norm() / our_gradient.norm()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(7):
        times[0].append(step(theirs, forecast, truth)[0])
        times[1].extend(step(ours, forecast, truth)[0] for _ in range(20))
    their_time, our_time = (torch.tensor(each).median().item() for each in times)
    print(
        f"B={arguments.batch} L={arguments.length} D=1, {arguments.threads} threads: authors "
        f"{their_time * 1e3:.1f} ms, DilateLoss {our_time * 1e3:.2f} ms, {their_time / our_time:.0f} times; "
        f"gradients differ by {difference:.1e} relative in norm"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
