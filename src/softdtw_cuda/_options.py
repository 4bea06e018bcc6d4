"""Options, checked one by one: numbers, flags, the metric and its fused path."""

from __future__ import annotations

import math
import numbers
import operator
from typing import SupportsFloat, SupportsIndex, cast

from torch import Tensor

from ._backends import kernel_missing
from ._distances import METRICS, DistanceFunction, Metric, name_of
from ._problem import NO_BAND

LARGEST_RADIUS = 2**31 - 1
"""No series is longer, so this is no band at all; beyond it sums of indices could overflow."""


def check_gamma(gamma: SupportsFloat) -> float:
    """gamma as a positive, finite Python float; of a tensor of one element, its number without a gradient."""
    if type(gamma) is not float:
        if isinstance(gamma, Tensor):
            gamma = _number_in(gamma)
        if isinstance(gamma, bool) or not isinstance(gamma, numbers.Real):
            raise TypeError(
                f"gamma must be a real number, got {type(gamma).__name__}; pass a Python float such as "
                "gamma=1.0."
            )
        gamma = _as_float(gamma)
    if not 0.0 < gamma < math.inf:
        raise ValueError(
            f"gamma must be a finite number greater than 0, got {gamma}; small values such as 0.01 come "
            "close to DTW, for DTW itself (gamma = 0) there is no gradient."
        )
    return gamma


def _as_float(number: numbers.Real) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer beyond every float
        return math.inf


def _number_in(gamma: Tensor) -> SupportsFloat:
    if gamma.numel() != 1:
        raise ValueError(
            f"gamma is a tensor of shape {tuple(gamma.shape)}, expected one number for the whole batch; pass "
            "a Python float such as gamma=1.0."
        )
    return cast("SupportsFloat", gamma.detach().item())


def check_bandwidth(bandwidth: SupportsIndex | float | None) -> int:
    """bandwidth as an int that kernels can add to an index; NO_BAND for None."""
    if bandwidth is None:
        return NO_BAND
    if isinstance(bandwidth, float) and bandwidth.is_integer():
        radius = int(bandwidth)
    else:
        try:
            if isinstance(bandwidth, (bool, Tensor)):
                raise TypeError
            radius = operator.index(bandwidth)  # type: ignore[arg-type]  # a float that is not whole raises
        except TypeError:
            shown = bandwidth if isinstance(bandwidth, (float, bool)) else type(bandwidth).__name__
            raise TypeError(
                f"bandwidth must be an integer or None, got {shown}; pass the largest allowed |i - j|, or "
                "None for no band."
            ) from None
    if radius < 0:
        raise ValueError(
            f"bandwidth must be at least 0, got {bandwidth}; 0 allows the diagonal alone, None means no band."
        )
    return min(radius, LARGEST_RADIUS)


def check_flag(name: str, value: object) -> bool:
    """A bool, Python's or NumPy's, or 1 or 0."""
    if value is True or value is False:
        return value
    if isinstance(value, numbers.Integral) and value in (0, 1):
        return bool(value)
    if str(getattr(value, "dtype", "")) == "bool" and getattr(value, "ndim", None) == 0:
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}; pass a bool.")


def check_count(name: str, value: object, least: int = 1) -> int:
    """An integer of at least 1, or of another least number."""
    try:
        if isinstance(value, (bool, Tensor)):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]  # what is no integer raises
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, got {value!r}; pass a whole number from {least} on."
        ) from None
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}.")
    return count


def check_real(name: str, value: object, positive: bool) -> float:
    """A finite number of at least 0, or greater if it has to be positive."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {value!r}; pass a Python float.")
    number = _as_float(value)
    if not 0.0 <= number < math.inf or (positive and number == 0.0):
        least = "greater than 0" if positive else "of at least 0"
        raise ValueError(f"{name} must be a finite number {least}, got {number}.")
    return number


def check_metric(dist: str | DistanceFunction) -> Metric:
    """The metric that `dist` names, or one made of the callable."""
    if isinstance(dist, str):
        metric = METRICS.get(dist)
        if metric is None:
            known = ", ".join(repr(name) for name in METRICS)
            raise ValueError(
                f"dist is {dist!r}, expected one of {known}, or a callable (x, y) -> (B, N, M) of your own."
            )
        return metric
    if callable(dist):
        return Metric(name_of(dist), dist, fused=False, is_named=False)
    raise TypeError(
        f"dist must be a string or a callable (x, y) -> (B, N, M), got {type(dist).__name__}; "
        "pass for example dist='sqeuclidean'."
    )


def check_fused(fused: bool | None, metric: Metric, x: Tensor | None) -> bool:
    """Whether to take the fused path for series x, None where there are none yet.

    An explicit True that cannot be had is an error.
    """
    if fused is None:
        return metric.fused
    if not check_flag("fused", fused):
        return False
    if not metric.fused:
        raise ValueError(
            f"fused=True is only possible for dist='sqeuclidean' and 'cosine', got dist={metric.name!r}; "
            "pass fused=None or fused=False to materialise the cost matrix."
        )
    missing = None if x is None else kernel_missing(x.device.type)
    if missing is not None:
        raise RuntimeError(f"fused=True is not possible here: {missing}; pass fused=None or fused=False.")
    return True


def check_memory_limit(memory_limit: object) -> int | None:
    """Bytes, or None."""
    if isinstance(memory_limit, float) and memory_limit.is_integer():  # 1e9 is how people write it
        memory_limit = int(memory_limit)
    return None if memory_limit is None else check_count("memory_limit", memory_limit)
