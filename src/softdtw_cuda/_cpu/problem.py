"""One batch as the CPU kernels see it: flat arrays, strides, lengths, and the tiles of its matrices."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdtw_cuda._cpu import kernels
from softdtw_cuda._cpu.config import saved_columns, tile_edge, tile_radius
from softdtw_cuda._cpu.intrinsics import VECTOR_BYTES
from softdtw_cuda._problem import Problem

Array = Any


class Tiles(NamedTuple):
    """How the matrices of a batch are cut up: `kept` tiles of a row lie in the band of `radius` tiles.

    `cells` of a matrix, or a few more, lie in the band.
    """

    edge: int
    radius: int
    rows: int
    columns: int
    kept: int
    bandwidth: int
    cells: int


@functools.lru_cache(maxsize=256)
def _tiles(n: int, m: int, dtype: torch.dtype, bandwidth: int) -> Tiles:
    edge = tile_edge(dtype)
    bandwidth = min(bandwidth, n + m)  # all that it can mean; indices are added to it
    rows, columns = -(-n // edge), -(-m // edge)
    radius = rows + columns if bandwidth < 0 else tile_radius(bandwidth, edge)
    kept = int(saved_columns(m, bandwidth, edge))
    cells = n * (m if bandwidth < 0 else min(m, 2 * bandwidth + 1))
    return Tiles(edge, radius, rows, columns, kept, kernels.UNBANDED if bandwidth < 0 else bandwidth, cells)


@functools.lru_cache(maxsize=64)
def order_of_tiles(
    rows: int, columns: int, radius: int, by_diagonal: bool, reverse: bool
) -> tuple[Array, Array]:
    """Rows and columns of the tiles in the band, every tile after those that it waits for."""
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
    inside = np.abs(row - column) <= radius
    row, column = row[inside], column[inside]
    if by_diagonal:
        order = np.argsort(row + column, kind="stable")
        row, column = row[order], column[order]
    if reverse:
        row, column = row[::-1], column[::-1]
    return np.ascontiguousarray(row), np.ascontiguousarray(column)


def _flat(tensor: Tensor) -> tuple[Array, int]:
    """The tensor's memory as a flat array and the distance between samples (0 for a broadcast one)."""
    batch, rows, columns = tensor.shape
    if tensor.is_contiguous():
        return tensor.detach().numpy().reshape(-1), 0 if batch == 1 else rows * columns
    if tensor.stride(2) != 1 or tensor.stride(1) != columns:
        tensor = tensor.contiguous()
    stride = 0 if batch == 1 else tensor.stride(0)
    if stride < 0:
        tensor = tensor.contiguous()
        stride = tensor.stride(0)
    flat = torch.as_strided(tensor.detach(), ((batch - 1) * stride + rows * columns,), (1,))
    return flat.numpy(), stride


@functools.lru_cache(maxsize=64)
def _full_lengths(batch: int, full: int) -> Array:
    return np.full(batch, full, np.int64)


def _lengths(lengths: Tensor | None, batch: int, full: int) -> Array:
    """Not to be written to: those of whole series are shared from call to call."""
    if lengths is None:
        return _full_lengths(batch, full)
    return lengths.detach().to(torch.int64).contiguous().numpy()


class Arrays(NamedTuple):
    """One batch as the kernels see it; ``x`` is the cost matrix when ``is_cost``."""

    is_cost: bool
    x: Array
    x_stride: int
    y: Array
    y_stride: int
    m: int
    d: int
    x_lengths: Array
    y_lengths: Array
    gamma: float
    tiles: Tiles
    batch: int
    dtype: torch.dtype

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
        return self.batch * self.tiles.cells

    def common(self) -> tuple[Any, ...]:
        t = self.tiles
        return (
            self.is_cost,
            self.x,
            self.x_stride,
            self.y,
            self.y_stride,
            self.m,
            self.d,
            self.x_lengths,
            self.y_lengths,
            self.gamma,
            t.bandwidth,
            t.edge,
            t.kept,
            t.rows,
            t.columns,
            t.radius,
        )


def arrays_of(problem: Problem) -> Arrays:
    """The batch of a problem whose tensors are float32 or float64."""
    x, y = problem.x, problem.y
    batch, n, m = problem.batch, problem.n, problem.m
    flat_x, x_stride = _flat(x)
    if y is None:
        flat_y, y_stride, d = flat_x, 0, 0
    else:
        flat_y, y_stride = _flat(y)
        d = x.shape[2]
    return Arrays(
        y is None,
        flat_x,
        x_stride,
        flat_y,
        y_stride,
        m,
        d,
        _lengths(problem.x_lengths, batch, n),
        _lengths(problem.y_lengths, batch, m),
        problem.gamma,
        _tiles(n, m, x.dtype, problem.bandwidth),
        batch,
        x.dtype,
    )
