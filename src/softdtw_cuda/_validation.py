"""Arguments, checked in one voice: which argument, what came, what was expected, how to mend it.

The checks run on every call, so the good case is a handful of comparisons; messages are built only on
failure.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence, Set
from typing import SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from ._distances import METRICS, DistanceFunction, Metric

Lengths = Tensor | Sequence[int] | int
"""Per-sample lengths as a user may pass them; a plain int only for unbatched input."""

_FLOATS = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))
LARGEST_RADIUS = 2**31 - 1
"""No series is longer, so this is no band at all; beyond it sums of indices could overflow."""
_INTEGERS = frozenset((torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8))


def check_gamma(gamma: SupportsFloat) -> float:
    """gamma as a positive, finite Python float."""
    if type(gamma) is not float:
        if isinstance(gamma, bool) or not isinstance(gamma, numbers.Real):
            raise TypeError(
                f"gamma must be a real number, got {type(gamma).__name__}; pass a Python float such as "
                "gamma=1.0 (for a tensor, gamma.item())."
            )
        try:
            gamma = float(gamma)
        except OverflowError:  # an integer beyond every float
            gamma = math.inf
    if not 0.0 < gamma < math.inf:
        raise ValueError(
            f"gamma must be a finite number greater than 0, got {gamma}; small values such as 0.01 come "
            "close to DTW, for DTW itself (gamma = 0) there is no gradient."
        )
    return gamma


def check_bandwidth(bandwidth: SupportsIndex | float | None) -> int:
    """bandwidth as an int that kernels can add to an index; -1 for None."""
    if bandwidth is None:
        return -1
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
    """A bool, Python's or NumPy's."""
    if value is True or value is False:
        return value
    if str(getattr(value, "dtype", "")) == "bool" and getattr(value, "ndim", None) == 0:
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}; pass a bool.")


def check_count(name: str, value: object) -> int:
    """An integer of at least 1."""
    try:
        if isinstance(value, (bool, Tensor)):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]  # what is no integer raises
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}; pass a whole number from 1 on.") from None
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}.")
    return count


def check_real(name: str, value: object, positive: bool) -> float:
    """A finite number of at least 0, or greater if it has to be positive."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {value!r}; pass a Python float.")
    number = float(value)
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
        name = getattr(dist, "__name__", type(dist).__name__)
        return Metric(name, dist, fused=False, is_named=False)
    raise TypeError(
        f"dist must be a string or a callable (x, y) -> (B, N, M), got {type(dist).__name__}; "
        "pass for example dist='sqeuclidean'."
    )


def _check_float_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it with "
            f"torch.as_tensor({name})."
        )
    if tensor.dtype not in _FLOATS:
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
    if torch.float64 in (x.dtype, y.dtype) or not torch.is_autocast_enabled(x.device.type):
        return None
    return x.float(), y.float()


def _are_dense(*tensors: object) -> bool:
    return all(
        isinstance(each, Tensor) and each.layout is torch.strided and not each.is_nested for each in tensors
    )


def check_pair(x: Tensor, y: Tensor, all_pairs: bool = False) -> tuple[Tensor, Tensor, bool]:
    """x (Bx, N, D) and y (By, M, D), and whether they came batched; for all_pairs batch sizes are free."""
    x_dim, y_dim = (x.dim(), y.dim()) if _are_dense(x, y) else (0, 0)
    if x_dim == 3 and y_dim == 3:
        batched = True
    elif x_dim == 2 and y_dim == 2:
        x, y, batched = x.unsqueeze(0), y.unsqueeze(0), False
    else:
        _check_float_tensor("x", x)
        _check_float_tensor("y", y)
        raise ValueError(
            f"x and y must both have 3 dimensions (batch, time, features) or both 2 (time, features), got "
            f"shapes {tuple(x.shape)} and {tuple(y.shape)}; add a missing feature axis with x.unsqueeze(-1), "
            "a missing batch axis with x.unsqueeze(0)."
        )
    x_dtype, y_dtype = x.dtype, y.dtype
    if x_dtype not in _FLOATS or y_dtype not in _FLOATS:
        _check_float_tensor("x", x)
        _check_float_tensor("y", y)
    if x.device != y.device:
        raise ValueError(
            f"x is on {x.device} and y on {y.device}, expected one device for both; move one with "
            "y.to(x.device)."
        )
    if x_dtype is not y_dtype:
        pair = _autocast_pair(x, y)
        if pair is None:
            raise TypeError(
                f"x has dtype {x_dtype} and y {y_dtype}, expected one dtype for both; convert one with "
                "y.to(x.dtype)."
            )
        x, y = pair
    x_batch, n, d = x.shape
    y_batch, m, y_d = y.shape
    if d != y_d:
        raise ValueError(
            f"x has {d} features and y has {y_d} (shapes {tuple(x.shape)} and {tuple(y.shape)}), expected "
            "the same number in the last dimension; series of time x features must not be transposed."
        )
    if x_batch != y_batch and x_batch != 1 and y_batch != 1 and not all_pairs:
        raise ValueError(
            f"x has batch size {x_batch} and y {y_batch}, expected equal batch sizes, or 1 for one of them; "
            "for all pairs use softdtw_cdist."
        )
    if n == 0 or m == 0 or d == 0:
        name, shape = ("x", x.shape) if n == 0 or d == 0 else ("y", y.shape)
        raise ValueError(
            f"{name} has shape {tuple(shape)}, expected at least one time step and one feature; drop empty "
            "series before the call."
        )
    return x, y, batched


def check_cost(cost: Tensor, name: str = "cost") -> tuple[Tensor, bool]:
    """cost (B, N, M) and whether it came batched."""
    _check_float_tensor(name, cost)
    dim = cost.dim()
    if dim not in (2, 3):
        raise ValueError(
            f"{name} must have shape (batch, N, M) or (N, M), got {tuple(cost.shape)}; add a batch axis with "
            f"{name}.unsqueeze(0)."
        )
    if cost.shape[-1] == 0 or cost.shape[-2] == 0:
        raise ValueError(
            f"{name} has shape {tuple(cost.shape)}, expected N and M to be at least 1; drop empty series "
            "before the call."
        )
    return (cost, True) if dim == 3 else (cost.unsqueeze(0), False)


def check_callable_cost(cost: object, batch: int, x: Tensor, y: Tensor, name: str) -> Tensor:
    """What a user's distance returned, if it is a cost matrix for x and y."""
    if not isinstance(cost, Tensor):
        raise TypeError(
            f"dist {name} returned {type(cost).__name__}, expected a torch.Tensor of shape (B, N, M)."
        )
    expected = (batch, x.shape[1], y.shape[1])
    if tuple(cost.shape) != expected:
        raise ValueError(
            f"dist {name} returned shape {tuple(cost.shape)} for x {tuple(x.shape)} and y {tuple(y.shape)}, "
            f"expected (B, N, M) = {expected}: one cost for each pair of time steps."
        )
    if cost.dtype not in _FLOATS:
        raise TypeError(
            f"dist {name} returned dtype {cost.dtype}, expected a float type; let it return costs.float()."
        )
    if cost.device != x.device:
        raise ValueError(
            f"dist {name} returned a tensor on {cost.device}, expected {x.device}, where x and y are."
        )
    return cost


def check_lengths(
    lengths: Lengths | None, name: str, rows: int, batch: int, size: int, device: torch.device, batched: bool
) -> tuple[Tensor | None, list[int] | None]:
    """Lengths as (batch,) int32 on `device`, and as a list unless the host would have to wait for a GPU.

    Args:
        rows: batch size of the tensor the lengths belong to, 1 where it is broadcast.
        size: its padded length.
    """
    if lengths is None:
        return None, None
    if isinstance(lengths, Tensor):
        given = _check_length_tensor(lengths, name, rows, batch, device, batched)
        if not _can_be_read(lengths):
            return _narrow(given, device).expand(batch).contiguous(), None
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
    tensor = torch.tensor(host, dtype=torch.int32, device="cpu")
    if device.type != "cpu":
        # A fresh tensor in pageable memory: the driver has its copy when this returns, and nothing waits.
        tensor = tensor.to(device, non_blocking=True)
    return tensor, host


def _can_be_read(lengths: Tensor) -> bool:
    """Whether the host has the numbers: not on a GPU, nor while torch traces."""
    return (
        lengths.device.type == "cpu"
        and type(lengths).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not torch.compiler.is_compiling()
    )


def _narrow(lengths: Tensor, device: torch.device) -> Tensor:
    """As int32 on `device`; what does not fit is no length, and stays none."""
    if lengths.dtype == torch.int64:
        lengths = lengths.clamp(-1, 2**31 - 1)
    # On its way to a GPU a copy in pageable memory, as above, even where the lengths are pinned.
    return lengths.to(torch.int32, copy=lengths.device != device).to(device, non_blocking=True)


def _check_length_tensor(
    lengths: Tensor, name: str, rows: int, batch: int, device: torch.device, batched: bool
) -> Tensor:
    if lengths.dtype not in _INTEGERS:
        raise TypeError(
            f"{name} has dtype {lengths.dtype}, expected an integer type; convert it with {name}.long()."
        )
    if lengths.device != device and lengths.device.type != "cpu":
        raise ValueError(
            f"{name} is on {lengths.device}, expected {device} (where the series are) or the CPU; move it "
            f"with {name}.to({str(device)!r})."
        )
    given = lengths.reshape(1) if lengths.dim() == 0 and not batched else lengths
    if given.dim() != 1 or given.shape[0] not in (batch, rows):
        raise _length_shape_error(name, tuple(lengths.shape), batch)
    return given


def _check_length_list(
    lengths: Sequence[int] | int, name: str, rows: int, batch: int, batched: bool
) -> list[int]:
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
    if len(host) not in (batch, rows):
        raise _length_shape_error(name, (len(host),), batch)
    return host


def _length_shape_error(name: str, shape: tuple[int, ...], batch: int) -> ValueError:
    return ValueError(
        f"{name} has shape {shape}, expected one length for each of the {batch} sample(s): shape ({batch},)."
    )


def check_band(bandwidth: int, rows: list[int] | None, columns: list[int] | None) -> None:
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


def check_band_of_all_pairs(bandwidth: int, rows: list[int] | None, columns: list[int] | None) -> None:
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
        f"bandwidth={bandwidth} leaves the pair x[{rows.index(i)}], y[{columns.index(j)}] without a path: "
        f"their lengths are {i} and {j}, and the smallest radius that works for all pairs is {needed}; pass "
        "that, or None for no band."
    )


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
