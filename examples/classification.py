"""Nearest-centroid classification: one average a class, Euclidean and Soft-DTW.

    python examples/classification.py [--out output] [--train 24] [--test 300]

The data are Saito's cylinder, bell and funnel, generated here: a plateau, a ramp
up, or a ramp down, each with a random beginning, end and height, in noise. The
classifier keeps one centroid a class and takes the class of the nearest one.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from softdtw_cuda import softdtw_barycenter, softdtw_cdist
from softdtw_cuda.plot import BLUE, GREY, VERMILLION, plot_barycenter

CLASSES = ("cylinder", "bell", "funnel")
STEPS = 128
GAMMA = 1.0


def cylinder_bell_funnel(
    count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(count, STEPS, 1) series with mean 0 and deviation 1, and (count,) labels."""
    step = torch.arange(STEPS)
    label = torch.arange(count) % len(CLASSES)
    begin = torch.randint(16, 33, (count, 1), generator=generator)
    end = begin + torch.randint(32, 97, (count, 1), generator=generator)
    inside = ((step >= begin) & (step <= end)).float()
    rising = (step - begin) / (end - begin)
    shapes = torch.stack((torch.ones(count, STEPS), rising, 1 - rising))[
        label, torch.arange(count)
    ]
    height = 6 + torch.randn(count, 1, generator=generator)
    series = height * inside * shapes + torch.randn(
        count, STEPS, generator=generator
    )
    series = (series - series.mean(1, keepdim=True)) / series.std(1, keepdim=True)
    return series.unsqueeze(2), label


def centroid(members: Tensor) -> Tensor:
    """(STEPS, 1) barycenter of members (K, STEPS, 1).

    It starts from the member that is nearest to all others: classes this wide have
    many local minima, and the Euclidean mean, the usual start, is near poor ones.
    """
    middle = softdtw_cdist(members, members, gamma=GAMMA).sum(1).argmin()
    return softdtw_barycenter(
        members, gamma=GAMMA, init=members[middle], max_iter=100
    )


def accuracy(distances: Tensor, label: Tensor) -> float:
    """Share of the series (rows) whose nearest centroid is that of their label."""
    return (distances.argmin(1) == label).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("output"), help="folder for the picture"
    )
    parser.add_argument(
        "--train", type=int, default=24, help="series to make the centroids of"
    )
    parser.add_argument("--test", type=int, default=300, help="series to classify")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(2)
    series, label = (
        side.to(device) for side in cylinder_bell_funnel(arguments.train, generator)
    )
    unseen, truth = (
        side.to(device) for side in cylinder_bell_funnel(arguments.test, generator)
    )
    print(
        f"{len(CLASSES)} classes, {len(series)} series to learn from, "
        f"{len(unseen)} to classify"
    )

    start = time.perf_counter()
    members = [series[label == k] for k in range(len(CLASSES))]
    means = torch.stack([each.mean(0) for each in members])
    barycenters = torch.stack([centroid(each) for each in members])
    distances = {
        "Euclidean mean, Euclidean distance": torch.cdist(
            unseen.flatten(1), means.flatten(1)
        ),
        "Euclidean mean, Soft-DTW divergence": softdtw_cdist(
            unseen, means, gamma=GAMMA, normalize=True
        ),
        "Soft-DTW barycenter, Soft-DTW divergence": softdtw_cdist(
            unseen, barycenters, gamma=GAMMA, normalize=True
        ),
    }
    scores = {name: accuracy(each, truth) for name, each in distances.items()}
    for name, score in scores.items():
        print(f"  {name + ':':42} {100 * score:5.1f} % right")

    figure, panels = plt.subplots(
        1, 4, figsize=(13, 3.6), width_ratios=(1, 1, 1, 0.95), layout="constrained"
    )
    for k, name in enumerate(CLASSES):
        plot_barycenter(
            members[k],
            barycenters[k],
            others={"Euclidean mean": means[k]},
            stretch=False,
            ax=panels[k],
            title=name,
        )
        panels[k].sharey(panels[0])
        if k > 0:
            panels[k].get_legend().remove()
            panels[k].tick_params(labelleft=False)
    panels[0].set_ylim(-2.5, 4.6)
    panels[0].set_ylabel("value")
    panels[0].legend(frameon=False, fontsize=8.5, loc="upper right")
    short = ("mean,\nEuclidean", "mean,\ndivergence", "barycenter,\ndivergence")
    bars = panels[3].bar(
        short,
        [100 * score for score in scores.values()],
        color=(VERMILLION, GREY, BLUE),
    )
    panels[3].bar_label(bars, fmt="%.1f", padding=2)
    panels[3].set_ylim(0, 108)
    panels[3].set_title("accuracy (%)", loc="left", fontweight="bold", fontsize=11)
    panels[3].tick_params(axis="x", labelsize=8.5)
    panels[3].spines[["top", "right"]].set_visible(False)
    path = arguments.out / "classification.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"{time.perf_counter() - start:.1f} s in all; picture: {path}")


if __name__ == "__main__":
    main()
