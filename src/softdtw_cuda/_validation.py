"""Arguments, checked in one voice: which argument, what came, what was expected, how to fix it.

The result is a Problem; nothing after it checks again. The checks run on every call, so the good case is a
handful of comparisons; messages are built only on failure.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import ParamSpec, SupportsFloat, SupportsIndex, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ._backends import kernel_missing
from ._distances import FLOATS, METRICS, DistanceFunction, Metric, name_of
from ._problem import NO_BAND, Direction, Problem
from ._torch_compat import WHOLE, can_be_read, in_graph

Lengths = Tensor | Sequence[int] | int
"""Per-sample lengths as a user may pass them; a plain int only for unbatched input."""

LARGEST_RADIUS = 2**31 - 1
"""No series is longer, so this is no band at all; beyond it sums of indices could overflow."""
_INTEGERS = frozenset((torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8))


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


def check_not_packed(name: str, series: object, lengths: str) -> None:
    """Raise for a PackedSequence; `lengths` is the argument that takes the lengths of its series."""
    if isinstance(series, PackedSequence):
        raise TypeError(
            f"{name} is a PackedSequence, expected a padded tensor and lengths; pad_packed_sequence({name}, "
            f"batch_first=True) of torch.nn.utils.rnn gives both, pass them as {name} and {lengths}."
        )


def _check_not_ragged(name: str, series: object) -> None:
    """Raise for a list of series, or NumPy's array of arrays."""
    if not isinstance(series, (list, tuple)) and str(getattr(series, "dtype", "")) != "object":
        return
    items = list(cast("Iterable[object]", series))
    if not any(hasattr(item, "__len__") for item in items):
        return
    tensors = name
    if not all(isinstance(item, Tensor) for item in items):
        tensors = f"[torch.as_tensor(one) for one in {name}]"
    raise TypeError(
        f"{name} must be a torch.Tensor, got a {type(series).__name__} of {len(items)} series; pad them with "
        f"torch.nn.utils.rnn.pad_sequence({tensors}, batch_first=True) and pass their true lengths as "
        f"{name}_lengths=[len(one) for one in {name}]."
    )


def _check_not_traced() -> None:
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # documented, not annotated
        raise RuntimeError(
            "softdtw_cuda: torch.jit.trace cannot record Soft-DTW, whose kernels it does not see; use "
            "torch.compile or torch.export, or trace the model without its loss."
        )


def _check_float_tensor(name: str, tensor: object) -> None:
    if name != "cost":
        check_not_packed(name, tensor, f"{name}_lengths")
        _check_not_ragged(name, tensor)
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it with "
            f"torch.as_tensor({name})."
        )
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}, expected float64, float32, bfloat16 or float16; "
            f"convert it with {name}.float()."
        )
    if tensor.is_nested:
        raise TypeError(
            f"{name} is a nested tensor, expected a dense one; convert it with {name}.to_padded_tensor(0.0) "
            "and pass the lengths."
        )
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{name} has layout {tensor.layout}, expected a dense tensor; convert it with {name}.to_dense()."
        )


def _autocast_pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
    """x and y in float32 where autocast may have made one of them narrower; None otherwise."""
    device_type = x.device.type
    if torch.float64 in (x.dtype, y.dtype) or not torch.amp.is_autocast_available(device_type):
        return None
    if not torch.is_autocast_enabled(device_type):
        return None
    return x.float(), y.float()


def _are_dense(*tensors: object) -> bool:
    return all(
        isinstance(each, Tensor) and each.layout is torch.strided and not each.is_nested for each in tensors
    )


def _dimension_error(x: Tensor, y: Tensor, all_pairs: bool, names: tuple[str, str]) -> ValueError:
    expected = "3 dimensions (series, time, features)"
    if x is y:
        shape = tuple(x.shape)
        return ValueError(
            f"{names[0]} must have {expected}, got shape {shape}; {fix_dimensions(names[0], x.dim())}."
        )
    if not all_pairs:
        expected = "3 dimensions (batch, time, features), or both 2 (time, features)"
    return ValueError(
        f"{names[0]} and {names[1]} must both have {expected}, got shapes {tuple(x.shape)} and "
        f"{tuple(y.shape)}; {fix_dimensions(names[0], max(x.dim(), y.dim()))}."
    )


def fix_dimensions(name: str, dimensions: int) -> str:
    """What to do about a tensor that should have (series, time, features)."""
    if dimensions > 3:
        return (
            "flatten what comes before time into the first dimension and what comes after it into the "
            f"features, for example {name}.flatten(0, 1) or {name}.flatten(2)"
        )
    return f"add a missing feature axis with {name}[..., None], a missing first axis with {name}[None]"


def _feature_error(x: Tensor, y: Tensor, batched: bool, names: tuple[str, str]) -> ValueError:
    first, second = names
    # As the user passed them.
    x_shape, y_shape = (tuple(t.shape) if batched else tuple(t.shape[1:]) for t in (x, y))
    if x.shape[1] == y.shape[1] and batched:
        fix = (
            f"if time comes last, as in (batch, features, time), pass {first}.transpose(1, 2) and "
            f"{second}.transpose(1, 2)"
        )
    elif not batched and x.shape[1] == y.shape[1]:
        fix = (
            "two dimensions are one series of (time, features); for a batch of univariate series pass "
            "x.unsqueeze(-1) and y.unsqueeze(-1), for one series with time last x.T and y.T"
        )
    else:
        fix = "the last dimension of both holds the features"
    return ValueError(
        f"{first} has {x.shape[2]} features and {second} has {y.shape[2]} (shapes {x_shape} and {y_shape}), "
        f"expected the same number in the last dimension; {fix}."
    )


def _check_pair(
    x: Tensor, y: Tensor, all_pairs: bool = False, names: tuple[str, str] = ("x", "y")
) -> tuple[Tensor, Tensor, bool]:
    """x (Bx, N, D) and y (By, M, D), and whether they came batched; for all_pairs batch sizes are free.

    `names` are those of the arguments.
    """
    _check_not_traced()
    x_dim, y_dim = (x.dim(), y.dim()) if _are_dense(x, y) else (0, 0)
    if x_dim == 3 and y_dim == 3:
        batched = True
    elif x_dim == 2 and y_dim == 2 and not all_pairs:
        x, y, batched = x.unsqueeze(0), y.unsqueeze(0), False
    else:
        _check_float_tensor(names[0], x)
        _check_float_tensor(names[1], y)
        raise _dimension_error(x, y, all_pairs, names)
    x_dtype, y_dtype = x.dtype, y.dtype
    if x_dtype not in FLOATS or y_dtype not in FLOATS:
        _check_float_tensor(names[0], x)
        _check_float_tensor(names[1], y)
    if x.device != y.device:
        fix = f"move one with {names[1]}.to({names[0]}.device)"
        if "meta" in (x.device.type, y.device.type):
            fix = (
                "a meta tensor has a shape and no numbers, so it cannot be moved: make it on the other device"
            )
        raise ValueError(
            f"{names[0]} is on {x.device} and {names[1]} on {y.device}, expected one device for both; {fix}."
        )
    if x_dtype is not y_dtype:
        pair = _autocast_pair(x, y)
        if pair is None:
            raise TypeError(
                f"{names[0]} has dtype {x_dtype} and {names[1]} {y_dtype}, expected one dtype for both; "
                f"convert one with {names[1]}.to({names[0]}.dtype)."
            )
        x, y = pair
    x_batch, n, d = x.shape
    y_batch, m, y_d = y.shape
    if d != y_d:
        raise _feature_error(x, y, batched, names)
    if x_batch != y_batch and x_batch != 1 and y_batch != 1 and not all_pairs:
        raise ValueError(
            f"x has batch size {x_batch} and y {y_batch}, expected equal batch sizes, or 1 for one of them; "
            "for all pairs use softdtw_cdist."
        )
    if n == 0 or m == 0 or d == 0:
        name, shape = (names[0], x.shape) if n == 0 or d == 0 else (names[1], y.shape)
        raise ValueError(
            f"{name} has shape {tuple(shape) if batched else tuple(shape[1:])}, expected at least one time "
            "step and one feature; drop empty series before the call."
        )
    return x, y, batched


def check_series(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int | None,
    dist: str | DistanceFunction,
    fused: bool | None,
    x_lengths: Lengths | None,
    y_lengths: Lengths | None,
) -> tuple[Problem, bool]:
    """The problem of pairs of series, and whether they came batched."""
    gamma = check_gamma(gamma)
    radius = check_bandwidth(bandwidth)
    metric = check_metric(dist)
    x, y, batched = _check_pair(x, y)
    use_fused = _check_fused(fused, metric, x)
    if x_lengths is None and y_lengths is None and radius < 0:
        return Problem(x, y, None, None, gamma, radius, metric=metric, fused=use_fused), batched
    problem = Problem(x, y, None, None, gamma, radius, metric=metric, fused=use_fused)
    return _with_lengths(problem, x_lengths, y_lengths, batched), batched


def check_cost(
    cost: Tensor,
    gamma: float,
    bandwidth: int | None,
    x_lengths: Lengths | None,
    y_lengths: Lengths | None,
) -> tuple[Problem, bool]:
    """The problem of cost matrices, and whether they came batched."""
    gamma = check_gamma(gamma)
    radius = check_bandwidth(bandwidth)
    _check_not_traced()
    _check_float_tensor("cost", cost)
    if cost.dim() not in (2, 3):
        fix = "flatten the batch with cost.flatten(0, -3)"
        if cost.dim() < 2:
            fix = "a matrix has a row for each step of x and a column for each step of y"
        raise ValueError(f"cost must have shape (batch, N, M) or (N, M), got {tuple(cost.shape)}; {fix}.")
    if cost.shape[-1] == 0 or cost.shape[-2] == 0:
        raise ValueError(
            f"cost has shape {tuple(cost.shape)}, expected N and M to be at least 1; drop empty series "
            "before the call."
        )
    batched = cost.dim() == 3
    problem = Problem(cost if batched else cost.unsqueeze(0), None, None, None, gamma, radius)
    return _with_lengths(problem, x_lengths, y_lengths, batched), batched


def check_all_pairs(
    x: Tensor,
    y: Tensor | None,
    gamma: float,
    bandwidth: int | None,
    dist: str | DistanceFunction,
    fused: bool | None,
    x_lengths: Lengths | None,
    y_lengths: Lengths | None,
) -> Problem:
    """The problem whose pairs are all of x (K, N, D) with all of y (L, M, D); lengths are (K,) and (L,)."""
    if y is None:
        if y_lengths is not None:
            raise ValueError(
                "y_lengths is given but y is not, so x is compared with itself; leave it out, x_lengths is "
                "enough."
            )
        y, y_lengths = x, x_lengths
    return _check_sets(x, y, gamma, bandwidth, dist, fused, (x_lengths, y_lengths), ("x", "y"))


def check_set(X: Tensor, lengths: Lengths | None) -> Problem:
    """The problem of all pairs of a set X (K, N, D)."""
    return _check_sets(X, X, 1.0, None, "sqeuclidean", None, (lengths, lengths), ("X", "X"))


def check_queries(
    queries: Tensor,
    database: Tensor,
    gamma: float,
    bandwidth: int | None,
    dist: str | DistanceFunction,
    fused: bool | None,
    query_lengths: Lengths | None,
    database_lengths: Lengths | None,
) -> Problem:
    """The problem of all queries (Q, N, D) with all of a database (K, M, D).

    For queries on a GPU the database may be on the CPU, and stays there as y; lengths are on the GPU.
    """
    names, lengths = ("queries", "database"), (query_lengths, database_lengths)
    streamed = isinstance(database, Tensor) and database.device.type == "cpu" and database.dim() > 0
    if streamed and isinstance(queries, Tensor) and queries.device.type == "cuda":
        _check_pair(queries, database[:0].to(queries.device), True, names)
        options = (gamma, bandwidth, dist, fused)
        return _check_sets(queries, database, *options, lengths, names, streamed=True)
    return _check_sets(queries, database, gamma, bandwidth, dist, fused, lengths, names)


def check_averages(
    averages: Tensor,
    X: Tensor,
    gamma: float,
    bandwidth: int | None,
    dist: str | DistanceFunction,
    fused: bool | None,
    lengths: Lengths | None,
) -> Problem:
    """The problem of averages (k, L, D) with the series X (K, N, D) that they are of."""
    return _check_sets(averages, X, gamma, bandwidth, dist, fused, (None, lengths), ("barycenter", "X"))


LENGTHS_OF = {
    "x": "x_lengths",
    "y": "y_lengths",
    "queries": "query_lengths",
    "database": "database_lengths",
    "barycenter": "length",
    "X": "lengths",
}


def _check_sets(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int | None,
    dist: str | DistanceFunction,
    fused: bool | None,
    lengths: tuple[Lengths | None, Lengths | None],
    names: tuple[str, str],
    streamed: bool = False,
) -> Problem:
    """The problem of all pairs of two sets; a `streamed` y is on another device, and checked already."""
    gamma = check_gamma(gamma)
    radius = check_bandwidth(bandwidth)
    metric = check_metric(dist)
    if not streamed:
        x, y, _ = _check_pair(x, y, all_pairs=True, names=names)
    use_fused = _check_fused(fused, metric, x)
    checked = [
        check_lengths(given, LENGTHS_OF[name], side.shape[0], side.shape[0], side.shape[1], x.device, True)
        for side, given, name in zip((x, y), lengths, names, strict=True)
    ]
    (x_rows, x_host), (y_rows, y_host) = checked
    _check_band_of_all_pairs(
        radius,
        x_host if x_rows is not None else [x.shape[1]],
        y_host if y_rows is not None else [y.shape[1]],
        names,
    )
    return Problem(x, y, x_rows, y_rows, gamma, radius, metric=metric, fused=use_fused)


def check_pairs(
    x: Tensor,
    y: Tensor,
    pairs: Tensor | Sequence[Sequence[int]],
    gamma: float,
    bandwidth: int | None,
    dist: str | DistanceFunction,
    fused: bool | None,
    x_lengths: Lengths | None,
    y_lengths: Lengths | None,
) -> Problem:
    """The problem of the listed pairs of x (K, N, D) and y (L, M, D); lengths are (K,) and (L,)."""
    # The band is checked for the listed pairs alone.
    problem = check_all_pairs(x, y, gamma, None, dist, fused, x_lengths, y_lengths)
    problem = problem._replace(bandwidth=check_bandwidth(bandwidth))
    problem = problem._replace(pairs=_check_indices(pairs, problem))
    _check_band_of_pairs(problem)
    return problem


def _check_indices(pairs: object, problem: Problem) -> Tensor:
    """pairs as (P, 2) int32 on the device of x; checked unless the host would have to wait for a GPU."""
    try:
        given = pairs if isinstance(pairs, Tensor) else torch.as_tensor(pairs, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"pairs must be a (P, 2) tensor or list of integers, got {type(pairs).__name__}; pass for "
            "example [[0, 3], [1, 2]]."
        ) from None
    if given.numel() == 0 and given.dim() == 1:
        given = given.new_empty((0, 2), dtype=torch.int64)  # an empty list
    if given.dim() != 2 or given.shape[1] != 2:
        raise ValueError(
            f"pairs has shape {tuple(given.shape)}, expected (P, 2): an index into x and one into y for each "
            "pair; torch.stack([rows, columns], 1) makes it of two lists."
        )
    if given.dtype not in _INTEGERS:
        raise TypeError(f"pairs has dtype {given.dtype}, expected integers; convert it with pairs.long().")
    device = problem.x.device
    if given.device != device and given.device.type != "cpu":
        raise ValueError(
            f"pairs is on {given.device}, expected {device} (where the series are) or the CPU; move it with "
            f"pairs.to({str(device)!r})."
        )
    if can_be_read(given):
        _check_index_range(given, problem)
    if given.dtype == torch.int64:
        given = given.clamp(-1, 2**31 - 1)  # what does not fit is no index, and stays none
    # A copy in any case: backwards read it again, and would not notice that the user had changed it.
    return given.to(torch.int32, copy=True).to(device, non_blocking=True)


def _check_index_range(pairs: Tensor, problem: Problem) -> None:
    assert problem.y is not None
    for column, side, name in ((0, problem.x, "x"), (1, problem.y, "y")):
        index = pairs[:, column]
        outside = (index < 0) | (index >= side.shape[0])
        if outside.any():
            p = int(outside.nonzero()[0, 0])
            raise ValueError(
                f"pairs[{p}, {column}] is {int(index[p])}, expected an index from 0 to {side.shape[0] - 1} "
                f"into the {side.shape[0]} series of {name}."
            )


def _check_band_of_pairs(problem: Problem) -> None:
    """Raise where the band leaves a listed pair without a path, if the host has lengths and pairs."""
    given = [each for each in (problem.x_lengths, problem.y_lengths, problem.pairs) if each is not None]
    if problem.bandwidth < 0 or problem.batch == 0 or not all(can_be_read(each) for each in given):
        return
    assert problem.pairs is not None
    first, second = problem.pairs.long().unbind(1)
    rows = [problem.n] * problem.batch if problem.x_lengths is None else problem.x_lengths[first].tolist()
    columns = [problem.m] * problem.batch if problem.y_lengths is None else problem.y_lengths[second].tolist()
    _check_band(problem.bandwidth, rows, columns)


def check_memory_limit(memory_limit: object) -> int | None:
    """Bytes, or None."""
    if isinstance(memory_limit, float) and memory_limit.is_integer():  # 1e9 is how people write it
        memory_limit = int(memory_limit)
    return None if memory_limit is None else check_count("memory_limit", memory_limit)


def _with_lengths(
    problem: Problem, x_lengths: Lengths | None, y_lengths: Lengths | None, batched: bool
) -> Problem:
    """The problem with its lengths, each sample of which has a path inside the band."""
    batch, n, m = problem.batch, problem.n, problem.m
    x_rows = problem.x.shape[0]
    y_rows = batch if problem.y is None else problem.y.shape[0]
    device = problem.x.device
    x_given, x_host = check_lengths(x_lengths, "x_lengths", x_rows, batch, n, device, batched)
    y_given, y_host = check_lengths(y_lengths, "y_lengths", y_rows, batch, m, device, batched)
    _check_band(
        problem.bandwidth,
        x_host if x_given is not None else [n] * batch,
        y_host if y_given is not None else [m] * batch,
    )
    return problem._replace(x_lengths=x_given, y_lengths=y_given)


def check_host_indices(problem: Problem) -> None:
    """Raise for bad lengths and pairs on the CPU: compiled graphs meet their numbers only when they run."""
    if problem.x.device.type != "cpu":
        return
    if problem.pairs is not None:
        assert problem.y is not None
        _check_index_range(problem.pairs, problem)
        for lengths, name, side in (
            (problem.x_lengths, "x_lengths", problem.x),
            (problem.y_lengths, "y_lengths", problem.y),
        ):
            check_lengths(lengths, name, side.shape[0], side.shape[0], side.shape[1], side.device, True)
        _check_band_of_pairs(problem)
    elif not (problem.x_lengths is None and problem.y_lengths is None):
        _with_lengths(problem, problem.x_lengths, problem.y_lengths, batched=True)


def check_lengths(
    lengths: Lengths | None, name: str, rows: int, batch: int, size: int, device: torch.device, batched: bool
) -> tuple[Tensor | None, list[int] | None]:
    """Lengths as (batch,) int64 on `device`, and as a list unless the host would have to wait for a GPU.

    Args:
        rows: batch size of the tensor the lengths belong to, 1 where it is broadcast.
        size: its padded length.
    """
    if lengths is None:
        return None, None
    if isinstance(lengths, Tensor):
        given = _check_length_tensor(lengths, name, rows, batch, device, batched)
        if not can_be_read(lengths):
            if given.dtype != torch.int64 or given.device != device:
                # On its way to a GPU a copy in pageable memory, as below, even where the lengths are pinned.
                given = given.to(torch.int64, copy=given.device != device).to(device, non_blocking=True)
            return (given if given.shape[0] == batch else given.expand(batch)).contiguous(), None
        host = given.tolist()
    else:
        host = _check_length_list(lengths, name, rows, batch, batched)
    if host and not (min(host) >= 1 and max(host) <= size):
        sample = next(b for b, length in enumerate(host) if not 1 <= length <= size)
        raise ValueError(
            f"{name}[{sample}] is {host[sample]}, expected a length from 1 to {size}, the padded length; "
            "drop empty series, and pad the batch to its longest series."
        )
    if len(host) != batch:
        host = host * batch
    tensor = torch.tensor(host, dtype=torch.int64, device="cpu")
    if device.type != "cpu":
        # A fresh tensor in pageable memory: the driver has its copy when this returns, and nothing waits.
        tensor = tensor.to(device, non_blocking=True)
    return tensor, host


def _check_length_tensor(
    lengths: Tensor, name: str, rows: int, batch: int, device: torch.device, batched: bool
) -> Tensor:
    if lengths.dtype == torch.bool:
        raise _mask_error(name, lengths.dtype)
    if lengths.dtype not in _INTEGERS:
        raise TypeError(
            f"{name} has dtype {lengths.dtype}, expected an integer type; convert it with {name}.long()."
        )
    if lengths.device != device and lengths.device.type != "cpu":
        fix = f"move it with {name}.to({str(device)!r})"
        if lengths.device.type == "meta":
            fix = "a meta tensor has no numbers, so it cannot be moved: make it on the CPU"
        raise ValueError(
            f"{name} is on {lengths.device}, expected {device} (where the series are) or the CPU; {fix}."
        )
    given = lengths.reshape(1) if lengths.dim() == 0 and not batched else lengths
    if given.dim() != 1 or (given.shape[0] != batch and given.shape[0] != rows):
        raise _length_shape_error(name, tuple(lengths.shape), batch)
    return given


def _mask_error(name: str, dtype: object) -> TypeError:
    return TypeError(
        f"{name} has dtype {dtype}, expected integers; a mask of shape (batch, time) that is True inside the "
        "series gives lengths by mask.sum(1)."
    )


def _check_length_list(
    lengths: Sequence[int] | int, name: str, rows: int, batch: int, batched: bool
) -> list[int]:
    if str(getattr(lengths, "dtype", "")) == "bool":
        raise _mask_error(name, "bool")
    if not batched and isinstance(lengths, SupportsIndex) and not isinstance(lengths, bool):
        lengths = [operator.index(lengths)]
    try:
        given = list(lengths)  # type: ignore[arg-type]  # an int raises
        # A set has no order and a dict no numbers; a bool is a flag.
        if isinstance(lengths, (Set, Mapping)) or any(isinstance(length, bool) for length in given):
            raise TypeError
        host = [operator.index(length) for length in given]
    except TypeError:
        raise TypeError(
            f"{name} must be an integer tensor or a list of integers, got {lengths!r}; pass one length for "
            "each series, for example [20, 17, 31]."
        ) from None
    if len(host) != batch and len(host) != rows:  # `in` takes no symbolic sizes
        raise _length_shape_error(name, (len(host),), batch)
    return host


def _length_shape_error(name: str, shape: tuple[int, ...], batch: int) -> ValueError:
    return ValueError(
        f"{name} has shape {shape}, expected one length for each of the {batch} sample(s): shape ({batch},)."
    )


def _check_band(bandwidth: int, rows: list[int] | None, columns: list[int] | None) -> None:
    """Raise where the band leaves a sample without a path.

    rows and columns are the lengths of each sample; None where only the device knows them, and the kernel
    answers NaN for a sample without a path.
    """
    if bandwidth < 0 or rows is None or columns is None:
        return
    needed = [abs(n - m) for n, m in zip(rows, columns, strict=True)]
    if not needed or max(needed) <= bandwidth:
        return
    sample = next(b for b, radius in enumerate(needed) if radius > bandwidth)
    raise ValueError(
        f"bandwidth={bandwidth} leaves sample {sample} without a path: its lengths are {rows[sample]} and "
        f"{columns[sample]}, so the smallest radius that works for it is {needed[sample]}, and {max(needed)} "
        "works for the whole batch; pass that, or None for no band."
    )


def _check_band_of_all_pairs(
    bandwidth: int, rows: list[int] | None, columns: list[int] | None, names: tuple[str, str]
) -> None:
    """Raise where the band leaves some pair of a row and a column without a path."""
    if bandwidth < 0 or not rows or not columns:
        return
    short_x, long_x = min(rows), max(rows)
    short_y, long_y = min(columns), max(columns)
    needed = max(long_x - short_y, long_y - short_x)
    if needed <= bandwidth:
        return
    i, j = (long_x, short_y) if needed == long_x - short_y else (short_x, long_y)
    raise ValueError(
        f"bandwidth={bandwidth} leaves the pair {names[0]}[{rows.index(i)}], {names[1]}[{columns.index(j)}] "
        f"without a path: their lengths are {i} and {j}, and the smallest radius that works for all pairs is "
        f"{needed}; pass that, or None for no band."
    )


def _check_fused(fused: bool | None, metric: Metric, x: Tensor) -> bool:
    if fused is None:
        return metric.fused
    return check_fused(fused, metric, None if fused is False else kernel_missing(x.device.type))


def check_fused(fused: bool | None, metric: Metric, kernel_missing: str | None) -> bool:
    """Whether to take the fused path; an explicit True that cannot be had is an error."""
    if fused is None:
        return metric.fused
    if not check_flag("fused", fused):
        return False
    if not metric.fused:
        raise ValueError(
            f"fused=True is only possible for dist='sqeuclidean' and 'cosine', got dist={metric.name!r}; "
            "pass fused=None or fused=False to materialise the cost matrix."
        )
    if kernel_missing is not None:
        raise RuntimeError(
            f"fused=True is not possible here: {kernel_missing}; pass fused=None or fused=False."
        )
    return True


Omega = str | Tensor | tuple[Tensor, Tensor]
"""What is summed along an alignment: "position", a matrix, or features whose squared distances it is."""


def check_omega(omega: Omega, problem: Problem, batched: bool) -> Direction:
    """The direction that `omega` names or holds, for the pairs of a problem."""
    batch, n, m = problem.batch, problem.n, problem.m
    if isinstance(omega, str):
        if omega != "position":
            raise ValueError(
                f"omega is {omega!r}, expected 'position', a tensor (N, M) or (B, N, M), or a pair of "
                "feature tensors."
            )
        return Direction("position")
    if isinstance(omega, Tensor):
        matrix = _with_batch_axis("omega", omega, batch, batched, problem.x.device)
        if tuple(matrix.shape[1:]) != (n, m):
            raise ValueError(
                f"omega has shape {tuple(omega.shape)}, expected ({n}, {m}), one number for each pair of "
                f"time steps, or ({batch}, {n}, {m})."
            )
        return Direction("matrix", matrix)
    if not isinstance(omega, (tuple, list)) or len(omega) != 2:
        raise TypeError(
            f"omega must be 'position', a tensor, or a pair of feature tensors, got {type(omega).__name__}; "
            "pass for example omega=(features_of_x, features_of_y)."
        )
    first, second = (
        _with_batch_axis(f"omega[{k}]", side, batch, batched, problem.x.device)
        for k, side in enumerate(omega)
    )
    if first.dtype != second.dtype or first.shape[2] != second.shape[2]:
        raise ValueError(
            f"omega[0] has dtype {first.dtype} and {first.shape[2]} features, omega[1] {second.dtype} and "
            f"{second.shape[2]}, expected the same of both."
        )
    for k, side, size, name in ((0, first, n, "x"), (1, second, m, "y")):
        if side.shape[1] != size:
            raise ValueError(
                f"omega[{k}] has {side.shape[1]} time steps, expected {size}, as {name} has; pass features "
                f"of shape ({batch}, {size}, features)."
            )
    return Direction("features", first, second)


def _with_batch_axis(name: str, tensor: object, batch: int, batched: bool, device: torch.device) -> Tensor:
    """A float tensor of three dimensions, the first of which is 1 or the batch size."""
    _check_float_tensor(name, tensor)
    assert isinstance(tensor, Tensor)
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device}, expected {device}, where x and y are; move it with "
            f"{name}.to({str(device)!r})."
        )
    whole = tensor.unsqueeze(0) if tensor.dim() == 2 else tensor
    if whole.dim() != 3 or whole.shape[0] not in ((1, batch) if batched else (1,)):
        expected = f"2 dimensions, or 3 with batch size {batch}" if batched else "2 dimensions"
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}.")
    return whole


# What other libraries call an argument, or where they put it.

_MIGRATION = {
    "use_cuda": "leave it out: the tensors' device decides",
    "dist_func": "pass it as dist=",
    "verbose": "leave it out; softdtw_barycenter shows its progress, with progress=True",
    "device": "leave it out: the tensors' device decides",
    "n_jobs": "torch.set_num_threads sets the number of threads",
    "sakoe_chiba_radius": "pass it as bandwidth=",
    "lengths": "pass x_lengths= and y_lengths=",
}

_FORMER_NAMES = {"verbose": "progress"}
"""What the paper's library called an argument that has the same meaning here."""

P = ParamSpec("P")
R = TypeVar("R")


def explains_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Adds to Python's error for a wrong argument what other libraries' users have to change.

    A former name is taken for the present one, with a warning.
    """
    is_method = "self" in inspect.signature(function).parameters
    whole = "" if is_method else in_graph(function)

    @functools.wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if whole and torch.compiler.is_compiling():
                result: R = getattr(WHOLE, whole)(*args, **kwargs)
                return result
            return function(*args, **kwargs)
        except TypeError as error:
            # Raised by the call itself, not inside it.
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            known = inspect.signature(function).parameters.keys()
            unknown = kwargs.keys() - known
            for former, name in _FORMER_NAMES.items():
                if unknown == {former} and name in known and name not in kwargs:
                    warnings.warn(
                        f"{function.__name__}: {former}= is deprecated, pass {name}= instead.",
                        DeprecationWarning,
                        stacklevel=2,
                    )
                    return function(*args, **{name: kwargs.pop(former), **kwargs})  # type: ignore[arg-type]
            hints = [f"{name}: {_MIGRATION[name]}" for name in _MIGRATION if name in unknown]
            if re.search("positional arguments? but", str(error)):
                hints.append("options are passed by name, for example gamma=0.1")
            if not hints:
                raise
            raise TypeError(f"{error}; {'; '.join(hints)} (docs: migrating from other libraries).") from None

    return explained
