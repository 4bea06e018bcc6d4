"""All pairs and neighbours over the processes of torch.distributed, in memory or into files.

The work is cut into tiles (`_tiles.py`), each process computes a range of them with about as many cells as
the others', and the results are gathered, or written tile by tile into files with a journal
(`_journal.py`). Without a process group one process does everything, with the same results, bit for bit.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._lengths import Lengths, check_lengths
from ._migration import explains_arguments
from ._options import check_bandwidth, check_flag
from ._processes import ProcessFailed as ProcessFailed
from ._processes import check_device, in_every_process, on_device, own_device
from ._series import Series, as_batch, in_kind
from ._tile_work import PathLike, Side, Work, in_files, in_memory
from ._tiles import Tile, row_tiles, square_tiles
from ._validation import LENGTHS_OF, check_all_pairs
from .neighbours import Nearest, check_neighbours, softdtw_knn, without_self
from .pairs import softdtw_cdist

__all__ = ["cdist", "knn"]


@explains_arguments
def cdist(
    x: Series,
    y: Series | None = None,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    normalize: bool = False,
    dist: str = "sqeuclidean",
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
    device: torch.device | str | None = None,
    out: PathLike | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Any:
    """Soft-DTW between every series of x and every series of y, divided among processes.

    To be called by every process of torch.distributed's default group with the same arguments. The results
    are bitwise the same for any number of processes, one without a group included.

    Args:
        x: (K, N, D) tensor or array, a memory map for instance, or a list of K series (N_k, D).
        y: (L, M, D), likewise. None compares x with itself, and computes each unordered pair once.
        x_lengths, y_lengths: (K,) and (L,) true lengths of padded series.
        gamma, bandwidth, normalize: as in :func:`softdtw_cuda.softdtw`.
        dist: the name of a metric, as there.
        device: where this process computes. "cuda": on the GPU of this process, numbered by torchrun's
            LOCAL_RANK, without torchrun torch's current one. None: where x is, or, for arrays, the GPU of
            this process if there is one, otherwise the CPU.
        out: a .npy file for the values, on a file system that all processes share. It is filled tile by
            tile: what is not finished is NaN. The folder `out` + ".journal" lists the finished tiles; the
            same call, after whatever ended the last one, computes the others. Values and journal are written
            out after the tile that ends half a second, and at the end.
        overwrite: start again where `out` exists, whatever is in it. (After a restart by torchrun what the
            earlier start of this very call has finished is kept.)
        progress: process 0 shows a progress bar of its share.

    Returns:
        (K, L) values, as a tensor on the device of x or an array, as x came; with `out` a memory map of it.

    Raises:
        TypeError, ValueError: as :func:`softdtw_cuda.softdtw_cdist`.
        FileExistsError: `out` exists and is of other inputs or options, or has no journal.
        OSError: for other troubles with the file, a full disk among them. What is finished is kept.
        ProcessFailed: another process has raised one of these.

    Examples:
        >>> cdist(torch.randn(5, 50, 3), torch.randn(7, 60, 3), gamma=0.1).shape
        torch.Size([5, 7])
    """
    symmetric, place = y is None, _device_of(x, device)
    with on_device(place), in_every_process():
        overwrite, progress = check_flag("overwrite", overwrite), check_flag("progress", progress)
        rows = _check_side("x", x, x_lengths, place)
        columns = rows if y is None else _check_side("y", y, y_lengths, place)
        options, value_dtype = _check_options(
            rows, None if symmetric else columns, y_lengths, gamma, bandwidth, normalize, dist
        )
    tiles = square_tiles(
        rows.lengths, None if symmetric else columns.lengths, check_bandwidth(bandwidth), place.type
    )
    held: dict[tuple[int, int], tuple[Tensor, list[int]]] = {}

    def compute(tile: Tile) -> tuple[Tensor, ...]:
        span = (tile.row_start, tile.row_stop)
        if span not in held:  # the tiles of a row have its series in common
            held.clear()
            held[span] = rows.take(tile.rows)
        first, first_lengths = held[span]
        if symmetric and tile.rows == tile.columns:
            return (softdtw_cdist(first, x_lengths=first_lengths, **options),)
        second, second_lengths = columns.take(tile.columns)
        return (softdtw_cdist(first, second, x_lengths=first_lengths, y_lengths=second_lengths, **options),)

    shape = (len(rows.lengths), len(columns.lengths))
    inputs = {"x": rows} if symmetric else {"x": rows, "y": columns}
    outputs = [(shape, _numpy_dtype(value_dtype), np.nan)]
    work = Work("cdist", inputs, options, tiles, outputs, symmetric, compute, place)
    with on_device(place):
        if out is not None:
            return in_files(work, [out], overwrite, progress)[0]
        return in_kind(in_memory(work, progress)[0], x, rows.home)


@explains_arguments
def knn(
    queries: Series,
    database: Series | None,
    k: int,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    normalize: bool = False,
    dist: str = "sqeuclidean",
    query_lengths: Lengths | None = None,
    database_lengths: Lengths | None = None,
    exclude_self: bool = False,
    device: torch.device | str | None = None,
    out: tuple[PathLike, PathLike] | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> tuple[Any, Any]:
    """The k series of a database that are nearest to each query, divided among processes.

    To be called by every process of torch.distributed's default group with the same arguments. A tile is a
    block of queries with the whole database, so there should be more queries than processes.

    Args:
        queries: (Q, N, D) tensor or array, a memory map for instance, or a list of Q series (N_q, D).
        database: (K, M, D), likewise. It is read in blocks, and may be larger than a GPU's memory. None: the
            queries themselves.
        k: neighbours of each query.
        query_lengths, database_lengths: (Q,) and (K,) true lengths of padded series.
        exclude_self: leave out series i of the database among the neighbours of query i.
        out: two .npy files, for values and for indices. What is not finished is NaN and -1.
        gamma, bandwidth, normalize, dist: as in :func:`softdtw_cuda.distributed.cdist`.
        device, overwrite, progress: as there.

    Returns:
        values (Q, k), ascending, and indices (Q, k) into the database, as in
        :func:`softdtw_cuda.softdtw_knn`; with `out` memory maps of those files.

    Raises:
        TypeError, ValueError: as :func:`softdtw_cuda.distributed.cdist`.
        FileExistsError, OSError, ProcessFailed: likewise.

    Examples:
        >>> queries, database = torch.randn(5, 50, 3), torch.randn(100, 60, 3)
        >>> values, indices = knn(queries, database, 3, gamma=0.1)
        >>> indices.shape
        torch.Size([5, 3])
    """
    place = _device_of(queries, device)
    with on_device(place), in_every_process():
        exclude_self = check_flag("exclude_self", exclude_self)
        overwrite, progress = check_flag("overwrite", overwrite), check_flag("progress", progress)
        rows = _check_side("queries", queries, query_lengths, place)
        columns = rows if database is None else _check_side("database", database, database_lengths, place)
        options, value_dtype = _check_options(
            rows, None if database is None else columns, database_lengths, gamma, bandwidth, normalize, dist
        )
        k = check_neighbours(k, len(columns.lengths), exclude_self)
        if out is not None and (isinstance(out, (str, os.PathLike)) or len(out) != 2):
            raise ValueError(f"out must be two files, for values and for indices, got {out!r}.")
    strips = row_tiles(rows.lengths, columns.lengths, check_bandwidth(bandwidth), place.type)
    column_lengths = columns.lengths.tolist()

    def compute(tile: Tile) -> tuple[Tensor, ...]:
        first, first_lengths = rows.take(tile.rows)
        nearest = Nearest(
            *softdtw_knn(
                first,
                columns.series,
                k + exclude_self,
                query_lengths=first_lengths,
                database_lengths=column_lengths,
                **options,
            )
        )
        return without_self(nearest, tile.row_start) if exclude_self else nearest

    shape = (len(rows.lengths), k)
    inputs = {"queries": rows} if database is None else {"queries": rows, "database": columns}
    job_options = {**options, "k": k, "exclude_self": exclude_self}
    tiles = [strip._replace(column_start=0, column_stop=k) for strip in strips]
    outputs = [(shape, _numpy_dtype(value_dtype), np.nan), (shape, np.dtype(np.int64), -1)]
    work = Work("knn", inputs, job_options, tiles, outputs, False, compute, place)
    with on_device(place):
        if out is not None:
            values_file, indices_file = in_files(work, out, overwrite, progress)
            return values_file, indices_file
        values, indices = in_memory(work, progress)
        return in_kind(values, queries, rows.home), in_kind(indices, queries, rows.home)


# ---- arguments


def _device_of(series: Series, device: torch.device | str | None) -> torch.device:
    """Where to compute; what is wrong with the series is found later."""
    if device is not None:
        return check_device(device)
    first = series[0] if isinstance(series, (list, tuple)) and len(series) else series
    return first.device if isinstance(first, Tensor) else own_device()


def _check_side(name: str, series: Series, lengths: Lengths | None, device: torch.device) -> Side:
    batch, lengths = as_batch(name, series, lengths)
    if not isinstance(batch, Tensor) or batch.dim() != 3:
        shape = f"shape {tuple(batch.shape)}" if hasattr(batch, "shape") else type(batch).__name__
        raise ValueError(
            f"{name} must be a tensor or an array of shape (series, time, features), or a list of series "
            f"(time, features), got {shape}; add a missing feature axis with {name}[..., None]."
        )
    count, size, _ = batch.shape
    if size == 0:
        raise ValueError(f"{name} has shape {tuple(batch.shape)}, expected at least one time step.")
    lengths = lengths.cpu() if isinstance(lengths, Tensor) else lengths
    _, host = check_lengths(lengths, LENGTHS_OF[name], count, count, size, torch.device("cpu"), batched=True)
    given = np.full(count, size) if host is None else np.array(host, np.int64)
    home, batch = batch.device, batch.detach()
    # A set on the host stays there, and is copied part by part.
    return Side(batch if home.type == "cpu" else batch.to(device), given, device, home)


def _check_options(
    rows: Side,
    columns: Side | None,
    column_lengths: Lengths | None,
    gamma: float,
    bandwidth: int | None,
    normalize: bool,
    dist: str,
) -> tuple[dict[str, Any], torch.dtype]:
    """Raise for what the tiles' own checks would find later, one after the other.

    The options in plain types, as a journal can keep them, and the type of the values.
    """
    normalize = check_flag("normalize", normalize)
    if not isinstance(dist, str):
        raise TypeError(
            f"dist must be the name of a metric, got {type(dist).__name__}; a callable of your own works "
            "with softdtw_cdist, in one process."
        )
    if columns is None and column_lengths is not None:
        raise ValueError("lengths are given for the second set, but there is none; leave them out.")
    if len(rows.lengths) == 0 or (columns is not None and len(columns.lengths) == 0):
        raise ValueError("there are no series, expected at least one in each set.")

    def outline(side: Side) -> Tensor:
        return torch.empty(side.series.shape, dtype=side.series.dtype, device="meta")

    problem = check_all_pairs(
        outline(rows),
        None if columns is None else outline(columns),
        gamma,
        bandwidth,
        dist,
        None,
        rows.lengths.tolist(),
        None if columns is None else columns.lengths.tolist(),
    )
    radius = None if bandwidth is None else problem.bandwidth
    options = {"gamma": problem.gamma, "bandwidth": radius, "normalize": normalize, "dist": str(dist)}
    return options, problem.value_dtype


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(np.float64 if dtype == torch.float64 else np.float32)
