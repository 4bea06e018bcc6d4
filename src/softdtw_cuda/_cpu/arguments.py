"""What the kernels are called with: groups of arrays and numbers, as tuples that Numba can read.

Arrays are flat and C-contiguous. P is the number of pairs; a pair's matrix is cut into square tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any
"""A flat, C-contiguous NumPy array."""

UNBANDED = 1 << 40
"""The bandwidth where there is no band; indices can be added to it."""


class Series(NamedTuple):
    """The pairs: where each one's series start, and how long they are.

    Attributes:
        is_cost: x holds cost matrices of rows of `columns` elements, and y nothing.
        x, y: all series; several pairs may start at the same element.
        x_offsets, y_offsets: (P,) first element of each pair's series.
        x_lengths, y_lengths: (P,) rows and columns of each pair's matrix.
        columns: columns of the largest matrix.
        dimensions: features of a time step, 0 for costs.
        gamma: temperature.
    """

    is_cost: bool
    x: Array
    y: Array
    x_offsets: Array
    y_offsets: Array
    x_lengths: Array
    y_lengths: Array
    columns: int
    dimensions: int
    gamma: float


class Tiles(NamedTuple):
    """How the largest matrix is cut up.

    Attributes:
        edge: rows and columns of a tile.
        radius: tiles (I, J) meet the band exactly when abs(I - J) is at most this.
        rows, columns: number of tiles in each direction.
        kept: tiles saved for each row of tiles.
        bandwidth: Sakoe-Chiba radius, or `UNBANDED`.
        cells: number of cells in the band, or a few more.
    """

    edge: int
    radius: int
    rows: int
    columns: int
    kept: int
    bandwidth: int
    cells: int


class Schedule(NamedTuple):
    """Who does what: one ticket is a pair, or, with `by_tile`, one tile of one pair.

    Attributes:
        tile_rows, tile_columns: the tiles in an order in which each comes after those that it waits for.
        by_tile: what a ticket is.
        tickets: (1,) the next ticket.
        finished: (P * rows * columns,) 1 for tiles that are finished, with `by_tile`.
        resume: (2 * workers,) ticket and tile that each worker goes on with, ticket -1 for a new one.
        budget: cells times (dimensions + 8) after which a worker returns.
    """

    tile_rows: Array
    tile_columns: Array
    by_tile: bool
    tickets: Array
    finished: Array
    resume: Array
    budget: int


class Edges(NamedTuple):
    """Bottom rows and right columns of tiles, as scaled floats (f, n).

    Attributes:
        bottom_f, bottom_n, right_f, right_n: `stride` cells for each pair, or for each worker.
        corner_f, corner_n: the cell above-left of the first tile of each row of tiles to come; not used where
            the edges of all tiles are saved.
        stride: cells of a pair in each array.
        saved: the edges of every tile are saved, for the backward. Otherwise those of each tile overwrite
            those of the tile above or left of it.
    """

    bottom_f: Array
    bottom_n: Array
    right_f: Array
    right_n: Array
    corner_f: Array
    corner_n: Array
    stride: int
    saved: bool


class Flow(NamedTuple):
    """Alignment weight on its way from tile to tile in the backward."""

    upward: Array
    leftward: Array
    cornerward: Array


class Gradients(NamedTuple):
    """What the backward multiplies with, and where its results go.

    Attributes:
        grad, value: (P,) gradient of the values, and the values.
        smallest: alignment weight below this is dropped.
        need_x, need_y: the sides whose gradients are computed.
        x, y: results, one per pair, zero before unless the worker clears them; x is that of the costs where
            there is no y.
        x_stride, y_stride: elements of a pair.
    """

    grad: Array
    value: Array
    smallest: float
    need_x: bool
    need_y: bool
    x: Array
    x_stride: int
    y: Array
    y_stride: int


class Grid(NamedTuple):
    """The tiles of one pair's matrix: how many in each direction, and the band's radius in tiles."""

    rows: int
    columns: int
    radius: int


class Place(NamedTuple):
    """Which tile of which pair, and where its pair's columns of y begin in `packed`."""

    pair: int
    row: int
    column: int
    packed: int


class Tile(NamedTuple):
    """The part of a tile that lies in the matrix and, but for the cells beside it, in the band.

    `offset` is i - j at the tile's first cell.
    """

    edge: int
    height: int
    width: int
    offset: int
    bandwidth: int


class Scale(NamedTuple):
    """log2(e) / gamma as the sum of two floats, and the cost beyond which a cell is forbidden."""

    high: float
    low: float
    largest_cost: float


class Boundary(NamedTuple):
    """Where a tile's boundaries are in the arrays of `Edges`; -1 for what is missing or need not be saved."""

    top: int
    left: int
    corner_f: float
    corner_n: int
    bottom: int
    right: int


class Directions(NamedTuple):
    """One array for each of the three moves of a path: from above, from the left, along the diagonal."""

    up: Array
    left: Array
    diagonal: Array


class Border(NamedTuple):
    """Alignment weight along one row and one column of a tile."""

    row: Array
    column: Array


class GradientMemory(NamedTuple):
    """Lane-wise partial sums or four blocks of padded rows; the blocks that have weight."""

    rows: Array
    occupied: Array


# Second order: what the kernels propagate beside the above, equations (12) to (15) of ``docs/math.md``.

TANGENTS, MATRIX, FEATURES, POSITION = range(4)
"""Kinds of a direction: those of `softdtw_cuda._problem.Direction`."""


class Omega(NamedTuple):
    """A direction on the costs of all pairs.

    Attributes:
        kind: `TANGENTS`, `MATRIX`, `FEATURES` or `POSITION`.
        series: a and b in the place of x and y, and their features in that of the dimensions.
    """

    kind: int
    series: Series


class DualEdges(NamedTuple):
    """Edges of tiles with V of eq. (12) along bottom rows and U along right columns.

    Attributes:
        edges: (f, n) of the same cells.
        bottom_v, right_u: as the arrays of `edges`.
        totals: R-dot of the last finished cell (i, j) on each diagonal j - i, of `totals_stride` diagonals of
            each pair, or of each worker's pair; for <E, Omega> alone.
    """

    edges: Edges
    bottom_v: Array
    right_u: Array
    totals: Array
    totals_stride: int


class DualLines(NamedTuple):
    """The last three anti-diagonals of a dual walk; `total` is R-dot itself."""

    f: Array
    n: Array
    u: Array
    v: Array
    total: Array


class DualShares(NamedTuple):
    """Shares of eq. (7) of a tile's cells, and b (`above`) and c (`beside`) of eq. (12)."""

    shares: Directions
    above: Array
    beside: Array


class DualFlow(NamedTuple):
    """Alignment weight on its way from tile to tile, and gamma times its derivative."""

    weight: Flow
    slope: Flow


class Memory(NamedTuple):
    """What one worker works in, laid out by `scratch.sizes_of`; parts that its kernel does not use are empty.

    Attributes:
        rows, slope_rows: a tile's costs and then its alignment, and the alignment's derivative, row by row.
        diagonals, changes: the same by anti-diagonals; `changes` holds Omega first.
        kept: what the walk keeps of every cell, by anti-diagonals.
        lines, weight_lines, slope_lines: the last three anti-diagonals of the walk and of the two sweeps.
        inflow, slope_inflow: what flows into the tile from outside.
        gradients: memory of `add_gradients`.
    """

    rows: Array
    slope_rows: Array
    diagonals: Array
    changes: Array
    kept: DualShares
    lines: DualLines
    weight_lines: Directions
    slope_lines: Directions
    inflow: Border
    slope_inflow: Border
    gradients: GradientMemory
