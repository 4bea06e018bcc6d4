"""Averages of time series under Soft-DTW: of one set, or of every cluster of a set in one optimisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from tqdm import tqdm

from . import _descent
from ._barycenter_arguments import Labels, check_init, check_labels, check_series, check_weights
from ._barycenter_loss import BarycenterLoss, Clusters, Divergence, cluster
from ._distances import DistanceFunction
from ._lengths import Lengths
from ._migration import explains_arguments
from ._options import check_count, check_flag, check_gamma, check_real
from ._processes import ALONE, Processes
from ._validation import check_all_pairs

if TYPE_CHECKING:
    from typing_extensions import Unpack

Optimizer = Literal["adam", "lbfgs", "newton-cg"]
StopReason = Literal["max_iter", "early_stopping", "converged", "diverged", "empty"]


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
    weights: Tensor | Sequence[float] | None = None,
    max_iter: int,
    lr: float | None = None,
    init: Tensor | Literal["mean"] | None,
    lengths: Lengths | None,
    length: int | None = None,
    optimizer: Optimizer,
    early_stopping: bool,
    patience: int,
    tol: float,
    callback: Callable[[int, Tensor, Any], object] | None = None,
    progress: bool = False,
    fused: bool | None = None,
    device: torch.device | str | None = None,
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
        series, host_lengths = check_series(X, lengths, device)
        if labels is None:
            owners, count = torch.zeros(series.shape[0], dtype=torch.int64, device="cpu"), 1
            init = init.unsqueeze(0) if isinstance(init, Tensor) else init
        else:
            owners, count = check_labels(labels, n_clusters, init, series.shape[0])
        given = check_weights(weights, series.shape[0])
        clusters = cluster(owners, given, count, series.device)
        check_init(init, length, count, series.shape[2], labels is not None)
        if not isinstance(init, Tensor) and not all(clusters.filled):
            empty = [k for k, filled in enumerate(clusters.filled) if not filled]
            shown = ", ".join(map(str, empty[:8])) + (", ..." if len(empty) > 8 else "")
            raise ValueError(
                f"clusters {shown} have no series of positive weight, expected at least one each of "
                f"{count}; relabel the series, or pass init, which empty clusters keep."
            )
        z = _start(init, length, series, host_lengths, given, clusters)
        problem = check_all_pairs(
            z, series, gamma, bandwidth, dist, fused, None, host_lengths, ("barycenter", "X")
        )
        with torch.enable_grad():
            objective = BarycenterLoss(problem, clusters, divergence, processes)
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


def _start(
    init: Tensor | str | None,
    length: int | None,
    series: Tensor,
    lengths: list[int] | None,
    weights: Tensor,
    clusters: Clusters,
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


def _descend(
    start: Tensor,
    objective: BarycenterLoss,
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
