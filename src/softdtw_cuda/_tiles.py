"""Tiles: a grid of pairs cut into rectangles, and their division among processes.

Tiles follow from the series' lengths and the options alone, never from the number of processes, and each is
computed whole by one process: so the results do not depend on that number either. Work is counted in cells,
the pairs of time steps inside the band, since a pair of long series takes longer than one of short ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ._problem import NO_BAND

TILES_OF_A_JOB = 256
"""At least, where cells suffice: the largest share of four processes is then within 2 % of the mean."""
SMALLEST_TILE = 1 << 20
"""Cells; below it a tile's own time, milliseconds for a launch, two files and their journal, would show."""
LARGEST_TILE = {"cpu": 1 << 30, "cuda": 1 << 34}
"""Cells: a second or so of a few cores, 30 ms of an H200. A killed process loses no more than that."""
LARGEST_STRIP = {"cpu": 1 << 33, "cuda": 1 << 40}
"""Cells of a tile of whole rows, in which a search compares some hundred queries with the database."""
LARGEST_SIDE = 4096
"""Series: 64 MiB of values in a tile."""


class Tile(NamedTuple):
    """The pairs of x[row_start:row_stop] and y[column_start:column_stop], and how many cells they have."""

    row_start: int
    row_stop: int
    column_start: int
    column_stop: int
    cells: int

    @property
    def rows(self) -> slice:
        return slice(self.row_start, self.row_stop)

    @property
    def columns(self) -> slice:
        return slice(self.column_start, self.column_stop)


def square_tiles(
    x_lengths: np.ndarray, y_lengths: np.ndarray | None, bandwidth: int, device: str
) -> list[Tile]:
    """Tiles of about as many rows as columns, which read the fewest series for their cells; row after row.

    Args:
        x_lengths: (K,) true lengths.
        y_lengths: (L,). None: x is compared with itself. Then only the tiles from the diagonal on are listed,
            and of one on the diagonal (rows equal to columns) each unordered pair is counted once.
        bandwidth: Sakoe-Chiba radius, or `NO_BAND`.
        device: type of the device, for the size of a tile.
    """
    symmetric = y_lengths is None
    columns = x_lengths if y_lengths is None else y_lengths
    total = count_cells(x_lengths, columns, bandwidth)
    x_steps, y_steps = int(x_lengths.sum()), int(columns.sum())
    if total == 0:
        return []
    tiles = _number_of_tiles(total // 2 if symmetric else total, _largest(LARGEST_TILE, device))
    # Of a set with itself about half of the grid's tiles are computed.
    area = x_steps * y_steps / (2 * tiles if symmetric else tiles)
    row_parts = min(len(x_lengths), max(1, round(x_steps / math.sqrt(area))))
    column_parts = row_parts
    if not symmetric:  # where one side is short, the other makes up for it
        column_parts = min(len(columns), max(1, round(tiles / row_parts)))
        row_parts = min(len(x_lengths), max(1, round(tiles / column_parts)))
    row_cuts = _cuts(x_lengths, row_parts, LARGEST_SIDE)
    column_cuts = row_cuts if symmetric else _cuts(columns, column_parts, LARGEST_SIDE)
    return _tiles(row_cuts, column_cuts, x_lengths, columns, bandwidth, symmetric)


def row_tiles(x_lengths: np.ndarray, y_lengths: np.ndarray, bandwidth: int, device: str) -> list[Tile]:
    """Tiles of whole rows, that is with all of y."""
    total = count_cells(x_lengths, y_lengths, bandwidth)
    if total == 0:
        return []
    row_cuts = _cuts(x_lengths, min(_number_of_tiles(total, _largest(LARGEST_STRIP, device)), len(x_lengths)))
    return _tiles(row_cuts, [0, len(y_lengths)], x_lengths, y_lengths, bandwidth, False)


def count_cells(rows: np.ndarray, columns: np.ndarray, bandwidth: int = NO_BAND) -> int:
    """Cells inside the band of all pairs of series of these lengths.

    A pair of lengths n and m with |n − m| ≤ r has n m − T(n − 1 − r) − T(m − 1 − r) of them, with
    T(a) = a (a + 1) / 2: the band cuts off two triangles.
    """
    cells = int(rows.sum()) * int(columns.sum())
    if bandwidth < 0:
        return cells
    return cells - len(columns) * _outside(rows, bandwidth) - len(rows) * _outside(columns, bandwidth)


def divide(tiles: Sequence[Tile], processes: int) -> list[range]:
    """For each process a range of tiles; each has the same number of cells, but for about a tile."""
    ends = np.cumsum([tile.cells for tile in tiles], dtype=np.float64)
    total = ends[-1] if len(ends) else 0.0
    # A tile belongs to the share that its middle falls into.
    middles = ends - 0.5 * np.array([tile.cells for tile in tiles], dtype=np.float64)
    cuts = np.searchsorted(middles, total * np.arange(processes + 1) / processes)
    cuts[0], cuts[-1] = 0, len(tiles)
    return [range(int(start), int(stop)) for start, stop in itertools.pairwise(cuts)]


def _largest(sizes: dict[str, int], device: str) -> int:
    """Devices without kernels of their own are about as fast as a CPU."""
    return sizes.get(device, sizes["cpu"])


def _number_of_tiles(cells: int, largest: int) -> int:
    return max(1, -(-cells // largest), min(TILES_OF_A_JOB, cells // SMALLEST_TILE))


def _cuts(lengths: np.ndarray, parts: int, largest_side: int | None = None) -> list[int]:
    """Where to cut a list of series so that about `parts` pieces have about as many steps each."""
    before = np.cumsum(lengths, dtype=np.int64) - lengths
    piece = before * parts // int(lengths.sum())
    cuts = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(lengths)]
    if largest_side is None:
        return cuts
    pairs = itertools.pairwise(cuts)
    return [cut for start, stop in pairs for cut in range(start, stop, largest_side)] + [len(lengths)]


def _tiles(
    row_cuts: list[int],
    column_cuts: list[int],
    x_lengths: np.ndarray,
    y_lengths: np.ndarray,
    bandwidth: int,
    symmetric: bool,
) -> list[Tile]:
    columns = list(itertools.pairwise(column_cuts))
    tiles = []
    for k, (top, bottom) in enumerate(itertools.pairwise(row_cuts)):
        rows = x_lengths[top:bottom]
        for left, right in columns[k if symmetric else 0 :]:
            cells = count_cells(rows, y_lengths[left:right], bandwidth)
            if symmetric and left == top:
                own = int((rows.astype(np.int64) ** 2).sum())
                own -= 2 * _outside(rows, bandwidth) if bandwidth >= 0 else 0
                cells = (cells + own) // 2
            tiles.append(Tile(top, bottom, left, right, cells))
    return tiles


def _outside(lengths: np.ndarray, bandwidth: int) -> int:
    """The sum of the triangles T that the band cuts off."""
    side = np.maximum(lengths.astype(np.int64) - 1 - bandwidth, 0)
    return int((side * (side + 1) // 2).sum())
