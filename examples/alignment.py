"""Soft alignment: which steps of two series belong together, at three temperatures.

    python examples/alignment.py [--out output]

E_ij is the probability that a random warping path passes through (i, j). A small
gamma leaves one path, ordinary DTW's; a large one spreads over many.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from softdtw_cuda import softdtw, softdtw_alignment
from softdtw_cuda.plot import plot_alignment

GAMMAS = (0.001, 0.03, 1.0)


def warped_pair() -> tuple[Tensor, Tensor]:
    """One shape at two speeds: (90, 1) and (120, 1)."""

    def shape(place: Tensor) -> Tensor:
        bump = torch.exp(-((place - 0.3) ** 2) / 0.004)
        dip = -0.8 * torch.exp(-((place - 0.55) ** 2) / 0.003)
        return (bump + dip + 0.4 * torch.sin(5 * place)).unsqueeze(1)

    even = torch.linspace(0, 1, 90)
    late = torch.linspace(0, 1, 120) ** 1.8  # slow at first, then fast
    return shape(even), shape(late)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("output"), help="folder for the picture"
    )
    arguments = parser.parse_args()
    x, y = warped_pair()
    figure = plt.figure(figsize=(12.5, 4.6), layout="constrained")
    parts = figure.subfigures(1, len(GAMMAS), width_ratios=(1, 1, 1.22))
    print(f"{'gamma':>6} {'Soft-DTW':>9} {'cells above 1%':>15} {'mean steps':>11}")
    for gamma, part in zip(GAMMAS, parts, strict=True):
        E = softdtw_alignment(x, y, gamma=gamma)
        value = softdtw(x, y, gamma=gamma).item()
        # The sum of E is the expected number of cells on a path.
        cells, steps = (E > 0.01).sum().item(), E.sum().item()
        print(f"{gamma:6g} {value:9.2f} {cells:15d} {steps:11.1f}")
        plot_alignment(
            E,
            x,
            y,
            figure=part,
            title=f"$\\gamma$ = {gamma:g}, Soft-DTW = {value:.2f}",
            colorbar=gamma == GAMMAS[-1],
        )
    path = arguments.out / "alignment.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
