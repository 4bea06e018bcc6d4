"""Clusters of real series: k-means under Soft-DTW, and the divergence of all pairs.

    python examples/clusters.py [--out output] [--set Trace]

The series are a set of the UCR archive that comes inside a wheel on PyPI: Trace
(simulated faults of an instrument) or GunPoint (recorded movements of a hand).
k-means is given nothing but the number of classes; the matrix of all pairs, sorted
by the true classes, shows which of them the divergence can tell apart.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.ucr_data import load
from benchmarks.ucr_methods import rand_index
from softdtw_cuda import softdtw_cdist
from softdtw_cuda.estimators import SoftDTWKMeans
from softdtw_cuda.plot import plot_clusters, plot_pairs

GAMMA = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("output"), help="folder for the picture"
    )
    parser.add_argument("--set", default="Trace", help="name of the set")
    parser.add_argument(
        "--starts",
        type=int,
        default=5,
        help="runs of k-means, of which the best counts",
    )
    arguments = parser.parse_args()
    data = load(arguments.set)
    print(f"{data.name}: {data.sizes}")

    start = time.perf_counter()
    clusters = len(data.classes)
    series = [one.float() for one in data.train.series]
    # Plain Soft-DTW: its centers are smooth. The divergence's self-term rewards
    # roughness, so that its centers take on the noise of their members.
    model = SoftDTWKMeans(
        clusters,
        gamma=GAMMA,
        normalize=False,
        n_init=arguments.starts,
        max_iter=15,
        random_state=0,
    )
    labels = model.fit(series).labels_
    score = rand_index(labels, data.train.labels)
    print(
        f"{clusters} clusters of "
        f"{labels.bincount(minlength=clusters).tolist()} series"
    )
    print(
        f"Rand index against the classes: {score:.3f}, "
        f"in {time.perf_counter() - start:.1f} s"
    )
    distances = softdtw_cdist(series, gamma=GAMMA, normalize=True)

    figure = plt.figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.55, 1))
    plot_clusters(
        series,
        labels,
        model.cluster_centers_,
        columns=2,
        figure=left,
        stretch=False,
    )
    left.suptitle(
        f"{data.name}, $\\gamma$ = {GAMMA}: members and barycenters, "
        f"Rand index {score:.2f}",
        fontsize=12,
    )
    left.supylabel("value", fontsize=10)
    panel = right.add_subplot()
    names = [f"class {name}" for name in data.classes]
    plot_pairs(
        distances.clamp(min=0).sqrt(),
        labels=data.train.labels,
        names=names,
        ax=panel,
    )
    panel.set(xlabel="series, by class", ylabel="series, by class")
    right.suptitle("Square root of the divergence, all pairs", fontsize=12)
    path = arguments.out / "clusters.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
