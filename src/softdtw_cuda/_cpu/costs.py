"""The costs of a tile: squared Euclidean distances, or a part of a cost matrix, row by row.

Whatever lies outside the tile, the band or the pair costs +inf: it gets f = 0 in the recurrence and takes
part in every sum without a special case.
"""

from __future__ import annotations

import math

from .arguments import Array, Place, Series, Tile
from .compile import jit
from .geometry import row_range, vectors_of
from .vectors import lanes_of, transpose, vbroadcast, vcount, vfma, vload, vselect, vsplat, vstore


@jit
def pack_columns(
    y: Array, start: int, width: int, dimensions: int, edge: int, packed: Array, at: int
) -> None:
    """Transpose rows of y into packed[b // pair, d, b % pair], a pair being two vectors, with zeros after."""
    lanes = lanes_of(packed)
    pair = 2 * lanes
    for b in range(0, edge, lanes):
        block = at + b // pair * pair * dimensions + b % pair
        full = dimensions - dimensions % lanes if b + lanes <= width else 0
        for d in range(0, full, lanes):
            transpose(y, start + b * dimensions + d, dimensions, packed, block + d * pair, pair)
        for d in range(full, dimensions):
            for k in range(lanes):
                packed[block + d * pair + k] = y[start + (b + k) * dimensions + d] if b + k < width else 0


@jit
def compensated_sum(total: Array, lost: Array, term: Array) -> tuple[Array, Array]:
    """Kahan's sum: the total with `term` added, and what rounding it lost."""
    term = term - lost
    larger = total + term
    return larger, (larger - total) - term


@jit
def distance_rows(
    x: Array, start: int, dimensions: int, packed: Array, at: int, tile: Tile, rows: Array
) -> None:
    """rows[a, b] = sum_d (x[a, d] - y[b, d])^2 by direct differences.

    Sums of 4 terms, or of an eighth of all, are added to a compensated total, which keeps the error near half
    a unit in the last place: long series with a small gamma show anything more in their gradients. A block of
    4 rows and 2 vectors shares its loads. Blocks outside the band are passed over.
    """
    lanes = lanes_of(rows)
    pitch = tile.edge + lanes
    pair = 2 * lanes
    zero = vsplat(rows, 0.0)
    last = start + (tile.height - 1) * dimensions
    group = max(4, dimensions // 8)
    for b in range(0, vectors_of(tile, lanes) * lanes, pair):
        for a in range(0, tile.height, 4):
            below = tile.offset + a - b
            if below + 3 < -tile.bandwidth or below - (pair - 1) > tile.bandwidth:
                continue
            x0 = start + a * dimensions
            x1 = min(x0 + dimensions, last)
            x2 = min(x1 + dimensions, last)
            x3 = min(x2 + dimensions, last)
            t00, t01, t10, t11, t20, t21, t30, t31 = zero, zero, zero, zero, zero, zero, zero, zero
            c00, c01, c10, c11, c20, c21, c30, c31 = zero, zero, zero, zero, zero, zero, zero, zero
            for first in range(0, dimensions, group):
                s00, s01, s10, s11, s20, s21, s30, s31 = zero, zero, zero, zero, zero, zero, zero, zero
                for d in range(first, min(first + group, dimensions)):
                    y0 = vload(packed, at + b * dimensions + d * pair)
                    y1 = vload(packed, at + b * dimensions + d * pair + lanes)
                    value = vbroadcast(x, x0 + d)
                    s00 = vfma(value - y0, value - y0, s00)
                    s01 = vfma(value - y1, value - y1, s01)
                    value = vbroadcast(x, x1 + d)
                    s10 = vfma(value - y0, value - y0, s10)
                    s11 = vfma(value - y1, value - y1, s11)
                    value = vbroadcast(x, x2 + d)
                    s20 = vfma(value - y0, value - y0, s20)
                    s21 = vfma(value - y1, value - y1, s21)
                    value = vbroadcast(x, x3 + d)
                    s30 = vfma(value - y0, value - y0, s30)
                    s31 = vfma(value - y1, value - y1, s31)
                t00, c00 = compensated_sum(t00, c00, s00)
                t01, c01 = compensated_sum(t01, c01, s01)
                t10, c10 = compensated_sum(t10, c10, s10)
                t11, c11 = compensated_sum(t11, c11, s11)
                t20, c20 = compensated_sum(t20, c20, s20)
                t21, c21 = compensated_sum(t21, c21, s21)
                t30, c30 = compensated_sum(t30, c30, s30)
                t31, c31 = compensated_sum(t31, c31, s31)
            to = (a + lanes) * pitch + b
            vstore(rows, to, t00)
            vstore(rows, to + lanes, t01)
            vstore(rows, to + pitch, t10)
            vstore(rows, to + pitch + lanes, t11)
            vstore(rows, to + 2 * pitch, t20)
            vstore(rows, to + 2 * pitch + lanes, t21)
            vstore(rows, to + 3 * pitch, t30)
            vstore(rows, to + 3 * pitch + lanes, t31)


@jit
def copy_rows(cost: Array, start: int, stride: int, least: float, tile: Tile, rows: Array) -> None:
    """rows[a, b] = the tile of a cost matrix, inside the band; NaN for what is below ``least``."""
    lanes = lanes_of(rows)
    for a in range(tile.height):
        source = start + a * stride
        to = (a + lanes) * (tile.edge + lanes)
        first, stop = row_range(a, tile)
        for b in range(first, stop):
            value = cost[source + b]
            # Its exponent would overflow: the pair is poisoned, as by NaN, rather than wrong.
            rows[to + b] = math.nan if value < least else value


@jit
def forbid_outside(rows: Array, tile: Tile, counts: Array) -> None:
    """Put +inf on everything the walk will read that is outside the tile or the band.

    Of a row, a vector of an anti-diagonal that meets the band reaches no farther than one vector beside it.
    """
    lanes = lanes_of(rows)
    pitch = tile.edge + lanes
    height, width, bandwidth = tile.height, tile.width, tile.bandwidth
    padded = vectors_of(tile, lanes) * lanes
    infinite = vsplat(rows, math.inf)
    lane = vcount(counts)
    for a in range(lanes):
        for b in range(0, padded, lanes):
            vstore(rows, a * pitch + b, infinite)
    for a in range(height + lanes, height + 3 * lanes):
        for b in range(0, padded, lanes):
            vstore(rows, a * pitch + b, infinite)
    if width < padded:
        for a in range(lanes, height + lanes):
            for b in range(width, padded):
                rows[a * pitch + b] = math.inf
    if abs(tile.offset) + tile.edge > bandwidth:
        for a in range(height):
            to = (a + lanes) * pitch
            first = tile.offset + a - bandwidth
            for b in range(max(0, first - lanes) // lanes * lanes, min(first, padded), lanes):
                outside = lane < vsplat(counts, first - b)
                vstore(rows, to + b, vselect(outside, infinite, vload(rows, to + b)))
            last = tile.offset + a + bandwidth
            for b in range(max(0, last + 1) // lanes * lanes, min(last + lanes + 1, padded), lanes):
                outside = vsplat(counts, last - b) < lane
                vstore(rows, to + b, vselect(outside, infinite, vload(rows, to + b)))


@jit
def pack_tile(series: Series, place: Place, width: int, edge: int, packed: Array) -> None:
    """Transpose the part of y that a column of tiles needs into its place in `packed`."""
    if not series.is_cost:
        first = place.column * edge * series.dimensions
        start = series.y_offsets[place.pair] + first
        pack_columns(series.y, start, width, series.dimensions, edge, packed, place.packed + first)


@jit
def tile_costs(
    series: Series, place: Place, tile: Tile, largest: float, packed: Array, counts: Array, rows: Array
) -> None:
    """rows[a, b] = the tile's costs, with +inf around them; ``largest`` is the largest that a walk takes."""
    dimensions, x_start = series.dimensions, series.x_offsets[place.pair]
    if series.is_cost:
        start = x_start + (place.row * series.columns + place.column) * tile.edge
        copy_rows(series.x, start, series.columns, -largest, tile, rows)
    else:
        start = x_start + place.row * tile.edge * dimensions
        at = place.packed + place.column * tile.edge * dimensions
        distance_rows(series.x, start, dimensions, packed, at, tile, rows)
    forbid_outside(rows, tile, counts)
