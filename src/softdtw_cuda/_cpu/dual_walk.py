"""The recurrence over one tile with its derivative along a direction. Equation numbers: ``docs/math.md``.

(f, n) as in `walk`; beside them the differences U and V of R-dot, the derivative of R, by (12) to (14). The
shares p are needed in the forward as well.
"""

from __future__ import annotations

import math

import numpy as np

from .arguments import Array, Boundary, DualEdges, DualLines, DualShares, Scale, Staircase, Tile
from .compile import jit
from .geometry import diagonal_range, first_diagonal
from .scaled_floats import vdivide_by_power, vdown, vexp2, vexponent, vround, vround_to_int, zero_exponent
from .vectors import lanes_of, vbroadcast, vfma, vfrom_below, vload, vmin, vselect, vsplat, vstore
from .walk import share_of


@jit
def slopes(
    up: Array, left: Array, diagonal: Array, above: Array, beside: Array
) -> tuple[Array, Array, Array]:
    """mu of the three predecessors, eq. (13), from the shares and b = `above`, c = `beside`."""
    return (
        left * (beside - above) - diagonal * above,
        up * (above - beside) - diagonal * beside,
        up * above + left * beside,
    )


@jit
def staircase_of(n: int, m: int, row: int, column: int) -> Staircase:
    """The staircase of a pair, for the tile whose first cell is (row, column)."""
    steps = max(n, m)
    return Staircase(n, m, row, column, max(-(-row * steps // n), -(-column * steps // m)))


@jit
def dual_walk(
    diagonals: Array,
    changes: Array,
    tile: Tile,
    scale: Scale,
    lines: DualLines,
    dual_edges: DualEdges,
    boundary: Boundary,
    stairs: Staircase,
    keep: bool,
    kept: DualShares,
) -> tuple[float, int, float]:
    """Eqs. (5), (6) and (12) to (14) over one tile; (f, n) of its last cell, and its part of <E, Omega>.

    `diagonals` are costs and `changes` Omega, both sheared. With `keep`, shares, b and c are stored for every
    cell. Of cells outside, U and V are taken as 0: they multiply shares that are zero.

    <E, Omega> is R-dot of the pair's last cell. Its part is the sum over the tile's cells of `stairs` of
    R-dot's growth since the cell before: U, V or, along the diagonal, Omega + mu_diag.
    """
    line_f, line_n, line_u, line_v, line_d = lines.f, lines.n, lines.u, lines.v, lines.diagonal
    edges = dual_edges.edges
    lanes = lanes_of(line_f)
    pitch = tile.edge + lanes
    span = tile.edge + 3 * lanes
    height, width = tile.height, tile.width
    top, left, bottom, right = boundary.top, boundary.left, boundary.bottom, boundary.right
    bottom_f, bottom_n, right_f, right_n = edges.bottom_f, edges.bottom_n, edges.right_f, edges.right_n
    bottom_v, right_u = dual_edges.bottom_v, dual_edges.right_u
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
    advance = 0.0
    steps = max(stairs.n, stairs.m)
    k = stairs.first
    stair_row, stair_column = k * stairs.n // steps - stairs.row, k * stairs.m // steps - stairs.column

    here, before, before2 = 0, span, 2 * span
    for at in range(0, 3 * span, lanes):
        vstore(line_f, at, zero)
        vstore(line_n, at, huge)
        vstore(line_u, at, zero)
        vstore(line_v, at, zero)
    line_f[before2 + lanes - 1] = boundary.corner_f
    line_n[before2 + lanes - 1] = boundary.corner_n
    if left >= 0:
        line_f[before + lanes - 1] = right_f[left]
        line_n[before + lanes - 1] = right_n[left]
        line_u[before + lanes - 1] = right_u[left]
    if top >= 0:
        line_f[before + lanes] = bottom_f[top]
        line_n[before + lanes] = bottom_n[top]
        line_v[before + lanes] = bottom_v[top]

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
            previous_f, previous_n, previous_u = up_f, up_n, up_u
            previous2_f, previous2_n = second_f, second_n

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
            slope_up, slope_left, slope_diagonal = slopes(up, side, across, above, beside)
            vstore(line_u, here + lanes + b, change + slope_up)
            vstore(line_v, here + lanes + b, change + slope_left)
            vstore(line_d, lanes + b, change + slope_diagonal)
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
        if top >= 0 and s + 1 < width:
            line_f[here + lanes + s + 1] = bottom_f[top + s + 1]
            line_n[here + lanes + s + 1] = bottom_n[top + s + 1]
            line_v[here + lanes + s + 1] = bottom_v[top + s + 1]

        if bottom >= 0:
            b = s - height + 1
            if b >= 0:
                inside = b >= low and b <= high
                bottom_f[bottom + b] = line_f[here + lanes + b] if inside else 0
                bottom_n[bottom + b] = line_n[here + lanes + b] if inside else zero_n
                bottom_v[bottom + b] = line_v[here + lanes + b] if inside else 0
        if right >= 0:
            a = s - width + 1
            if a >= 0:
                inside = high == width - 1 and low <= high
                right_f[right + a] = line_f[here + lanes + width - 1] if inside else 0
                right_n[right + a] = line_n[here + lanes + width - 1] if inside else zero_n
                right_u[right + a] = line_u[here + lanes + width - 1] if inside else 0
        if stair_row + stair_column == s and stair_row < height and stair_column < width:
            at = lanes + stair_column
            goes_down = k * stairs.n // steps != (k - 1) * stairs.n // steps
            goes_right = k * stairs.m // steps != (k - 1) * stairs.m // steps
            if goes_down and goes_right:
                advance += np.float64(line_d[at])
            else:
                advance += np.float64(line_u[here + at] if goes_down else line_v[here + at])
            k += 1
            stair_row = k * stairs.n // steps - stairs.row
            stair_column = k * stairs.m // steps - stairs.column
        here, before, before2 = before2, here, before
    return line_f[before + lanes + width - 1], line_n[before + lanes + width - 1], advance
