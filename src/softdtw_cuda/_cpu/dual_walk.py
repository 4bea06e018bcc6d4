"""The recurrence over one tile with its derivative along a direction. Equation numbers: ``docs/math.md``.

(f, n) as in `walk`; beside them R-dot, the derivative of R, by (9), for <E, Omega> alone, and its differences
U and V by (12) to (14), for everything else. The shares p are needed in the forward as well.
"""

from __future__ import annotations

import math

from .arguments import Array, Boundary, DualEdges, DualLines, DualShares, Scale, Tile, Tiles
from .compile import jit
from .geometry import diagonal_range, first_diagonal
from .scaled_floats import vdivide_by_power, vdown, vexp2, vexponent, vround, vround_to_int, zero_exponent
from .vectors import lanes_of, vbroadcast, vfma, vfrom_below, vload, vmin, vselect, vsplat, vstore
from .walk import share_of


@jit
def slopes(up: Array, left: Array, diagonal: Array, above: Array, beside: Array) -> tuple[Array, Array]:
    """mu of the upper and the left predecessor, eq. (13), from the shares and b = `above`, c = `beside`."""
    return left * (beside - above) - diagonal * above, up * (above - beside) - diagonal * beside


@jit
def corner_total(totals_stride: int, slot: int, tiles: Tiles, row: int, column: int) -> int:
    """Where in `DualEdges.totals` the diagonal of a tile's first cell is."""
    return slot * totals_stride + (tiles.rows + column - row) * tiles.edge


@jit
def dual_walk(
    diagonals: Array,
    changes: Array,
    tile: Tile,
    scale: Scale,
    lines: DualLines,
    dual_edges: DualEdges,
    boundary: Boundary,
    corner: int,
    keep: bool,
    kept: DualShares,
) -> tuple[float, int, float]:
    """Eqs. (5), (6), (9) and (12) to (14) over one tile; (f, n) and R-dot of its last cell.

    `diagonals` are costs and `changes` Omega, both sheared. With `keep`, shares, b and c are stored for every
    cell. Of cells outside, U and V are taken as 0: they multiply shares that are zero.

    `corner` says where in `DualEdges.totals` the diagonal of the first cell is. Those of the row above, the
    column on the left and the cell between them lie around it, and those of the last row and column take
    their places.
    """
    line_f, line_n, line_u, line_v, line_r = lines.f, lines.n, lines.u, lines.v, lines.total
    edges = dual_edges.edges
    lanes = lanes_of(line_f)
    pitch = tile.edge + lanes
    span = tile.edge + 3 * lanes
    height, width = tile.height, tile.width
    top, left, bottom, right = boundary.top, boundary.left, boundary.bottom, boundary.right
    bottom_f, bottom_n, right_f, right_n = edges.bottom_f, edges.bottom_n, edges.right_f, edges.right_n
    bottom_v, right_u, totals = dual_edges.bottom_v, dual_edges.right_u, dual_edges.totals
    zero = vsplat(line_f, 0.0)
    one = vsplat(line_f, 1.0)
    smallest = vsplat(line_f, 1e-37)
    infinite = vsplat(line_f, math.inf)
    zero_n = zero_exponent(line_n)
    huge = vsplat(line_n, zero_n)
    too_large = vsplat(line_f, scale.largest_cost)
    high_part = vsplat(line_f, scale.high)
    minus_high = vsplat(line_f, -scale.high)
    minus_low = vsplat(line_f, -scale.low)

    here, before, before2 = 0, span, 2 * span
    for at in range(0, 3 * span, lanes):
        vstore(line_f, at, zero)
        vstore(line_n, at, huge)
        vstore(line_u, at, zero)
        vstore(line_v, at, zero)
        vstore(line_r, at, zero)
    line_f[before2 + lanes - 1] = boundary.corner_f
    line_n[before2 + lanes - 1] = boundary.corner_n
    line_r[before2 + lanes - 1] = totals[corner]
    if left >= 0:
        line_f[before + lanes - 1] = right_f[left]
        line_n[before + lanes - 1] = right_n[left]
        line_u[before + lanes - 1] = right_u[left]
        line_r[before + lanes - 1] = totals[corner - 1]
    if top >= 0:
        line_f[before + lanes] = bottom_f[top]
        line_n[before + lanes] = bottom_n[top]
        line_v[before + lanes] = bottom_v[top]
        line_r[before + lanes] = totals[corner + 1]

    # The two anti-diagonals before the band's first bring in the boundary cells that it reads.
    for s in range(max(0, first_diagonal(tile) - 2), height + width - 1):
        low, high = diagonal_range(s, tile)
        if low > high:  # the band has not entered the tile yet, or has left it
            first, stop = 0, 0
            for at in range(here, here + span, lanes):
                vstore(line_f, at, zero)
                vstore(line_n, at, huge)
                vstore(line_u, at, zero)
                vstore(line_v, at, zero)
        else:
            first = low // lanes * lanes
            stop = high // lanes * lanes + lanes
        # Paths of diagonal moves alone meet every other anti-diagonal: two in a row must be renormalized.
        renormalize = (s & 15) < 2
        previous_f = vbroadcast(line_f, before + lanes + first - 1)
        previous_n = vbroadcast(line_n, before + lanes + first - 1)
        previous_u = vbroadcast(line_u, before + lanes + first - 1)
        previous2_f = vbroadcast(line_f, before2 + lanes + first - 1)
        previous2_n = vbroadcast(line_n, before2 + lanes + first - 1)
        previous_r = vbroadcast(line_r, before + lanes + first - 1)
        previous2_r = vbroadcast(line_r, before2 + lanes + first - 1)
        for b in range(first, stop, lanes):
            cost = vload(diagonals, s * pitch + b)
            up_f = vload(line_f, before + lanes + b)
            up_n = vload(line_n, before + lanes + b)
            up_u = vload(line_u, before + lanes + b)
            second_f = vload(line_f, before2 + lanes + b)
            second_n = vload(line_n, before2 + lanes + b)
            left_cell_f = vfrom_below(previous_f, up_f)
            left_cell_n = vfrom_below(previous_n, up_n)
            diagonal_f = vfrom_below(previous2_f, second_f)
            diagonal_n = vfrom_below(previous2_n, second_n)
            above = vload(line_v, before + lanes + b)
            beside = vfrom_below(previous_u, up_u)
            up_r = vload(line_r, before + lanes + b)
            second_r = vload(line_r, before2 + lanes + b)
            left_r = vfrom_below(previous_r, up_r)
            diagonal_r = vfrom_below(previous2_r, second_r)
            previous_f, previous_n, previous_u, previous_r = up_f, up_n, up_u, up_r
            previous2_f, previous2_n, previous2_r = second_f, second_n, second_r

            scaled = cost * high_part
            nearest = vround(scaled)
            remainder = vfma(cost, minus_low, vfma(cost, minus_high, nearest))
            forbidden = too_large < cost
            exponential = vselect(forbidden, zero, vexp2(remainder))

            m = vmin(vmin(up_n, left_cell_n), diagonal_n)
            term_up = up_f * vdown(up_n, m)
            term_left = left_cell_f * vdown(left_cell_n, m)
            term_diagonal = diagonal_f * vdown(diagonal_n, m)
            total = term_diagonal + (term_left + term_up)
            f = total * exponential
            n = m + vround_to_int(scaled)
            empty = f == zero
            if renormalize:
                exponent = vexponent(f)
                # NaN has an exponent too and must not be divided into a number.
                f = vselect(f < infinite, vselect(empty, zero, vdivide_by_power(f, exponent)), f)
                n = n - exponent
            n = vselect(empty, huge, n)
            vstore(line_f, here + lanes + b, f)
            vstore(line_n, here + lanes + b, n)

            inverse = one / vselect(total < smallest, smallest, total)
            up = share_of(term_up, total, inverse, zero)
            side = share_of(term_left, total, inverse, zero)
            across = share_of(term_diagonal, total, inverse, zero)
            # A cell that no path reaches takes shares that sum to 1, so that U - V = c - b around it.
            across = vselect(total == zero, one, across)

            change = vselect(forbidden, zero, vload(changes, s * pitch + b))
            # (9): a mean of the predecessors, in which nothing cancels. Differences of it would lose digits,
            # and so would a sum of U and V along cells that the likely paths avoid.
            mean = vfma(up, up_r, vfma(side, left_r, across * diagonal_r))
            vstore(line_r, here + lanes + b, change + mean)
            slope_up, slope_left = slopes(up, side, across, above, beside)
            vstore(line_u, here + lanes + b, change + slope_up)
            vstore(line_v, here + lanes + b, change + slope_left)
            if keep:
                vstore(kept.shares.up, s * pitch + b, up)
                vstore(kept.shares.left, s * pitch + b, side)
                vstore(kept.shares.diagonal, s * pitch + b, across)
                vstore(kept.above, s * pitch + b, above)
                vstore(kept.beside, s * pitch + b, beside)

        # What the next two anti-diagonals read beside the vectors just written.
        vstore(line_f, here + lanes + stop, zero)
        vstore(line_n, here + lanes + stop, huge)
        vstore(line_u, here + lanes + stop, zero)
        vstore(line_v, here + lanes + stop, zero)
        line_f[here + lanes + first - 1] = 0
        line_n[here + lanes + first - 1] = zero_n
        line_u[here + lanes + first - 1] = 0
        # In the first row U, and in the first column V, would grow with nothing to multiply.
        if top < 0 and s < width:
            line_u[here + lanes + s] = 0
        if left < 0 and s < height:
            line_v[here + lanes] = 0
        if first == 0 and left >= 0 and s + 1 < height:
            line_f[here + lanes - 1] = right_f[left + s + 1]
            line_n[here + lanes - 1] = right_n[left + s + 1]
            line_u[here + lanes - 1] = right_u[left + s + 1]
            line_r[here + lanes - 1] = totals[corner - s - 2]
        if top >= 0 and s + 1 < width:
            line_f[here + lanes + s + 1] = bottom_f[top + s + 1]
            line_n[here + lanes + s + 1] = bottom_n[top + s + 1]
            line_v[here + lanes + s + 1] = bottom_v[top + s + 1]
            line_r[here + lanes + s + 1] = totals[corner + s + 2]

        if bottom >= 0:
            b = s - height + 1
            if b >= 0:
                inside = b >= low and b <= high
                bottom_f[bottom + b] = line_f[here + lanes + b] if inside else 0
                bottom_n[bottom + b] = line_n[here + lanes + b] if inside else zero_n
                bottom_v[bottom + b] = line_v[here + lanes + b] if inside else 0
                totals[corner - tile.edge + 1 + b] = line_r[here + lanes + b] if inside else 0
        if right >= 0:
            a = s - width + 1
            if a >= 0:
                inside = high == width - 1 and low <= high
                right_f[right + a] = line_f[here + lanes + width - 1] if inside else 0
                right_n[right + a] = line_n[here + lanes + width - 1] if inside else zero_n
                right_u[right + a] = line_u[here + lanes + width - 1] if inside else 0
                totals[corner + tile.edge - 1 - a] = line_r[here + lanes + width - 1] if inside else 0
        here, before, before2 = before2, here, before
    last = before + lanes + width - 1
    return line_f[last], line_n[last], line_r[last]
