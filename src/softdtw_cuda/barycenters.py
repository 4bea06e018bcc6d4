"""Averages of time series under Soft-DTW."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ._problem import value_dtype
from ._validation import (
    Lengths,
    check_count,
    check_gamma,
    check_lengths,
    check_not_packed,
    check_real,
    explains_arguments,
    fix_dimensions,
)
from .functional import softdtw

Optimizer = Literal["adam", "lbfgs"]
StopReason = Literal["max_iter", "early_stopping", "converged", "diverged"]


@dataclass(frozen=True)
class BarycenterInfo:
    """How an optimisation went.

    Attributes:
        losses: weighted loss of the start and of the iterate after each iteration; `iterations` + 1 numbers.
        iterations: optimiser steps taken.
        stop_reason: "max_iter"; "early_stopping" (no improvement above `tol` for `patience` iterations);
            "converged" (L-BFGS found no better point); "diverged" (the loss left the finite numbers).
    """

    losses: list[float]
    iterations: int
    stop_reason: StopReason

    @property
    def best_loss(self) -> float:
        """Loss of the barycenter that was returned."""
        return min(loss for loss in self.losses if math.isfinite(loss))


@overload
def softdtw_barycenter(
    X: Tensor | Sequence[Tensor],
    *,
    gamma: float = ...,
    weights: Tensor | Sequence[float] | None = ...,
    max_iter: int = ...,
    lr: float | None = ...,
    init: Tensor | Literal["mean"] | None = ...,
    lengths: Lengths | None = ...,
    length: int | None = ...,
    optimizer: Optimizer = ...,
    early_stopping: bool = ...,
    patience: int = ...,
    tol: float = ...,
    progress: bool = ...,
    fused: bool | None = ...,
    device: torch.device | str | None = ...,
    return_info: Literal[False] = ...,
) -> Tensor: ...


@overload
def softdtw_barycenter(
    X: Tensor | Sequence[Tensor],
    *,
    gamma: float = ...,
    weights: Tensor | Sequence[float] | None = ...,
    max_iter: int = ...,
    lr: float | None = ...,
    init: Tensor | Literal["mean"] | None = ...,
    lengths: Lengths | None = ...,
    length: int | None = ...,
    optimizer: Optimizer = ...,
    early_stopping: bool = ...,
    patience: int = ...,
    tol: float = ...,
    progress: bool = ...,
    fused: bool | None = ...,
    device: torch.device | str | None = ...,
    return_info: Literal[True],
) -> tuple[Tensor, BarycenterInfo]: ...


@explains_arguments
def softdtw_barycenter(
    X: Tensor | Sequence[Tensor],
    *,
    gamma: float = 1.0,
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
    progress: bool = False,
    fused: bool | None = None,
    device: torch.device | str | None = None,
    return_info: bool = False,
) -> Tensor | tuple[Tensor, BarycenterInfo]:
    """The series z that minimises the weighted sum of sdtw(z, X_k): an average that respects shapes.

    Args:
        X: (K, N, D) series, or a list of K tensors (N_k, D) of different lengths.
        gamma: temperature, greater than 0; large values smooth the barycenter.
        weights: (K,) non-negative numbers, divided by their sum. None weighs all series alike.
        max_iter: most optimiser steps.
        lr: step size; None stands for 0.1 with Adam and 1 with L-BFGS.
        init: (L, D) start. None or "mean" start from the weighted mean of the series, each stretched to the
            barycenter's length.
        lengths: (K,) true lengths where X is padded.
        length: length of the barycenter. None: that of `init`, else the weighted mean of the lengths,
            rounded.
        optimizer: "adam", with a cosine decay to a tenth of lr, or "lbfgs", for those who want the optimum.
        early_stopping: stop after `patience` iterations that improve the best loss by no more than `tol`.
            Adam is left alone for the first half of max_iter, when its steps are still too long to settle.
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
    gamma = check_gamma(gamma)
    if optimizer not in ("adam", "lbfgs"):
        raise ValueError(f"optimizer is {optimizer!r}, expected 'adam' or 'lbfgs'.")
    max_iter, patience = check_count("max_iter", max_iter), check_count("patience", patience)
    tol = check_real("tol", tol, positive=False)
    lr = None if lr is None else check_real("lr", lr, positive=True)
    # A descent needs gradients, and torch's optimisers what they count with on the CPU.
    with torch.inference_mode(False), _default_device_cpu():
        series, host_lengths = _check_series(X, lengths, device)
        shares = _check_weights(weights, series)
        z = _start(init, length, series, host_lengths, shares)
        series_lengths = None if host_lengths is None else torch.tensor(host_lengths, device=series.device)

        def loss_of(candidate: Tensor) -> Tensor:
            one = candidate.unsqueeze(0)
            return torch.dot(shares, softdtw(one, series, gamma=gamma, fused=fused, y_lengths=series_lengths))

        with torch.enable_grad():
            descent: torch.optim.Optimizer
            schedule = None
            unit = 1.0 if optimizer == "adam" else _unit_of(series, host_lengths)
            z = (z / unit).requires_grad_()
            if optimizer == "adam":
                step = 0.1 if lr is None else lr
                descent = torch.optim.Adam([z], lr=step)
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(descent, max_iter, eta_min=step / 10)
            else:
                # One iteration a call, so that the loop sees every iterate; curvature is kept between calls.
                # Its tolerances are absolute, made for numbers around 1, hence the unit.
                descent = torch.optim.LBFGS(
                    [z],
                    lr=1.0 if lr is None else lr,
                    max_iter=1,
                    max_eval=25,
                    tolerance_grad=1e-9,
                    tolerance_change=1e-12,
                    line_search_fn="strong_wolfe",
                )
            best, info = _descend(
                z,
                loss_of if unit == 1.0 else lambda candidate: loss_of(candidate * unit) / unit**2,
                descent,
                schedule,
                max_iter,
                patience=patience if early_stopping else math.inf,
                earliest_stop=max_iter // 2 if optimizer == "adam" else 0,
                tol=tol / unit**2,
                progress=progress,
                unit=unit**2,
            )
            best = best * unit
        return (best, info) if return_info else best


def _default_device_cpu() -> AbstractContextManager[object]:
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


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


def _check_weights(weights: Tensor | Sequence[float] | None, series: Tensor) -> Tensor:
    count = series.shape[0]
    if weights is None:
        return series.new_full((count,), 1 / count)
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
    return (given / total).to(series)


def _start(
    init: Tensor | str | None, length: int | None, series: Tensor, lengths: list[int] | None, shares: Tensor
) -> Tensor:
    """Where the descent begins, (L, D)."""
    _, size, features = series.shape
    if length is not None:
        length = check_count("length", length)
    if isinstance(init, Tensor):
        if init.dim() != 2 or init.shape[1] != features or init.shape[0] == 0:
            raise ValueError(
                f"init has shape {tuple(init.shape)}, expected (L, {features}): the barycenter's length and "
                "the number of features of X."
            )
        if length is not None and length != init.shape[0]:
            raise ValueError(
                f"length is {length} but init has {init.shape[0]} time steps, expected the same; leave "
                "length out."
            )
        return init.detach().to(series, copy=True)
    if init is not None and not isinstance(init, str):
        raise TypeError(
            f"init must be a (L, {features}) tensor, 'mean' or None, got {type(init).__name__}; convert an "
            "array with torch.as_tensor."
        )
    if init is not None and init != "mean":
        raise ValueError(f"init is {init!r}, expected a (L, {features}) tensor, 'mean' or None.")
    each = lengths if lengths is not None else [size] * series.shape[0]
    if length is None:
        length = max(1, round(sum(n * share for n, share in zip(each, shares.tolist(), strict=True))))
    mean = series.new_zeros(length, features)
    for one, n, share in zip(series, each, shares, strict=True):
        stretched = one[:n]
        if n != length:
            channels = stretched.T.unsqueeze(0)
            stretched = F.interpolate(channels, size=length, mode="linear", align_corners=True)[0].T
        mean += share * stretched
    return mean


def _unit_of(series: Tensor, lengths: list[int] | None) -> float:
    """The power of two next to the standard deviation of X: dividing by it rounds nothing.

    1 where its square, which divides losses, is beyond the type of X; so are the losses, then.
    """
    each = lengths if lengths is not None else [series.shape[1]] * series.shape[0]
    numbers = torch.cat([one[:n].flatten() for one, n in zip(series, each, strict=True)])
    size = numbers.double().std(correction=0).item()
    unit = 2.0 ** round(math.log2(size)) if 0.0 < size < math.inf else 1.0
    limits = torch.finfo(series.dtype)
    return unit if limits.tiny <= unit * unit <= limits.max else 1.0


def _descend(
    z: Tensor,
    loss_of: Callable[[Tensor], Tensor],
    descent: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler | None,
    max_iter: int,
    patience: float,
    earliest_stop: int,
    tol: float,
    progress: bool,
    unit: float,
) -> tuple[Tensor, BarycenterInfo]:
    """Walk from z; the best point seen, and how it went, with losses in their unit. `patience` may be inf."""

    def closure() -> float:
        descent.zero_grad()
        loss = loss_of(z)
        loss.backward()
        return loss.item()

    best = z.detach().clone()
    best_loss = milestone = math.inf
    losses: list[float] = []
    waited = 0
    stop_reason: StopReason = "max_iter"
    with tqdm(total=max_iter, desc="barycenter", disable=not progress, leave=True) as bar:
        while True:
            here = z.detach().clone()
            last = len(losses) == max_iter
            # An optimiser's step evaluates the point it starts from, so the loss is that of `here`.
            loss = loss_of(here).item() if last else float(descent.step(closure))
            losses.append(loss)
            if not math.isfinite(loss):
                if len(losses) == 1:
                    raise ValueError(
                        f"the loss of the first iterate is {loss}; X, init or weights hold NaN or infinite "
                        "values, or differences too large to square in their type."
                    )
                stop_reason = "diverged"
                break
            if loss < best_loss:
                best, best_loss = here, loss
            waited = 0 if loss < milestone - tol else waited + 1
            milestone = min(milestone, loss) if waited == 0 else milestone
            if last:
                break
            if torch.equal(here, z.detach()):
                stop_reason = "converged"
                break
            if waited >= patience and len(losses) > earliest_stop:
                stop_reason = "early_stopping"
                break
            if schedule is not None:
                schedule.step()
            bar.update()
            bar.set_postfix(loss=f"{loss * unit:.6g}", refresh=False)
    return best, BarycenterInfo([loss * unit for loss in losses], len(losses) - 1, stop_reason)
