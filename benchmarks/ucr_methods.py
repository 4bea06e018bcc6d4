"""1-NN, nearest centroid and k-means on a split of a set, under three measures of this library.

Soft-DTW and its divergence by the estimators, whose centers are barycenters under the same measure. These
have no sharp divergence: its neighbours come from its table, its centroids from `softdtw_barycenters`, and
there is no k-means under it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from softdtw_cuda import softdtw_barycenters, softdtw_cdist, softdtw_sharp

from .ucr_data import Split

Answers = dict[str, Callable[[], Tensor]]
"""Task to what computes its labels."""

SHARP = "sharp divergence"
MEASURES = ("Soft-DTW", "divergence", SHARP)
PAIRS_AT_A_TIME = 4096


def answers(
    train: Split, test: Split, measure: str, gamma: float, *, n_init: int, max_iter: int, seed: int = 0
) -> Answers:
    """Predicted labels of the test series, and for k-means the clusters of the training series."""
    if measure == SHARP:
        return {
            "1-NN": lambda: train.labels[sharp(test, train, gamma).argmin(1)],
            "nearest centroid": lambda: sharp(test, sharp_centroids(train, gamma), gamma).argmin(1),
        }
    from softdtw_cuda.estimators import (  # need scikit-learn
        SoftDTWKMeans,
        SoftDTWKNeighborsClassifier,
        SoftDTWNearestCentroid,
    )

    x, queries = ([one.float() for one in split.series] for split in (train, test))
    options: dict[str, Any] = {"gamma": gamma, "normalize": measure == "divergence", "device": "cpu"}

    def predicted(model: Any) -> Tensor:
        labels: Tensor = model.fit(x, train.labels).predict(queries)
        return labels

    def clusters() -> Tensor:
        count = len(train.labels.unique())
        model = SoftDTWKMeans(count, n_init=n_init, max_iter=max_iter, random_state=seed, **options)
        labels: Tensor = model.fit(x).labels_
        return labels

    return {
        "1-NN": lambda: predicted(SoftDTWKNeighborsClassifier(1, **options)),
        "nearest centroid": lambda: predicted(SoftDTWNearestCentroid(**options)),
        "k-means": clusters,
    }


def soft(x: Split, y: Split, gamma: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """(x, y) values of Soft-DTW."""
    return softdtw_cdist(
        x.padded(dtype), y.padded(dtype), gamma=gamma, x_lengths=x.lengths, y_lengths=y.lengths
    )


def sharp(x: Split, y: Split, gamma: float) -> Tensor:
    """(x, y) values of the sharp divergence; each series' self-term is computed once."""
    rows, columns = torch.cartesian_prod(torch.arange(len(x)), torch.arange(len(y))).unbind(1)
    table = _sharp_pairs(x, y, rows, columns, gamma).view(len(x), len(y))
    x_self, y_self = (
        _sharp_pairs(side, side, index, index, gamma)
        for side, index in ((x, torch.arange(len(x))), (y, torch.arange(len(y))))
    )
    return table - x_self.unsqueeze(1) / 2 - y_self / 2


def _sharp_pairs(x: Split, y: Split, first: Tensor, second: Tensor, gamma: float) -> Tensor:
    """(P,) values of sharp Soft-DTW of listed pairs, which have no table of their own in the library."""
    series, others = x.padded(), y.padded()
    parts = []
    for i, j in zip(first.split(PAIRS_AT_A_TIME), second.split(PAIRS_AT_A_TIME), strict=True):
        parts.append(
            softdtw_sharp(
                series[i],
                others[j],
                gamma=gamma,
                x_lengths=None if x.lengths is None else x.lengths[i],
                y_lengths=None if y.lengths is None else y.lengths[j],
            )
        )
    return torch.cat(parts)


def sharp_centroids(train: Split, gamma: float) -> Split:
    """A barycenter of each class under the sharp divergence, with as many steps as the estimators take."""
    centers = softdtw_barycenters(
        [one.float() for one in train.series],
        train.labels,
        gamma=gamma,
        divergence="sharp",
        optimizer="lbfgs",
        max_iter=30,
    )
    return Split(list(centers), torch.arange(len(centers)))


def rand_index(labels: Tensor, truth: Tensor) -> float:
    """Share of the pairs of series on which two partitions agree: together in both, or apart in both."""
    together = [each.unsqueeze(0) == each.unsqueeze(1) for each in (labels, truth)]
    agree = int((together[0] == together[1]).sum()) - len(truth)
    return agree / (len(truth) * (len(truth) - 1))


def accuracy(labels: Tensor, truth: Tensor) -> float:
    """Share of the series with the right label."""
    return float((labels == truth).double().mean())
