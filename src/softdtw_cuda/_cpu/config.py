"""Sizes of the CPU kernels' saved state: pure arithmetic, importable without Numba and traceable with
symbolic sizes.

A pair's cost matrix is cut into square tiles. The forward saves the bottom row and the right column of every
tile that the band touches, as scaled floats (f, n): 4 numbers for each of the tile's edge cells, 16 / TILE
bytes a cell in float32.
"""

from __future__ import annotations

import torch

TILE = 128
"""Edge of the tiles of long pairs: costs, shares and alignment of one take 400 KB in float32."""
LARGEST_TILE = 256
"""A pair of at most so many steps is one tile, of 1.6 MB: loss and gradient of 129 to 256 steps take 0.5
to 0.8 of the time of tiles of 128, second order 0.8 to 1.2."""
TILE_MULTIPLE = 32
"""Of edges: two vectors of the longest kind."""


def tile_edge(n: int, m: int) -> int:
    """Edge of the square tiles of an N x M matrix."""
    longest = torch.sym_max(n, m)
    if longest > LARGEST_TILE:
        return TILE
    edge: int = -(-longest // TILE_MULTIPLE) * TILE_MULTIPLE
    return edge


def is_one_tile(n: int, m: int) -> bool:
    """Whether an N x M matrix is one tile, whose edges no other tile and no backward reads."""
    return bool(n <= LARGEST_TILE and m <= LARGEST_TILE)


def tile_radius(bandwidth: int, edge: int) -> int:
    """Tiles (I, J) hold cells of the band |i - j| <= bandwidth exactly when |I - J| <= this."""
    return (bandwidth + edge - 1) // edge


def saved_columns(m: int, bandwidth: int, edge: int) -> int:
    """Tiles kept for each row of tiles."""
    columns = (m + edge - 1) // edge
    if bandwidth < 0:
        return columns
    kept: int = torch.sym_min(columns, 2 * tile_radius(bandwidth, edge) + 1)
    return kept


def saved_edge_cells(n: int, m: int, bandwidth: int) -> int:
    """Cells saved for one pair in each of the two directions (bottom rows, right columns)."""
    if is_one_tile(n, m):
        return 0
    edge = tile_edge(n, m)
    return ((n + edge - 1) // edge) * saved_columns(m, bandwidth, edge) * edge


def saved_bytes(batch: int, n: int, m: int, dtype: torch.dtype, bandwidth: int) -> int:
    """Bytes of the state that a forward of `batch` pairs saves."""
    number = 8 if dtype == torch.float64 else 4
    return 4 * number * batch * saved_edge_cells(n, m, bandwidth)


def gradient_with_value(n: int, m: int) -> bool:
    """Whether the forward computes the gradient, too: of pairs of one tile, whose costs and shares it has.

    The gradients for a `grad` of 1 are the state then. Loss and gradient of 512 pairs of 128 steps take 0.50
    (D = 1), 0.62 (D = 3), 0.57 (D = 8) and 0.73 (D = 64) of the time of two passes.
    """
    return is_one_tile(n, m)


def dual_saved_bytes(batch: int, n: int, m: int, dtype: torch.dtype, bandwidth: int) -> int:
    """The same for a forward of second order: V beside (f, n) in bottom rows, U in right columns."""
    return saved_bytes(batch, n, m, dtype, bandwidth) // 4 * 6
