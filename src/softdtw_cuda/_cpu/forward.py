"""The forward: values, and the edges of all tiles where a backward follows."""

from __future__ import annotations

import math

import numpy as np

from .arguments import Array, Boundary, Edges, Grid, Memory, Place, Schedule, Series, Tile, Tiles
from .compile import jit, kernel
from .costs import pack_tile, tile_costs
from .geometry import grid_of, part_in_band, saved_slot, tile_in_band
from .scaled_floats import zero_exponent
from .schedule import NONE_LEFT, SLICE_OVER, finish, is_ready, next_ticket, put_back
from .shear import shear
from .walk import scale_of, walk


@jit
def saved_boundary(edges: Edges, tiles: Tiles, grid: Grid, place: Place, counts: Array) -> Boundary:
    """Where the edges of the tile and of its neighbours are among those of all tiles."""
    row, column, start = place.row, place.column, place.pair * edges.stride
    here = start + saved_slot(row, column, tiles) * tiles.edge
    top, left = -1, -1
    corner_f, corner_n = 0.0, zero_exponent(counts)
    if row == 0 and column == 0:
        corner_f, corner_n = 1.0, 0
    if tile_in_band(grid, row - 1, column):
        top = start + saved_slot(row - 1, column, tiles) * tiles.edge
    if tile_in_band(grid, row, column - 1):
        left = start + saved_slot(row, column - 1, tiles) * tiles.edge
    if tile_in_band(grid, row - 1, column - 1):
        at = start + saved_slot(row - 1, column - 1, tiles) * tiles.edge + tiles.edge - 1
        corner_f, corner_n = edges.bottom_f[at], edges.bottom_n[at]
    return Boundary(top, left, corner_f, corner_n, here, here)


@jit
def overwritten_boundary(
    edges: Edges, tiles: Tiles, grid: Grid, place: Place, slot: int, width: int, counts: Array
) -> Boundary:
    """Where the tile's edges replace those of its neighbours. Keeps the corner that the next tile needs."""
    row, column, start = place.row, place.column, slot * edges.stride
    bottom, right = start + column * tiles.edge, start + row * tiles.edge
    has_top, has_left = tile_in_band(grid, row - 1, column), tile_in_band(grid, row, column - 1)
    corner_f, corner_n = 0.0, zero_exponent(counts)
    if row == 0 and column == 0:
        corner_f, corner_n = 1.0, 0
    at = slot * tiles.rows + row
    if tile_in_band(grid, row - 1, column - 1):
        if has_left:
            corner_f, corner_n = edges.corner_f[at], edges.corner_n[at]
        else:  # the tile on the left, outside the band, has overwritten nothing
            corner_f, corner_n = edges.bottom_f[bottom - 1], edges.bottom_n[bottom - 1]
    if has_top:
        edges.corner_f[at] = edges.bottom_f[bottom + width - 1]
        edges.corner_n[at] = edges.bottom_n[bottom + width - 1]
    else:
        edges.corner_f[at] = 0
        edges.corner_n[at] = zero_exponent(counts)
    return Boundary(bottom if has_top else -1, right if has_left else -1, corner_f, corner_n, bottom, right)


@jit
def clear_rest_of_edges(
    edges: Edges, bottom: int, right: int, tile: Tile, height: int, width: int, counts: Array
) -> None:
    """Zero the cells of the edges outside the band, where the tile has `height` rows and `width` columns."""
    if bottom >= 0:
        for b in range(tile.width if tile.height == height else 0, width):
            edges.bottom_f[bottom + b] = 0
            edges.bottom_n[bottom + b] = zero_exponent(counts)
    if right >= 0:
        for a in range(tile.height, height):
            edges.right_f[right + a] = 0
            edges.right_n[right + a] = zero_exponent(counts)


@jit
def value_of(f: float, n: int, gamma: float) -> float:
    """The value of a pair whose last cell has Z = f 2^-n."""
    if f == 0:
        return math.inf
    return gamma * (np.float64(n) * math.log(2.0) - math.log(np.float64(f)))


@kernel
def forward_worker(
    series: Series,
    tiles: Tiles,
    schedule: Schedule,
    edges: Edges,
    value: Array,
    memory: Memory,
    packed: Array,
    worker: int,
) -> bool:
    """Take tickets until none is left; True (call again) after a slice of work, or to wait for a tile."""
    pairs = series.x_lengths.size
    edge, dimensions = tiles.edge, series.dimensions
    rows, diagonals, counts = memory.rows, memory.diagonals, memory.lines.n

    budget = schedule.budget
    while True:
        ticket, first_tile = next_ticket(schedule, pairs, budget, worker)
        if ticket == NONE_LEFT:
            return False
        if ticket == SLICE_OVER:
            return True
        pair = ticket % pairs
        last_tile = first_tile + 1 if schedule.by_tile else schedule.tile_rows.size
        grid = grid_of(series, tiles, pair)
        slot = pair if schedule.by_tile else worker
        packed_start = slot * tiles.columns * edge * dimensions
        scale = scale_of(series.gamma, (grid.rows + grid.columns) * edge, rows)
        if schedule.by_tile:
            row, column = schedule.tile_rows[first_tile], schedule.tile_columns[first_tile]
            if not is_ready(schedule, tiles, grid, pair, row, column, -1):
                put_back(schedule, ticket, first_tile, worker)
                return True

        for tile_index in range(first_tile, last_tile):
            if budget <= 0:
                put_back(schedule, ticket, tile_index, worker)
                return True
            row, column = schedule.tile_rows[tile_index], schedule.tile_columns[tile_index]
            if row >= grid.rows or column >= grid.columns:
                continue
            place = Place(pair, row, column, packed_start)
            height = min(edge, series.x_lengths[pair] - row * edge)
            width = min(edge, series.y_lengths[pair] - column * edge)
            budget -= (height * width + edge) * (dimensions + 8)
            if not tile_in_band(grid, row - 1, column):
                pack_tile(series, place, width, edge, packed)
            tile = part_in_band(edge, height, width, (row - column) * edge, tiles.bandwidth)
            tile_costs(series, place, tile, scale.largest_cost, packed, counts, rows)
            shear(rows, tile, diagonals)

            if edges.saved:
                found = saved_boundary(edges, tiles, grid, place, counts)
            else:
                found = overwritten_boundary(edges, tiles, grid, place, slot, width, counts)
            bottom = found.bottom if row < grid.rows - 1 else -1
            right = found.right if column < grid.columns - 1 else -1
            boundary = Boundary(
                found.top,
                found.left,
                found.corner_f,
                found.corner_n,
                bottom if tile.height == height else -1,
                right,
            )
            f, n = walk(
                diagonals, tile, scale, memory.lines.f, counts, edges, boundary, False, memory.kept.shares
            )
            clear_rest_of_edges(edges, bottom, right, tile, height, width, counts)
            if row == grid.rows - 1 and column == grid.columns - 1:
                value[pair] = value_of(f, n, series.gamma)
            finish(schedule, tiles, pair, row, column)
