"""The pairs of a problem as the CPU kernels see them: flat arrays, offsets, lengths, and tiles."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._problem import Problem
from .._validation import check_host_indices
from .arguments import UNBANDED, Array, Series, Tiles
from .config import saved_columns, tile_edge, tile_radius
from .vectors import VECTOR_BYTES


@functools.lru_cache(maxsize=256)
def _tiles(n: int, m: int, bandwidth: int) -> Tiles:
    edge = int(tile_edge(n, m))
    bandwidth = min(bandwidth, n + m)  # all that it can mean; indices are added to it
    rows, columns = -(-n // edge), -(-m // edge)
    radius = rows + columns if bandwidth < 0 else tile_radius(bandwidth, edge)
    kept = int(saved_columns(m, bandwidth, edge))
    cells = n * (m if bandwidth < 0 else min(m, 2 * bandwidth + 1))
    return Tiles(edge, radius, rows, columns, kept, UNBANDED if bandwidth < 0 else bandwidth, cells)


@functools.lru_cache(maxsize=64)
def order_of_tiles(
    rows: int, columns: int, radius: int, by_diagonal: bool, reverse: bool
) -> tuple[Array, Array]:
    """Rows and columns of the tiles in the band, every tile after those that it waits for."""
    every = np.arange(rows, dtype=np.int64)
    first, stop = np.maximum(every - radius, 0), np.minimum(every + radius + 1, columns)
    widths = np.maximum(stop - first, 0)
    row = np.repeat(every, widths)
    column = np.arange(row.size) - np.repeat(np.cumsum(widths) - widths - first, widths)
    if by_diagonal:
        order = np.argsort(row + column, kind="stable")
        row, column = row[order], column[order]
    if reverse:
        row, column = row[::-1], column[::-1]
    return np.ascontiguousarray(row), np.ascontiguousarray(column)


def _flat(tensor: Tensor) -> tuple[Array, int]:
    """The tensor's memory as a flat array, and the distance between its series."""
    count, rows, columns = tensor.shape
    if tensor.is_contiguous():
        return tensor.detach().numpy().reshape(-1), rows * columns
    if tensor.stride(2) != 1 or tensor.stride(1) != columns or tensor.stride(0) < 0:
        tensor = tensor.contiguous()
    stride = tensor.stride(0)
    flat = torch.as_strided(tensor.detach(), ((count - 1) * stride + rows * columns,), (1,))
    return flat.numpy(), stride


# Arrays that are the same from call to call are kept. Kernels do not write to them.


@functools.lru_cache(maxsize=64)
def _equal_steps(pairs: int, step: int) -> Array:
    return np.arange(pairs, dtype=np.int64) * step


@functools.lru_cache(maxsize=64)
def _full_lengths(pairs: int, full: int) -> Array:
    return np.full(pairs, full, np.int64)


def _offsets(count: int, stride: int, indices: Array | None, pairs: int) -> Array:
    """First element of each pair's series: by its index, or in order, or one series for all."""
    if indices is not None:
        return indices * stride
    return _equal_steps(pairs, 0 if count == 1 else stride)


def _lengths(lengths: Tensor | None, indices: Array | None, pairs: int, full: int) -> Array:
    """Length of each pair's series."""
    if lengths is None:
        return _full_lengths(pairs, full)
    known: Array = lengths.detach().to(torch.int64).contiguous().numpy()
    return known if indices is None else known[indices]


def _are_below(numbers: Array, count: int) -> bool:
    """Whether all of these int64 are from 0 to count - 1. Unsigned, negative ones are the largest."""
    return numbers.size == 0 or bool(numbers.view(np.uint64).max() < count)


def _checked_lengths(
    problem: Problem, x_indices: Array | None, y_indices: Array | None
) -> tuple[Array, Array]:
    """Length of each pair's series. Raises for numbers by which kernels would read what is not theirs.

    Whatever route the problem took: those of mapped lengths, for example, nobody has seen before.
    """
    pairs, n, m = problem.batch, problem.n, problem.m
    fit = True
    if x_indices is not None and y_indices is not None and problem.y is not None:
        fit = _are_below(x_indices, problem.x.shape[0]) and _are_below(y_indices, problem.y.shape[0])
    if fit:
        x_lengths = _lengths(problem.x_lengths, x_indices, pairs, n)
        y_lengths = _lengths(problem.y_lengths, y_indices, pairs, m)
        fit = x_lengths.size == y_lengths.size == pairs
        fit = fit and (problem.x_lengths is None or _are_below(x_lengths - 1, n))
        fit = fit and (problem.y_lengths is None or _are_below(y_lengths - 1, m))
        if fit and problem.bandwidth >= 0:
            fit = bool(np.abs(x_lengths - y_lengths).max(initial=0) <= problem.bandwidth)
    if not fit:
        check_host_indices(problem)
        raise ValueError("softdtw_cuda: lengths are not those of the pairs, expected one for each series.")
    return x_lengths, y_lengths


class Arrays(NamedTuple):
    """The pairs of a problem, and how their matrices are cut up."""

    series: Series
    tiles: Tiles
    dtype: torch.dtype

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        count: int = self.series.x_lengths.size
        return count

    @property
    def float_type(self) -> type:
        return np.float64 if self.dtype == torch.float64 else np.float32

    @property
    def int_type(self) -> type:
        return np.int64 if self.dtype == torch.float64 else np.int32

    @property
    def lanes(self) -> int:
        return VECTOR_BYTES // (8 if self.dtype == torch.float64 else 4)

    @property
    def cells(self) -> int:
        return self.pairs * self.tiles.cells


def arrays_of(problem: Problem) -> Arrays:
    """The pairs of a problem whose tensors are float32 or float64."""
    x, y, n, m = problem.x, problem.y, problem.n, problem.m
    pairs = problem.batch
    x_indices = y_indices = None
    if problem.pairs is not None:
        x_indices, y_indices = problem.pairs.to(torch.int64).t().contiguous().numpy()
    flat_x, x_stride = _flat(x)
    flat_y, y_stride = (flat_x, 0) if y is None else _flat(y)
    x_lengths, y_lengths = _checked_lengths(problem, x_indices, y_indices)
    series = Series(
        y is None,
        flat_x,
        flat_y,
        _offsets(x.shape[0], x_stride, x_indices, pairs),
        _offsets(1 if y is None else y.shape[0], y_stride, y_indices, pairs),
        x_lengths,
        y_lengths,
        m,
        0 if y is None else x.shape[2],
        problem.gamma,
    )
    return Arrays(series, _tiles(n, m, problem.bandwidth), x.dtype)


def series_of(a: Tensor, b: Tensor | None, of: Series) -> Series:
    """a and b of a direction, one per pair or one for all, in the place of the x and y of its problem."""
    pairs = of.x_lengths.size
    flat_a, a_stride = _flat(a)
    flat_b, b_stride = (flat_a, 0) if b is None else _flat(b)
    return of._replace(
        is_cost=b is None,
        x=flat_a,
        y=flat_b,
        x_offsets=_offsets(a.shape[0], a_stride, None, pairs),
        y_offsets=_offsets(1 if b is None else b.shape[0], b_stride, None, pairs),
        dimensions=0 if b is None else a.shape[2],
    )
