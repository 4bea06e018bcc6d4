"""All pairs and neighbours over the processes of torch.distributed, in memory or into files.

The work is cut into tiles (`_tiles.py`), each process computes a range of them with about as many cells as
the others', and the results are gathered, or written tile by tile into files with a journal
(`_journal.py`). Without a process group one process does everything, with the same results, bit for bit.

What one process raises, every process raises, so that none waits for an answer that never comes. A process
that is killed is another matter: gloo notices and raises in the others; NCCL does not, and whoever started
them (torchrun does) has to end them.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from tqdm import tqdm

from ._journal import Journal, Output, difference, hash_array
from ._lengths import Lengths, check_lengths
from ._migration import explains_arguments
from ._options import check_bandwidth, check_flag
from ._processes import default_group
from ._series import Array, Series, as_batch, in_kind
from ._tiles import Tile, divide, row_tiles, square_tiles
from ._validation import LENGTHS_OF, check_all_pairs
from .neighbours import Nearest, check_neighbours, softdtw_knn, without_self
from .pairs import softdtw_cdist

__all__ = ["cdist", "knn"]

SECONDS_BETWEEN_FLUSHES = 0.5
"""Writing out takes a disk milliseconds, a tile hardly more on a GPU. What is not yet written out when a
process is killed is computed again."""

VALUES_OF_A_MESSAGE = 1 << 24
"""Tiles go from process to process together, 64 MiB of float32 at a time. Sent one by one, 256 small ones
took every process 0.13 s of CPU time (gloo, AMD EPYC)."""

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
        overwrite: start again where `out` exists, whatever is in it. (After a restart by torchrun what the
            earlier start of this very call has finished is kept.)
        progress: process 0 shows a progress bar of its share.

    Returns:
        (K, L) values: a tensor on the device of x, or an array, as x came; with `out` a memory map of it.

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
    with _current(place), in_every_process():
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
    work = _Work("cdist", inputs, options, tiles, outputs, symmetric, compute, place)
    with _current(place):
        if out is not None:
            return _in_files(work, [out], overwrite, progress)[0]
        return in_kind(_in_memory(work, progress)[0], x, rows.home)


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
        TypeError, ValueError, FileExistsError, OSError, ProcessFailed: as :func:`cdist`.

    Examples:
        >>> values, indices = knn(torch.randn(5, 50, 3), torch.randn(100, 60, 3), 3, gamma=0.1)
        >>> indices.shape
        torch.Size([5, 3])
    """
    place = _device_of(queries, device)
    with _current(place), in_every_process():
        exclude_self = check_flag("exclude_self", exclude_self)
        overwrite, progress = check_flag("overwrite", overwrite), check_flag("progress", progress)
        rows = _check_side("queries", queries, query_lengths, place)
        columns = rows if database is None else _check_side("database", database, database_lengths, place)
        options, value_dtype = _check_options(
            rows,
            None if database is None else columns,
            database_lengths,
            gamma,
            bandwidth,
            normalize,
            dist,
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
    work = _Work("knn", inputs, job_options, tiles, outputs, False, compute, place)
    with _current(place):
        if out is not None:
            values_file, indices_file = _in_files(work, out, overwrite, progress)
            return values_file, indices_file
        values, indices = _in_memory(work, progress)
        return in_kind(values, queries, rows.home), in_kind(indices, queries, rows.home)


# ---- arguments


class _Side(NamedTuple):
    """A set of series.

    Attributes:
        series: (K, N, D), on the host or on `device`.
        lengths: (K,) true lengths.
        device: where it is computed with.
        home: where it came from.
    """

    series: Tensor
    lengths: np.ndarray
    device: torch.device
    home: torch.device

    def take(self, part: slice) -> tuple[Tensor, list[int]]:
        """Some of the series on the device, without padding that none of them needs, and their lengths."""
        lengths = self.lengths[part]
        return self.series[part, : int(lengths.max())].to(self.device), lengths.tolist()


def _device_of(series: Series, device: torch.device | str | None) -> torch.device:
    """Where to compute; what is wrong with the series is found later."""
    if device is not None:
        return torch.device(device)
    first = series[0] if isinstance(series, (list, tuple)) and len(series) else series
    return first.device if isinstance(first, Tensor) else own_device()


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: NCCL sends objects from that, and GPU 0 is not for all processes."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check_side(name: str, series: Series, lengths: Lengths | None, device: torch.device) -> _Side:
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
    return _Side(batch if home.type == "cpu" else batch.to(device), given, device, home)


def _check_options(
    rows: _Side,
    columns: _Side | None,
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

    def outline(side: _Side) -> Tensor:
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


def own_device() -> torch.device:
    """The GPU of this process, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


# ---- processes


def _rank() -> int:
    return default_group().rank


def _processes() -> int:
    return default_group().count


class ProcessFailed(RuntimeError):
    """Another process of the group has raised an error, which the message quotes."""


def _gather(own: T) -> list[T]:
    """What every process brings, in the order of their ranks, in every process."""
    if _processes() == 1:
        return [own]
    found: list[Any] = [None] * _processes()
    try:
        dist.all_gather_object(found, own)
    except RuntimeError as error:
        raise RuntimeError(
            "the processes have lost each other: one was killed, or its machine cannot be reached. Into "
            f"files, the same again goes on from what is finished ({str(error).split('. ')[0]})."
        ) from error
    return found


@contextmanager
def in_every_process() -> Iterator[None]:
    """Waits at its end for every process; where one of them has raised an error, all raise.

    The first process that has one raises its own, the others `ProcessFailed`.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    texts = _gather(None if error is None else str(error) or type(error).__name__)
    for process, text in enumerate(texts):
        if text is not None:
            if error is not None and process == _rank():
                raise error
            raise ProcessFailed(f"process {process} failed: {text}") from error


def _on_first(action: Callable[[], T]) -> T:
    """What process 0 gets from the action, in every process; what it raises, every process raises."""
    results: list[T] = []
    with in_every_process():
        if _rank() == 0:
            results.append(action())
    return _gather(results)[0][0]


def _check_agreement(job: dict[str, object]) -> None:
    """Raise in every process where one of them was called with something else."""
    first = _gather(job)[0]
    with in_every_process():
        if job != first:
            raise ValueError(
                f"process {_rank()} was called with something else than process 0: {difference(first, job)}; "
                "expected the same arguments in every process."
            )


# ---- tiles


class _Work(NamedTuple):
    """What is to be computed.

    Attributes:
        command: name of the function.
        inputs: its sets of series, by their names.
        options: its other arguments that the values depend on.
        tiles: as they lie in the outputs.
        outputs: shape, type and filling of each.
        mirrored: outputs are symmetric, and the tiles below their diagonal are not listed.
        compute: values of a tile, one tensor for each output.
    """

    command: str
    inputs: Mapping[str, _Side]
    options: Mapping[str, object]
    tiles: list[Tile]
    outputs: list[tuple[tuple[int, int], np.dtype[Any], float]]
    mirrored: bool
    compute: Callable[[Tile], tuple[Tensor, ...]]
    device: torch.device

    def describe(self, content: bool) -> dict[str, object]:
        """All that the bits of the outputs depend on; the series' content, if asked for, by its hash."""
        from . import __version__

        return {
            "command": self.command,
            "options": dict(self.options),
            "inputs": {
                name: {
                    "shape": list(side.series.shape),
                    "dtype": str(side.series.dtype),
                    "lengths": hash_array(side.lengths),
                    **({"content": hash_array(_bytes_of(side.series))} if content else {}),
                }
                for name, side in self.inputs.items()
            },
            "tiles": hash_array(np.array(self.tiles, dtype=np.int64)),
            "device": _kind_of(self.device),
            "versions": {"softdtw_cuda": __version__, "torch": str(torch.__version__)},
        }

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
    """Compute tiles; a thread consumes the values of one while the next is computed.

    On a GPU the thread has a stream of its own, that waits for the tile's values and not for the next tile's.
    """
    cells = sum(work.tiles[tile].cells for tile in todo)
    shown = progress and _rank() == 0
    label = f"process 1 of {_processes()}" if _processes() > 1 else None
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        side = torch.cuda.Stream(work.device) if work.device.type == "cuda" else None
        bar = stack.enter_context(
            tqdm(total=cells, desc=label, unit="cell", unit_scale=True, disable=not shown, smoothing=0.1)
        )
        writer = stack.enter_context(ThreadPoolExecutor(1))

        def take(tile: int, values: tuple[Tensor, ...], ready: torch.cuda.Event | None) -> None:
            if side is None or ready is None:
                return consume(tile, values)
            with torch.cuda.stream(side):
                side.wait_event(ready)
                consume(tile, values)
                side.synchronize()  # the values' memory is free for the next tile now

        pending: tuple[int, Future[None]] | None = None
        for tile in todo:
            values = work.compute(work.tiles[tile])
            ready = None if side is None else torch.cuda.current_stream(work.device).record_event()
            if pending is not None:
                pending[1].result()
                bar.update(work.tiles[pending[0]].cells)
            pending = tile, writer.submit(take, tile, values, ready)
        if pending is not None:
            pending[1].result()
            bar.update(work.tiles[pending[0]].cells)


def _shape(tile: Tile) -> tuple[int, int]:
    return tile.row_stop - tile.row_start, tile.column_stop - tile.column_start


def _messages(share: range, tiles: Sequence[Tile]) -> Iterator[range]:
    """The tiles of a process, as many of them at a time as fit into one message."""
    start, values = share.start, 0
    for tile in share:
        size = math.prod(_shape(tiles[tile]))
        if tile > start and values + size > VALUES_OF_A_MESSAGE:
            yield range(start, tile)
            start, values = tile, 0
        values += size
    if share:
        yield range(start, share.stop)


def _in_memory(work: _Work, progress: bool) -> list[Tensor]:
    """The outputs, gathered in every process."""
    _check_agreement(work.describe(content=False))
    shares = divide(work.tiles, _processes())
    results = [
        torch.empty(shape, dtype=_torch_dtype(dtype), device="cpu") for shape, dtype, _ in work.outputs
    ]
    # NCCL speaks between GPUs only, gloo between CPUs.
    home = torch.device("cpu")
    if _processes() > 1 and dist.get_backend() == "nccl":
        home = work.device if work.device.type == "cuda" else own_device()
    kept: dict[int, tuple[Tensor, ...]] = {}

    def consume(tile: int, values: tuple[Tensor, ...]) -> None:
        kept[tile] = tuple(value.to(home) for value in values)

    with in_every_process():
        _computed(work, shares[_rank()], consume, progress)
    for process, share in enumerate(shares):
        for part in _messages(share, work.tiles):
            tiles = [work.tiles[tile] for tile in part]
            sizes = [math.prod(_shape(tile)) for tile in tiles]
            for k, result in enumerate(results):
                if process == _rank():
                    message = torch.cat([kept[tile][k].reshape(-1) for tile in part])
                else:
                    message = torch.empty(sum(sizes), dtype=result.dtype, device=home)
                if _processes() > 1:
                    dist.broadcast(message, src=process)
                for tile, flat in zip(tiles, message.split(sizes), strict=True):
                    values = flat.view(_shape(tile))
                    for rows, columns, transposed in work.places(tile):
                        result[rows, columns] = values.mT if transposed else values
    return results


def _in_files(
    work: _Work, paths: Sequence[PathLike], overwrite: bool, progress: bool
) -> list[np.memmap[Any, Any]]:
    """The outputs in files; tiles that the journal lists are not computed again."""
    outputs = [Output(Path(path), *spec) for path, spec in zip(paths, work.outputs, strict=True)]
    if len({each.path.resolve() for each in outputs}) != len(outputs):
        raise ValueError(f"out names {outputs[0].path} twice, expected a file for each output.")
    with in_every_process():
        job = work.describe(content=True)
    _check_agreement(job)
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    with ExitStack() as stack:

        def begin() -> set[int]:
            journal = stack.enter_context(Journal(outputs, job, 0))  # holds the lock
            return journal.begin(overwrite, restarted)

        finished = _on_first(begin)
        missing = [tile for tile in range(len(work.tiles)) if tile not in finished]
        share = divide([work.tiles[tile] for tile in missing], _processes())[_rank()]
        journal = stack.enter_context(Journal(outputs, job, _rank()))
        written: list[int] = []
        flushed = time.monotonic()

        def flush() -> None:
            nonlocal flushed
            # Not a second time where it fails: of what could not be written out, the next fsync says nothing.
            tiles, written[:] = list(written), []
            journal.finish(tiles)
            flushed = time.monotonic()

        def consume(tile: int, values: tuple[Tensor, ...]) -> None:
            for k, value in enumerate(values):
                array = value.numpy(force=True)
                for rows, columns, transposed in work.places(work.tiles[tile]):
                    journal.write(k, rows, columns, array.T if transposed else array)
            written.append(tile)
            if time.monotonic() - flushed >= SECONDS_BETWEEN_FLUSHES:
                flush()

        with in_every_process():
            journal.open()
            try:
                _computed(work, [missing[k] for k in share], consume, progress)
            finally:
                flush()
    return [np.load(each.path, mmap_mode="r") for each in outputs]


def _kind_of(device: torch.device) -> str:
    """Another model of GPU, or a CPU with other vectors, may round differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        from llvmlite.binding import get_host_cpu_name
    except ImportError:  # then no code is compiled for this very CPU either
        return f"cpu {platform.machine()}"
    return f"cpu {get_host_cpu_name()}"


def _bytes_of(series: Tensor) -> Array:
    """A tensor of any type as an array; NumPy has no bfloat16."""
    series = series.cpu().resolve_neg()
    if series.dtype == torch.bfloat16:
        series = series.view(torch.int16)
    return series.numpy()


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
