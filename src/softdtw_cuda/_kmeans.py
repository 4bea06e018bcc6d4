"""k-means under Soft-DTW: k-means++ starts, assignments in tiles, barycenters from where the centers were.

A round moves every center to the barycenter of its members and assigns each series to the nearest center.
Series stay on their device; a round brings a label and a value for each of them to the host, where everything
that chooses is done, in float64 and in a fixed order. Several processes divide the series; each has all of
them at hand, and every sum has the same order for any number of processes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ._distances import DistanceFunction
from ._journal import hash_array
from ._options import check_metric
from ._problem import Problem
from ._processes import ALONE, Processes, check_agreement, on_device
from ._series import Array
from ._tile_work import describe_machine, describe_series
from ._validation import check_all_pairs
from .barycenters import averages
from .pairs import half_selves, tile_values

PAIRS_OF_A_TILE = 1 << 23
"""Distances of series to centers that are held together: 32 MiB in float32."""


class Clusters(NamedTuple):
    """What k-means found: centers (k, L, D), where the series are; labels (n,); the sum of the distances."""

    centers: Tensor
    labels: Array
    inertia: float
    rounds: int


class Options(NamedTuple):
    """Of Soft-DTW; `normalize` stands for the divergence."""

    gamma: float
    bandwidth: int | None
    normalize: bool
    dist: str | DistanceFunction


class Progress(NamedTuple):
    """Where a fit is after a start or a round: what it goes on from, bit for bit.

    Attributes:
        run: its number.
        clusters: the best of this run; all rounds but the last of a run are better than those before.
        ended: whether the run has ended.
        best: of the runs before.
        random: state of the generator, for the starts of later runs.
    """

    run: int
    clusters: Clusters
    ended: bool
    best: Clusters | None
    random: dict[str, Any]


class Distances:
    """The distances of a set of series to centers of one length; its self-terms are computed once."""

    def __init__(
        self,
        series: Tensor,
        lengths: list[int] | None,
        length: int,
        options: Options,
        processes: Processes = ALONE,
    ) -> None:
        self.processes = processes
        steps = [1] * len(series) if lengths is None else lengths
        self.shares = processes.divide(torch.tensor(steps, device="cpu"))
        rows = self.shares[processes.rank]
        center = series.new_zeros(1, length, series.shape[2])
        problem = check_all_pairs(
            series, center, options.gamma, options.bandwidth, options.dist, None, lengths, None
        )
        self.problem: Problem = problem._replace(
            x=problem.x[rows], x_lengths=None if problem.x_lengths is None else problem.x_lengths[rows]
        )
        self.half_self = half_selves(self.problem, True, None) if options.normalize else None

    @torch.no_grad()
    def tiles(self, centers: Tensor) -> Iterator[Tensor]:
        """Distances (rows, k), block after block of this process's series."""
        problem = self.problem._replace(y=centers)
        count, k = problem.x.shape[0], centers.shape[0]
        center_self = None
        if self.half_self is not None:
            center_self = half_selves(problem, False, None)
        size = max(1, PAIRS_OF_A_TILE // k)
        for start in range(0, max(count, 1), size):  # a share may be empty
            rows = slice(start, min(start + size, count))
            tile = tile_values(problem, rows, slice(None), None)
            if self.half_self is not None and center_self is not None:
                tile = tile - (self.half_self[rows].unsqueeze(1) + center_self)
            yield tile

    def table(self, centers: Tensor) -> Tensor:
        """(n, k) distances of every series to every center."""
        return self.processes.gather(torch.cat(list(self.tiles(centers))), self.shares)

    def nearest(self, centers: Tensor) -> tuple[Array, Array]:
        """(n,) distances to the nearest center, in float64, and (n,) which it is, the first of equals."""
        found = []
        for tile in self.tiles(centers):
            label = tile.argmin(1, keepdim=True)  # min(1) opens a parallel region, even for a small tile
            found.append((tile.gather(1, label), label))
        values, labels = (
            self.processes.gather(torch.cat(each)[:, 0], self.shares).cpu().numpy()
            for each in zip(*found, strict=True)
        )
        return values.astype(np.float64), labels


def k_means(
    series: Tensor,
    lengths: list[int] | None,
    n_clusters: int,
    options: Options,
    *,
    init: Tensor | str,
    n_init: int,
    max_iter: int,
    max_iter_barycenter: int = 5,
    tol: float,
    random: np.random.RandomState,
    progress: bool = False,
    processes: Processes = ALONE,
    reached: Progress | None = None,
    keep: Callable[[Progress], object] = lambda progress: None,
) -> Clusters:
    """The best of `n_init` runs, by the sum of the distances.

    Args:
        series: (n, N, D) float32 or float64, at least `n_clusters` of them.
        lengths: (n,) true lengths of padded series. Centers then have their mean as length.
        init: (k, L, D) centers, "k-means++" or "random" (series, drawn without repetition).
        max_iter: rounds of a run at most. One that lowers the sum by no more than `tol` of it is the last.
        max_iter_barycenter: optimiser steps that a round takes towards the barycenters.
        processes: that call with the same arguments and divide the series; the result is bitwise the same for
            any number of them.
        reached: what `keep` got last from a fit with the same arguments that was stopped, to go on from.
        keep: called after each start and each round.
    """
    if processes.count > 1:
        with on_device(series.device):
            check_agreement(
                describe_fit(
                    series,
                    lengths,
                    n_clusters,
                    options,
                    init=init,
                    n_init=n_init,
                    max_iter=max_iter,
                    max_iter_barycenter=max_iter_barycenter,
                    tol=tol,
                    random=random,
                )
            )
    if isinstance(init, Tensor):
        length = init.shape[1]
    else:
        length = series.shape[1] if lengths is None else max(1, round(sum(lengths) / len(lengths)))
    distances = Distances(series, lengths, length, options, processes)
    first_run, best = 0, None
    found: Clusters | None = None
    ended = False
    if reached is not None:
        first_run, found, ended, best, state = reached
        found, best = _moved(found, series.device), _moved(best, series.device)
        random.set_state(state)
    for run in range(first_run, n_init):
        if found is not None:
            centers = found.centers
        elif isinstance(init, Tensor):
            centers = init
        elif init == "random":
            chosen = random.permutation(series.shape[0])[:n_clusters]
            centers = stretched(series, lengths, chosen, length)
        else:
            centers = spread_start(distances, series, lengths, n_clusters, length, random)
        label = f"k-means, run {run + 1} of {n_init}" if n_init > 1 else "k-means"
        shown = progress and processes.rank == 0
        first = 0 if found is None else found.rounds
        with tqdm(total=max_iter, initial=first, desc=label, unit="round", disable=not shown) as bar:
            if found is None or not ended:
                for found, ended in _rounds(
                    distances, series, lengths, centers, first, options, max_iter, max_iter_barycenter, tol
                ):
                    keep(Progress(run, found, ended, best, random.get_state(legacy=False)))
                    bar.set_postfix(inertia=f"{found.inertia:.6g}", refresh=False)
                    bar.update(found.rounds - bar.n)
        assert found is not None
        if best is None or found.inertia < best.inertia:
            best = found
        found, ended = None, False
    assert best is not None
    return best


def describe_fit(
    series: Tensor,
    lengths: list[int] | None,
    n_clusters: int,
    options: Options,
    *,
    init: Tensor | str,
    n_init: int,
    max_iter: int,
    max_iter_barycenter: int = 5,
    tol: float,
    random: np.random.RandomState,
) -> dict[str, object]:
    """All that the bits of a fit depend on: arguments of `k_means`, series and centers by their hashes."""
    steps = np.full(len(series), series.shape[1]) if lengths is None else np.array(lengths)
    return {
        "command": "kmeans",
        "options": {
            **options._asdict(),
            "dist": check_metric(options.dist).name,
            "n_clusters": n_clusters,
            "init": init if isinstance(init, str) else hash_array(init.numpy(force=True)),
            "n_init": n_init,
            "max_iter": max_iter,
            "max_iter_barycenter": max_iter_barycenter,
            "tol": tol,
            "draws": copy.deepcopy(random).randint(1 << 31, size=4).tolist(),
        },
        "inputs": {"x": describe_series(series, steps)},
        **describe_machine(series.device),
    }


def _moved(clusters: Clusters | None, device: torch.device) -> Clusters | None:
    return None if clusters is None else clusters._replace(centers=clusters.centers.to(device))


def _rounds(
    distances: Distances,
    series: Tensor,
    lengths: list[int] | None,
    centers: Tensor,
    first: int,
    options: Options,
    max_iter: int,
    max_iter_barycenter: int,
    tol: float,
) -> Iterator[tuple[Clusters, bool]]:
    """The best clusters after round `first`, which made the centers, and after each of those that follow.

    No round makes the sum of the distances larger. With them whether the round is the last.
    """
    values, labels = distances.nearest(centers)
    best = Clusters(centers, labels, float(values.sum()), first)
    yield best, first == max_iter
    for rounds in range(first + 1, max_iter + 1):
        members = labels.copy()
        moved = fill_empty(members, values, centers.shape[0])
        if moved:
            clusters, farthest = zip(*moved, strict=True)
            centers = centers.clone()
            centers[list(clusters)] = stretched(series, lengths, np.array(farthest), centers.shape[1])
        centers, _ = averages(
            series,
            torch.from_numpy(members),
            centers.shape[0],
            gamma=options.gamma,
            bandwidth=options.bandwidth,
            dist=options.dist,
            divergence="soft" if options.normalize else None,
            max_iter=max_iter_barycenter,
            init=centers,
            lengths=lengths,
            optimizer="lbfgs",
            early_stopping=False,
            patience=1,
            tol=0.0,
            processes=distances.processes,
        )
        values, labels = distances.nearest(centers)
        inertia = float(values.sum())
        gain = best.inertia - inertia
        best = Clusters(centers, labels, inertia, rounds) if gain > 0 else best._replace(rounds=rounds)
        ended = rounds == max_iter or not gain > tol * abs(best.inertia)
        yield best, ended
        if ended:
            return


def spread_start(
    distances: Distances,
    series: Tensor,
    lengths: list[int] | None,
    n_clusters: int,
    length: int,
    random: np.random.RandomState,
) -> Tensor:
    """k-means++: each center is a series, drawn in proportion to its distance to the nearest one before.

    Of some draws that is taken which lowers the sum of the distances most. The distances are costs, that is
    squared already.
    """
    count = series.shape[0]
    trials = 2 + int(math.log(n_clusters))
    chosen = [int(random.randint(count))]
    nearest = _on_host(distances.table(stretched(series, lengths, np.array(chosen), length)))[:, 0]
    while len(chosen) < n_clusters:
        chances = np.cumsum(nearest - nearest.min())  # Soft-DTW itself may be negative
        draws = random.uniform(size=trials) * chances[-1]
        candidates = np.searchsorted(chances, draws, side="right").clip(max=count - 1)
        to_candidates = _on_host(distances.table(stretched(series, lengths, candidates, length)))
        with_candidates = np.minimum(nearest[:, None], to_candidates)
        taken = int(with_candidates.sum(0).argmin())
        nearest = with_candidates[:, taken]
        chosen.append(int(candidates[taken]))
    return stretched(series, lengths, np.array(chosen), length)


def fill_empty(labels: Array, values: Array, n_clusters: int) -> list[tuple[int, int]]:
    """Move the series farthest from its center, of those that are not alone, into each empty cluster.

    Changes labels in place.

    Returns:
        the clusters that were empty, each with its series.
    """
    moved = []
    sizes = np.bincount(labels, minlength=n_clusters)
    for cluster in np.flatnonzero(sizes == 0):
        farthest = int(np.where(sizes[labels] > 1, values, -np.inf).argmax())
        sizes[labels[farthest]] -= 1
        sizes[cluster] = 1
        labels[farthest] = cluster
        moved.append((int(cluster), farthest))
    return moved


def stretched(series: Tensor, lengths: list[int] | None, chosen: Array, length: int) -> Tensor:
    """Some of the series, each interpolated to `length` steps."""
    if lengths is None and series.shape[1] == length:
        return series[torch.from_numpy(chosen).to(series.device)]
    each = [series[k, : None if lengths is None else lengths[k]] for k in chosen.tolist()]
    return torch.stack(
        [
            F.interpolate(one.T.unsqueeze(0), size=length, mode="linear", align_corners=True)[0].T
            for one in each
        ]
    )


def _on_host(table: Tensor) -> Array:
    array: Array = table.cpu().numpy().astype(np.float64)
    return array
