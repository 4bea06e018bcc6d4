"""Sets of series as users have them: tensors, NumPy arrays, memory maps, lists of unequal series."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ._lengths import Lengths

Array = np.ndarray[Any, Any]
Series = Tensor | Array | Sequence[Tensor] | Sequence[Array]
"""(K, N, D), or K series (N_k, D)."""

TensorOrArray = TypeVar("TensorOrArray", Tensor, Array)
"""Results come as the series did."""


def as_batch(name: str, series: Series, lengths: Lengths | None) -> tuple[Tensor, Lengths | None]:
    """A set as a padded tensor (K, N, D), and the lengths of its series.

    Nothing is copied unless series have to be padded; a memory map stays one. What is neither an array nor a
    list of series is returned as it is, for the checks that follow to name.
    """
    if isinstance(series, Tensor):
        return series, lengths
    if isinstance(series, np.ndarray) and series.dtype != object:
        return _as_tensor(name, series), lengths
    if not isinstance(series, (list, tuple, np.ndarray)) or len(series) == 0:
        return cast(Tensor, series), lengths
    each = list(series)
    if not all(isinstance(one, (Tensor, np.ndarray)) for one in each):
        return cast(Tensor, series), lengths
    if len({isinstance(one, Tensor) for one in each}) > 1:
        raise TypeError(f"{name} has tensors and arrays, expected one of them; results come back in kind.")
    if lengths is not None:
        raise ValueError(
            f"lengths of {name} are given, but {name} is a list, whose series have theirs; leave them out."
        )
    first = each[0]
    for k, one in enumerate(each):
        if one.ndim != 2 or one.shape[1] != first.shape[-1] or one.shape[0] == 0:
            features = first.shape[1] if first.ndim == 2 else "features"
            raise ValueError(
                f"{name}[{k}] has shape {tuple(one.shape)}, expected (time, {features}): at least one time "
                "step, and as many features in each series; make a univariate series with reshape(-1, 1)."
            )
        if one.dtype != first.dtype or (isinstance(one, Tensor) and one.device != first.device):
            raise TypeError(
                f"{name}[{k}] has dtype {one.dtype}, expected {first.dtype}, and the device, of {name}[0]; "
                "convert the series to one type on one device."
            )
    tensors = [one if isinstance(one, Tensor) else _as_tensor(f"{name}[0]", one) for one in each]
    sizes = [one.shape[0] for one in tensors]
    if min(sizes) == max(sizes):
        return torch.stack(tensors), None
    return pad_sequence(tensors, batch_first=True), sizes


def _as_tensor(name: str, array: Array) -> Tensor:
    """The same memory as a tensor, or a copy where torch has no such layout."""
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise TypeError(
            f"{name} has dtype {array.dtype}, expected float64, float32 or float16; convert it with "
            f"{name}.astype(numpy.float32)."
        )
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        array = array.astype(array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        # Read-only memory, as memory maps often are: these tensors are only read.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(array)


def in_kind(result: Tensor, series: object, home: torch.device) -> Any:
    """A result as the `series` it belongs to came: an array, or a tensor on `home`, where they were."""
    first = series[0] if isinstance(series, (list, tuple)) and len(series) > 0 else series
    return result.numpy(force=True) if isinstance(first, np.ndarray) else result.to(home)


def blocks_on(device: torch.device, series: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """The series, `size` at a time, on a device, with their place in the set.

    Those of a set on the host go to a GPU through two buffers of pinned memory on a stream of their own: the
    next block is copied while the GPU works on what the consumer launched for this one. A block is valid
    until the next one is asked for.
    """
    count = series.shape[0]
    ranges = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    if series.device == device or device.type != "cuda":
        for each in ranges:
            yield each, series[each].to(device)
        return
    shape, used = (min(size, count), *series.shape[1:]), min(2, len(ranges))
    pinned = [torch.empty(shape, dtype=series.dtype, device="cpu", pin_memory=True) for _ in range(used)]
    arrived = [torch.empty(shape, dtype=series.dtype, device=device) for _ in range(used)]
    copies, work = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    copies.wait_stream(work)  # the memory may have been another's on that stream
    finished = [torch.cuda.Event() for _ in range(used)]
    for k, each in enumerate(ranges):
        length, turn = each.stop - each.start, k % 2
        if k >= 2:
            finished[turn].synchronize()  # with the block before the last, whose buffers these are
        pinned[turn][:length].copy_(series[each])
        with torch.cuda.stream(copies):
            arrived[turn][:length].copy_(pinned[turn][:length], non_blocking=True)
        work.wait_stream(copies)
        yield each, arrived[turn][:length]
        finished[turn].record(work)
