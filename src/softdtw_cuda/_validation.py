"""Arguments, checked in one voice: which argument, what came, what was expected, how to fix it.

The result is a Problem; nothing after it checks again. The checks run on every call, so the good case is a
handful of comparisons; messages are built only on failure. `_options` and `_lengths` have those of the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ._distances import FLOATS, DistanceFunction
from ._lengths import INTEGERS, Lengths, check_band, check_band_of_all_pairs, check_lengths
from ._options import check_bandwidth, check_fused, check_gamma, check_metric
from ._problem import Direction, Problem
from ._torch_compat import can_be_read, host_numbers


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
    use_fused = check_fused(fused, metric, x)
    problem = Problem(x, y, None, None, gamma, radius, metric=metric, fused=use_fused)
    if x_lengths is None and y_lengths is None and radius < 0:
        return problem, batched
    return _with_lengths(problem, x_lengths, y_lengths, batched), batched


def check_cost(
    cost: Tensor, gamma: float, bandwidth: int | None, x_lengths: Lengths | None, y_lengths: Lengths | None
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


LENGTHS_OF = {
    "x": "x_lengths",
    "y": "y_lengths",
    "queries": "query_lengths",
    "database": "database_lengths",
    "barycenter": "length",
    "X": "lengths",
}


def check_all_pairs(
    x: Tensor,
    y: Tensor | None,
    gamma: float,
    bandwidth: int | None,
    dist: str | DistanceFunction,
    fused: bool | None,
    x_lengths: Lengths | None,
    y_lengths: Lengths | None,
    names: tuple[str, str] = ("x", "y"),
    streamed: bool = False,
) -> Problem:
    """The problem whose pairs are all of x (K, N, D) with all of y (L, M, D); lengths are (K,) and (L,).

    Args:
        y: None compares x with itself.
        names: those of the arguments.
        streamed: y is on another device, and checked already.
    """
    if y is None:
        if y_lengths is not None:
            raise ValueError(
                "y_lengths is given but y is not, so x is compared with itself; leave it out, x_lengths is "
                "enough."
            )
        y, y_lengths = x, x_lengths
    gamma = check_gamma(gamma)
    radius = check_bandwidth(bandwidth)
    metric = check_metric(dist)
    if not streamed:
        x, y, _ = _check_pair(x, y, all_pairs=True, names=names)
    use_fused = check_fused(fused, metric, x)
    checked = [
        check_lengths(given, LENGTHS_OF[name], side.shape[0], side.shape[0], side.shape[1], x.device, True)
        for side, given, name in zip((x, y), (x_lengths, y_lengths), names, strict=True)
    ]
    (x_rows, x_host), (y_rows, y_host) = checked
    check_band_of_all_pairs(
        radius,
        x_host if x_rows is not None else [x.shape[1]],
        y_host if y_rows is not None else [y.shape[1]],
        names,
    )
    return Problem(x, y, x_rows, y_rows, gamma, radius, metric=metric, fused=use_fused)


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
    names = ("queries", "database")
    on_host = isinstance(database, Tensor) and database.device.type == "cpu" and database.dim() > 0
    streamed = on_host and isinstance(queries, Tensor) and queries.device.type == "cuda"
    if streamed:
        _check_pair(queries, database[:0].to(queries.device), True, names)
    options, lengths = (gamma, bandwidth, dist, fused), (query_lengths, database_lengths)
    return check_all_pairs(queries, database, *options, *lengths, names, streamed)


def check_pairs(
    x: Tensor,
    y: Tensor | None,
    pairs: Tensor | Sequence[Sequence[int]],
    gamma: float,
    bandwidth: int | None,
    dist: str | DistanceFunction,
    fused: bool | None,
    x_lengths: Lengths | None,
    y_lengths: Lengths | None,
) -> Problem:
    """The problem of the listed pairs of x (K, N, D) and y (L, M, D), or x where y is None; lengths are (K,)
    and (L,)."""
    # The band is checked for the listed pairs alone.
    problem = check_all_pairs(x, y, gamma, None, dist, fused, x_lengths, y_lengths)
    problem = problem._replace(bandwidth=check_bandwidth(bandwidth))
    problem = problem._replace(pairs=_check_indices(pairs, problem))
    _check_band_of_pairs(problem)
    return problem


def _check_indices(pairs: object, problem: Problem) -> Tensor:
    """pairs as (P, 2) int32 on the device of x; checked unless the host would have to wait for a GPU."""
    if isinstance(pairs, np.ndarray):
        pairs = np.ascontiguousarray(pairs)  # torch has no negative strides
    try:
        given = pairs if isinstance(pairs, Tensor) else torch.as_tensor(pairs, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(pairs, (list, tuple)) and any(isinstance(each, Tensor) for each in pairs):
            raise TypeError(
                f"pairs is a {type(pairs).__name__} of tensors, expected one tensor (P, 2), or a list of "
                "integers; torch.stack makes it one."
            ) from None
        raise TypeError(
            f"pairs must be a (P, 2) tensor or list of integers, got {type(pairs).__name__} that torch "
            f"cannot read ({error}); pass for example [[0, 3], [1, 2]]."
        ) from None
    if given.numel() == 0 and given.dim() == 1:
        given = given.new_empty((0, 2), dtype=torch.int64)  # an empty list
    if given.dim() != 2 or given.shape[1] != 2:
        raise ValueError(
            f"pairs has shape {tuple(given.shape)}, expected (P, 2): an index into x and one into y for each "
            "pair; torch.stack([rows, columns], 1) makes it of two lists."
        )
    if given.dtype not in INTEGERS:
        raise TypeError(f"pairs has dtype {given.dtype}, expected integers; convert it with pairs.long().")
    device = problem.x.device
    if given.device != device and given.device.type != "cpu":
        raise ValueError(
            f"pairs is on {given.device}, expected {device} (where the series are) or the CPU; move it with "
            f"pairs.to({str(device)!r})."
        )
    _check_index_range(given, problem)
    if given.dtype == torch.int64:
        given = given.clamp(-1, 2**31 - 1)  # what does not fit is no index, and stays none
    # A copy in any case: backwards read it again, and would not notice that the user had changed it.
    return given.to(torch.int32, copy=True).to(device, non_blocking=True)


def _check_index_range(pairs: Tensor, problem: Problem) -> None:
    """Raise for an index that no series has, if the host has the numbers."""
    assert problem.y is not None
    for column, side, name in ((0, problem.x, "x"), (1, problem.y, "y")):
        index = host_numbers(pairs[:, column])
        if index is None:
            return
        outside = (index < 0) | (index >= side.shape[0])
        if outside.any():
            found = outside.nonzero()[0]
            # Of indices that a transform maps the numbers of all maps are here, not in the order of any list.
            place = f"pairs[{int(found[0])}, {column}]" if can_be_read(pairs) else f"pairs[..., {column}]"
            series = f"an index from 0 to {side.shape[0] - 1} into the {side.shape[0]} series of {name}"
            if side.shape[0] == 0:
                series = f"no pairs, since {name} has no series"
            raise ValueError(f"{place} is {int(index[tuple(found)])}, expected {series}.")


def _check_band_of_pairs(problem: Problem) -> None:
    """Raise where the band leaves a listed pair without a path, if the host has lengths and pairs."""
    given = [each for each in (problem.x_lengths, problem.y_lengths, problem.pairs) if each is not None]
    if problem.bandwidth < 0 or problem.batch == 0 or not all(can_be_read(each) for each in given):
        return
    assert problem.pairs is not None
    first, second = problem.pairs.long().unbind(1)
    rows = [problem.n] * problem.batch if problem.x_lengths is None else problem.x_lengths[first].tolist()
    columns = [problem.m] * problem.batch if problem.y_lengths is None else problem.y_lengths[second].tolist()
    check_band(problem.bandwidth, rows, columns)


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
    check_band(
        problem.bandwidth,
        x_host if x_given is not None else [n] * batch,
        y_host if y_given is not None else [m] * batch,
    )
    return problem._replace(x_lengths=x_given, y_lengths=y_given)


def check_operands(problem: Problem, direction: Direction | None = None) -> None:
    """Raise for operands that kernels cannot read: operators can be called by hand, and compiled graphs meet
    the numbers of lengths and pairs only when they run."""
    x, y, pairs = problem.x, problem.y, problem.pairs
    fit = x.dim() == 3 and x.dtype in FLOATS and 0 not in x.shape[1:]
    if fit and y is not None:
        fit = y.dim() == 3 and y.shape[1] > 0 and y.shape[2] == x.shape[2]
        fit = fit and (y.dtype, y.device) == (x.dtype, x.device)
    if fit and pairs is not None:
        fit = y is not None and pairs.dim() == 2 and pairs.shape[1] == 2 and pairs.dtype in INTEGERS
    elif fit:
        fit = all(side is None or side.shape[0] in (1, problem.batch) for side in (x, y))
    if not fit or (direction is not None and not _is_direction_of(problem, direction)):
        given = (x, y, pairs) if direction is None else (x, y, pairs, direction.a, direction.b)
        shown = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in given if each is not None)
        raise ValueError(
            f"softdtw_cuda: an operator got {shown}, expected the operands of a Problem; call softdtw, "
            "softdtw_pairs or softdtw_from_cost, which say what is wrong."
        )
    check_host_indices(problem)


def _is_direction_of(problem: Problem, direction: Direction) -> bool:
    """Whether a direction has the shapes that its kind has for this problem."""
    n, m, d = problem.n, problem.m, problem.x.shape[2]
    a, b = direction.a, direction.b
    tails: dict[str, tuple[tuple[int, int] | None, tuple[int, int] | None]] = {
        "position": (None, None),
        "matrix": ((n, m), None),
        "tangents": (None if a is None else (n, d), None if b is None else (m, d)),
        "features": ((n, 0 if b is None else b.shape[-1]), (m, 0 if a is None else a.shape[-1])),
    }

    def fits(side: Tensor | None, tail: tuple[int, int] | None) -> bool:
        if side is None or tail is None:
            return side is None and tail is None
        return side.dim() == 3 and side.shape[0] in (1, problem.batch) and tuple(side.shape[1:]) == tail

    if direction.kind not in tails or (direction.kind == "tangents" and problem.y is None):
        return False
    return all(fits(side, tail) for side, tail in zip((a, b), tails[direction.kind], strict=True))


def check_host_indices(problem: Problem) -> None:
    """Raise for bad lengths and pairs on the CPU, whose kernels read where these say."""
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
    elif not (problem.x_lengths is None and problem.y_lengths is None and problem.bandwidth < 0):
        _with_lengths(problem, problem.x_lengths, problem.y_lengths, batched=True)


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
