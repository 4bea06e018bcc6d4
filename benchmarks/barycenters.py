"""What the optimizers of barycenters need: iterations, evaluations, Hessian-vector products, time.

    python -m benchmarks.barycenters [--device cuda] [--optimizers lbfgs newton-cg]

Each run goes on until the optimizer finds no better point, or for 500 steps (*), in float64. Its work is
evaluations (a loss with its gradient, of all series) + Hessian-vector products. Seconds are CPU time of the
process on a CPU and wall time on a GPU. Losses that differ are those of different local minima or saddles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from softdtw_cuda import BarycenterInfo, softdtw_barycenter
from softdtw_cuda._barycenter_loss import BarycenterLoss, Divergence
from softdtw_cuda._descent import Points
from softdtw_cuda.barycenters import Optimizer

GAMMAS = (0.01, 0.1, 1.0, 10.0)
MAX_ITER = 500


def cylinders(count: int = 16, size: int = 96) -> Tensor:
    """The cylinders of the Cylinder-Bell-Funnel set (Saito, 1994): noisy plateaus of any place and width."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.arange(size)
    start = torch.randint(size // 8, size // 4, (count, 1), generator=generator)
    width = torch.randint(size // 4, size // 2, (count, 1), generator=generator)
    height = 6 + torch.randn(count, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, size, generator=generator, dtype=torch.float64)
    return ((steps >= start) & (steps < start + width)).unsqueeze(2) * height.unsqueeze(2) + noise.unsqueeze(
        2
    )


def sines(count: int = 16, size: int = 64) -> Tensor:
    """Waves of different frequency and phase in two features."""
    generator = torch.Generator().manual_seed(1)
    frequency = 1 + 0.3 * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    phase = torch.rand(count, 1, generator=generator, dtype=torch.float64)
    angle = 6 * torch.linspace(0, 1, size, dtype=torch.float64) * frequency + phase
    return torch.stack([angle.sin(), angle.cos()], 2)


def walks(count: int = 16, size: int = 64) -> Tensor:
    """Random walks: nothing in common, many local minima."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, size, 1, generator=generator, dtype=torch.float64).cumsum(1)


SETS: dict[str, Callable[[], Tensor]] = {"cylinders": cylinders, "sines": sines, "walks": walks}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts evaluations and Hessian-vector products."""
    counts = {"evaluations": 0, "products": 0}
    evaluate, hessians = BarycenterLoss.evaluate, BarycenterLoss.hessians

    def counting_evaluate(self: BarycenterLoss, points: Tensor, which: list[bool]) -> Points:
        counts["evaluations"] += 1
        return evaluate(self, points, which)

    def counting_hessians(
        self: BarycenterLoss, points: Tensor, which: list[bool]
    ) -> Callable[[Tensor], Tensor]:
        product = hessians(self, points, which)

        def counting_product(vectors: Tensor) -> Tensor:
            counts["products"] += 1
            return product(vectors)

        return counting_product

    BarycenterLoss.evaluate, BarycenterLoss.hessians = counting_evaluate, counting_hessians  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        BarycenterLoss.evaluate, BarycenterLoss.hessians = evaluate, hessians  # type: ignore[method-assign]


def measure(
    X: Tensor, gamma: float, divergence: Divergence | None, optimizer: Optimizer
) -> tuple[BarycenterInfo, dict[str, int], float]:
    """How one descent went, what it evaluated, and its seconds."""
    clock = time.perf_counter if X.is_cuda else time.process_time
    with counted() as counts:
        begin = clock()
        _, info = softdtw_barycenter(
            X,
            gamma=gamma,
            divergence=divergence,
            optimizer=optimizer,
            max_iter=MAX_ITER,
            early_stopping=False,
            return_info=True,
        )
        seconds = clock() - begin
    return info, counts, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--optimizers", nargs="+", default=["lbfgs", "newton-cg"])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--gammas", nargs="+", type=float, default=list(GAMMAS))
    arguments = parser.parse_args()
    columns = [f"{name}: {what}" for name in arguments.optimizers for what in ("steps", "work", "s", "loss")]
    print("| series | minimised | gamma | " + " | ".join(columns) + " |")
    print("|---" * (3 + len(columns)) + "|")
    divergences: tuple[Divergence | None, ...] = (None, "soft")
    for name in arguments.sets:
        X = SETS[name]().to(arguments.device)
        for divergence in divergences:
            for optimizer in arguments.optimizers:  # compiles
                softdtw_barycenter(X[:2], divergence=divergence, optimizer=optimizer, max_iter=1)
            for gamma in arguments.gammas:
                cells = [name, "Soft-DTW" if divergence is None else "divergence", f"{gamma:g}"]
                for optimizer in arguments.optimizers:
                    info, counts, seconds = measure(X, gamma, divergence, optimizer)
                    steps = f"{info.iterations}" + ("" if info.stop_reason == "converged" else "*")
                    work = f"{counts['evaluations']}" + (
                        f" + {counts['products']}" if counts["products"] else ""
                    )
                    cells += [steps, work, f"{seconds:.2f}", f"{info.best_loss:.6g}"]
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
