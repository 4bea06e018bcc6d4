"""Which tiles and cells lie in the band.

Names used throughout the kernels:

    i, j      row (of x) and column (of y) in the pair's N x M matrix
    I, J      row and column of a tile of ``edge`` x ``edge`` cells
    a, b      row and column inside a tile, a < height <= edge, b < width <= edge
    s = a+b   anti-diagonal inside the tile

Vectors run along b.
"""

from __future__ import annotations

from .arguments import Grid, Series, Tile, Tiles
from .compile import jit


@jit
def grid_of(series: Series, tiles: Tiles, pair: int) -> Grid:
    """The tiles of a pair's matrix."""
    edge = tiles.edge
    rows = (series.x_lengths[pair] + edge - 1) // edge
    return Grid(rows, (series.y_lengths[pair] + edge - 1) // edge, tiles.radius)


@jit
def tile_in_band(grid: Grid, row: int, column: int) -> bool:
    """Whether the pair has this tile, and the band meets it."""
    if row < 0 or column < 0 or row >= grid.rows or column >= grid.columns:
        return False
    return abs(row - column) <= grid.radius


@jit
def saved_slot(row: int, column: int, tiles: Tiles) -> int:
    """Position of tile (row, column) among the tiles whose edges are saved."""
    if tiles.kept == tiles.columns:
        return row * tiles.kept + column
    return row * tiles.kept + column - row + tiles.radius


@jit
def part_in_band(edge: int, height: int, width: int, offset: int, bandwidth: int) -> Tile:
    """The tile up to its last row and column that meet the band."""
    return Tile(
        edge,
        min(height, bandwidth - offset + width),
        min(width, bandwidth + offset + height),
        offset,
        bandwidth,
    )


@jit
def has_cells_outside(tile: Tile) -> bool:
    """Whether some cells of the square lie outside the tile's part, or perhaps outside the band."""
    return tile.height < tile.edge or tile.width < tile.edge or abs(tile.offset) + tile.edge > tile.bandwidth


@jit
def vectors_of(tile: Tile, lanes: int) -> int:
    """Vectors that cover a row."""
    return (tile.width + lanes - 1) // lanes


@jit
def first_diagonal(tile: Tile) -> int:
    """The first anti-diagonal that meets the band."""
    return max(0, abs(tile.offset) - tile.bandwidth)


@jit
def diagonal_range(s: int, tile: Tile) -> tuple[int, int]:
    """First and last b of anti-diagonal s inside tile and band."""
    low = max(0, s - tile.height + 1)
    high = min(tile.width - 1, s)
    # |offset + a - b| <= bandwidth with a = s - b
    low = max(low, (tile.offset + s - tile.bandwidth + 1) >> 1)
    high = min(high, (tile.offset + s + tile.bandwidth) >> 1)
    return low, high


@jit
def row_range(a: int, tile: Tile) -> tuple[int, int]:
    """First b of row a inside tile and band, and the one after the last."""
    first = tile.offset + a
    return max(0, first - tile.bandwidth), min(tile.width, first + tile.bandwidth + 1)


@jit
def vector_rows(b: int, lanes: int, tile: Tile) -> tuple[int, int]:
    """First row, and the one after the last, that meet the band in columns b to b + lanes - 1."""
    return max(0, b - tile.offset - tile.bandwidth), min(
        tile.height, b + lanes - tile.offset + tile.bandwidth
    )
