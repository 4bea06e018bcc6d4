"""The direction Omega of a tile, row by row: a tangent of the costs, a matrix, distances, or the position.

What it is outside the tile or the band is not written: the walk takes 0 wherever the cost forbids the cell.
"""

from __future__ import annotations

import math

import numpy as np

from .arguments import FEATURES, MATRIX, TANGENTS, Array, Omega, Place, Series, Tile
from .compile import jit
from .costs import copy_rows, distance_rows
from .geometry import row_range, vectors_of
from .vectors import lanes_of, vbroadcast, vfma, vload, vsplat, vstore


@jit
def tangent_rows(
    x: Array,
    x_start: int,
    a: Array,
    a_start: int,
    dimensions: int,
    packed: Array,
    y_at: int,
    b_at: int,
    tile: Tile,
    rows: Array,
) -> None:
    """rows = 2 sum_d (x - y)(a - b), eq. (18), by direct differences; the columns of y and b are packed."""
    lanes = lanes_of(rows)
    pitch = tile.edge + lanes
    pair = 2 * lanes
    zero = vsplat(rows, 0.0)
    last = (tile.height - 1) * dimensions
    for column in range(0, vectors_of(tile, lanes) * lanes, pair):
        for row in range(0, tile.height, 2):
            below = tile.offset + row - column
            if below + 1 < -tile.bandwidth or below - (pair - 1) > tile.bandwidth:
                continue
            first = row * dimensions
            second = min(first + dimensions, last)
            t00, t01, t10, t11 = zero, zero, zero, zero
            for d in range(dimensions):
                at = column * dimensions + d * pair
                y0, y1 = vload(packed, y_at + at), vload(packed, y_at + at + lanes)
                b0, b1 = vload(packed, b_at + at), vload(packed, b_at + at + lanes)
                value, change = vbroadcast(x, x_start + first + d), vbroadcast(a, a_start + first + d)
                t00 = vfma(value - y0, change - b0, t00)
                t01 = vfma(value - y1, change - b1, t01)
                value, change = vbroadcast(x, x_start + second + d), vbroadcast(a, a_start + second + d)
                t10 = vfma(value - y0, change - b0, t10)
                t11 = vfma(value - y1, change - b1, t11)
            to = (row + lanes) * pitch + column
            vstore(rows, to, t00 + t00)
            vstore(rows, to + lanes, t01 + t01)
            vstore(rows, to + pitch, t10 + t10)
            vstore(rows, to + pitch + lanes, t11 + t11)


@jit
def position_rows(n: int, m: int, first_row: int, first_column: int, tile: Tile, rows: Array) -> None:
    """rows = (i / n - j / m)^2 with i and j counted from 1."""
    lanes = lanes_of(rows)
    scale = 1.0 / (np.float64(n) * np.float64(m))
    for a in range(tile.height):
        to = (a + lanes) * (tile.edge + lanes)
        first, stop = row_range(a, tile)
        here = (first_row + a + 1) * m
        for b in range(first, stop):
            # The difference of whole numbers is exact.
            distance = np.float64(here - (first_column + b + 1) * n) * scale
            rows[to + b] = distance * distance


@jit
def tile_direction(
    omega: Omega, series: Series, place: Place, b_packed: int, tile: Tile, packed: Array, rows: Array
) -> None:
    """rows[a, b] = Omega of the tile's cells. The columns of y and b have been packed."""
    pair, edge, features = place.pair, tile.edge, omega.series.dimensions
    first_row, first_column = place.row * edge, place.column * edge
    a_start = omega.series.x_offsets[pair]
    b_at = b_packed + first_column * features
    if omega.kind == TANGENTS:
        x_start = series.x_offsets[pair] + first_row * features
        y_at = place.packed + first_column * features
        a_start += first_row * features
        tangent_rows(series.x, x_start, omega.series.x, a_start, features, packed, y_at, b_at, tile, rows)
    elif omega.kind == MATRIX:
        start = a_start + first_row * series.columns + first_column
        copy_rows(omega.series.x, start, series.columns, -math.inf, tile, rows)
    elif omega.kind == FEATURES:
        start = a_start + first_row * features
        distance_rows(omega.series.x, start, features, packed, b_at, tile, rows)
    else:
        n, m = series.x_lengths[pair], series.y_lengths[pair]
        position_rows(n, m, first_row, first_column, tile, rows)
