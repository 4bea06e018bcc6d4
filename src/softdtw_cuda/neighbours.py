"""Nearest neighbours under Soft-DTW: tile after tile of the table of all pairs, which is never kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ._distances import DistanceFunction
from ._free_memory import free_memory
from ._lengths import Lengths
from ._migration import explains_arguments
from ._options import check_count, check_flag, check_memory_limit
from ._problem import Problem
from ._processes import check_device
from ._series import Series, TensorOrArray, as_batch, blocks_on, in_kind
from ._validation import check_queries
from .pairs import half_selves, tile_values

CELLS_OF_A_TILE = 1 << 33
"""Some 8 ms of a GPU: long beside what the host does for a tile, short enough for a progress bar."""
BYTES_OF_A_VALUE = 64
"""For each pair of a tile: its value, its indices and what sorting takes."""
ROWS_OF_A_TILE = 1024


class Nearest(NamedTuple):
    """The nearest series so far of each of R queries: values (R, k) ascending, equal ones by index."""

    values: Tensor
    indices: Tensor


@explains_arguments
def softdtw_knn(
    queries: TensorOrArray | Sequence[TensorOrArray],
    database: Series | None,
    k: int,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    normalize: bool = False,
    dist: str | DistanceFunction = "sqeuclidean",
    fused: bool | None = None,
    query_lengths: Lengths | None = None,
    database_lengths: Lengths | None = None,
    exclude_self: bool = False,
    memory_limit: int | None = None,
    progress: bool = False,
    device: torch.device | str | None = None,
) -> tuple[TensorOrArray, TensorOrArray]:
    """The k series of a database that are nearest to each query under Soft-DTW.

    Exact: every pair is computed, in tiles whose values are merged into the nearest so far and dropped, so
    that memory is O(Q k) besides the data. The results do not depend on the tiles. No gradients: for those,
    pass the indices to :func:`softdtw_pairs`.
    Lists are padded to their longest series: compute one that is much longer than the others in a call of
    its own.

    Args:
        queries: (Q, N, D), a tensor or a NumPy array, or a list of Q series (N_q, D) of unequal lengths.
        database: (K, M, D), or a list, likewise. For queries on a GPU it may stay on the host, as a CPU
            tensor, an array or a memory map: it is copied block by block while the GPU computes. None: the
            queries themselves, where each unordered pair is computed once.
        k: neighbours of each query, at most as many as the database has.
        query_lengths, database_lengths: (Q,) and (K,) true lengths of padded series.
        exclude_self: leave out series i of the database among the neighbours of query i.
        memory_limit: as in :func:`softdtw_pairs`.
        progress: show a progress bar.
        device: where to compute; None: where the queries are. "cuda" is the GPU of torchrun's LOCAL_RANK,
            without torchrun torch's current one.
        gamma, bandwidth, normalize, dist, fused: as in :func:`softdtw`.

    Returns:
        values (Q, k), ascending, and indices (Q, k) into the database; of equal values the smaller index
        comes first. Values that are NaN come last. Both come as the queries did: NumPy arrays for arrays,
        otherwise tensors on the device of the queries.

    Raises:
        TypeError, ValueError: as :func:`softdtw`, and for a k that the database does not have.

    Examples:
        >>> queries, database = torch.randn(5, 50, 3), torch.randn(100, 60, 3)
        >>> values, indices = softdtw_knn(queries, database, 3, gamma=0.1)
        >>> indices.shape
        torch.Size([5, 3])
    """
    normalize, exclude_self = check_flag("normalize", normalize), check_flag("exclude_self", exclude_self)
    limit, progress = check_memory_limit(memory_limit), check_flag("progress", progress)
    if database is None and database_lengths is not None:
        raise ValueError(
            "database_lengths is given but database is None, so the queries are compared with themselves; "
            "leave it out, query_lengths is enough."
        )
    x, x_lengths = as_batch("queries", queries, query_lengths)
    home = x.device if isinstance(x, Tensor) else torch.device("cpu")
    if device is not None and isinstance(x, Tensor):
        x = x.to(check_device(device))
    y, y_lengths = (x, x_lengths) if database is None else as_batch("database", database, database_lengths)
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.device.type == "cpu" != y.device.type:
        raise ValueError(
            f"queries is on {x.device} and database on {y.device}, expected the queries where the database "
            f"is; pass device={str(y.device)!r}."
        )
    problem = check_queries(x, y, gamma, bandwidth, dist, fused, x_lengths, y_lengths)
    k = check_neighbours(k, y.shape[0], exclude_self)
    symmetric = database is None and problem.metric.is_named
    total = len(x) * (len(x) + 1) // 2 if symmetric else len(x) * len(y)
    with (
        torch.no_grad(),
        tqdm(total=total, desc="neighbours", unit="pair", unit_scale=True, disable=not progress) as bar,
    ):
        nearest = nearest_series(problem, k + exclude_self, normalize, symmetric, limit, bar)
        if exclude_self:
            nearest = without_self(nearest, 0)
        return in_kind(nearest.values, queries, home), in_kind(nearest.indices, queries, home)


def check_neighbours(k: int, count: int, exclude_self: bool) -> int:
    k = check_count("k", k)
    if k + exclude_self > count:
        others = ", one of them the query itself" if exclude_self else ""
        raise ValueError(
            f"k is {k} but the database has {count} series{others}; expected at most {count - exclude_self}."
        )
    return k


def nearest_series(
    problem: Problem,
    k: int,
    normalize: bool,
    symmetric: bool,
    limit: int | None,
    bar: tqdm[Any],
) -> Nearest:
    """The k series of y that are nearest to each of x; y may be on the host.

    With `symmetric` y is x, and the tiles from the diagonal on serve both of their sides.
    """
    x, y = problem.x, problem.y
    assert y is not None
    device = x.device
    height, width = tile_shape(problem, limit)
    x_self = half_selves(problem, True, limit) if normalize else None
    rows = [slice(start, min(start + height, len(x))) for start in range(0, len(x), height)]
    if symmetric:
        width = height
    nearest = empty_nearest(problem, k)
    for columns, block in blocks_on(device, y, width):
        lengths = None if problem.y_lengths is None else problem.y_lengths[columns]
        part = problem._replace(y=block, y_lengths=lengths)
        y_self = None
        if normalize:
            assert x_self is not None
            y_self = x_self[columns] if symmetric else half_selves(part, False, limit)
        for each in rows:
            if symmetric and each.start > columns.start:
                break
            on_diagonal = symmetric and each == columns
            tile = tile_values(part, each, slice(None), limit, on_diagonal)
            if x_self is not None and y_self is not None:
                tile = tile - (x_self[each].unsqueeze(1) + y_self.unsqueeze(0))
            _update(nearest, each, nearest_of_tile(tile, columns.start, k))
            if symmetric and not on_diagonal:
                _update(nearest, columns, nearest_of_tile(tile.mT, each.start, k))
            if not bar.disable:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # a bar shows what is done, not what is launched
                size = tile.shape[0]
                bar.update(size * (size + 1) // 2 if on_diagonal else tile.numel())
    return nearest


def tile_shape(problem: Problem, limit: int | None) -> tuple[int, int]:
    """Rows and columns of a tile whose values fit into the limit."""
    assert problem.y is not None
    pairs = max(1, CELLS_OF_A_TILE // (problem.n * problem.m))
    memory = free_memory(problem.x.device) if limit is None else limit
    pairs = max(1, min(pairs, memory // BYTES_OF_A_VALUE))
    height = max(1, min(problem.x.shape[0], ROWS_OF_A_TILE, math.isqrt(pairs)))
    width = min(problem.y.shape[0], pairs // height)
    if problem.y.device != problem.x.device:  # two blocks on each side
        width = min(width, memory // (4 * problem.y[0:1].nbytes))
    return height, max(1, width)


def empty_nearest(problem: Problem, k: int) -> Nearest:
    """What no tile has been merged into: every tile's series come first."""
    shape, device = (problem.x.shape[0], k), problem.x.device
    return Nearest(
        torch.full(shape, math.nan, dtype=problem.value_dtype, device=device),
        torch.full(shape, torch.iinfo(torch.int64).max, device=device),
    )


def nearest_of_tile(tile: Tensor, first: int, k: int) -> Nearest:
    """The k smallest values of each row of a tile (R, C) whose columns are series `first` and following."""
    # A stable sort keeps equal values, and NaN, which comes last, in the order of their indices.
    values, indices = torch.sort(tile, dim=1, stable=True)
    return Nearest(values[:, :k], indices[:, :k] + first)


def merge_nearest(one: Nearest, other: Nearest, k: int) -> Nearest:
    """The k nearest of two, whose series differ, in whatever order they were found."""
    values, indices = (torch.cat(both, 1) for both in zip(one, other, strict=True))
    by_index = torch.argsort(indices, dim=1)
    values, indices = values.gather(1, by_index), indices.gather(1, by_index)
    values, order = torch.sort(values, dim=1, stable=True)
    return Nearest(values[:, :k], indices.gather(1, order)[:, :k])


def _update(nearest: Nearest, rows: slice, found: Nearest) -> None:
    """Merge what a tile found into some rows, in place."""
    so_far = Nearest(nearest.values[rows], nearest.indices[rows])
    values, indices = merge_nearest(so_far, found, nearest.values.shape[1])
    nearest.values[rows], nearest.indices[rows] = values, indices


def without_self(nearest: Nearest, first: int) -> Nearest:
    """One neighbour fewer: not the series of the same index as the query, or else the farthest.

    `first` is the index of the first query.
    """
    count, k = nearest.indices.shape
    query = torch.arange(first, first + count, device=nearest.indices.device).unsqueeze(1)
    order = torch.argsort((nearest.indices == query).byte(), dim=1, stable=True)[:, : k - 1]
    return Nearest(nearest.values.gather(1, order), nearest.indices.gather(1, order))
