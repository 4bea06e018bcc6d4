"""What a barycenter minimises: weighted losses of averages with their clusters' series, and derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._descent import Points
from ._problem import Problem
from ._processes import Processes
from .functional import half_self, sharp, with_itself
from .pairs import half_selves, pair_values, pairs_at_a_time

Divergence = Literal["soft", "sharp"]

SERIES_OF_A_GROUP = 256
"""Gradients are summed in two steps, of a cluster's groups and then of the cluster: float32 sums of hundreds
of thousands of series keep their digits, and a GPU has enough sums to compute side by side."""


class Clusters(NamedTuple):
    """The series in the order of their clusters, each cluster in groups of a few hundred."""

    order: Tensor
    """(K,) series, those of cluster 0 first."""
    shares: Tensor
    """(K,) float64: each one's part in its cluster's average, in that order; 0 in empty clusters."""
    group_sizes: Tensor
    """(G,) numbers of series."""
    groups: Tensor
    """(k,) numbers of groups."""
    filled: list[bool]
    """k times whether there is a series of positive weight."""

    @property
    def owners(self) -> Tensor:
        """(G,) the cluster of each group."""
        return _repeated(self.groups, len(self.group_sizes))

    def sums(self, rows: Tensor) -> Tensor:
        """Sums (k, ...) over each cluster of rows (K, ...)."""
        return self.sums_of_groups(_segment_sums(rows, self.group_sizes))

    def sums_of_groups(self, rows: Tensor) -> Tensor:
        """Sums (k, ...) over each cluster of rows (G, ...)."""
        return _segment_sums(rows, self.groups)


def _repeated(sizes: Tensor, total: int) -> Tensor:
    """(total,) 0, sizes[0] times, then 1, sizes[1] times, and so on.

    torch.repeat_interleave opens a parallel region on the CPU, even for a handful of numbers.
    """
    return torch.searchsorted(sizes.cumsum(0), torch.arange(total, device=sizes.device), right=True)


def _segment_sums(rows: Tensor, sizes: Tensor) -> Tensor:
    """Sums, one after the other, of the first sizes[0] rows, the next sizes[1] rows and so on."""
    return torch.segment_reduce(rows, "sum", lengths=sizes, axis=0, unsafe=True)


def cluster(owners: Tensor, weights: Tensor, count: int, device: torch.device) -> Clusters:
    order = torch.argsort(owners, stable=True)
    sizes = torch.bincount(owners, minlength=count)
    totals = torch.from_numpy(np.bincount(owners.numpy(), weights.numpy(), minlength=count))
    shares = torch.where(totals > 0, 1 / totals, 0.0)[owners] * weights
    groups = -(-sizes // SERIES_OF_A_GROUP)
    group_sizes = torch.full((int(groups.sum()),), SERIES_OF_A_GROUP, device="cpu")
    ends = groups.cumsum(0)[groups > 0]
    group_sizes[ends - 1] = (sizes - (groups - 1) * SERIES_OF_A_GROUP)[groups > 0]
    return Clusters(
        order.to(device),
        shares[order].to(device),
        group_sizes.to(device),
        groups.to(device),
        (totals > 0).tolist(),
    )


class _Selection(NamedTuple):
    """The part of the work that belongs to some of the clusters, and this process's share of it."""

    chosen: Tensor
    """(c,) clusters."""
    clusters: Clusters
    """Of those alone."""
    group_shares: list[slice]
    """The groups of each process."""
    pair_shares: list[slice]
    """The pairs of each process: those of its groups."""
    owners: Tensor
    """(G,) the cluster, of those chosen, of each group of this process."""
    pairs: Tensor
    """(P, 2) int32: group and series of each pair of this process."""
    weights: Tensor
    """(P,) of those pairs."""


class BarycenterLoss:
    """Losses of averages (k, n), their gradients and Hessians: all series of the clusters that are asked for
    in one list of pairs, none of them copied."""

    def __init__(
        self, problem: Problem, clusters: Clusters, divergence: Divergence | None, processes: Processes
    ) -> None:
        self.problem, self.clusters, self.divergence = problem, clusters, divergence
        self.processes = processes
        self.shape = problem.x.shape
        self.selected: tuple[list[bool], _Selection] | None = None
        self.constant = torch.zeros(self.shape[0], dtype=torch.float64, device=problem.x.device)
        if divergence is not None:
            self.constant -= clusters.sums(clusters.shares * self._selves()[clusters.order].double())

    def _selves(self) -> Tensor:
        """(K,) halves of what each series has with itself."""
        series, lengths = self.problem.y, self.problem.y_lengths
        assert series is not None
        steps = [1] * len(series) if lengths is None else lengths.tolist()
        shares = self.processes.divide(torch.tensor(steps, device="cpu"))
        rows = shares[self.processes.rank]
        own = self.problem._replace(x=series[rows], x_lengths=None if lengths is None else lengths[rows])
        return self.processes.gather(self._half_selves(own), shares)

    @torch.no_grad()
    def _half_selves(self, own: Problem) -> Tensor:
        if self.divergence == "soft":
            return half_selves(own, True, None)
        own = own._replace(y=own.x, y_lengths=own.x_lengths)
        parts = torch.arange(own.x.shape[0], device=own.x.device).split(self._sharp_part())
        pairs = (torch.stack([part, part], 1) for part in parts)
        return torch.cat([0.5 * sharp(own._replace(pairs=part).gathered()) for part in pairs])

    def _sharp_part(self) -> int:
        """Pairs of sharp Soft-DTW at a time: its state is that of two problems and of their gradients."""
        return max(1, pairs_at_a_time(self.problem, True, None) // 4)

    def _select(self, which: list[bool]) -> _Selection:
        clusters, device = self.clusters, self.problem.x.device
        chosen = torch.tensor(which, device=device)
        of_groups = chosen[clusters.owners]
        of_series = of_groups[_repeated(clusters.group_sizes, len(clusters.order))]
        part = Clusters(
            clusters.order[of_series],
            clusters.shares[of_series],
            clusters.group_sizes[of_groups],
            clusters.groups[chosen],
            [filled for filled, wanted in zip(clusters.filled, which, strict=True) if wanted],
        )
        groups, pairs = self._shares(part)
        own_groups, own_pairs = groups[self.processes.rank], pairs[self.processes.rank]
        count = own_pairs.stop - own_pairs.start
        group = _repeated(part.group_sizes[own_groups], count)
        return _Selection(
            chosen.nonzero().squeeze(1),
            part,
            groups,
            pairs,
            part.owners[own_groups],
            torch.stack([group, part.order[own_pairs]], 1).int(),
            part.shares[own_pairs],
        )

    def _shares(self, part: Clusters) -> tuple[list[slice], list[slice]]:
        """The groups and pairs of each process: about as many cells each, groups whole, in their order.

        So every sum has the same terms in the same order whatever the number of processes.
        """
        if self.processes.count == 1:
            return [slice(0, len(part.group_sizes))], [slice(0, len(part.order))]
        sizes = part.group_sizes.cpu()
        ends = [0, *sizes.cumsum(0).tolist()]
        lengths = self.problem.y_lengths
        steps = sizes
        if lengths is not None:
            steps = _segment_sums(lengths[part.order].double(), part.group_sizes).long().cpu()
        groups = self.processes.divide(steps)
        return groups, [slice(ends[each.start], ends[each.stop]) for each in groups]

    def _selection(self, which: list[bool]) -> _Selection:
        """That of the last call where the clusters are the same."""
        if self.selected is None or self.selected[0] != which:
            self.selected = (list(which), self._select(which))
        return self.selected[1]

    def _soft(self, groups: Tensor, part: _Selection) -> Tensor:
        """(P,) weighted values of the pairs, for the averages (G, L, D) of each group."""
        problem = self.problem._replace(x=groups)
        values = pair_values(problem, len(part.pairs), lambda start, stop: part.pairs[start:stop], None)
        return values * part.weights.to(values.dtype)

    def _sharp(self, z: Tensor, part: _Selection) -> tuple[Tensor, Tensor]:
        """(P,) weighted values and (G, L, D) gradients, a part of the pairs after the other."""
        group, member = part.pairs.long().unbind(1)
        owners = part.owners[group]
        values: list[Tensor] = []
        gradients: list[Tensor] = []
        step = self._sharp_part()
        for start in range(0, len(owners), step):
            own = z[owners[start : start + step]].requires_grad_()
            series = member[start : start + step]
            lengths = self.problem.y_lengths
            assert self.problem.y is not None
            pairs = self.problem._replace(
                x=own, y=self.problem.y[series], y_lengths=None if lengths is None else lengths[series]
            )
            weighted = sharp(pairs) * part.weights[start : start + step].to(z.dtype)
            gradients += torch.autograd.grad(weighted.sum(), own)
            values.append(weighted.detach())
        sizes = part.clusters.group_sizes[part.group_shares[self.processes.rank]]
        return torch.cat(values), _segment_sums(torch.cat(gradients), sizes)

    def _own(self, z: Tensor) -> Tensor:
        """(c,) halves of what the averages (c, L, D) have with themselves."""
        problem = with_itself(self.problem._replace(x=z), first=True)
        return half_self(problem, first=True) if self.divergence == "soft" else 0.5 * sharp(problem)

    def evaluate(self, points: Tensor, which: list[bool]) -> Points:
        """Losses and gradients of points (k, n); zeros for clusters that are not asked for."""
        part = self._selection(which)
        z = points.view(self.shape)[part.chosen]
        with torch.enable_grad():
            if self.divergence == "sharp":
                values, per_group = self._sharp(z, part)
            else:
                groups = z[part.owners].requires_grad_()
                values = self._soft(groups, part)
                (per_group,) = torch.autograd.grad(values.sum(), groups)
            gradient = part.clusters.sums_of_groups(self.processes.gather(per_group, part.group_shares))
            values = self.processes.gather(values.detach(), part.pair_shares).double()
            constant = self.constant[part.chosen]
            loss = part.clusters.sums(values) + constant
            # As accurate as the terms, which may cancel; theirs is that of gamma (N + M), too.
            size = part.clusters.sums(values.abs()) + constant.abs()
            size = size + self.problem.gamma * (self.problem.n + self.problem.m)
            if self.divergence is not None:
                own = self._own(z.requires_grad_())
                gradient = gradient - torch.autograd.grad(own.sum(), z)[0]
                loss = loss - own.detach().double()
                size = size + own.detach().double().abs()
        nothing = torch.zeros_like(self.constant)
        return Points(
            points,
            nothing.index_copy(0, part.chosen, loss),
            torch.zeros_like(points).index_copy(0, part.chosen, gradient.flatten(1)),
            nothing.index_copy(0, part.chosen, torch.finfo(points.dtype).eps * size),
        )

    def hessians(self, points: Tensor, which: list[bool]) -> Callable[[Tensor], Tensor]:
        """Hessian-vector products at points (k, n)."""
        part = self._selection(which)
        z = points.view(self.shape)[part.chosen]
        with torch.enable_grad():
            groups = z[part.owners].requires_grad_()
            (first,) = torch.autograd.grad(self._soft(groups, part).sum(), groups, create_graph=True)
            own_first = None
            if self.divergence is not None:
                z.requires_grad_()
                (own_first,) = torch.autograd.grad(self._own(z).sum(), z, create_graph=True)

        def product(vectors: Tensor) -> Tensor:
            along = vectors.view(self.shape)[part.chosen]
            (second,) = torch.autograd.grad(first, groups, along[part.owners], retain_graph=True)
            result = part.clusters.sums_of_groups(self.processes.gather(second, part.group_shares))
            if own_first is not None:
                result = result - torch.autograd.grad(own_first, z, along, retain_graph=True)[0]
            return torch.zeros_like(vectors).index_copy(0, part.chosen, result.flatten(1))

        return product
