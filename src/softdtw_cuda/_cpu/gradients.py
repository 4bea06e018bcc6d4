"""Gradients of a tile's time steps from its alignment E, eq. (8) of ``docs/math.md``.

For squared distances the gradient of x_a is the sum of ``factor * E_ab (x_a - y_b)`` over b, with the factor
2 times the gradient of the value; that of y_b is minus the sum over a.
"""

from __future__ import annotations

from typing import NamedTuple

from .arguments import Array, GradientMemory, Gradients, Place, Series, Tile
from .compile import jit
from .geometry import row_range, vector_rows, vectors_of
from .vectors import lanes_of, vbroadcast, vfma, vload, vsplat, vstore, vsum

LARGEST_LANE_WISE_DIMENSION = 8
"""Up to this D the products keep lanes along y's time axis, above it along the dimensions."""


class Sides(NamedTuple):
    """A tile's time steps of x and y, and where their gradients go."""

    x: Array
    x_start: int
    y: Array
    y_start: int
    factor: float
    need_x: bool
    need_y: bool
    gx: Array
    gx_start: int
    gy: Array
    gy_start: int


@jit
def gradient_along_columns(
    alignment: Array, tile: Tile, dimensions: int, sides: Sides, packed: Array, at: int, partial: Array
) -> None:
    """With lanes along b, for few dimensions; the columns of y are at ``packed[at]``."""
    lanes = lanes_of(alignment)
    pitch = tile.edge + lanes
    pair = 2 * lanes
    height, width = tile.height, tile.width
    x, gx, gy = sides.x, sides.gx, sides.gy
    column = partial[tile.edge * lanes : tile.edge * lanes + lanes]
    zero = vsplat(alignment, 0.0)
    for d in range(dimensions):
        if sides.need_x:
            for a in range(height):
                vstore(partial, a * lanes, zero)
        for v in range(vectors_of(tile, lanes)):
            b = v * lanes
            y_vector = vload(packed, at + b // pair * pair * dimensions + d * pair + b % pair)
            first, stop = vector_rows(b, lanes, tile)
            total = zero
            if sides.need_x:
                for a in range(first, stop):
                    weight = vload(alignment, (a + lanes) * pitch + b)
                    difference = vbroadcast(x, sides.x_start + a * dimensions + d) - y_vector
                    total = vfma(weight, difference, total)
                    vstore(partial, a * lanes, vfma(weight, difference, vload(partial, a * lanes)))
            else:
                for a in range(first, stop):
                    weight = vload(alignment, (a + lanes) * pitch + b)
                    difference = vbroadcast(x, sides.x_start + a * dimensions + d) - y_vector
                    total = vfma(weight, difference, total)
            if sides.need_y:
                vstore(column, 0, total)
                for k in range(min(lanes, width - b)):
                    to = sides.gy_start + (b + k) * dimensions + d
                    gy[to] = gy[to] - sides.factor * column[k]
        if sides.need_x:
            for a in range(height):
                to = sides.gx_start + a * dimensions + d
                gx[to] = gx[to] + sides.factor * vsum(vload(partial, a * lanes))


@jit
def pad_rows(source: Array, start: int, count: int, dimensions: int, edge: int, target: Array) -> None:
    """Copy rows into target[d // lanes, row, d % lanes], with zeros up to full vectors and 4 rows."""
    lanes = lanes_of(target)
    for first in range(0, dimensions, lanes):
        full = first + lanes <= dimensions
        for k in range(count):
            to = first * edge + k * lanes
            at = start + k * dimensions + first
            if full:
                vstore(target, to, vload(source, at))
            else:
                vstore(target, to, vsplat(target, 0.0))
                for d in range(dimensions - first):
                    target[to + d] = source[at + d]
        for k in range(count, (count + 3) // 4 * 4):
            vstore(target, first * edge + k * lanes, vsplat(target, 0.0))


@jit
def add_rows(
    blocks: Array, factor: float, count: int, dimensions: int, edge: int, target: Array, start: int
) -> None:
    """target[row, d] += factor * blocks[d // lanes, row, d % lanes]."""
    lanes = lanes_of(blocks)
    factors = vsplat(blocks, factor)
    for first in range(0, dimensions, lanes):
        full = first + lanes <= dimensions
        for k in range(count):
            at = first * edge + k * lanes
            to = start + k * dimensions + first
            if full:
                vstore(target, to, vfma(factors, vload(blocks, at), vload(target, to)))
            else:
                vstore(blocks, at, factors * vload(blocks, at))
                for d in range(dimensions - first):
                    target[to + d] = target[to + d] + blocks[at + d]


@jit
def occupied_blocks(weights: Array, tile: Tile, line: Array, occupied: Array) -> int:
    """List the blocks of 4 x 4 cells that have alignment weight, row by row; how many there are."""
    lanes = lanes_of(weights)
    edge, height, width, offset, bandwidth = tile
    pitch = edge + lanes
    width4 = (width + 3) // 4 * 4
    blocks = 0
    for a in range(0, height, 4):
        # Vectors beside the band hold nothing, not even zeros.
        first = max(0, offset + a - bandwidth) // lanes * lanes
        for v in range(first, min(width4, offset + a + 4 + bandwidth), lanes):
            at = (a + lanes) * pitch + v
            # Weight is never negative: a sum is zero only when all of its terms are.
            column = vload(weights, at) + vload(weights, at + pitch)
            column = column + (vload(weights, at + 2 * pitch) + vload(weights, at + 3 * pitch))
            if vsum(column) != 0:
                vstore(line, 0, column)
                for l in range(0, min(lanes, width4 - v), 4):
                    if line[l] + line[l + 1] + line[l + 2] + line[l + 3] != 0:
                        occupied[2 * blocks] = a
                        occupied[2 * blocks + 1] = v + l
                        blocks += 1
    return blocks


@jit
def gradient_along_dimensions(
    alignment: Array, tile: Tile, dimensions: int, sides: Sides, rows: Array, occupied: Array, blocks: int
) -> None:
    """With lanes along the dimensions.

    One step is a block of 4 x 4 cells of those listed in ``occupied``. ``rows`` has room for four copies of a
    tile's time steps, padded to full vectors.
    """
    lanes = lanes_of(alignment)
    edge, height, width = tile.edge, tile.height, tile.width
    pitch = edge + lanes
    padded = (dimensions + lanes - 1) // lanes * lanes
    size = edge * padded
    x_rows, y_rows = rows[:size], rows[size : 2 * size]
    gx_rows, gy_rows = rows[2 * size : 3 * size], rows[3 * size : 4 * size]
    need_x, need_y = sides.need_x, sides.need_y
    pad_rows(sides.x, sides.x_start, height, dimensions, edge, x_rows)
    pad_rows(sides.y, sides.y_start, width, dimensions, edge, y_rows)
    zero = vsplat(alignment, 0.0)
    for k in range(0, padded * edge, lanes):
        vstore(gx_rows, k, zero)
        vstore(gy_rows, k, zero)

    for d in range(0, padded, lanes):
        k = 0
        while k < blocks:
            a = occupied[2 * k]
            at = d * edge + a * lanes
            x0 = vload(x_rows, at)
            x1 = vload(x_rows, at + lanes)
            x2 = vload(x_rows, at + 2 * lanes)
            x3 = vload(x_rows, at + 3 * lanes)
            g0, g1, g2, g3 = zero, zero, zero, zero
            if need_x and need_y:
                while k < blocks and occupied[2 * k] == a:
                    b = occupied[2 * k + 1]
                    k += 1
                    for l in range(4):
                        cell = (a + lanes) * pitch + b + l
                        to = d * edge + (b + l) * lanes
                        yl = vload(y_rows, to)
                        h = vload(gy_rows, to)
                        weight = vbroadcast(alignment, cell)
                        difference = x0 - yl
                        g0 = vfma(weight, difference, g0)
                        h = vfma(weight, difference, h)
                        weight = vbroadcast(alignment, cell + pitch)
                        difference = x1 - yl
                        g1 = vfma(weight, difference, g1)
                        h = vfma(weight, difference, h)
                        weight = vbroadcast(alignment, cell + 2 * pitch)
                        difference = x2 - yl
                        g2 = vfma(weight, difference, g2)
                        h = vfma(weight, difference, h)
                        weight = vbroadcast(alignment, cell + 3 * pitch)
                        difference = x3 - yl
                        g3 = vfma(weight, difference, g3)
                        h = vfma(weight, difference, h)
                        vstore(gy_rows, to, h)
            elif need_x:
                while k < blocks and occupied[2 * k] == a:
                    b = occupied[2 * k + 1]
                    k += 1
                    for l in range(4):
                        cell = (a + lanes) * pitch + b + l
                        yl = vload(y_rows, d * edge + (b + l) * lanes)
                        g0 = vfma(vbroadcast(alignment, cell), x0 - yl, g0)
                        g1 = vfma(vbroadcast(alignment, cell + pitch), x1 - yl, g1)
                        g2 = vfma(vbroadcast(alignment, cell + 2 * pitch), x2 - yl, g2)
                        g3 = vfma(vbroadcast(alignment, cell + 3 * pitch), x3 - yl, g3)
            else:
                while k < blocks and occupied[2 * k] == a:
                    b = occupied[2 * k + 1]
                    k += 1
                    for l in range(4):
                        cell = (a + lanes) * pitch + b + l
                        to = d * edge + (b + l) * lanes
                        yl = vload(y_rows, to)
                        h = vfma(vbroadcast(alignment, cell), x0 - yl, vload(gy_rows, to))
                        h = vfma(vbroadcast(alignment, cell + pitch), x1 - yl, h)
                        h = vfma(vbroadcast(alignment, cell + 2 * pitch), x2 - yl, h)
                        vstore(gy_rows, to, vfma(vbroadcast(alignment, cell + 3 * pitch), x3 - yl, h))
            vstore(gx_rows, at, g0)
            vstore(gx_rows, at + lanes, g1)
            vstore(gx_rows, at + 2 * lanes, g2)
            vstore(gx_rows, at + 3 * lanes, g3)

    if need_x:
        add_rows(gx_rows, sides.factor, height, dimensions, edge, sides.gx, sides.gx_start)
    if need_y:
        add_rows(gy_rows, -sides.factor, width, dimensions, edge, sides.gy, sides.gy_start)


@jit
def write_alignment(
    alignment: Array, tile: Tile, factor: float, target: Array, start: int, stride: int
) -> None:
    """target[a, b] = factor * E_ab inside the band."""
    lanes = lanes_of(alignment)
    for a in range(tile.height):
        source = (a + lanes) * (tile.edge + lanes)
        to = start + a * stride
        first, stop = row_range(a, tile)
        for b in range(first, stop):
            target[to + b] = factor * alignment[source + b]


@jit
def add_gradients(
    alignment: Array,
    weights: Array,
    tile: Tile,
    place: Place,
    series: Series,
    gradients: Gradients,
    packed: Array,
    memory: GradientMemory,
) -> None:
    """The tile's part of the gradients of its pair, from its alignment, or from the alignment's derivative.

    `weights` is the alignment itself: where that is zero, so is its derivative.
    """
    pair, dimensions = place.pair, series.dimensions
    if series.is_cost:
        start = pair * gradients.x_stride + (place.row * series.columns + place.column) * tile.edge
        write_alignment(alignment, tile, gradients.grad[pair], gradients.x, start, series.columns)
        return
    x_row, y_row = place.row * tile.edge * dimensions, place.column * tile.edge * dimensions
    sides = Sides(
        series.x,
        series.x_offsets[pair] + x_row,
        series.y,
        series.y_offsets[pair] + y_row,
        2 * gradients.grad[pair],
        gradients.need_x,
        gradients.need_y,
        gradients.x,
        pair * gradients.x_stride + x_row,
        gradients.y,
        pair * gradients.y_stride + y_row,
    )
    if dimensions <= LARGEST_LANE_WISE_DIMENSION:
        at = place.packed + y_row
        gradient_along_columns(alignment, tile, dimensions, sides, packed, at, memory.rows)
    else:
        blocks = occupied_blocks(weights, tile, memory.rows, memory.occupied)
        gradient_along_dimensions(alignment, tile, dimensions, sides, memory.rows, memory.occupied, blocks)
