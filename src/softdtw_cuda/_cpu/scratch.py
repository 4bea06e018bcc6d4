"""Scratch memory of the CPU kernels: how much a worker needs, part by part, kept from call to call."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from .arguments import Array, Border, Directions, DualLines, DualShares, GradientMemory, Memory

Loan = TypeVar("Loan")
"""An array, or a tuple of parts of one."""

LARGEST_KEPT_BYTES = 16 << 20

_scratch: dict[Hashable, list[Any]] = {}


class Needs(NamedTuple):
    """What the memory of a worker depends on; `features` is the larger number of series and direction."""

    edge: int
    lanes: int
    features: int
    backward: bool
    dual: bool
    float_type: type
    int_type: type


class _Integers(int):
    """A number of integers; plain numbers are numbers of floats."""


def sizes_of(needs: Needs) -> Memory:
    """Elements of each part of a worker's memory: here, and nowhere else.

    Vectors are read and written whole, at a tile's margins too: `rows` has a vector more in each row, and
    `lanes` rows above and three times as many below the tile; of the anti-diagonals of walks and sweeps each
    has a vector before its cells and two after them.
    """
    edge, lanes = needs.edge, needs.lanes
    square = (edge + 4 * lanes) * (edge + lanes)
    diagonals = (2 * edge + 3 * lanes) * (edge + lanes)
    three_diagonals = 3 * (edge + 3 * lanes)
    four_copies = 4 * edge * -(-needs.features // lanes) * lanes
    # Factors of what only some kernels use.
    dual, backward = int(needs.dual), int(needs.backward)
    dual_backward = dual * backward
    return Memory(
        rows=square,
        slope_rows=dual_backward * square,
        diagonals=diagonals,
        changes=dual * diagonals,
        kept=DualShares(
            Directions(*[backward * diagonals] * 3),
            above=dual_backward * diagonals,
            beside=dual_backward * diagonals,
        ),
        lines=DualLines(
            f=three_diagonals,
            n=_Integers(three_diagonals),
            u=dual * three_diagonals,
            v=dual * three_diagonals,
            total=dual * three_diagonals,
        ),
        weight_lines=Directions(*[backward * three_diagonals] * 3),
        slope_lines=Directions(*[dual_backward * three_diagonals] * 3),
        inflow=Border(*[backward * edge] * 2),
        slope_inflow=Border(*[dual_backward * edge] * 2),
        gradients=GradientMemory(
            rows=backward * max((edge + 1) * lanes, four_copies),
            occupied=_Integers(backward * 2 * (edge // 4) ** 2),
        ),
    )


def allocate(needs: Needs) -> Memory:
    """Memory of one worker: the parts one after the other in one block of floats and one of integers."""
    sizes = sizes_of(needs)

    def total(part: Any, kind: type) -> Any:
        if isinstance(part, tuple):
            return sum(total(each, kind) for each in part)
        return part if type(part) is kind else 0

    element_types = ((int, needs.float_type), (_Integers, needs.int_type))
    rest = {kind: aligned(total(sizes, kind), element) for kind, element in element_types}

    def take(part: Any) -> Any:
        if isinstance(part, tuple):
            return type(part)(*(take(each) for each in part))
        kind = type(part)
        array, rest[kind] = rest[kind][:part], rest[kind][part:]
        return array

    memory: Memory = take(sizes)
    return memory


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


def borrow_memory(needs: Needs, workers: int) -> list[Memory]:
    """Memory for so many workers, for `give_back(needs, ...)`."""
    return _borrow(needs, workers, lambda: allocate(needs))


def borrow_array(size: int, dtype: type) -> list[Array]:
    """One array, for `give_back((size, dtype), ...)`."""
    return _borrow((size, dtype), 1, lambda: aligned(size, dtype))


def _borrow(kind: Hashable, count: int, make: Callable[[], Loan]) -> list[Loan]:
    """``count`` of a kind, from a small store where it has any: fresh pages cost more than small problems.

    They go back with `give_back` when the work has succeeded. After an exception they do not, lest a thread
    that still writes to one meets the next call in it.
    """
    store = _scratch.get(kind, [])
    loans = []
    for _ in range(count):
        try:
            loans.append(store.pop())
        except IndexError:
            loans.append(make())
    return loans


def give_back(kind: Hashable, loans: Sequence[Any]) -> None:
    """Keep what was borrowed for the next call, unless it is large or there is enough already."""
    if len(_scratch) > 16:
        _scratch.clear()
    store = _scratch.setdefault(kind, [])
    for loan in loans:
        block = (loan[0] if isinstance(loan, tuple) else loan).base
        if len(store) < 2 * torch.get_num_threads() and block.nbytes < LARGEST_KEPT_BYTES:
            store.append(loan)
