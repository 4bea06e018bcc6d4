"""The backward of second order: gradients of <E, Omega>, tile by tile in the reverse of the forward's order.

Each tile that receives alignment weight is computed again from its saved top and left boundary, then swept.
"""

from __future__ import annotations

import math

from .arguments import (
    Array,
    Border,
    Boundary,
    DualEdges,
    DualFlow,
    Flow,
    Gradients,
    Memory,
    Omega,
    Place,
    Schedule,
    Series,
    Tiles,
)
from .backward import clear_gradients, fill_with_nan, reached_part, take_inflow
from .compile import jit, kernel
from .costs import pack_tile, tile_costs
from .dual_costs import tile_direction
from .dual_forward import expected_cost_of
from .dual_sweep import dual_sweep
from .dual_walk import corner_total, dual_walk
from .forward import saved_boundary, value_of
from .geometry import grid_of, has_cells_outside, part_in_band, tile_in_band
from .gradients import add_gradients
from .schedule import NONE_LEFT, SLICE_OVER, finish, is_ready, next_ticket, put_back
from .shear import clear_margins, shear, unshear
from .walk import scale_of


@jit
def _outflow(flow: Flow, up_start: int, left_start: int, height: int, width: int) -> Border:
    return Border(flow.upward[up_start : up_start + width], flow.leftward[left_start : left_start + height])


@kernel
def dual_backward_worker(
    series: Series,
    omega: Omega,
    tiles: Tiles,
    schedule: Schedule,
    dual_edges: DualEdges,
    slope_gradients: Gradients,
    weight_gradients: Gradients,
    flow: DualFlow,
    makes_value: bool,
    dot: Array,
    memory: Memory,
    packed: Array,
    worker: int,
) -> bool:
    """Take tickets until none is left; True (call again) after a slice of work, or to wait for a tile.

    With `makes_value` every pair is one tile, nothing is saved of it, its value and <E, Omega> are stored on
    the way, and its gradients need not be zero before.

    gamma E-dot goes to `slope_gradients`, whose factor has 1 / gamma in it, and E to `weight_gradients`:
    those of the direction's tensors or, where they are tangents, of x and y again.
    """
    pairs = series.x_lengths.size
    edge, dimensions, features = tiles.edge, series.dimensions, omega.series.dimensions
    rows, slope_rows, diagonals, changes = memory.rows, memory.slope_rows, memory.diagonals, memory.changes
    inflow, slope_inflow, counts = memory.inflow, memory.slope_inflow, memory.lines.n
    needs_slope = slope_gradients.need_x or slope_gradients.need_y
    needs_weight = weight_gradients.need_x or weight_gradients.need_y

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
        y_packed = slot * tiles.columns * edge * dimensions
        b_packed = packed.size - (slot + 1) * tiles.columns * edge * features

        if makes_value:
            clear_gradients(slope_gradients, pair)
            clear_gradients(weight_gradients, pair)
        else:
            value = weight_gradients.value[pair]
            if math.isnan(value):
                if first_tile == 0:
                    fill_with_nan(series, slope_gradients, pair)
                    fill_with_nan(omega.series, weight_gradients, pair)
                    cells = series.x_lengths[pair] * series.y_lengths[pair]
                    budget -= 2 * cells + series.x_lengths[pair] * (dimensions + features)
                continue
            if math.isinf(value) or weight_gradients.grad[pair] == 0:
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
            place = Place(pair, row, column, y_packed)
            b_place = Place(pair, row, column, b_packed)
            height = min(edge, series.x_lengths[pair] - row * edge)
            width = min(edge, series.y_lengths[pair] - column * edge)
            budget -= (height * width + edge) * (dimensions + features + 16)
            if not tile_in_band(grid, row + 1, column):
                pack_tile(series, place, width, edge, packed)
                pack_tile(omega.series, b_place, width, edge, packed)
            up_start = (slot * tiles.columns + column) * edge
            left_start = (slot * tiles.rows + row) * edge
            corner = slot * (tiles.rows + tiles.columns) + tiles.rows + column - row
            outflow = _outflow(flow.weight, up_start, left_start, height, width)
            slope_outflow = _outflow(flow.slope, up_start, left_start, height, width)
            take_inflow(flow.weight, outflow, corner, grid, place, inflow, height, width, 1.0)
            take_inflow(flow.slope, slope_outflow, corner, grid, place, slope_inflow, height, width, 0.0)

            height, width = reached_part(inflow, height, width)
            tile = part_in_band(edge, height, width, (row - column) * edge, tiles.bandwidth)
            if width > 0:
                tile_costs(series, place, tile, scale.largest_cost, packed, counts, rows)
                shear(rows, tile, diagonals)
                tile_direction(omega, series, place, b_packed, tile, packed, rows)
                shear(rows, tile, changes)
                found = saved_boundary(dual_edges.edges, tiles, grid, place, counts)
                boundary = Boundary(found.top, found.left, found.corner_f, found.corner_n, -1, -1)
                f, n, total = dual_walk(
                    diagonals,
                    changes,
                    tile,
                    scale,
                    memory.lines,
                    dual_edges,
                    boundary,
                    corner_total(dual_edges.totals_stride, slot, tiles, row, column),
                    True,
                    memory.kept,
                )
                if makes_value:
                    value = value_of(f, n, series.gamma)
                    weight_gradients.value[pair] = value
                    dot[pair] = expected_cost_of(value, total)
                    if math.isnan(value):
                        fill_with_nan(series, slope_gradients, pair)
                        fill_with_nan(omega.series, weight_gradients, pair)
                    if not math.isfinite(value):
                        continue
                if has_cells_outside(tile):
                    clear_margins(diagonals, tile)
                    clear_margins(changes, tile)
                to_corner, slope_to_corner = dual_sweep(
                    tile,
                    weight_gradients.smallest,
                    memory.kept,
                    memory.weight_lines,
                    memory.slope_lines,
                    inflow,
                    slope_inflow,
                    diagonals,
                    changes,
                    outflow,
                    slope_outflow,
                )
                flow.weight.cornerward[corner] = to_corner
                flow.slope.cornerward[corner] = slope_to_corner
                unshear(diagonals, tile, rows)
                if needs_slope:
                    unshear(changes, tile, slope_rows)
                    add_gradients(
                        slope_rows, rows, tile, place, series, slope_gradients, packed, memory.gradients
                    )
                if needs_weight:
                    add_gradients(
                        rows, rows, tile, b_place, omega.series, weight_gradients, packed, memory.gradients
                    )
            finish(schedule, tiles, pair, row, column)
