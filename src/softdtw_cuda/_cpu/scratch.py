"""Scratch memory of the CPU kernels, kept from call to call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Array = Any

LARGEST_KEPT_BYTES = 16 << 20

_scratch: dict[tuple[type, int], list[Array]] = {}


def aligned(size: int, dtype: type) -> Array:
    """An array on a cache line's boundary: vectors that straddle two lines cost twice as much."""
    raw = np.empty(size * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * np.dtype(dtype).itemsize].view(dtype)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in NumPy's memory, which comes in huge pages on Linux.

    What is read or written for the first time costs less there: 33 MB of zeros take 4 ms, 22 ms in torch's.
    """
    made = torch.from_numpy(aligned(math.prod(shape) * dtype.itemsize, np.uint8))
    return made.view(dtype).view(*shape)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros, written by this thread: torch.zeros would wait for threads that a forked child does not have."""
    made = empty(shape, dtype)
    made.numpy().fill(0)
    return made


def borrow(count: int, size: int, dtype: type) -> list[Array]:
    """``count`` arrays, from a small store where it has any: fresh pages cost more than small problems.

    They go back with `give_back` when the work has succeeded. After an exception they do not, lest a thread
    that still writes to one meets the next call in it.
    """
    store = _scratch.get((dtype, size), [])
    arrays = []
    for _ in range(count):
        try:
            arrays.append(store.pop())
        except IndexError:
            arrays.append(aligned(size, dtype))
    return arrays


def give_back(arrays: list[Array], size: int, dtype: type) -> None:
    """Keep what was borrowed for the next call, unless it is large or there is enough already."""
    if len(_scratch) > 16:
        _scratch.clear()
    store = _scratch.setdefault((dtype, size), [])
    for array in arrays:
        if len(store) < 2 * torch.get_num_threads() and array.nbytes < LARGEST_KEPT_BYTES:
            store.append(array)
