"""The backward: gradients, tile by tile in the reverse of the forward's order.

Each tile is computed again from its saved top and left boundary, then swept by eq. (8).
"""

from __future__ import annotations

import math

from .arguments import (
    Array,
    Border,
    Boundary,
    Edges,
    Flow,
    Gradients,
    Grid,
    Memory,
    Place,
    Schedule,
    Series,
    Tiles,
)
from .atomics import atomic_next
from .compile import jit, kernel
from .costs import pack_tile, tile_costs
from .forward import saved_boundary, value_of
from .geometry import grid_of, has_cells_outside, part_in_band, tile_in_band
from .gradients import add_gradients
from .schedule import NONE_LEFT, SLICE_OVER, finish, is_ready, next_ticket, put_back
from .shear import clear_margins, shear, unshear
from .sweep import sweep
from .vectors import lanes_of, vload, vselect, vsplat, vstore
from .walk import scale_of, walk


@jit
def fill_with_nan(series: Series, gradients: Gradients, pair: int) -> None:
    """The gradients of a pair whose value is NaN; its padding stays zero."""
    height, width = series.x_lengths[pair], series.y_lengths[pair]
    x_start, y_start = pair * gradients.x_stride, pair * gradients.y_stride
    if series.is_cost:
        for i in range(height if gradients.need_x else 0):
            for j in range(width):
                gradients.x[x_start + i * series.columns + j] = math.nan
        return
    if gradients.need_x:
        for k in range(height * series.dimensions):
            gradients.x[x_start + k] = math.nan
    if gradients.need_y:
        for k in range(width * series.dimensions):
            gradients.y[y_start + k] = math.nan


@jit
def clear_gradients(gradients: Gradients, pair: int) -> None:
    """Zero the gradients of a pair: here they are in its worker's cache when the tile adds to them."""
    if gradients.need_x:
        gradients.x[pair * gradients.x_stride : (pair + 1) * gradients.x_stride] = 0
    if gradients.need_y:
        gradients.y[pair * gradients.y_stride : (pair + 1) * gradients.y_stride] = 0


@jit
def take_inflow(
    flow: Flow,
    outflow: Border,
    corner: int,
    grid: Grid,
    place: Place,
    inflow: Border,
    height: int,
    width: int,
    seed: float,
) -> None:
    """Take the weight that the tiles below, right and below-right sent; what this one sends starts at 0.

    Into a pair's last cell comes the `seed`.
    """
    row, column = place.row, place.column
    has_below, has_beside = tile_in_band(grid, row + 1, column), tile_in_band(grid, row, column + 1)
    for b in range(width):
        inflow.row[b] = outflow.row[b] if has_below else 0
        outflow.row[b] = 0
    for a in range(height):
        inflow.column[a] = outflow.column[a] if has_beside else 0
        outflow.column[a] = 0
    if tile_in_band(grid, row + 1, column + 1):
        inflow.row[width - 1] = inflow.row[width - 1] + flow.cornerward[corner]
    if row == grid.rows - 1 and column == grid.columns - 1:
        inflow.row[width - 1] = seed
    flow.cornerward[corner] = 0


@jit
def reach_of(weights: Array, count: int) -> int:
    """One more than the index of the last of `count` weights that is not zero."""
    while count > 0 and weights[count - 1] == 0:
        count -= 1
    return count


@jit
def reached_part(inflow: Border, height: int, width: int) -> tuple[int, int]:
    """How many rows and columns of a tile have alignment weight; no columns where none flows in.

    Weight moves up and left only: what lies below and right of all inflow has none.
    """
    below, beside = reach_of(inflow.row, width), reach_of(inflow.column, height)
    if beside == 0:
        return height, below
    if below == 0:
        return beside, width
    return height, width


@kernel
def backward_worker(
    series: Series,
    tiles: Tiles,
    schedule: Schedule,
    edges: Edges,
    gradients: Gradients,
    flow: Flow,
    makes_value: bool,
    memory: Memory,
    packed: Array,
    worker: int,
) -> bool:
    """Take tickets until none is left; True (call again) after a slice of work, or to wait for a tile.

    With `makes_value` every pair is one tile, nothing is saved of it, its value is stored on the way, and its
    gradients need not be zero before.
    """
    pairs = series.x_lengths.size
    edge, dimensions = tiles.edge, series.dimensions
    rows, diagonals, shares, inflow = memory.rows, memory.diagonals, memory.kept.shares, memory.inflow
    line_f, line_n = memory.lines.f, memory.lines.n

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

        if makes_value:
            clear_gradients(gradients, pair)
        else:
            value = gradients.value[pair]
            if math.isnan(value):
                if first_tile == 0:
                    fill_with_nan(series, gradients, pair)
                    budget -= series.x_lengths[pair] * (
                        series.y_lengths[pair] if series.is_cost else dimensions
                    )
                continue
            if math.isinf(value) or gradients.grad[pair] == 0:
                continue
        scale = scale_of(series.gamma, (grid.rows + grid.columns) * edge, rows)
        if schedule.by_tile:
            row, column = schedule.tile_rows[first_tile], schedule.tile_columns[first_tile]
            if not is_ready(schedule, tiles, grid, pair, row, column, 1):
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
            if not tile_in_band(grid, row + 1, column):
                pack_tile(series, place, width, edge, packed)
            up_start = (slot * tiles.columns + column) * edge
            left_start = (slot * tiles.rows + row) * edge
            outflow = Border(
                flow.upward[up_start : up_start + width], flow.leftward[left_start : left_start + height]
            )
            corner = slot * (tiles.rows + tiles.columns) + tiles.rows + column - row
            take_inflow(flow, outflow, corner, grid, place, inflow, height, width, 1.0)

            height, width = reached_part(inflow, height, width)
            tile = part_in_band(edge, height, width, (row - column) * edge, tiles.bandwidth)
            if width > 0:
                tile_costs(series, place, tile, scale.largest_cost, packed, line_n, rows)
                shear(rows, tile, diagonals)
                found = saved_boundary(edges, tiles, grid, place, line_n)
                boundary = Boundary(found.top, found.left, found.corner_f, found.corner_n, -1, -1)
                f, n = walk(diagonals, tile, scale, line_f, line_n, edges, boundary, True, shares)
                if makes_value:
                    value = value_of(f, n, series.gamma)
                    gradients.value[pair] = value
                    if math.isnan(value):
                        fill_with_nan(series, gradients, pair)
                    if not math.isfinite(value):
                        continue
                if has_cells_outside(tile):
                    clear_margins(diagonals, tile)
                flow.cornerward[corner] = sweep(
                    tile, gradients.smallest, shares, memory.weight_lines, inflow, diagonals, outflow
                )
                unshear(diagonals, tile, rows)
                add_gradients(rows, rows, tile, place, series, gradients, packed, memory.gradients)
            finish(schedule, tiles, pair, row, column)


@kernel
def scale_worker(kept: Array, grad: Array, scaled: Array, tickets: Array) -> bool:
    """Gradients for a `grad` of 1 times that of their pair. Zeros, as in padding, stay zero in any case."""
    lanes = lanes_of(kept)
    zero = vsplat(kept, 0.0)
    size = kept.size // grad.size
    full = size - size % lanes
    while True:
        pair = atomic_next(tickets, 0)
        if pair >= grad.size:
            return False
        start = pair * size
        factor = vsplat(kept, grad[pair])
        for k in range(start, start + full, lanes):
            gradient = vload(kept, k)
            vstore(scaled, k, vselect(gradient == zero, zero, gradient * factor))
        for k in range(start + full, start + size):
            scaled[k] = kept[k] * grad[pair] if kept[k] != 0 else 0
