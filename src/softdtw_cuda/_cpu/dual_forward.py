"""The forward of second order: <E, Omega>, values, and the edges of all tiles where a backward follows."""

from __future__ import annotations

import math

from .arguments import Array, Boundary, DualEdges, Memory, Omega, Place, Schedule, Series, Tiles
from .compile import jit, kernel
from .costs import pack_tile, tile_costs
from .dual_costs import tile_direction
from .dual_walk import corner_total, dual_walk
from .forward import clear_rest_of_edges, overwritten_boundary, saved_boundary, value_of
from .geometry import grid_of, part_in_band, tile_in_band
from .schedule import NONE_LEFT, SLICE_OVER, finish, is_ready, next_ticket, put_back
from .shear import shear
from .walk import scale_of


@jit
def _clear_rest_of_differences(
    edges: DualEdges, bottom: int, right: int, first_column: int, first_row: int, height: int, width: int
) -> None:
    """Zero V and U in the cells of the edges outside the band, as `clear_rest_of_edges` does (f, n)."""
    if bottom >= 0:
        for b in range(first_column, width):
            edges.bottom_v[bottom + b] = 0
    if right >= 0:
        for a in range(first_row, height):
            edges.right_u[right + a] = 0


@jit
def expected_cost_of(value: float, total: float) -> float:
    """<E, Omega> of a pair, from R-dot of its last cell."""
    if math.isnan(value):
        return math.nan
    return 0.0 if math.isinf(value) else total


@kernel
def dual_forward_worker(
    series: Series,
    omega: Omega,
    tiles: Tiles,
    schedule: Schedule,
    dual_edges: DualEdges,
    value: Array,
    dot: Array,
    memory: Memory,
    packed: Array,
    worker: int,
) -> bool:
    """Take tickets until none is left; True (call again) after a slice of work, or to wait for a tile."""
    pairs = series.x_lengths.size
    edge, dimensions, features = tiles.edge, series.dimensions, omega.series.dimensions
    edges = dual_edges.edges
    rows, diagonals, changes, counts = memory.rows, memory.diagonals, memory.changes, memory.lines.n

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
        # The columns of every slot's y come first, then those of b.
        y_packed = slot * tiles.columns * edge * dimensions
        b_packed = packed.size - (slot + 1) * tiles.columns * edge * features
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
            place = Place(pair, row, column, y_packed)
            height = min(edge, series.x_lengths[pair] - row * edge)
            width = min(edge, series.y_lengths[pair] - column * edge)
            budget -= (height * width + edge) * (dimensions + features + 16)
            if not tile_in_band(grid, row - 1, column):
                pack_tile(series, place, width, edge, packed)
                pack_tile(omega.series, Place(pair, row, column, b_packed), width, edge, packed)
            tile = part_in_band(edge, height, width, (row - column) * edge, tiles.bandwidth)
            tile_costs(series, place, tile, scale.largest_cost, packed, counts, rows)
            shear(rows, tile, diagonals)
            tile_direction(omega, series, place, b_packed, tile, packed, rows)
            shear(rows, tile, changes)

            if edges.saved:
                found = saved_boundary(edges, tiles, grid, place, counts)
            else:
                found = overwritten_boundary(edges, tiles, grid, place, slot, width, counts)
            last_row, last_column = row == grid.rows - 1, column == grid.columns - 1
            bottom = -1 if last_row else found.bottom
            right = -1 if last_column else found.right
            reaches_bottom = tile.height == height
            if row == 0 and column == 0:  # nothing of the worker's last pair, nor of the cells outside
                totals_start = slot * dual_edges.totals_stride
                dual_edges.totals[totals_start : totals_start + dual_edges.totals_stride] = 0
            corner = corner_total(dual_edges.totals_stride, slot, tiles, row, column)
            boundary = Boundary(
                found.top, found.left, found.corner_f, found.corner_n, bottom if reaches_bottom else -1, right
            )
            f, n, total = dual_walk(
                diagonals,
                changes,
                tile,
                scale,
                memory.lines,
                dual_edges,
                boundary,
                corner,
                False,
                memory.kept,
            )
            clear_rest_of_edges(edges, bottom, right, tile, height, width, counts)
            first_clear = tile.width if reaches_bottom else 0
            _clear_rest_of_differences(dual_edges, bottom, right, first_clear, tile.height, height, width)
            if last_row and last_column:
                value[pair] = value_of(f, n, series.gamma)
                dot[pair] = expected_cost_of(value[pair], total)
            finish(schedule, tiles, pair, row, column)
