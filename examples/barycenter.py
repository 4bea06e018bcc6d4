"""Barycenters of block waves of different lengths, beside their Euclidean mean.

    python examples/barycenter.py [--out output] [--iterations 150]

Every wave has one block up and one block down, of random place and width, and a
random number of steps. The Euclidean mean of such waves looks like none of them. A
Soft-DTW barycenter does, and gamma says how sharp its edges are.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor

from softdtw_cuda import softdtw_barycenter
from softdtw_cuda.plot import VERMILLION, plot_barycenter

GAMMAS = (0.1, 1.0, 10.0)
LENGTH = 100


def block_waves(count: int, generator: torch.Generator) -> list[Tensor]:
    """`count` waves (N_k, 1) of 80 to 120 steps."""
    waves = []
    for _ in range(count):
        length = int(torch.randint(80, 121, (), generator=generator))
        up, down = torch.rand(2, generator=generator).tolist()
        width = (0.05 + 0.06 * torch.rand(2, generator=generator)).tolist()
        place = torch.linspace(0, 1, length)
        wave = ((place - (0.12 + 0.26 * up)).abs() < width[0]).float()
        wave -= ((place - (0.60 + 0.26 * down)).abs() < width[1]).float()
        waves.append(
            (wave + 0.03 * torch.randn(length, generator=generator)).unsqueeze(1)
        )
    return waves


def euclidean_mean(waves: list[Tensor]) -> Tensor:
    """(LENGTH, 1) the mean of the waves, each stretched to the same length."""
    stretched = [
        F.interpolate(
            wave.T.unsqueeze(0), LENGTH, mode="linear", align_corners=True
        )[0].T
        for wave in waves
    ]
    return torch.stack(stretched).mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("output"), help="folder for the picture"
    )
    parser.add_argument(
        "--iterations",
        type=int,
        default=150,
        help="most optimiser steps of each barycenter",
    )
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    waves = [
        wave.to(device)
        for wave in block_waves(20, torch.Generator().manual_seed(3))
    ]
    print(
        f"{len(waves)} waves of {min(map(len, waves))} to "
        f"{max(map(len, waves))} steps; barycenters of {LENGTH}"
    )

    mean = euclidean_mean(waves)
    figure, panels = plt.subplots(
        2, 2, figsize=(11, 6), sharex=True, sharey=True, layout="constrained"
    )
    plot_barycenter(
        waves,
        mean,
        label="Euclidean mean",
        ax=panels[0, 0],
        title="Euclidean mean: heights washed out",
    )
    panels[0, 0].lines[-1].set_color(VERMILLION)
    panels[0, 0].legend(frameon=False, fontsize=9)
    print(
        f"{'average':18} {'highest':>8} {'lowest':>8} {'steps':>6} {'seconds':>8}  "
        "stopped"
    )
    print(f"{'Euclidean mean':18} {mean.max():8.2f} {mean.min():8.2f}")
    for gamma, panel in zip(GAMMAS, panels.flat[1:], strict=True):
        start = time.perf_counter()
        # From the Euclidean mean, L-BFGS finds a minimum nearby; small gammas have
        # many of them.
        barycenter, info = softdtw_barycenter(
            waves,
            gamma=gamma,
            length=LENGTH,
            optimizer="lbfgs",
            max_iter=arguments.iterations,
            return_info=True,
        )
        seconds = time.perf_counter() - start
        print(
            f"{f'Soft-DTW {gamma:g}':18} {barycenter.max():8.2f} "
            f"{barycenter.min():8.2f} {info.iterations:6d} {seconds:8.1f}  "
            f"{info.stop_reason}"
        )
        plot_barycenter(
            waves, barycenter, ax=panel, title=f"Soft-DTW, $\\gamma$ = {gamma:g}"
        )
    for panel in panels[0]:
        panel.set_xlabel("")
    for panel in panels[:, 0]:
        panel.set_ylabel("value")
    path = arguments.out / "barycenter.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
