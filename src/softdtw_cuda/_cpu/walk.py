"""The recurrence over one tile, an anti-diagonal at a time. Equation numbers are those of ``docs/math.md``.

(f, n) is the scaled float f * 2^-n, eq. (5); f = 0 goes with n = huge.
"""

from __future__ import annotations

import math

import numpy as np

from .arguments import Array, Boundary, Directions, Edges, Scale, Tile
from .compile import jit
from .geometry import diagonal_range, first_diagonal
from .scaled_floats import vdivide_by_power, vdown, vexp2, vexponent, vround, vround_to_int, zero_exponent
from .vectors import lanes_of, vbroadcast, vfma, vfrom_below, vload, vmin, vselect, vsplat, vstore


@jit
def largest_cost_of(scale: float, path: int, floats: Array) -> float:
    """Beyond it a cost forbids its cell, as +inf does: rounded to an exponent it would be wrong, or the sum
    over a path of so many cells would not fit 63 bits. (float32 has flagged such samples long before.)"""
    largest = 3.4e38 if floats.itemsize == 4 else 1.7e308
    return min(min(2.0**51, 2.0**62 / path) / max(scale, 1e-290), largest)


@jit
def scale_of(gamma: float, path: int, floats: Array) -> Scale:
    """`path` is at least the number of cells of any path."""
    scale = math.log2(math.e) / gamma
    floats[0] = scale  # rounds it to their type
    high = np.float64(floats[0])
    return Scale(high, scale - high, largest_cost_of(high, path, floats))


@jit
def share_of(term: Array, total: Array, inverse: Array, zero: Array) -> Array:
    """Eq. (7). One Newton step: a lone path must keep all of its weight, to the last bit."""
    share = term * inverse
    return vfma(vfma(zero - share, total, term), inverse, share)


@jit
def walk(
    diagonals: Array,
    tile: Tile,
    scale: Scale,
    line_f: Array,
    line_n: Array,
    edges: Edges,
    boundary: Boundary,
    keep_shares: bool,
    shares: Directions,
) -> tuple[float, int]:
    """Eqs. (5) and (6) over one tile, an anti-diagonal at a time; (f, n) of the tile's last cell.

    Where there is no boundary, the cells outside are zero. With ``keep_shares`` the three shares of eq. (7)
    are stored for every cell. The last three anti-diagonals are in ``line_f`` and ``line_n``: slot b at
    ``lanes + b``, slot -1 for the column left of the tile.
    """
    lanes = lanes_of(line_f)
    pitch = tile.edge + lanes
    span = tile.edge + 3 * lanes
    height, width = tile.height, tile.width
    top, left, bottom, right = boundary.top, boundary.left, boundary.bottom, boundary.right
    bottom_f, bottom_n, right_f, right_n = edges.bottom_f, edges.bottom_n, edges.right_f, edges.right_n
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
    for k in range(0, 3 * span, lanes):
        vstore(line_f, k, zero)
        vstore(line_n, k, huge)
    line_f[before2 + lanes - 1] = boundary.corner_f
    line_n[before2 + lanes - 1] = boundary.corner_n
    if left >= 0:
        line_f[before + lanes - 1] = right_f[left]
        line_n[before + lanes - 1] = right_n[left]
    if top >= 0:
        line_f[before + lanes] = bottom_f[top]
        line_n[before + lanes] = bottom_n[top]

    # The two anti-diagonals before the band's first bring in the boundary cells that it reads.
    for s in range(max(0, first_diagonal(tile) - 2), height + width - 1):
        low, high = diagonal_range(s, tile)
        if low > high:  # the band has not entered the tile yet, or has left it
            first, stop = 0, 0
            for k in range(here, here + span, lanes):
                vstore(line_f, k, zero)
                vstore(line_n, k, huge)
        else:
            first = low // lanes * lanes
            stop = high // lanes * lanes + lanes
        # Paths of diagonal moves alone meet every other anti-diagonal: two in a row must be renormalized.
        renormalize = (s & 15) < 2
        previous_f = vbroadcast(line_f, before + lanes + first - 1)
        previous_n = vbroadcast(line_n, before + lanes + first - 1)
        previous2_f = vbroadcast(line_f, before2 + lanes + first - 1)
        previous2_n = vbroadcast(line_n, before2 + lanes + first - 1)
        for b in range(first, stop, lanes):
            cost = vload(diagonals, s * pitch + b)
            up_f = vload(line_f, before + lanes + b)
            up_n = vload(line_n, before + lanes + b)
            second_f = vload(line_f, before2 + lanes + b)
            second_n = vload(line_n, before2 + lanes + b)
            left_cell_f = vfrom_below(previous_f, up_f)
            left_cell_n = vfrom_below(previous_n, up_n)
            diagonal_f = vfrom_below(previous2_f, second_f)
            diagonal_n = vfrom_below(previous2_n, second_n)
            previous_f, previous_n, previous2_f, previous2_n = up_f, up_n, second_f, second_n

            scaled = cost * high_part
            nearest = vround(scaled)
            remainder = vfma(cost, minus_low, vfma(cost, minus_high, nearest))
            forbidden = too_large < cost
            exponential = vselect(forbidden, zero, vexp2(remainder))

            m = vmin(vmin(up_n, left_cell_n), diagonal_n)
            scale_up = vdown(up_n, m)
            scale_left = vdown(left_cell_n, m)
            scale_diagonal = vdown(diagonal_n, m)
            total = vfma(diagonal_f, scale_diagonal, vfma(left_cell_f, scale_left, up_f * scale_up))
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
            if keep_shares:
                inverse = one / vselect(total < smallest, smallest, total)
                at = s * pitch + b
                vstore(shares.up, at, share_of(up_f * scale_up, total, inverse, zero))
                vstore(shares.left, at, share_of(left_cell_f * scale_left, total, inverse, zero))
                vstore(shares.diagonal, at, share_of(diagonal_f * scale_diagonal, total, inverse, zero))

        # What the next two anti-diagonals read beside the vectors just written.
        vstore(line_f, here + lanes + stop, zero)
        vstore(line_n, here + lanes + stop, huge)
        line_f[here + lanes + first - 1] = 0
        line_n[here + lanes + first - 1] = zero_n
        if first == 0 and left >= 0 and s + 1 < height:
            line_f[here + lanes - 1] = right_f[left + s + 1]
            line_n[here + lanes - 1] = right_n[left + s + 1]
        if top >= 0 and s + 1 < width:
            line_f[here + lanes + s + 1] = bottom_f[top + s + 1]
            line_n[here + lanes + s + 1] = bottom_n[top + s + 1]

        if bottom >= 0:
            b = s - height + 1
            if b >= 0:
                inside = b >= low and b <= high
                bottom_f[bottom + b] = line_f[here + lanes + b] if inside else 0
                bottom_n[bottom + b] = line_n[here + lanes + b] if inside else zero_n
        if right >= 0:
            a = s - width + 1
            if a >= 0:
                inside = high == width - 1 and low <= high
                right_f[right + a] = line_f[here + lanes + width - 1] if inside else 0
                right_n[right + a] = line_n[here + lanes + width - 1] if inside else zero_n
        here, before, before2 = before2, here, before
    return line_f[before + lanes + width - 1], line_n[before + lanes + width - 1]
