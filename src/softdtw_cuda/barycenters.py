"""Averages of time series under Soft-DTW: of one set, or of every cluster of a set in one optimisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from . import _descent
from ._descent import Points
from ._distances import DistanceFunction
from ._problem import Problem, value_dtype
from ._processes import ALONE, Processes
from ._validation import (
    Lengths,
    check_averages,
    check_count,
    check_flag,
    check_gamma,
    check_lengths,
    check_not_packed,
    check_real,
    explains_arguments,
    fix_dimensions,
)
from .functional import half_self, sharp, with_itself
from .pairs import half_self_values, pair_values, pairs_at_a_time

if TYPE_CHECKING:
    from typing_extensions import Unpack

Optimizer = Literal["adam", "lbfgs", "newton-cg"]
Divergence = Literal["soft", "sharp"]
StopReason = Literal["max_iter", "early_stopping", "converged", "diverged", "empty"]
Labels = Tensor | Sequence[int] | np.ndarray[Any, Any]

SERIES_OF_A_GROUP = 256
"""Gradients are summed in two steps, of a cluster's groups and then of the cluster: float32 sums of hundreds
of thousands of series keep their digits, and a GPU has enough sums to compute side by side."""


@dataclass(frozen=True)
class BarycenterInfo:
    """How an optimisation went.

    Attributes:
        losses: weighted loss of the start and of the iterate after each iteration; `iterations` + 1 numbers.
        iterations: optimiser steps taken.
        stop_reason: "max_iter"; "early_stopping" (no improvement above `tol` for `patience` iterations);
            "converged" (the optimiser found no better point); "diverged" (the loss left the finite numbers);
            "empty" (a cluster without a series of positive weight: `losses` is empty, too).
    """

    losses: list[float]
    iterations: int
    stop_reason: StopReason

    @property
    def best_loss(self) -> float:
        """Loss of the barycenter that was returned; NaN for an empty cluster."""
        return min((loss for loss in self.losses if math.isfinite(loss)), default=math.nan)


class _Options(TypedDict, total=False):
    """The options that both functions have, for their overloads."""

    gamma: float
    bandwidth: int | None
    dist: str | DistanceFunction
    divergence: Divergence | None
    weights: Tensor | Sequence[float] | None
    max_iter: int
    lr: float | None
    init: Tensor | Literal["mean"] | None
    lengths: Lengths | None
    length: int | None
    optimizer: Optimizer
    early_stopping: bool
    patience: int
    tol: float
    progress: bool
    fused: bool | None
    device: torch.device | str | None


CallbackOfOne = Callable[[int, Tensor, float], object]
Callback = Callable[[int, Tensor, list[float]], object]


@overload
def softdtw_barycenter(
    X: Tensor | Sequence[Tensor],
    *,
    callback: CallbackOfOne | None = ...,
    return_info: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def softdtw_barycenter(
    X: Tensor | Sequence[Tensor],
    *,
    callback: CallbackOfOne | None = ...,
    return_info: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, BarycenterInfo]: ...


@explains_arguments
def softdtw_barycenter(
    X: Tensor | Sequence[Tensor],
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    dist: str | DistanceFunction = "sqeuclidean",
    divergence: Divergence | None = None,
    weights: Tensor | Sequence[float] | None = None,
    max_iter: int = 100,
    lr: float | None = None,
    init: Tensor | Literal["mean"] | None = None,
    lengths: Lengths | None = None,
    length: int | None = None,
    optimizer: Optimizer = "adam",
    early_stopping: bool = True,
    patience: int = 10,
    tol: float = 1e-5,
    callback: Callable[[int, Tensor, float], object] | None = None,
    progress: bool = False,
    fused: bool | None = None,
    device: torch.device | str | None = None,
    return_info: bool = False,
) -> Tensor | tuple[Tensor, BarycenterInfo]:
    """The series z that minimises the weighted sum of sdtw(z, X_k): an average that respects shapes.

    Args:
        X: (K, N, D) series, or a list of K tensors (N_k, D) of different lengths.
        gamma: temperature, greater than 0; large values smooth the barycenter.
        bandwidth, dist: as in :func:`softdtw_cuda.softdtw`.
        divergence: what is minimised in place of plain Soft-DTW (None), which shrinks and smooths for a large
            gamma: the divergence of Soft-DTW, "soft", or of sharp Soft-DTW, "sharp", as in
            :func:`softdtw_cuda.softdtw_divergence`. "sharp" copies the series and takes a few times as long.
        weights: (K,) non-negative numbers, divided by their sum. None weighs all series alike.
        max_iter: most optimiser steps. 0 returns the start, with its loss in the :class:`BarycenterInfo`.
        lr: step size. Adam's first, None for 0.1; with "lbfgs" and "newton-cg" a factor of the first step
            that the line search or trust region tries, None for 1.
        init: (L, D) start. None or "mean" start from the weighted mean of the series, each stretched to the
            barycenter's length.
        lengths: (K,) true lengths where X is padded.
        length: length of the barycenter. None: that of `init`, else the weighted mean of the lengths,
            rounded.
        optimizer: "adam", with a cosine decay to a tenth of lr; "lbfgs", for those who want the optimum;
            "newton-cg", a trust-region Newton method on Hessian-vector products, with fewer iterations that
            cost more each (not with divergence="sharp", whose Hessian would be a third derivative).
        early_stopping: stop after `patience` iterations that improve the best loss by no more than `tol`.
            Adam is left alone for the first half of max_iter, when its steps are still too long to settle.
        callback: called after each iteration with its number, from 1 on, the (L, D) iterate and its loss.
            What it returns is ignored; what it raises ends the call.
        progress: show a progress bar.
        fused: as in :func:`softdtw_cuda.softdtw`.
        device: where to compute; None leaves X where it is.
        return_info: also return a :class:`BarycenterInfo`.

    Returns:
        (L, D) barycenter, the best iterate that was seen, not the last; in float32 for narrower X. With
        return_info=True a pair of it and the :class:`BarycenterInfo`.

    Raises:
        TypeError, ValueError: naming the argument, what came, what was expected and how to fix it.

    Examples:
        >>> X = torch.randn(16, 100, 3)
        >>> softdtw_barycenter(X, gamma=0.1, max_iter=20).shape
        torch.Size([100, 3])
    """
    return_info = check_flag("return_info", return_info)
    z, infos = averages(
        X,
        None,
        None,
        gamma=gamma,
        bandwidth=bandwidth,
        dist=dist,
        divergence=divergence,
        weights=weights,
        max_iter=max_iter,
        lr=lr,
        init=init,
        lengths=lengths,
        length=length,
        optimizer=optimizer,
        early_stopping=early_stopping,
        patience=patience,
        tol=tol,
        callback=callback,
        progress=progress,
        fused=fused,
        device=device,
    )
    return (z[0], infos[0]) if return_info else z[0]


@overload
def softdtw_barycenters(
    X: Tensor | Sequence[Tensor],
    labels: Labels,
    n_clusters: int | None = ...,
    *,
    callback: Callback | None = ...,
    return_info: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def softdtw_barycenters(
    X: Tensor | Sequence[Tensor],
    labels: Labels,
    n_clusters: int | None = ...,
    *,
    callback: Callback | None = ...,
    return_info: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, list[BarycenterInfo]]: ...


@explains_arguments
def softdtw_barycenters(
    X: Tensor | Sequence[Tensor],
    labels: Labels,
    n_clusters: int | None = None,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    dist: str | DistanceFunction = "sqeuclidean",
    divergence: Divergence | None = None,
    weights: Tensor | Sequence[float] | None = None,
    max_iter: int = 100,
    lr: float | None = None,
    init: Tensor | Literal["mean"] | None = None,
    lengths: Lengths | None = None,
    length: int | None = None,
    optimizer: Optimizer = "adam",
    early_stopping: bool = True,
    patience: int = 10,
    tol: float = 1e-5,
    callback: Callable[[int, Tensor, list[float]], object] | None = None,
    progress: bool = False,
    fused: bool | None = None,
    device: torch.device | str | None = None,
    return_info: bool = False,
) -> Tensor | tuple[Tensor, list[BarycenterInfo]]:
    """The Soft-DTW barycenter of every cluster of X, all of them in one optimisation.

    One batched loss a step for all clusters; each has its own step lengths and stops on its own, after which
    it costs nothing more. The results are bitwise deterministic, and those of one
    :func:`softdtw_barycenter` per cluster up to rounding.

    Args:
        X: (K, N, D) series, or a list of K tensors (N_k, D) of different lengths.
        labels: (K,) integers from 0 to n_clusters - 1, a tensor, an array or a list: each series' cluster.
        n_clusters: number of clusters, k. None: that of `init`, else the largest label plus 1.
        weights: (K,) non-negative numbers, divided by their sum in each cluster.
        init: (k, L, D) starts. None or "mean" start from the weighted mean of each cluster.
        length: length of all barycenters. None: that of `init`, else the weighted mean of all lengths,
            rounded.
        callback: called after each iteration with its number, from 1 on, the (k, L, D) iterates and the list
            of their losses, NaN for empty clusters. Clusters that have stopped stay where they were.
        gamma, bandwidth, dist, divergence, max_iter, lr: as in :func:`softdtw_barycenter`.
        lengths, optimizer, early_stopping, patience, tol: as in :func:`softdtw_barycenter`.
        progress, fused, device: as in :func:`softdtw_barycenter`.
        return_info: also return a list of k :class:`BarycenterInfo`.

    Returns:
        (k, L, D) barycenters; with return_info=True a pair of them and the infos. A cluster without a series
        of positive weight keeps its `init` and has the stop_reason "empty".

    Raises:
        TypeError, ValueError: naming the argument, what came, what was expected and how to fix it; for empty
            clusters where `init` is not given.

    Examples:
        >>> X = torch.randn(16, 100, 3)
        >>> softdtw_barycenters(X, [0, 1, 2, 1] * 4, gamma=0.1, max_iter=20).shape
        torch.Size([3, 100, 3])
    """
    return_info = check_flag("return_info", return_info)
    z, infos = averages(
        X,
        labels,
        n_clusters,
        gamma=gamma,
        bandwidth=bandwidth,
        dist=dist,
        divergence=divergence,
        weights=weights,
        max_iter=max_iter,
        lr=lr,
        init=init,
        lengths=lengths,
        length=length,
        optimizer=optimizer,
        early_stopping=early_stopping,
        patience=patience,
        tol=tol,
        callback=callback,
        progress=progress,
        fused=fused,
        device=device,
    )
    return (z, infos) if return_info else z


def averages(
    X: Tensor | Sequence[Tensor],
    labels: Labels | None,
    n_clusters: int | None,
    *,
    gamma: float,
    bandwidth: int | None,
    dist: str | DistanceFunction,
    divergence: Divergence | None,
    weights: Tensor | Sequence[float] | None,
    max_iter: int,
    lr: float | None,
    init: Tensor | Literal["mean"] | None,
    lengths: Lengths | None,
    length: int | None,
    optimizer: Optimizer,
    early_stopping: bool,
    patience: int,
    tol: float,
    callback: Callable[[int, Tensor, Any], object] | None,
    progress: bool,
    fused: bool | None,
    device: torch.device | str | None,
    processes: Processes = ALONE,
) -> tuple[Tensor, list[BarycenterInfo]]:
    """(k, L, D) averages of the labelled clusters, or (1, L, D) of all series without labels.

    `processes`, all of which call with the same arguments, divide the series; results are bitwise the
    same for any number of them.
    """
    gamma = check_gamma(gamma)
    if optimizer not in ("adam", "lbfgs", "newton-cg"):
        raise ValueError(f"optimizer is {optimizer!r}, expected 'adam', 'lbfgs' or 'newton-cg'.")
    if divergence not in (None, "soft", "sharp"):
        raise ValueError(f"divergence is {divergence!r}, expected 'soft', 'sharp' or None.")
    if divergence == "sharp" and optimizer == "newton-cg":
        raise ValueError(
            "optimizer='newton-cg' needs second derivatives, which divergence='sharp' has none of; pass "
            "optimizer='lbfgs'."
        )
    if callback is not None and not callable(callback):
        raise TypeError(
            f"callback must be callable or None, got {callback!r}; pass a function of the iteration, the "
            "iterate and its loss."
        )
    max_iter, patience = check_count("max_iter", max_iter, least=0), check_count("patience", patience)
    tol = check_real("tol", tol, positive=False)
    lr = None if lr is None else check_real("lr", lr, positive=True)
    early_stopping, progress = check_flag("early_stopping", early_stopping), check_flag("progress", progress)
    # A descent needs gradients.
    with torch.inference_mode(False):
        series, host_lengths = _check_series(X, lengths, device)
        if labels is None:
            owners, count = torch.zeros(series.shape[0], dtype=torch.int64, device="cpu"), 1
            init = init.unsqueeze(0) if isinstance(init, Tensor) else init
        else:
            owners, count = _check_labels(labels, n_clusters, init, series.shape[0])
        given = _check_weights(weights, series.shape[0])
        clusters = _cluster(owners, given, count, series.device)
        _check_init(init, length, count, series.shape[2], labels is not None)
        if not isinstance(init, Tensor) and not all(clusters.filled):
            empty = [k for k, filled in enumerate(clusters.filled) if not filled]
            shown = ", ".join(map(str, empty[:8])) + (", ..." if len(empty) > 8 else "")
            raise ValueError(
                f"clusters {shown} have no series of positive weight, expected at least one each of "
                f"{count}; relabel the series, or pass init, which empty clusters keep."
            )
        z = _start(init, length, series, host_lengths, given, clusters)
        problem = check_averages(z, series, gamma, bandwidth, dist, fused, host_lengths)
        with torch.enable_grad():
            objective = _Objective(problem, clusters, divergence, processes)
            descent: _descent.Optimizer
            if optimizer == "adam":
                descent = _descent.Adam(objective.evaluate, 0.1 if lr is None else lr, max_iter)
            elif optimizer == "lbfgs":
                descent = _descent.LBFGS(objective.evaluate, 1.0 if lr is None else lr)
            else:
                descent = _descent.NewtonCG(objective.evaluate, objective.hessians, 1.0 if lr is None else lr)
        return _descend(
            z,
            objective,
            descent,
            max_iter,
            patience=patience if early_stopping else math.inf,
            earliest_stop=max_iter // 2 if optimizer == "adam" else 0,
            tol=tol,
            report=_report_of_one(callback) if labels is None and callback is not None else callback,
            progress=progress,
        )


def _report_of_one(callback: CallbackOfOne) -> Callback:
    return lambda iteration, z, losses: callback(iteration, z[0], losses[0])


def _check_series(
    X: Tensor | Sequence[Tensor], lengths: Lengths | None, device: torch.device | str | None
) -> tuple[Tensor, list[int] | None]:
    """X as (K, N, D) in float32 or float64, and the lengths where they are not all N."""
    if isinstance(X, Tensor):
        if X.dim() != 3:
            raise ValueError(
                f"X must have shape (K, N, D), or be a list of (N_k, D) tensors, got shape {tuple(X.shape)}; "
                f"{fix_dimensions('X', X.dim())}."
            )
        batch = X
    else:
        if not isinstance(X, Sequence) or not all(isinstance(item, Tensor) for item in X):
            check_not_packed("X", X, "lengths")
            raise TypeError(
                f"X must be a (K, N, D) tensor or a list of (N_k, D) tensors, got {type(X).__name__}; "
                "convert arrays with torch.as_tensor, those of a list each."
            )
        if lengths is not None:
            raise ValueError("lengths is given but X is a list, whose tensors know theirs; leave it out.")
        for k, item in enumerate(X):
            if item.dim() != 2 or item.shape[1] != X[0].shape[-1]:
                features = X[0].shape[1] if X[0].dim() == 2 else "features"
                raise ValueError(
                    f"X[{k}] has shape {tuple(item.shape)}, expected (time, {features}): two dimensions, and "
                    "as many features in each series; add a feature axis with unsqueeze(-1)."
                )
            if item.dtype != X[0].dtype or item.device != X[0].device:
                raise ValueError(
                    f"X[{k}] is {item.dtype} on {item.device}, expected {X[0].dtype} on {X[0].device} like "
                    "X[0]; convert it with X[k].to(X[0])."
                )
        lengths = [item.shape[0] for item in X]
        if not X:
            raise ValueError("X is an empty list, expected at least one (N, D) tensor.")
        batch = torch.nn.utils.rnn.pad_sequence(list(X), batch_first=True)
    count, size, features = batch.shape
    if count == 0 or size == 0 or features == 0:
        raise ValueError(
            f"X has shape {tuple(batch.shape)}, expected at least one series, time step and feature; drop "
            "empty series before the call."
        )
    if batch.device.type == "meta":
        raise ValueError("X is on meta, where a tensor has a shape and no numbers; make X on another device.")
    if not batch.is_floating_point():
        raise TypeError(f"X has dtype {batch.dtype}, expected a float type; convert it with X.float().")
    batch = batch.detach().to(device=device, dtype=value_dtype(batch.dtype))
    if batch.is_inference():
        batch = batch.clone()
    # The start is made with lengths the host knows; one wait for a GPU before the loop is cheap.
    if isinstance(lengths, Tensor):
        lengths = lengths.cpu()
    _, host = check_lengths(lengths, "lengths", count, count, size, batch.device, batched=True)
    return batch, None if host is None or min(host) == size else host


def _check_labels(labels: Labels, n_clusters: int | None, init: object, count: int) -> tuple[Tensor, int]:
    """Labels as (K,) int64 on the CPU, and the number of clusters."""
    if n_clusters is not None:
        n_clusters = check_count("n_clusters", n_clusters)
    elif isinstance(init, Tensor) and init.dim() == 3:
        n_clusters = init.shape[0]
    try:
        given = labels.detach().cpu() if isinstance(labels, Tensor) else torch.from_numpy(np.asarray(labels))
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"labels must be {count} integers, one for each series, got {type(labels).__name__}; pass a "
            "tensor, an array or a list."
        ) from None
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(
            f"labels has dtype {given.dtype}, expected integers; number the clusters from 0 on, for example "
            "with numpy.unique(labels, return_inverse=True)."
        )
    if given.shape != (count,):
        raise ValueError(f"labels has shape {tuple(given.shape)}, expected ({count},): one for each series.")
    given = given.long()
    least, most = int(given.min()), int(given.max())
    if least < 0 or (n_clusters is not None and most >= n_clusters):
        wrong = least if least < 0 else most
        place = int((given == wrong).nonzero()[0])
        last = "" if n_clusters is None else f" to {n_clusters - 1}, the last of {n_clusters} clusters"
        raise ValueError(
            f"labels[{place}] is {wrong}, expected numbers from 0{last}; number the clusters from 0 on, and "
            "leave out series that belong to none."
        )
    return given, most + 1 if n_clusters is None else n_clusters


def _check_weights(weights: Tensor | Sequence[float] | None, count: int) -> Tensor:
    """(K,) weights in float64 on the CPU."""
    if weights is None:
        return torch.ones(count, dtype=torch.float64, device="cpu")
    try:
        given = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"weights must be {count} numbers, one for each series, got {weights!r}; pass a list or a tensor."
        ) from None
    total = given.sum()
    if given.shape != (count,) or not (torch.isfinite(total) and total > 0 and (given >= 0).all()):
        raise ValueError(
            f"weights must be {count} non-negative finite numbers, one for each series and not all zero, got "
            f"shape {tuple(given.shape)} and values {given.flatten()[:8].tolist()}."
        )
    return given


def _check_init(init: object, length: int | None, count: int, features: int, many: bool) -> None:
    sizes = f"({count}, L, {features})" if many else f"(L, {features})"
    if isinstance(init, Tensor):
        shape = tuple(init.shape if many else init.shape[1:])
        if init.dim() != 3 or init.shape[0] != count or init.shape[2] != features or init.shape[1] == 0:
            what = "clusters, the barycenters' length and" if many else "the barycenter's length and"
            raise ValueError(f"init has shape {shape}, expected {sizes}: {what} the number of features of X.")
        if length is not None and check_count("length", length) != init.shape[1]:
            raise ValueError(
                f"length is {length} but init has {init.shape[1]} time steps, expected the same; leave "
                "length out."
            )
    elif init is not None and not isinstance(init, str):
        raise TypeError(
            f"init must be a {sizes} tensor, 'mean' or None, got {type(init).__name__}; convert an "
            "array with torch.as_tensor."
        )
    elif init is not None and init != "mean":
        raise ValueError(f"init is {init!r}, expected a {sizes} tensor, 'mean' or None.")


class _Clusters(NamedTuple):
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


def _cluster(owners: Tensor, weights: Tensor, count: int, device: torch.device) -> _Clusters:
    order = torch.argsort(owners, stable=True)
    sizes = torch.bincount(owners, minlength=count)
    totals = torch.from_numpy(np.bincount(owners.numpy(), weights.numpy(), minlength=count))
    shares = torch.where(totals > 0, 1 / totals, 0.0)[owners] * weights
    groups = -(-sizes // SERIES_OF_A_GROUP)
    group_sizes = torch.full((int(groups.sum()),), SERIES_OF_A_GROUP, device="cpu")
    ends = groups.cumsum(0)[groups > 0]
    group_sizes[ends - 1] = (sizes - (groups - 1) * SERIES_OF_A_GROUP)[groups > 0]
    return _Clusters(
        order.to(device),
        shares[order].to(device),
        group_sizes.to(device),
        groups.to(device),
        (totals > 0).tolist(),
    )


def _start(
    init: Tensor | str | None,
    length: int | None,
    series: Tensor,
    lengths: list[int] | None,
    weights: Tensor,
    clusters: _Clusters,
) -> Tensor:
    """Where the descent begins, (k, L, D)."""
    if isinstance(init, Tensor):
        return init.detach().to(series, copy=True)
    count, size, _ = series.shape
    each = torch.tensor([size] * count if lengths is None else lengths, device="cpu")
    if length is None:
        length = max(1, round(float((each * weights).sum() / weights.sum())))
    length = check_count("length", length)
    rows = series[clusters.order].double()
    if lengths is not None or size != length:
        ends = each.to(series.device)[clusters.order].view(-1, 1) - 1
        steps = torch.arange(length, dtype=torch.float64, device=series.device)
        place = steps * ends / max(length - 1, 1)
        before = place.long().clamp(max=ends)
        after = (before + 1).clamp(max=ends)
        owner = torch.arange(count, device=series.device).view(-1, 1)
        rows = torch.lerp(rows[owner, before], rows[owner, after], (place - before).unsqueeze(2))
    return clusters.sums(rows * clusters.shares.view(-1, 1, 1)).to(series.dtype)


class _Selection(NamedTuple):
    """The part of the work that belongs to some of the clusters, and this process's share of it."""

    chosen: Tensor
    """(c,) clusters."""
    clusters: _Clusters
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


class _Objective:
    """Losses of averages (k, n), their gradients and Hessians: all series of the clusters that are asked for
    in one list of pairs, none of them copied."""

    def __init__(
        self, problem: Problem, clusters: _Clusters, divergence: Divergence | None, processes: Processes
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
            return half_self_values(own, None)
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
        part = _Clusters(
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

    def _shares(self, part: _Clusters) -> tuple[list[slice], list[slice]]:
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


def _descend(
    start: Tensor,
    objective: _Objective,
    descent: _descent.Optimizer,
    max_iter: int,
    patience: float,
    earliest_stop: int,
    tol: float,
    report: Callback | None,
    progress: bool,
) -> tuple[Tensor, list[BarycenterInfo]]:
    """Walk from the start (k, L, D); the best points seen, and how it went. `patience` may be inf."""
    active = list(objective.clusters.filled)
    count = len(active)
    at = objective.evaluate(start.flatten(1), active)
    first = at.loss.tolist()
    for k, loss in enumerate(first):
        if active[k] and not math.isfinite(loss):
            where = "" if count == 1 else f" of cluster {k}"
            raise ValueError(
                f"the loss of the first iterate{where} is {loss}; X, init or weights hold NaN or infinite "
                "values, or differences too large to square in their type."
            )
    losses = [[loss] if active[k] else [] for k, loss in enumerate(first)]
    best = at
    milestones = list(first)
    waited = [0] * count
    reasons: list[StopReason] = ["max_iter" if filled else "empty" for filled in active]
    with tqdm(total=max_iter, desc="barycenter", disable=not progress, leave=True) as bar:
        for iteration in range(1, max_iter + 1):
            if not any(active):
                break
            at, moved = descent.step(at, active)
            best = at.where(at.loss < best.loss, best)
            rows = torch.stack([at.loss, moved.double()]).tolist()  # the host waits here, and nowhere else
            for k, (loss, has_moved) in enumerate(zip(*rows, strict=True)):
                if not active[k]:
                    continue
                if not has_moved:
                    reasons[k], active[k] = "converged", False
                    continue
                losses[k].append(loss)
                if not math.isfinite(loss):
                    reasons[k], active[k] = "diverged", False
                    continue
                improved = loss < milestones[k] - tol
                waited[k] = 0 if improved else waited[k] + 1
                milestones[k] = loss if improved else milestones[k]
                if waited[k] >= patience and len(losses[k]) > earliest_stop and iteration < max_iter:
                    reasons[k], active[k] = "early_stopping", False
            latest = [each[-1] if each else math.nan for each in losses]
            if report is not None:
                report(iteration, at.z.view(start.shape).clone(), latest)
            bar.update()
            if progress:
                known = [loss for loss in latest if math.isfinite(loss)]
                bar.set_postfix(loss=f"{sum(known) / max(len(known), 1):.6g}", refresh=False)
    infos = [BarycenterInfo(each, max(len(each) - 1, 0), reasons[k]) for k, each in enumerate(losses)]
    return best.z.view(start.shape), infos
