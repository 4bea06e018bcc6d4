"""All pairs and neighbours over the processes of torch.distributed, in memory or into files.

The work is cut into tiles (`_tiles.py`), each process computes a range of them with about as many cells as
the others', and the results are gathered, or written tile by tile into files with a journal
(`_journal.py`). Without a process group one process does everything, with the same results, bit for bit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from tqdm import tqdm

from ._journal import Journal, Output, hash_array
from ._series import Array, Series, as_batch, is_numpy
from ._tiles import Tile, divide, row_tiles, square_tiles
from ._validation import (
    Lengths,
    check_all_pairs,
    check_bandwidth,
    check_flag,
    check_gamma,
    explains_arguments,
)
from .neighbours import Nearest, check_neighbours, softdtw_knn, without_self
from .pairs import softdtw_cdist

__all__ = ["cdist", "knn"]

SECONDS_BETWEEN_FLUSHES = 0.5
"""Writing out takes a disk milliseconds, a tile hardly more on a GPU. What is not yet written out when a
process is killed is computed again."""

PathLike = str | os.PathLike[str]
T = TypeVar("T")


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
        device: where this process computes. None: where x is, or, for arrays, the GPU of this process if
            there is one (numbered by torchrun's LOCAL_RANK), otherwise the CPU.
        out: a .npy file for the values, on a file system that all processes share. It is filled tile by
            tile: what is not finished is NaN. The folder `out` + ".journal" lists the finished tiles; the
            same call, after whatever ended the last one, computes the others. Values and journal are written
            out after the tile that ends half a second, and at the end.
        overwrite: start again where `out` exists, whatever is in it.
        progress: process 0 shows a progress bar of its share.

    Returns:
        (K, L) values: a tensor on the device of x, or an array, as x came; with `out` a memory map of it.

    Raises:
        TypeError, ValueError: as :func:`softdtw_cuda.softdtw_cdist`.
        FileExistsError: `out` exists and is of other inputs or options, or has no journal.
        OSError: for other troubles with the file, a full disk among them. What is finished is kept.
    """
    normalize, symmetric = check_flag("normalize", normalize), y is None
    options: dict[str, Any] = {
        "gamma": check_gamma(gamma),
        "bandwidth": bandwidth,
        "normalize": normalize,
        "dist": dist,
    }
    rows = _check_side("x", x, x_lengths, device)
    columns = rows if y is None else _check_side("y", y, y_lengths, device)
    value_dtype = _check_options(rows, None if symmetric else columns, y_lengths, options)
    tiles = square_tiles(
        rows.lengths, None if symmetric else columns.lengths, check_bandwidth(bandwidth), rows.device.type
    )
    held: dict[tuple[int, int], tuple[Tensor, list[int]]] = {}

    def compute(tile: Tile) -> tuple[Tensor, ...]:
        place = (tile.row_start, tile.row_stop)
        if place not in held:  # the tiles of a row have its series in common
            held.clear()
            held[place] = rows.take(tile.rows)
        first, first_lengths = held[place]
        if symmetric and tile.rows == tile.columns:
            return (softdtw_cdist(first, x_lengths=first_lengths, **options),)
        second, second_lengths = columns.take(tile.columns)
        return (softdtw_cdist(first, second, x_lengths=first_lengths, y_lengths=second_lengths, **options),)

    shape = (len(rows.lengths), len(columns.lengths))
    work = _Work(tiles, [(shape, _numpy_dtype(value_dtype), np.nan)], symmetric, compute, rows.device)
    if out is None:
        (values,) = _in_memory(work, progress)
        return values.numpy(force=True) if is_numpy(x) else values.to(rows.series.device)
    inputs = {"x": rows} if symmetric else {"x": rows, "y": columns}
    return _in_files(work, [out], "cdist", inputs, options, overwrite, progress)[0]


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
        gamma, bandwidth, normalize, dist, device, overwrite, progress: as in :func:`cdist`.

    Returns:
        values (Q, k), ascending, and indices (Q, k) into the database, as in
        :func:`softdtw_cuda.softdtw_knn`; with `out` memory maps of those files.

    Raises:
        TypeError, ValueError, FileExistsError, OSError: as :func:`cdist`.
    """
    normalize, exclude_self = check_flag("normalize", normalize), check_flag("exclude_self", exclude_self)
    options: dict[str, Any] = {
        "gamma": check_gamma(gamma),
        "bandwidth": bandwidth,
        "normalize": normalize,
        "dist": dist,
    }
    rows = _check_side("queries", queries, query_lengths, device)
    columns = rows if database is None else _check_side("database", database, database_lengths, device)
    value_dtype = _check_options(rows, None if database is None else columns, database_lengths, options)
    k = check_neighbours(k, len(columns.lengths), exclude_self)
    strips = row_tiles(rows.lengths, columns.lengths, check_bandwidth(bandwidth), rows.device.type)
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
    outputs = [(shape, _numpy_dtype(value_dtype), np.nan), (shape, np.dtype(np.int64), -1)]
    tiles = [strip._replace(column_start=0, column_stop=k) for strip in strips]
    work = _Work(tiles, outputs, False, compute, rows.device)
    if out is None:
        values, indices = _in_memory(work, progress)
        if is_numpy(queries):
            return values.numpy(force=True), indices.numpy(force=True)
        return values.to(rows.series.device), indices.to(rows.series.device)
    inputs = {"queries": rows} if database is None else {"queries": rows, "database": columns}
    job_options = {**options, "k": k, "exclude_self": exclude_self}
    values_file, indices_file = _in_files(work, out, "knn", inputs, job_options, overwrite, progress)
    return values_file, indices_file


# ---- arguments


class _Side(NamedTuple):
    """A set of series: where it is, how long its series are, where it is computed with."""

    series: Tensor
    lengths: np.ndarray
    device: torch.device

    def take(self, part: slice) -> tuple[Tensor, list[int]]:
        """Some of the series on the device, without padding that none of them needs, and their lengths."""
        lengths = self.lengths[part]
        return self.series[part, : int(lengths.max())].to(self.device), lengths.tolist()


def _check_side(
    name: str, series: Series, lengths: Lengths | None, device: torch.device | str | None
) -> _Side:
    batch, lengths = as_batch(name, series, lengths)
    if not isinstance(batch, Tensor) or batch.dim() != 3:
        shape = f"shape {tuple(batch.shape)}" if hasattr(batch, "shape") else type(batch).__name__
        raise ValueError(
            f"{name} must be a tensor or an array of shape (series, time, features), or a list of series "
            f"(time, features), got {shape}; add a missing feature axis with {name}[..., None]."
        )
    count, size, _ = batch.shape
    try:
        given = np.full(count, size) if lengths is None else np.asarray(lengths, dtype=np.int64)
    except (TypeError, ValueError):
        raise TypeError(f"the lengths of {name} must be {count} integers, got {lengths!r}.") from None
    if given.shape != (count,) or (count and (given.min() < 1 or given.max() > size)):
        raise ValueError(
            f"the lengths of {name} have shape {given.shape} and lie from {given.min(initial=size)} to "
            f"{given.max(initial=0)}, expected {count} numbers from 1 to {size}, one for each series."
        )
    if device is None:
        device = own_device() if is_numpy(series) else batch.device
    return _Side(batch.detach(), given, torch.device(device))


def _check_options(
    rows: _Side, columns: _Side | None, column_lengths: Lengths | None, options: Mapping[str, Any]
) -> torch.dtype:
    """Raise for what the tiles' own checks would find later, one after the other; the type of the values."""
    if not isinstance(options["dist"], str):
        raise TypeError(
            f"dist must be the name of a metric, got {type(options['dist']).__name__}; a callable of your "
            "own works with softdtw_cdist, in one process."
        )
    if columns is None and column_lengths is not None:
        raise ValueError("lengths are given for a set that is not; leave them out.")
    if len(rows.lengths) == 0 or (columns is not None and len(columns.lengths) == 0):
        raise ValueError("there are no series, expected at least one in each set.")

    def outline(side: _Side) -> Tensor:
        return torch.empty(side.series.shape, dtype=side.series.dtype, device="meta")

    problem = check_all_pairs(
        outline(rows),
        None if columns is None else outline(columns),
        options["gamma"],
        options["bandwidth"],
        options["dist"],
        None,
        rows.lengths.tolist(),
        None if columns is None else columns.lengths.tolist(),
    )
    return problem.value_dtype


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(np.float64 if dtype == torch.float64 else np.float32)


def own_device() -> torch.device:
    """The GPU of this process, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


# ---- processes


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _on_first(action: Callable[[], T]) -> T:
    """What process 0 gets from the action, in every process; what it raises, every process raises."""
    answer: list[Any] = [None, None]
    if _rank() == 0:
        try:
            answer[0] = action()
        except Exception as error:
            answer[1] = error
    if _processes() > 1:
        dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


def _wait_for_all(error: BaseException | None) -> None:
    """Until every process is here; raises where one of them comes with an error."""
    errors: list[Any] = [error]
    if _processes() > 1:
        errors = [None] * _processes()
        dist.all_gather_object(errors, error if error is None else str(error))
    if error is not None:
        raise error
    for process, text in enumerate(errors):
        if text is not None:
            raise RuntimeError(f"process {process} failed: {text}")


# ---- tiles


class _Work(NamedTuple):
    """What is to be computed.

    Attributes:
        tiles: as they lie in the outputs.
        outputs: shape, type and filling of each.
        mirrored: outputs are symmetric, and the tiles below their diagonal are not listed.
        compute: values of a tile, one tensor for each output.
    """

    tiles: list[Tile]
    outputs: list[tuple[tuple[int, int], np.dtype[Any], float]]
    mirrored: bool
    compute: Callable[[Tile], tuple[Tensor, ...]]
    device: torch.device

    def places(self, tile: Tile) -> list[tuple[slice, slice, bool]]:
        """Rows and columns where a tile's values go, and whether transposed."""
        if self.mirrored and tile.rows != tile.columns:
            return [(tile.rows, tile.columns, False), (tile.columns, tile.rows, True)]
        return [(tile.rows, tile.columns, False)]


def _computed(
    work: _Work,
    todo: Sequence[int],
    consume: Callable[[int, tuple[Tensor, ...]], None],
    progress: bool,
) -> None:
    """Compute tiles; a thread consumes the values of one while the next is computed."""
    cells = sum(work.tiles[tile].cells for tile in todo)
    shown = progress and _rank() == 0
    label = f"process 1 of {_processes()}" if _processes() > 1 else None
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if work.device.type == "cuda":
            stack.enter_context(torch.cuda.device(work.device))
        bar = stack.enter_context(
            tqdm(total=cells, desc=label, unit="cell", unit_scale=True, disable=not shown, smoothing=0.1)
        )
        writer = stack.enter_context(ThreadPoolExecutor(1))
        pending: tuple[int, Future[None]] | None = None
        for tile in todo:
            values = work.compute(work.tiles[tile])
            if pending is not None:
                pending[1].result()
                bar.update(work.tiles[pending[0]].cells)
            pending = tile, writer.submit(consume, tile, values)
        if pending is not None:
            pending[1].result()
            bar.update(work.tiles[pending[0]].cells)


def _in_memory(work: _Work, progress: bool) -> list[Tensor]:
    """The outputs, gathered in every process."""
    shares = divide(work.tiles, _processes())
    results = [torch.empty(shape, dtype=_torch_dtype(dtype)) for shape, dtype, _ in work.outputs]
    # NCCL speaks between GPUs only, gloo between CPUs.
    home = work.device if _processes() > 1 and dist.get_backend() == "nccl" else torch.device("cpu")
    kept: dict[int, tuple[Tensor, ...]] = {}

    def consume(tile: int, values: tuple[Tensor, ...]) -> None:
        kept[tile] = tuple(value.to(home) for value in values)

    error: Exception | None = None
    try:
        _computed(work, shares[_rank()], consume, progress)
    except Exception as raised:
        error = raised
    _wait_for_all(error)
    for process, share in enumerate(shares):
        for tile in share:
            at = work.tiles[tile]
            for k, result in enumerate(results):
                if process == _rank():
                    values = kept[tile][k].contiguous()
                else:
                    size = (at.row_stop - at.row_start, at.column_stop - at.column_start)
                    values = torch.empty(size, dtype=result.dtype, device=home)
                if _processes() > 1:
                    dist.broadcast(values, src=process)
                for rows, columns, transposed in work.places(at):
                    result[rows, columns] = values.mT if transposed else values
    return results


def _in_files(
    work: _Work,
    paths: Sequence[PathLike],
    command: str,
    inputs: Mapping[str, _Side],
    options: Mapping[str, object],
    overwrite: bool,
    progress: bool,
) -> list[np.memmap[Any, Any]]:
    """The outputs in files; tiles that the journal lists are not computed again."""
    outputs = [Output(Path(path), *spec) for path, spec in zip(paths, work.outputs, strict=True)]
    if len({each.path for each in outputs}) != len(outputs):
        raise ValueError(f"out names {outputs[0].path} twice, expected a file for each output.")
    with ExitStack() as stack:

        def begin() -> tuple[dict[str, object], set[int]]:
            job = _describe(work, command, inputs, options)
            journal = stack.enter_context(Journal(outputs, job, 0))  # holds the lock
            return job, journal.begin(overwrite)

        job, finished = _on_first(begin)
        journal = stack.enter_context(Journal(outputs, job, _rank()))
        journal.open()
        missing = [tile for tile in range(len(work.tiles)) if tile not in finished]
        share = divide([work.tiles[tile] for tile in missing], _processes())[_rank()]
        written: list[int] = []
        flushed = time.monotonic()

        def consume(tile: int, values: tuple[Tensor, ...]) -> None:
            nonlocal flushed
            for k, value in enumerate(values):
                array = value.numpy(force=True)
                for rows, columns, transposed in work.places(work.tiles[tile]):
                    journal.write(k, rows, columns, array.T if transposed else array)
            written.append(tile)
            if time.monotonic() - flushed >= SECONDS_BETWEEN_FLUSHES:
                journal.finish(written)
                written.clear()
                flushed = time.monotonic()

        error: Exception | None = None
        try:
            try:
                _computed(work, [missing[k] for k in share], consume, progress)
            finally:
                journal.finish(written)
        except Exception as raised:
            error = raised
        _wait_for_all(error)
    return [np.load(each.path, mmap_mode="r") for each in outputs]


def _describe(
    work: _Work, command: str, inputs: Mapping[str, _Side], options: Mapping[str, object]
) -> dict[str, object]:
    """All that the bits of the outputs depend on."""
    from . import __version__

    device = work.device
    return {
        "command": command,
        "options": dict(options),
        "inputs": {
            name: {
                "shape": list(side.series.shape),
                "dtype": str(side.series.dtype),
                "content": hash_array(_bytes_of(side.series)),
                "lengths": hash_array(side.lengths),
            }
            for name, side in inputs.items()
        },
        "tiles": len(work.tiles),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": {"softdtw_cuda": __version__, "torch": str(torch.__version__)},
    }


def _bytes_of(series: Tensor) -> Array:
    """A tensor of any type as an array; NumPy has no bfloat16."""
    series = series.cpu()
    if series.dtype == torch.bfloat16:
        series = series.view(torch.int16)
    return series.numpy()


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
