"""The public functions: check the arguments, pick the fused or the cost-matrix path, call the operators."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _autograd
from ._autograd import PLAIN
from ._backends import kernel_missing
from ._distances import SQUARED_EUCLIDEAN, DistanceFunction, Metric
from ._ops import batch_size
from ._reduction import REDUCTIONS, Reduction, reduced
from ._reference import fill_padding, value_dtype
from ._validation import (
    LARGEST_RADIUS,
    Lengths,
    check_band,
    check_band_of_all_pairs,
    check_bandwidth,
    check_callable_cost,
    check_cost,
    check_flag,
    check_fused,
    check_gamma,
    check_lengths,
    check_metric,
    check_pair,
)

if TYPE_CHECKING:
    from ._cuda.at_once import SmallPairs


def softdtw(
    x: Tensor,
    y: Tensor,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    normalize: bool = False,
    dist: str | DistanceFunction = "sqeuclidean",
    fused: bool | None = None,
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Soft-DTW between two batches of series, differentiable in both.

    Args:
        x: (B, N, D), or (N, D) for one series; float64, float32, bfloat16 or float16.
        y: (B, M, D), or (M, D). N and M may differ. One of x, y may have batch size 1: it is compared with
            every series of the other and not copied.
        gamma: temperature, greater than 0. Small values come close to DTW, large ones blur the alignment.
        bandwidth: Sakoe-Chiba radius: only cells with |i - j| <= bandwidth are visited. None for no band.
        normalize: return the divergence, see :func:`softdtw_divergence`.
        dist: "sqeuclidean", "euclidean", "cityblock", "cosine", or a callable (x, y) -> (B, N, M) of
            differentiable torch operations. It gets float32 tensors for bfloat16 and float16 input.
        fused: True demands the path that keeps no N x M table ("sqeuclidean" and "cosine" only), False builds
            the cost matrix, None picks.
        x_lengths, y_lengths: true lengths of padded series, (B,) integers as a tensor or a list. What lies in
            the padding changes nothing and gets a zero gradient. Lengths in a CUDA tensor are checked by the
            kernel, not by the host: a bad one gives NaN for its sample.

    Returns:
        (B,) values, 0-dim for unbatched input: float64 for float64 input, otherwise float32. Gradients come
        in the type of the input.

    Raises:
        TypeError, ValueError: naming the argument, what came, what was expected and how to mend it.
        RuntimeError: fused=True where there is no kernel; a backward with create_graph=True.

    Under torch.autocast the loss computes in the types above all the same. Where autocast left x and y in
    different types, both are taken in float32.

    Example:
        >>> x, y = torch.randn(8, 50, 3, requires_grad=True), torch.randn(8, 60, 3)
        >>> softdtw(x, y, gamma=0.1).mean().backward()
    """
    return softdtw_reduced(
        x, y, gamma, bandwidth, normalize, dist, fused, x_lengths, y_lengths, reduction="none"
    )


def softdtw_reduced(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int | None,
    normalize: bool,
    dist: str | DistanceFunction,
    fused: bool | None,
    x_lengths: Lengths | None,
    y_lengths: Lengths | None,
    reduction: Reduction,
) -> Tensor:
    """:func:`softdtw`, and for a `reduction` other than "none" the mean or the sum of its values."""
    if (
        not torch.compiler.is_compiling()
        and type(x) in PLAIN
        and type(y) in PLAIN
        and x.is_cuda
        and type(gamma) is float
        and (bandwidth is None or type(bandwidth) is int)
        and normalize is False
        and type(dist) is str
        and (fused is None or fused is True)
        and x_lengths is None
        and y_lengths is None
        and _autograd.needs_plain_gradient(x, y)
    ):
        pairs = _small_pairs(
            x.shape, y.shape, x.dtype, y.dtype, x.device, y.device, gamma, bandwidth, dist, reduction
        )
        if pairs is not None:
            return _autograd.fused_at_once(x, y, pairs)
    gamma = check_gamma(gamma)
    radius = check_bandwidth(bandwidth)
    metric = check_metric(dist)
    x, y, batched = check_pair(x, y)
    use_fused = _use_fused(fused, metric, x)
    x_rows, y_rows = _check_pair_lengths(x, y, x_lengths, y_lengths, radius, batched)
    if check_flag("normalize", normalize):
        values = _divergence(x, y, gamma, radius, metric, use_fused, x_rows, y_rows)
        value = reduced(values, reduction)
    else:
        value = _softdtw(x, y, gamma, radius, metric, use_fused, x_rows, y_rows, reduction=reduction)
    return value if batched or reduction != "none" else value[0]


@functools.lru_cache(maxsize=256)
def _small_pairs(
    x_shape: torch.Size,
    y_shape: torch.Size,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
    x_device: torch.device,
    y_device: torch.device,
    gamma: float,
    bandwidth: int | None,
    dist: str,
    reduction: Reduction,
) -> SmallPairs | None:
    """For `_autograd.fused_at_once`, if pairs are small and there is nothing wrong; None otherwise.

    What was found right once is not checked again, argument by argument, in every call: for small pairs that
    would take as long as the kernels do.
    """
    if len(x_shape) != 3 or len(y_shape) != 3:
        return None
    (batch, n, d), (y_batch, m, y_d) = x_shape, y_shape
    fine = (
        x_dtype == y_dtype == torch.float32
        and x_device == y_device
        and batch == y_batch
        and d == y_d
        and min(batch, n, m, d) > 0
        and 0.0 < gamma < math.inf
        and (bandwidth is None or abs(n - m) <= bandwidth <= LARGEST_RADIUS)
        and dist == "sqeuclidean"
        and reduction in REDUCTIONS
    )
    if not fine or not _autograd.are_small(batch, n, m, d):
        return None
    radius = -1 if bandwidth is None else bandwidth
    return _autograd.small_pairs(x_shape, y_shape, x_device, gamma, radius, reduction)


def softdtw_divergence(
    x: Tensor,
    y: Tensor,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    dist: str | DistanceFunction = "sqeuclidean",
    fused: bool | None = None,
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Soft-DTW divergence: sdtw(x, y) - (sdtw(x, x) + sdtw(y, y)) / 2.

    Zero for x = y, with a zero gradient there, and never meaningfully below zero for "sqeuclidean", where
    plain Soft-DTW can be negative. Works for N != M and with lengths. Arguments, shapes and errors as
    :func:`softdtw`.

    Example:
        >>> x, y = torch.randn(8, 50, 3), torch.randn(8, 60, 3)
        >>> softdtw_divergence(x, y, gamma=0.1).shape
        torch.Size([8])
    """
    return softdtw(
        x,
        y,
        gamma=gamma,
        bandwidth=bandwidth,
        normalize=True,
        dist=dist,
        fused=fused,
        x_lengths=x_lengths,
        y_lengths=y_lengths,
    )


def softdtw_from_cost(
    cost: Tensor,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Soft-DTW of cost matrices of your own, differentiable in the costs.

    Args:
        cost: (B, N, M), or (N, M). Negative costs are allowed, +inf forbids a cell. Where every path is
            forbidden the value is +inf and the gradient zero.
        gamma, bandwidth, x_lengths, y_lengths: as in :func:`softdtw`; x_lengths counts rows, y_lengths
            columns.

    Returns:
        (B,) values, 0-dim for an unbatched matrix. The gradient wrt cost is the soft alignment.

    Raises:
        TypeError, ValueError: naming the argument, what came, what was expected and how to mend it.

    Example:
        >>> cost = torch.rand(8, 50, 60, requires_grad=True)
        >>> softdtw_from_cost(cost, gamma=0.1).sum().backward()
    """
    cost, gamma, radius, x_rows, y_rows, batched = _check_cost_arguments(
        cost, gamma, bandwidth, x_lengths, y_lengths
    )
    value = _from_cost(cost, gamma, radius, x_rows, y_rows)
    return value if batched else value[0]


def softdtw_alignment(
    x: Tensor | None = None,
    y: Tensor | None = None,
    *,
    cost: Tensor | None = None,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    dist: str | DistanceFunction = "sqeuclidean",
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Soft alignment E of two series, or of a cost matrix: the expected path under Soft-DTW's distribution.

    E_ij is the derivative of Soft-DTW wrt the cost of matching step i with step j, and the probability that a
    random warping path passes through (i, j). It is 1 in both corners and 0 in the padding.

    Args:
        x, y: (B, N, D) and (B, M, D), or (N, D) and (M, D).
        cost: (B, N, M) or (N, M), instead of x and y.
        gamma, bandwidth, dist, x_lengths, y_lengths: as in :func:`softdtw`.

    Returns:
        (B, N, M), or (N, M) for unbatched input. The result cannot be differentiated yet: doing so raises.

    Raises:
        TypeError, ValueError: as :func:`softdtw`, and where neither or both of (x, y) and cost are given.

    Example:
        >>> x, y = torch.randn(50, 3), torch.randn(60, 3)
        >>> softdtw_alignment(x, y, gamma=0.1).shape
        torch.Size([50, 60])
    """
    if cost is not None:
        if x is not None or y is not None:
            raise TypeError("softdtw_alignment takes x and y, or cost, got both; leave one of them out.")
        cost, gamma, radius, x_rows, y_rows, batched = _check_cost_arguments(
            cost, gamma, bandwidth, x_lengths, y_lengths
        )
    else:
        if x is None or y is None:
            raise TypeError(
                f"softdtw_alignment takes x and y, or cost, got {_given(x, y)}; pass two series or cost=..."
            )
        gamma = check_gamma(gamma)
        radius = check_bandwidth(bandwidth)
        metric = check_metric(dist)
        x, y, batched = check_pair(x, y)
        x_rows, y_rows = _check_pair_lengths(x, y, x_lengths, y_lengths, radius, batched)
        cost = _cost(x, y, metric, x_rows, y_rows)
    alignment = cost * 0 if cost.shape[0] == 0 else _autograd.alignment(cost, gamma, radius, x_rows, y_rows)
    return alignment if batched else alignment[0]


def softdtw_cdist(
    x: Tensor,
    y: Tensor,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    normalize: bool = False,
    dist: str | DistanceFunction = "sqeuclidean",
    fused: bool | None = None,
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Soft-DTW between every series of x and every series of y, differentiable in both.

    One broadcast call for each series of the smaller set, so no series is ever copied.

    Args:
        x: (K, N, D).
        y: (L, M, D).
        x_lengths, y_lengths: (K,) and (L,) true lengths.
        gamma, bandwidth, normalize, dist, fused: as in :func:`softdtw`.

    Returns:
        (K, L) values.

    Raises:
        TypeError, ValueError: as :func:`softdtw`.

    Example:
        >>> x, y = torch.randn(5, 50, 3), torch.randn(7, 60, 3)
        >>> softdtw_cdist(x, y, gamma=0.1).shape
        torch.Size([5, 7])
    """
    gamma = check_gamma(gamma)
    radius = check_bandwidth(bandwidth)
    metric = check_metric(dist)
    x, y, batched = check_pair(x, y, all_pairs=True)
    if not batched:
        raise ValueError(
            f"x and y must have 3 dimensions (series, time, features), got shapes {tuple(x.shape[1:])} and "
            f"{tuple(y.shape[1:])}; add the first with x.unsqueeze(0)."
        )
    use_fused = _use_fused(fused, metric, x)
    rows, columns = x.shape[0], y.shape[0]
    x_rows, x_host = check_lengths(x_lengths, "x_lengths", rows, rows, x.shape[1], x.device, batched)
    y_rows, y_host = check_lengths(y_lengths, "y_lengths", columns, columns, y.shape[1], x.device, batched)
    check_band_of_all_pairs(
        radius,
        x_host if x_rows is not None else [x.shape[1]],
        y_host if y_rows is not None else [y.shape[1]],
    )
    if rows == 0 or columns == 0:
        return _empty_value(x, rows).unsqueeze(1) + _empty_value(y, columns).unsqueeze(0)

    these, those, distance = x, y, metric
    if use_fused:  # embedded once, not for every pair
        these, those = _embedded(x, y, metric, x_rows, y_rows)
        distance = SQUARED_EUCLIDEAN
    if rows <= columns:
        pairs = _each(these, x_rows, columns)
        values = [
            _softdtw(one, those, gamma, radius, distance, use_fused, length, y_rows, at_once=False)
            for one, length in pairs
        ]
    else:
        pairs = _each(those, y_rows, rows)
        values = [
            _softdtw(these, one, gamma, radius, distance, use_fused, x_rows, length, at_once=False)
            for one, length in pairs
        ]
    value = torch.stack(values, 0 if rows <= columns else 1)
    if check_flag("normalize", normalize):
        x_self = _half_self(x, gamma, radius, metric, use_fused, x_rows, first=True, at_once=False)
        y_self = _half_self(y, gamma, radius, metric, use_fused, y_rows, first=False, at_once=False)
        value = value - x_self.unsqueeze(1) - y_self.unsqueeze(0)
    return value


def _given(x: Tensor | None, y: Tensor | None) -> str:
    return "y alone" if y is not None else "neither" if x is None else "x alone"


def _use_fused(fused: bool | None, metric: Metric, x: Tensor) -> bool:
    if fused is None:
        return metric.fused
    missing = None if fused is False else kernel_missing(x.device.type)
    return check_fused(fused, metric, missing)


# From here on the arguments are checked: gamma > 0, radius >= -1, series (B or 1, N, D), lengths (B,) int32
# or None.


def _check_pair_lengths(
    x: Tensor, y: Tensor, x_lengths: Lengths | None, y_lengths: Lengths | None, radius: int, batched: bool
) -> tuple[Tensor | None, Tensor | None]:
    if x_lengths is None and y_lengths is None and radius < 0:
        return None, None
    n, m = x.shape[1], y.shape[1]
    batch = batch_size(x, y)
    if x_lengths is None and y_lengths is None:
        if batch > 0:  # without a sample there is none without a path
            check_band(radius, [n], [m])
        return None, None
    x_rows, x_host = check_lengths(x_lengths, "x_lengths", x.shape[0], batch, n, x.device, batched)
    y_rows, y_host = check_lengths(y_lengths, "y_lengths", y.shape[0], batch, m, x.device, batched)
    check_band(
        radius,
        x_host if x_rows is not None else [n] * batch,
        y_host if y_rows is not None else [m] * batch,
    )
    return x_rows, y_rows


def _check_cost_arguments(
    cost: Tensor,
    gamma: float,
    bandwidth: int | None,
    x_lengths: Lengths | None,
    y_lengths: Lengths | None,
) -> tuple[Tensor, float, int, Tensor | None, Tensor | None, bool]:
    gamma = check_gamma(gamma)
    radius = check_bandwidth(bandwidth)
    cost, batched = check_cost(cost)
    batch, n, m = cost.shape
    x_rows, x_host = check_lengths(x_lengths, "x_lengths", batch, batch, n, cost.device, batched)
    y_rows, y_host = check_lengths(y_lengths, "y_lengths", batch, batch, m, cost.device, batched)
    check_band(
        radius,
        x_host if x_rows is not None else [n] * batch,
        y_host if y_rows is not None else [m] * batch,
    )
    return cost, gamma, radius, x_rows, y_rows, batched


def _empty_value(series: Tensor, batch: int) -> Tensor:
    """(batch,) zeros that still backpropagate to series: with an empty batch there is no pair to compute."""
    flat = series.flatten(1).sum(1, dtype=value_dtype(series.dtype))
    return (flat * 0).sum().expand(batch)


def _each(series: Tensor, lengths: Tensor | None, batch: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Every series alone, with its length repeated for the batch it will be compared with."""
    for k, one in enumerate(series.split(1)):
        yield one, None if lengths is None else lengths[k].expand(batch).contiguous()


def _widened_and_filled(
    x: Tensor, y: Tensor, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x and y, in float32 if they are narrower, with zeros for padding."""
    # First of all, so that the gradient of a broadcast side is summed before it is rounded.
    if x.dtype in (torch.float16, torch.bfloat16):
        x, y = x.float(), y.float()
    # NaN in the padding would come back through the distance's own gradient, as 0 * NaN.
    if x_lengths is not None:
        x = fill_padding(x, x_lengths)
    if y_lengths is not None:
        y = fill_padding(y, y_lengths)
    return x, y


def _embedded(
    x: Tensor, y: Tensor, metric: Metric, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Series whose squared Euclidean distances are the metric's, for the fused path."""
    if metric.embedding is None:
        return x, y
    x, y = _widened_and_filled(x, y, x_lengths, y_lengths)
    return metric.embedding(x, True), metric.embedding(y, False)


def _cost(x: Tensor, y: Tensor, metric: Metric, x_lengths: Tensor | None, y_lengths: Tensor | None) -> Tensor:
    """(B, N, M) cost matrix, in float32 for narrower input."""
    x, y = _widened_and_filled(x, y, x_lengths, y_lengths)
    if metric.is_named:
        return metric.cost(x, y)
    batch = batch_size(x, y)
    x, y = x.expand(batch, -1, -1), y.expand(batch, -1, -1)
    return check_callable_cost(metric.cost(x, y), batch, x, y, metric.name)


def _from_cost(
    cost: Tensor, gamma: float, radius: int, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> Tensor:
    if cost.shape[0] == 0:
        return _empty_value(cost, 0)
    return _autograd.from_cost(cost, gamma, radius, x_lengths, y_lengths)


def _softdtw(
    x: Tensor,
    y: Tensor,
    gamma: float,
    radius: int,
    metric: Metric,
    fused: bool,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    at_once: bool = True,
    reduction: Reduction = "none",
) -> Tensor:
    if x.shape[0] == 0 or y.shape[0] == 0:
        value = _empty_value(x, 0) + _empty_value(y, 0)
    elif fused:
        if metric.embedding is not None:
            x, y = _embedded(x, y, metric, x_lengths, y_lengths)
        return _autograd.fused(x, y, gamma, radius, x_lengths, y_lengths, reduction, at_once)
    else:
        cost = _cost(x, y, metric, x_lengths, y_lengths)
        value = _autograd.from_cost(cost, gamma, radius, x_lengths, y_lengths)
    return reduced(value, reduction)


def _half_self(
    x: Tensor,
    gamma: float,
    radius: int,
    metric: Metric,
    fused: bool,
    lengths: Tensor | None,
    first: bool,
    at_once: bool,
) -> Tensor:
    """sdtw(x, x) / 2 for each series; `first` says on which side of the pair it is differentiated."""
    if lengths is not None and lengths.shape[0] != x.shape[0]:
        x = x.expand(lengths.shape[0], -1, -1)
    if not metric.is_named:
        return 0.5 * _softdtw(x, x, gamma, radius, metric, fused, lengths, lengths, at_once)
    # The named distances are symmetric, so both sides of sdtw(x, x) have the same gradient: take one of them
    # in full instead of half of each. It is half the work, and makes the gradient of the divergence exactly
    # zero at x = y, since sdtw(x, y) is differentiated on that side by the same arithmetic.
    other = x.detach()
    left, right = (x, other) if first else (other, x)
    value = _softdtw(left, right, gamma, radius, metric, fused, lengths, lengths, at_once)
    return value - 0.5 * value.detach()


def _divergence(
    x: Tensor,
    y: Tensor,
    gamma: float,
    radius: int,
    metric: Metric,
    fused: bool,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
) -> Tensor:
    # All terms or none, for the sake of that zero. Compiled graphs never do, and must not depend on sizes.
    at_once = not torch.compiler.is_compiling() and _autograd.is_small(x, y, x_lengths, y_lengths)
    value = _softdtw(x, y, gamma, radius, metric, fused, x_lengths, y_lengths, at_once)
    x_self = _half_self(x, gamma, radius, metric, fused, x_lengths, first=True, at_once=at_once)
    y_self = _half_self(y, gamma, radius, metric, fused, y_lengths, first=False, at_once=at_once)
    return value - x_self - y_self
