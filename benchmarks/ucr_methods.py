"""1-NN, nearest centroid and k-means on a split of a set, under three measures of this library."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from softdtw_cuda import softdtw, softdtw_barycenter, softdtw_cdist

from .ucr_data import Split

Measure = Callable[[Split, Split, float], Tensor]
"""(series, others, gamma) to (series, others) distances."""


def soft(x: Split, y: Split, gamma: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Soft-DTW."""
    return softdtw_cdist(
        x.padded(dtype), y.padded(dtype), gamma=gamma, x_lengths=x.lengths, y_lengths=y.lengths
    )


def divergence(x: Split, y: Split, gamma: float) -> Tensor:
    """Soft-DTW's divergence."""
    return softdtw_cdist(
        x.padded(), y.padded(), gamma=gamma, normalize=True, x_lengths=x.lengths, y_lengths=y.lengths
    )


def sharp(x: Split, y: Split, gamma: float) -> Tensor:
    """The sharp divergence, of the expected cost <E, C> in place of Soft-DTW."""
    lengths = y.lengths
    rows = []
    for k, one in enumerate(x.padded()):
        row_lengths = None if x.lengths is None else x.lengths[k].expand(len(y))
        rows.append(_expected_cost(one.expand(len(y), -1, -1), y.padded(), gamma, row_lengths, lengths))
    selves = [
        _expected_cost(side.padded(), side.padded(), gamma, side.lengths, side.lengths) for side in (x, y)
    ]
    return torch.stack(rows) - selves[0].unsqueeze(1) / 2 - selves[1] / 2


def _expected_cost(
    x: Tensor, y: Tensor, gamma: float, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> Tensor:
    """(B,) expected costs <E, C>, from one gradient.

    Scaling both series by s scales squared distances by s^2. The derivative of Soft-DTW by s at s = 1 is
    <E, 2 C>, and by the chain rule <x, dx> + <y, dy>.
    """
    x, y = x.detach().clone().requires_grad_(), y.detach().clone().requires_grad_()
    value = softdtw(x, y, gamma=gamma, x_lengths=x_lengths, y_lengths=y_lengths)
    grad_x, grad_y = torch.autograd.grad(value.sum(), (x, y))
    return ((x * grad_x).sum((1, 2)) + (y * grad_y).sum((1, 2))).detach() / 2


MEASURES: dict[str, Measure] = {"Soft-DTW": soft, "divergence": divergence, "sharp divergence": sharp}


def nearest_neighbour(train: Split, test: Split, measure: Measure, gamma: float) -> Tensor:
    """Predicted labels of the test series; of equally near neighbours the first counts."""
    return train.labels[measure(test, train, gamma).argmin(1)]


def nearest_centroid(train: Split, test: Split, measure: Measure, gamma: float) -> Tensor:
    """Predicted labels of the test series: the class whose Soft-DTW barycenter is nearest."""
    classes = train.labels.unique()
    centroids = Split([class_centroid(train.take(train.labels == k), gamma) for k in classes], classes)
    nearest: Tensor = classes[measure(test, centroids, gamma).argmin(1)]
    return nearest


def class_centroid(members: Split, gamma: float, max_iter: int = 20) -> Tensor:
    """The barycenter of a class, started from the member that is nearest to all others."""
    middle = int(soft(members, members, gamma).sum(1).argmin())
    return _average(members, gamma, members.series[middle], max_iter)


def k_means(
    train: Split, clusters: int, measure: Measure, gamma: float, *, n_init: int, max_iter: int, seed: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Labels and centres of the best of n_init runs from k-means++ starts, best by the sum of distances.

    Series go to the nearest centre under the measure; centres are Soft-DTW barycenters.
    """
    generator = torch.Generator().manual_seed(seed)
    best: tuple[float, Tensor, list[Tensor]] = (math.inf, train.labels, [])
    for _ in range(n_init):
        centres = _spread_start(train, clusters, measure, gamma, generator)
        labels = torch.full((len(train),), -1)
        for _ in range(max_iter):
            distances = measure(train, Split(centres, torch.arange(clusters)), gamma)
            nearest, new_labels = distances.min(1)
            _fill_empty(new_labels, nearest, clusters)
            if torch.equal(new_labels, labels):
                break
            labels = new_labels
            centres = [
                _average(train.take(labels == k), gamma, centre, max_iter=5)
                for k, centre in enumerate(centres)
            ]
        inertia = float(measure(train, Split(centres, torch.arange(clusters)), gamma).min(1).values.sum())
        best = min(best, (inertia, labels, centres), key=lambda run: run[0])
    return best[1], best[2]


def rand_index(labels: Tensor, truth: Tensor) -> float:
    """Share of the pairs of series on which two partitions agree: together in both, or apart in both."""
    together = [each.unsqueeze(0) == each.unsqueeze(1) for each in (labels, truth)]
    agree = int((together[0] == together[1]).sum()) - len(truth)
    return agree / (len(truth) * (len(truth) - 1))


def accuracy(labels: Tensor, truth: Tensor) -> float:
    """Share of the series with the right label."""
    return float((labels == truth).double().mean())


def _fill_empty(labels: Tensor, distances: Tensor, clusters: int) -> None:
    """Move the worst described series of larger clusters into empty ones."""
    for cluster in range(clusters):
        sizes = labels.bincount(minlength=clusters)
        if sizes[cluster] == 0:
            labels[distances.masked_fill(sizes[labels] == 1, -math.inf).argmax()] = cluster


def _average(members: Split, gamma: float, start: Tensor, max_iter: int) -> Tensor:
    return softdtw_barycenter(
        [one.float() for one in members.series],
        gamma=gamma,
        init=start.float(),
        optimizer="lbfgs",
        max_iter=max_iter,
        early_stopping=False,
    ).to(members.series[0].dtype)


def _spread_start(
    train: Split, clusters: int, measure: Measure, gamma: float, generator: torch.Generator
) -> list[Tensor]:
    """k-means++: each centre is a series, drawn in proportion to its distance to those before.

    The measures are costs, squared distances already.
    """
    chosen = [int(torch.randint(len(train), (), generator=generator))]
    distances = measure(train, train.take(torch.tensor(chosen)), gamma)[:, 0]
    while len(chosen) < clusters:
        chance = (distances - distances.min()).double()  # Soft-DTW may be negative
        chance[chosen] = 0
        chosen.append(int(torch.multinomial(chance, 1, generator=generator)))
        new = measure(train, train.take(torch.tensor(chosen[-1:])), gamma)[:, 0]
        distances = torch.minimum(distances, new)
    return [train.series[k] for k in chosen]
