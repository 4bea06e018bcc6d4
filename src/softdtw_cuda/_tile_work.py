"""Tiles computed by all processes, their values gathered in memory or written into files with a journal."""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from tqdm import tqdm

from ._journal import Journal, Output, hash_array
from ._processes import (
    check_agreement,
    default_group,
    in_every_process,
    is_restarted,
    on_first,
    own_device,
)
from ._series import Array
from ._tiles import Tile, divide

SECONDS_BETWEEN_FLUSHES = 0.5
"""Writing out takes a disk milliseconds, a tile hardly more on a GPU. What is not yet written out when a
process is killed is computed again."""

VALUES_OF_A_MESSAGE = 1 << 24
"""Tiles go from process to process together, 64 MiB of float32 at a time. Sent one by one, 256 small ones
took every process 0.13 s of CPU time (gloo, AMD EPYC)."""

PathLike = str | os.PathLike[str]


class Side(NamedTuple):
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


class Work(NamedTuple):
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
    inputs: Mapping[str, Side]
    options: Mapping[str, object]
    tiles: list[Tile]
    outputs: list[tuple[tuple[int, int], np.dtype[Any], float]]
    mirrored: bool
    compute: Callable[[Tile], tuple[Tensor, ...]]
    device: torch.device

    def describe(self) -> dict[str, object]:
        """All that the bits of the outputs depend on; the series' content by its hash."""
        return {
            "command": self.command,
            "options": dict(self.options),
            "inputs": {
                name: describe_series(side.series, side.lengths) for name, side in self.inputs.items()
            },
            "tiles": hash_array(np.array(self.tiles, dtype=np.int64)),
            **describe_machine(self.device),
        }

    def places(self, tile: Tile) -> list[tuple[slice, slice, bool]]:
        """Rows and columns where a tile's values go, and whether transposed."""
        if self.mirrored and tile.rows != tile.columns:
            return [(tile.rows, tile.columns, False), (tile.columns, tile.rows, True)]
        return [(tile.rows, tile.columns, False)]


def _computed(
    work: Work, todo: Sequence[int], consume: Callable[[int, tuple[Tensor, ...]], None], progress: bool
) -> None:
    """Compute tiles; a thread consumes the values of one while the next is computed.

    On a GPU the thread has a stream of its own, that waits for the tile's values and not for the next tile's.
    """
    cells = sum(work.tiles[tile].cells for tile in todo)
    group = default_group()
    shown = progress and group.rank == 0 and len(todo) > 0
    label = f"process 1 of {group.count}" if group.count > 1 else None
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


def in_memory(work: Work, progress: bool) -> list[Tensor]:
    """The outputs, gathered in every process."""
    group = default_group()
    if group.count > 1:
        with in_every_process():
            job = work.describe()
        check_agreement(job)
    shares = divide(work.tiles, group.count)
    results = [
        torch.empty(shape, dtype=_torch_dtype(dtype), device="cpu") for shape, dtype, _ in work.outputs
    ]
    # NCCL speaks between GPUs only, gloo between CPUs.
    home = torch.device("cpu")
    if group.count > 1 and dist.get_backend() == "nccl":
        home = work.device if work.device.type == "cuda" else own_device()
    kept: dict[int, tuple[Tensor, ...]] = {}

    def consume(tile: int, values: tuple[Tensor, ...]) -> None:
        kept[tile] = tuple(value.to(home) for value in values)

    with in_every_process():
        _computed(work, shares[group.rank], consume, progress)
    for process, share in enumerate(shares):
        for part in _messages(share, work.tiles):
            tiles = [work.tiles[tile] for tile in part]
            sizes = [math.prod(_shape(tile)) for tile in tiles]
            for k, result in enumerate(results):
                if process == group.rank:
                    message = torch.cat([kept[tile][k].reshape(-1) for tile in part])
                else:
                    message = torch.empty(sum(sizes), dtype=result.dtype, device=home)
                if group.count > 1:
                    dist.broadcast(message, src=process)
                for tile, flat in zip(tiles, message.split(sizes), strict=True):
                    values = flat.view(_shape(tile))
                    for rows, columns, transposed in work.places(tile):
                        result[rows, columns] = values.mT if transposed else values
    return results


def in_files(
    work: Work, paths: Sequence[PathLike], overwrite: bool, progress: bool
) -> list[np.memmap[Any, Any]]:
    """The outputs in files; tiles that the journal lists are not computed again."""
    outputs = [Output(Path(path), *spec) for path, spec in zip(paths, work.outputs, strict=True)]
    if len({each.path.resolve() for each in outputs}) != len(outputs):
        raise ValueError(f"out names {outputs[0].path} twice, expected a file for each output.")
    group = default_group()
    with in_every_process():
        job = work.describe()
    check_agreement(job)
    with ExitStack() as stack:

        def begin() -> set[int]:
            journal = stack.enter_context(Journal(outputs, job, 0))  # holds the lock
            return journal.begin(overwrite, is_restarted())

        finished = on_first(begin)
        missing = [tile for tile in range(len(work.tiles)) if tile not in finished]
        if progress and not missing and group.rank == 0:
            print(f"{outputs[0].path}: already finished", file=sys.stderr)
        share = divide([work.tiles[tile] for tile in missing], group.count)[group.rank]
        journal = stack.enter_context(Journal(outputs, job, group.rank))
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


def describe_series(series: Tensor, lengths: Array) -> dict[str, object]:
    return {
        "shape": list(series.shape),
        "dtype": str(series.dtype),
        "lengths": hash_array(lengths),
        "content": hash_array(_bytes_of(series)),
    }


def describe_machine(device: torch.device) -> dict[str, object]:
    """What rounding depends on besides the arguments."""
    from . import __version__

    versions = {"softdtw_cuda": __version__, "torch": str(torch.__version__)}
    return {"device": _kind_of(device), "versions": versions}


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
