"""Rows of a tile into anti-diagonals and back: ``diagonals[s, b]`` is ``rows[s - b, b]``.

An anti-diagonal is then contiguous. Both arrays have a pitch of ``edge + lanes``; row a of the tile is row
``a + lanes`` of ``rows``, so that a vector of an anti-diagonal can begin above the tile.
"""

from __future__ import annotations

from .arguments import Array, Tile
from .compile import jit
from .geometry import vector_rows, vectors_of
from .vectors import lanes_of, shear_down, shear_up, vsplat, vstore


@jit
def shear(rows: Array, tile: Tile, diagonals: Array) -> None:
    """diagonals[a + b, b] = rows[a, b] wherever a vector of the anti-diagonal meets the band."""
    lanes = lanes_of(rows)
    pitch = tile.edge + lanes
    for v in range(vectors_of(tile, lanes)):
        b = v * lanes
        first, stop = vector_rows(b, lanes, tile)
        first = first // lanes * lanes
        source, target = rows[first * pitch :], diagonals[first * pitch :]
        for t in range(0, stop - first + lanes - 1, lanes):
            shear_down(source, (t + lanes) * pitch + b, pitch, target, (b + t) * pitch + b, pitch)


@jit
def clear_margins(diagonals: Array, tile: Tile) -> None:
    """Zero what ``unshear`` reads and the sweep does not write: the lanes outside the tile or the band."""
    lanes = lanes_of(diagonals)
    pitch = tile.edge + lanes
    zero = vsplat(diagonals, 0.0)
    for v in range(vectors_of(tile, lanes)):
        b = v * lanes
        first, stop = vector_rows(b, lanes, tile)
        for s in range(b + first // lanes * lanes, b + stop + 2 * lanes):
            vstore(diagonals, s * pitch + b, zero)


@jit
def unshear(diagonals: Array, tile: Tile, rows: Array) -> None:
    """rows[a, b] = diagonals[a + b, b] wherever the vector of the row meets the band."""
    lanes = lanes_of(rows)
    pitch = tile.edge + lanes
    for v in range(vectors_of(tile, lanes)):
        b = v * lanes
        first, stop = vector_rows(b, lanes, tile)
        first = first // lanes * lanes
        source, target = diagonals[first * pitch :], rows[first * pitch :]
        for a in range(0, stop - first, lanes):
            shear_up(source, (a + b) * pitch + b, pitch, target, (a + lanes) * pitch + b, pitch)
