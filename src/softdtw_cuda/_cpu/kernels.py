"""The Soft-DTW recurrence and its gradient on the CPU, tile by tile, with no N x M table.

Equation numbers are those of ``docs/math.md``. Names used throughout:

    i, j      row (of x) and column (of y) in the pair's N x M matrix
    I, J      row and column of a tile of ``edge`` x ``edge`` cells
    a, b      row and column inside a tile, a < height <= edge, b < width <= edge
    s = a+b   anti-diagonal inside the tile
    (f, n)    the scaled float f * 2^-n, eq. (5); f = 0 goes with n = huge

Vector lanes run along b. A tile's costs are computed row by row into ``rows[a, b]`` and sheared into
``diagonals[s, b]``, so that an anti-diagonal is contiguous. Whatever lies outside the tile, the band or the
pair costs +inf there: it gets f = 0 and takes part in every sum without a special case.

Order of work. The forward visits a tile after the tiles above, left and above-left; the backward after those
below, right and below-right. One ticket is a pair, or, when pairs are few, one tile of one pair in such an
order; every sum has the same order either way, so results depend neither on the choice nor on the number of
threads.

A worker returns after a slice of work, `budget`, so that the interpreter can handle signals. What it was
doing is in `resume` (a ticket and a tile for each worker); everything else it needs is in memory already.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from softdtw_cuda._cpu.compile import jit, kernel
from softdtw_cuda._cpu.intrinsics import (
    atomic_next,
    lanes_of,
    load_acquire,
    shear_down,
    shear_up,
    store_release,
    transpose,
    vbroadcast,
    vcount,
    vdivide_by_power,
    vdown,
    vexp2,
    vexponent,
    vfma,
    vfrom_above,
    vfrom_below,
    vload,
    vmin,
    vround,
    vround_to_int,
    vselect,
    vsplat,
    vstore,
    vsum,
    zero_exponent,
)

Array = Any
"""A flat, C-contiguous NumPy array."""

UNBANDED = 1 << 40
SPINS_BEFORE_YIELD = 2000
LARGEST_LANE_WISE_DIMENSION = 8
"""Up to this D the gradient products keep lanes along y's time axis, above it along the dimensions."""


# ------------------------------------------------------------------------------------------------- geometry
@jit
def tile_in_band(row: int, column: int, rows: int, columns: int, radius: int) -> bool:
    if row < 0 or column < 0 or row >= rows or column >= columns:
        return False
    return abs(row - column) <= radius


@jit
def saved_slot(row: int, column: int, kept: int, columns: int, radius: int) -> int:
    """Position of tile (row, column) among the tiles whose edges are saved."""
    if kept == columns:
        return row * kept + column
    return row * kept + column - row + radius


@jit
def diagonal_range(s: int, height: int, width: int, offset: int, bandwidth: int) -> tuple[int, int]:
    """First and last b of anti-diagonal s inside tile and band; ``offset`` is i - j at the tile's corner."""
    low = max(0, s - height + 1)
    high = min(width - 1, s)
    # |offset + a - b| <= bandwidth with a = s - b
    low = max(low, (offset + s - bandwidth + 1) >> 1)
    high = min(high, (offset + s + bandwidth) >> 1)
    return low, high


@jit
def first_diagonal(offset: int, bandwidth: int) -> int:
    """The first anti-diagonal of a tile that meets the band."""
    return max(0, abs(offset) - bandwidth)


@jit
def banded_extent(height: int, width: int, offset: int, bandwidth: int) -> tuple[int, int]:
    """Height and width of the tile's part up to its last row and column that meet the band."""
    return min(height, bandwidth - offset + width), min(width, bandwidth + offset + height)


@jit
def vector_rows(b: int, lanes: int, height: int, offset: int, bandwidth: int) -> tuple[int, int]:
    """First row, and the one after the last, of the tile that meet the band in columns b to b + lanes - 1."""
    return max(0, b - offset - bandwidth), min(height, b + lanes - offset + bandwidth)


# ---------------------------------------------------------------------------------------------------- costs
@jit
def pack_columns(
    y: Array, start: int, width: int, dimensions: int, edge: int, packed: Array, at: int
) -> None:
    """Transpose rows of y into packed[b // pair, d, b % pair], a pair being two vectors, with zeros after."""
    lanes = lanes_of(packed)
    pair = 2 * lanes
    for b in range(0, edge, lanes):
        block = at + b // pair * pair * dimensions + b % pair
        whole = dimensions - dimensions % lanes if b + lanes <= width else 0
        for d in range(0, whole, lanes):
            transpose(y, start + b * dimensions + d, dimensions, packed, block + d * pair, pair)
        for d in range(whole, dimensions):
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
    x: Array,
    start: int,
    height: int,
    dimensions: int,
    packed: Array,
    at: int,
    vectors: int,
    edge: int,
    offset: int,
    bandwidth: int,
    rows: Array,
) -> None:
    """rows[a, b] = sum_d (x[a, d] - y[b, d])^2 by direct differences.

    Sums of at most 4 terms are added to a compensated total, which keeps the error near half a unit in the
    last place: long series with a small gamma show anything more in their gradients. A block of 4 rows and 2
    vectors shares its loads. Blocks outside the band are passed over.
    """
    lanes = lanes_of(rows)
    pitch = edge + lanes
    pair = 2 * lanes
    zero = vsplat(rows, 0.0)
    last = start + (height - 1) * dimensions
    for b in range(0, vectors * lanes, pair):
        for a in range(0, height, 4):
            if offset + a + 3 - b < -bandwidth or offset + a - (b + pair - 1) > bandwidth:
                continue
            x0 = start + a * dimensions
            x1 = min(x0 + dimensions, last)
            x2 = min(x1 + dimensions, last)
            x3 = min(x2 + dimensions, last)
            t00, t01, t10, t11, t20, t21, t30, t31 = zero, zero, zero, zero, zero, zero, zero, zero
            c00, c01, c10, c11, c20, c21, c30, c31 = zero, zero, zero, zero, zero, zero, zero, zero
            for first in range(0, dimensions, 4):
                s00, s01, s10, s11, s20, s21, s30, s31 = zero, zero, zero, zero, zero, zero, zero, zero
                for d in range(first, min(first + 4, dimensions)):
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
def copy_rows(
    cost: Array,
    start: int,
    height: int,
    width: int,
    stride: int,
    offset: int,
    bandwidth: int,
    edge: int,
    rows: Array,
) -> None:
    """rows[a, b] = the tile of the given cost matrix, inside the band."""
    lanes = lanes_of(rows)
    for a in range(height):
        source = start + a * stride
        to = (a + lanes) * (edge + lanes)
        for b in range(max(0, offset + a - bandwidth), min(width, offset + a + bandwidth + 1)):
            rows[to + b] = cost[source + b]


@jit
def forbid_outside(
    rows: Array,
    height: int,
    width: int,
    vectors: int,
    offset: int,
    bandwidth: int,
    edge: int,
    counts: Array,
) -> None:
    """Put +inf on everything the walk will read that is outside the tile or the band.

    Of a row, a vector of an anti-diagonal that meets the band reaches no farther than one vector beside it.
    """
    lanes = lanes_of(rows)
    pitch = edge + lanes
    padded = vectors * lanes
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
    if abs(offset) + edge > bandwidth:
        for a in range(height):
            to = (a + lanes) * pitch
            first = offset + a - bandwidth
            for b in range(max(0, first - lanes) // lanes * lanes, min(first, padded), lanes):
                outside = lane < vsplat(counts, first - b)
                vstore(rows, to + b, vselect(outside, infinite, vload(rows, to + b)))
            last = offset + a + bandwidth
            for b in range(max(0, last + 1) // lanes * lanes, min(last + lanes + 1, padded), lanes):
                outside = vsplat(counts, last - b) < lane
                vstore(rows, to + b, vselect(outside, infinite, vload(rows, to + b)))


@jit
def shear(
    rows: Array,
    height: int,
    vectors: int,
    offset: int,
    bandwidth: int,
    edge: int,
    diagonals: Array,
) -> None:
    """diagonals[a + b, b] = rows[a, b] wherever a vector of the anti-diagonal meets the band."""
    lanes = lanes_of(rows)
    pitch = edge + lanes
    for v in range(vectors):
        b = v * lanes
        first, stop = vector_rows(b, lanes, height, offset, bandwidth)
        first = first // lanes * lanes
        source, target = rows[first * pitch :], diagonals[first * pitch :]
        for t in range(0, stop - first + lanes - 1, lanes):
            shear_down(source, (t + lanes) * pitch + b, pitch, target, (b + t) * pitch + b, pitch)


@jit
def clear_margins(
    diagonals: Array, height: int, vectors: int, offset: int, bandwidth: int, edge: int
) -> None:
    """Zero what ``unshear`` reads and the sweep leaves alone: the lanes outside the tile or the band."""
    lanes = lanes_of(diagonals)
    pitch = edge + lanes
    zero = vsplat(diagonals, 0.0)
    for v in range(vectors):
        b = v * lanes
        first, stop = vector_rows(b, lanes, height, offset, bandwidth)
        for s in range(b + first // lanes * lanes, b + stop + 2 * lanes):
            vstore(diagonals, s * pitch + b, zero)


@jit
def unshear(
    diagonals: Array, height: int, vectors: int, offset: int, bandwidth: int, edge: int, rows: Array
) -> None:
    """rows[a, b] = diagonals[a + b, b] wherever the vector of the row meets the band."""
    lanes = lanes_of(rows)
    pitch = edge + lanes
    for v in range(vectors):
        b = v * lanes
        first, stop = vector_rows(b, lanes, height, offset, bandwidth)
        first = first // lanes * lanes
        source, target = diagonals[first * pitch :], rows[first * pitch :]
        for a in range(0, stop - first, lanes):
            shear_up(source, (a + b) * pitch + b, pitch, target, (a + lanes) * pitch + b, pitch)


# ----------------------------------------------------------------------------------------------- recurrence
@jit
def largest_cost_of(scale: float, path: int, floats: Array) -> float:
    """Beyond it a cost forbids its cell, as +inf does: rounded to an exponent it would be wrong, or the sum
    over a path of so many cells would not fit 63 bits. (float32 has flagged such samples long before.)"""
    largest = 3.4e38 if floats.itemsize == 4 else 1.7e308
    return min(min(2.0**51, 2.0**62 / path) / max(scale, 1e-290), largest)


@jit
def walk(
    diagonals: Array,
    edge: int,
    height: int,
    width: int,
    offset: int,
    bandwidth: int,
    largest_cost: float,
    scale_high: float,
    scale_low: float,
    line_f: Array,
    line_n: Array,
    top_f: Array,
    top_n: Array,
    top: int,
    left_f: Array,
    left_n: Array,
    left: int,
    corner_f: float,
    corner_n: int,
    bottom_f: Array,
    bottom_n: Array,
    bottom: int,
    right_f: Array,
    right_n: Array,
    right: int,
    keep_shares: bool,
    share_up: Array,
    share_left: Array,
    share_diagonal: Array,
) -> tuple[float, int]:
    """Eqs. (5) and (6) over one tile, an anti-diagonal at a time; (f, n) of the tile's last cell.

    ``top``, ``left``, ``bottom`` and ``right`` are offsets of the tile's boundary in their arrays, negative
    for a boundary that does not exist (all zeros) or need not be saved. With ``keep_shares`` the three shares
    of eq. (7) are stored for every cell. The last three anti-diagonals live in ``line_f`` and ``line_n``:
    slot b at ``lanes + b``, slot -1 for the column left of the tile.
    """
    lanes = lanes_of(line_f)
    pitch = edge + lanes
    span = edge + 3 * lanes
    zero = vsplat(line_f, 0.0)
    one = vsplat(line_f, 1.0)
    smallest = vsplat(line_f, 1e-37)
    infinite = vsplat(line_f, math.inf)
    zero_n = zero_exponent(line_n)
    huge = vsplat(line_n, zero_n)
    too_large = vsplat(line_f, largest_cost)
    high_part = vsplat(line_f, scale_high)
    minus_high = vsplat(line_f, -scale_high)
    minus_low = vsplat(line_f, -scale_low)

    here, before, before2 = 0, span, 2 * span
    for k in range(0, 3 * span, lanes):
        vstore(line_f, k, zero)
        vstore(line_n, k, huge)
    line_f[before2 + lanes - 1] = corner_f
    line_n[before2 + lanes - 1] = corner_n
    if left >= 0:
        line_f[before + lanes - 1] = left_f[left]
        line_n[before + lanes - 1] = left_n[left]
    if top >= 0:
        line_f[before + lanes] = top_f[top]
        line_n[before + lanes] = top_n[top]

    # The two anti-diagonals before the band's first bring in the boundary cells that it reads.
    for s in range(max(0, first_diagonal(offset, bandwidth) - 2), height + width - 1):
        low, high = diagonal_range(s, height, width, offset, bandwidth)
        if low > high:  # the band has not entered the tile yet, or has left it
            first, stop = 0, 0
            for k in range(here, here + span, lanes):
                vstore(line_f, k, zero)
                vstore(line_n, k, huge)
        else:
            first = low // lanes * lanes
            stop = high // lanes * lanes + lanes
        # Paths of diagonal moves alone meet every other anti-diagonal: two in a row must be renormalised.
        renormalise = (s & 15) < 2
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
            whole = vround(scaled)
            remainder = vfma(cost, minus_low, vfma(cost, minus_high, whole))
            forbidden = too_large < cost
            weight = vselect(forbidden, zero, vexp2(remainder))

            m = vmin(vmin(up_n, left_cell_n), diagonal_n)
            scale_up = vdown(up_n, m)
            scale_left = vdown(left_cell_n, m)
            scale_diagonal = vdown(diagonal_n, m)
            total = vfma(diagonal_f, scale_diagonal, vfma(left_cell_f, scale_left, up_f * scale_up))
            f = total * weight
            n = m + vround_to_int(scaled)
            empty = f == zero
            if renormalise:
                exponent = vexponent(f)
                # NaN has an exponent too and must not be divided into a number.
                f = vselect(f < infinite, vselect(empty, zero, vdivide_by_power(f, exponent)), f)
                n = n - exponent
            n = vselect(empty, huge, n)
            vstore(line_f, here + lanes + b, f)
            vstore(line_n, here + lanes + b, n)
            if keep_shares:
                inverse = one / vselect(total < smallest, smallest, total)
                # One Newton step each: a lone path must keep all of its mass, to the last bit.
                term_up = up_f * scale_up
                term_left = left_cell_f * scale_left
                term_diagonal = diagonal_f * scale_diagonal
                up = term_up * inverse
                vstore(share_up, s * pitch + b, vfma(vfma(zero - up, total, term_up), inverse, up))
                side = term_left * inverse
                vstore(share_left, s * pitch + b, vfma(vfma(zero - side, total, term_left), inverse, side))
                across = term_diagonal * inverse
                across = vfma(vfma(zero - across, total, term_diagonal), inverse, across)
                vstore(share_diagonal, s * pitch + b, across)

        # What the next two anti-diagonals read beside the vectors just written.
        vstore(line_f, here + lanes + stop, zero)
        vstore(line_n, here + lanes + stop, huge)
        line_f[here + lanes + first - 1] = 0
        line_n[here + lanes + first - 1] = zero_n
        if first == 0 and left >= 0 and s + 1 < height:
            line_f[here + lanes - 1] = left_f[left + s + 1]
            line_n[here + lanes - 1] = left_n[left + s + 1]
        if top >= 0 and s + 1 < width:
            line_f[here + lanes + s + 1] = top_f[top + s + 1]
            line_n[here + lanes + s + 1] = top_n[top + s + 1]

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


@jit
def sweep(
    edge: int,
    height: int,
    width: int,
    offset: int,
    bandwidth: int,
    smallest: float,
    share_up: Array,
    share_left: Array,
    share_diagonal: Array,
    flow_up: Array,
    flow_left: Array,
    flow_diagonal: Array,
    below: Array,
    beside: Array,
    alignment: Array,
    to_above: Array,
    to_left: Array,
) -> float:
    """Eq. (8) over one tile, the anti-diagonals in reverse.

    ``below[b]`` and ``beside[a]`` are the mass that enters the bottom row and the right column from outside;
    the mass that leaves the tile is added to ``to_above[b]``, ``to_left[a]`` and, for the tile above-left,
    returned. Mass below ``smallest`` is dropped: it would only make denormal numbers.
    """
    lanes = lanes_of(alignment)
    pitch = edge + lanes
    span = edge + 3 * lanes
    zero = vsplat(alignment, 0.0)
    threshold = vsplat(alignment, smallest)
    here, after, after2 = 0, span, 2 * span
    for k in range(0, 3 * span, lanes):
        vstore(flow_up, k, zero)
        vstore(flow_left, k, zero)
        vstore(flow_diagonal, k, zero)
    to_corner = flow_up[0]

    for s in range(height + width - 2, first_diagonal(offset, bandwidth) - 1, -1):
        low, high = diagonal_range(s, height, width, offset, bandwidth)
        if low > high:  # the band has not entered the tile yet, or has left it
            first, stop = 0, 0
            for k in range(here, here + span, lanes):
                vstore(flow_up, k, zero)
                vstore(flow_left, k, zero)
                vstore(flow_diagonal, k, zero)
        else:
            first = low // lanes * lanes
            stop = high // lanes * lanes + lanes
        b = s - height + 1
        if b >= low and b <= high:
            flow_up[after + lanes + b] = below[b]
        a = s - width + 1
        if a >= 0 and low <= high and high == width - 1:
            flow_left[after + lanes + width] = beside[a]
        next_left = vbroadcast(flow_left, after + lanes + stop)
        next_diagonal = vbroadcast(flow_diagonal, after2 + lanes + stop)
        for b in range(stop - lanes, first - 1, -lanes):
            left_here = vload(flow_left, after + lanes + b)
            diagonal_here = vload(flow_diagonal, after2 + lanes + b)
            mass = vload(flow_up, after + lanes + b) + vfrom_above(left_here, next_left)
            mass = mass + vfrom_above(diagonal_here, next_diagonal)
            next_left, next_diagonal = left_here, diagonal_here
            mass = vselect(mass < threshold, zero, mass)
            vstore(alignment, s * pitch + b, mass)
            vstore(flow_up, here + lanes + b, mass * vload(share_up, s * pitch + b))
            vstore(flow_left, here + lanes + b, mass * vload(share_left, s * pitch + b))
            vstore(flow_diagonal, here + lanes + b, mass * vload(share_diagonal, s * pitch + b))
        # What the previous two anti-diagonals read beside the vectors just written.
        vstore(flow_up, here + first, zero)
        vstore(flow_left, here + first, zero)
        vstore(flow_diagonal, here + first, zero)
        flow_left[here + lanes + stop] = 0
        flow_diagonal[here + lanes + stop] = 0

        if s < width and high == s and low <= high:
            to_above[s] = to_above[s] + flow_up[here + lanes + s]
            if s > 0:
                to_above[s - 1] = to_above[s - 1] + flow_diagonal[here + lanes + s]
        if s < height and low == 0 and low <= high:
            to_left[s] = to_left[s] + flow_left[here + lanes]
            if s > 0:
                to_left[s - 1] = to_left[s - 1] + flow_diagonal[here + lanes]
            else:
                to_corner = flow_diagonal[here + lanes]
        here, after, after2 = after2, here, after
    return to_corner  # type: ignore[no-any-return]  # what an Array holds is Any


# ------------------------------------------------------------------------------------------------ gradients
@jit
def gradient_along_columns(
    alignment: Array,
    edge: int,
    height: int,
    width: int,
    offset: int,
    bandwidth: int,
    dimensions: int,
    x: Array,
    x_start: int,
    packed: Array,
    at: int,
    factor: float,
    partial: Array,
    need_x: bool,
    need_y: bool,
    gx: Array,
    gx_start: int,
    gy: Array,
    gy_start: int,
) -> None:
    """Add factor * E_ab (x_a - y_b) to gx_a and take it from gy_b; lanes along b, for few dimensions."""
    lanes = lanes_of(alignment)
    pitch = edge + lanes
    pair = 2 * lanes
    vectors = (width + lanes - 1) // lanes
    column = partial[edge * lanes : edge * lanes + lanes]
    zero = vsplat(alignment, 0.0)
    for d in range(dimensions):
        if need_x:
            for a in range(height):
                vstore(partial, a * lanes, zero)
        for v in range(vectors):
            b = v * lanes
            y_vector = vload(packed, at + b // pair * pair * dimensions + d * pair + b % pair)
            first, stop = vector_rows(b, lanes, height, offset, bandwidth)
            total = zero
            if need_x:
                for a in range(first, stop):
                    mass = vload(alignment, (a + lanes) * pitch + b)
                    difference = vbroadcast(x, x_start + a * dimensions + d) - y_vector
                    total = vfma(mass, difference, total)
                    vstore(partial, a * lanes, vfma(mass, difference, vload(partial, a * lanes)))
            else:
                for a in range(first, stop):
                    mass = vload(alignment, (a + lanes) * pitch + b)
                    difference = vbroadcast(x, x_start + a * dimensions + d) - y_vector
                    total = vfma(mass, difference, total)
            if need_y:
                vstore(column, 0, total)
                for k in range(min(lanes, width - b)):
                    to = gy_start + (b + k) * dimensions + d
                    gy[to] = gy[to] - factor * column[k]
        if need_x:
            for a in range(height):
                to = gx_start + a * dimensions + d
                gx[to] = gx[to] + factor * vsum(vload(partial, a * lanes))


@jit
def pad_rows(source: Array, start: int, count: int, dimensions: int, edge: int, target: Array) -> None:
    """Copy rows into target[d // lanes, row, d % lanes], with zeros up to whole vectors and 4 rows."""
    lanes = lanes_of(target)
    for first in range(0, dimensions, lanes):
        whole = first + lanes <= dimensions
        for k in range(count):
            to = first * edge + k * lanes
            at = start + k * dimensions + first
            if whole:
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
        whole = first + lanes <= dimensions
        for k in range(count):
            at = first * edge + k * lanes
            to = start + k * dimensions + first
            if whole:
                vstore(target, to, vfma(factors, vload(blocks, at), vload(target, to)))
            else:
                vstore(blocks, at, factors * vload(blocks, at))
                for d in range(dimensions - first):
                    target[to + d] = target[to + d] + blocks[at + d]


@jit
def gradient_along_dimensions(
    alignment: Array,
    edge: int,
    height: int,
    width: int,
    offset: int,
    bandwidth: int,
    dimensions: int,
    x: Array,
    x_start: int,
    y: Array,
    y_start: int,
    factor: float,
    x_rows: Array,
    y_rows: Array,
    gx_rows: Array,
    gy_rows: Array,
    occupied: Array,
    need_x: bool,
    need_y: bool,
    gx: Array,
    gx_start: int,
    gy: Array,
    gy_start: int,
) -> None:
    """Add factor * E_ab (x_a - y_b) to gx_a and take it from gy_b; lanes along the dimensions.

    One step is a block of 4 x 4 cells; blocks with no mass are skipped.
    """
    lanes = lanes_of(alignment)
    pitch = edge + lanes
    padded = (dimensions + lanes - 1) // lanes * lanes
    pad_rows(x, x_start, height, dimensions, edge, x_rows)
    pad_rows(y, y_start, width, dimensions, edge, y_rows)
    height4 = (height + 3) // 4 * 4
    width4 = (width + 3) // 4 * 4
    zero = vsplat(alignment, 0.0)

    blocks = 0
    for a in range(0, height4, 4):
        # Vectors beside the band hold nothing, not even zeros.
        first = max(0, offset + a - bandwidth) // lanes * lanes
        for v in range(first, min(width4, offset + a + 4 + bandwidth), lanes):
            at = (a + lanes) * pitch + v
            # Mass is never negative: a sum is zero only when all of its terms are.
            column = vload(alignment, at) + vload(alignment, at + pitch)
            column = column + (vload(alignment, at + 2 * pitch) + vload(alignment, at + 3 * pitch))
            if vsum(column) != 0:
                vstore(gx_rows, 0, column)
                for l in range(0, min(lanes, width4 - v), 4):
                    if gx_rows[l] + gx_rows[l + 1] + gx_rows[l + 2] + gx_rows[l + 3] != 0:
                        occupied[2 * blocks] = a
                        occupied[2 * blocks + 1] = v + l
                        blocks += 1
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
                        mass = vbroadcast(alignment, cell)
                        difference = x0 - yl
                        g0 = vfma(mass, difference, g0)
                        h = vfma(mass, difference, h)
                        mass = vbroadcast(alignment, cell + pitch)
                        difference = x1 - yl
                        g1 = vfma(mass, difference, g1)
                        h = vfma(mass, difference, h)
                        mass = vbroadcast(alignment, cell + 2 * pitch)
                        difference = x2 - yl
                        g2 = vfma(mass, difference, g2)
                        h = vfma(mass, difference, h)
                        mass = vbroadcast(alignment, cell + 3 * pitch)
                        difference = x3 - yl
                        g3 = vfma(mass, difference, g3)
                        h = vfma(mass, difference, h)
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
        add_rows(gx_rows, factor, height, dimensions, edge, gx, gx_start)
    if need_y:
        add_rows(gy_rows, -factor, width, dimensions, edge, gy, gy_start)


@jit
def write_alignment(
    alignment: Array,
    edge: int,
    height: int,
    width: int,
    offset: int,
    bandwidth: int,
    factor: float,
    target: Array,
    start: int,
    stride: int,
) -> None:
    """target[a, b] = factor * E_ab inside the band."""
    lanes = lanes_of(alignment)
    for a in range(height):
        source = (a + lanes) * (edge + lanes)
        to = start + a * stride
        for b in range(max(0, offset + a - bandwidth), min(width, offset + a + bandwidth + 1)):
            target[to + b] = factor * alignment[source + b]


# ---------------------------------------------------------------------------------------------- whole tiles
@jit
def tile_costs(
    is_cost: bool,
    x: Array,
    x_start: int,
    dimensions: int,
    stride: int,
    row: int,
    column: int,
    height: int,
    width: int,
    edge: int,
    bandwidth: int,
    packed: Array,
    packed_start: int,
    rows: Array,
    diagonals: Array,
    counts: Array,
) -> None:
    """The tile's costs, sheared. ``x`` is the cost matrix when ``is_cost``."""
    lanes = lanes_of(rows)
    vectors = (width + lanes - 1) // lanes
    offset = (row - column) * edge
    if is_cost:
        start = x_start + row * edge * stride + column * edge
        copy_rows(x, start, height, width, stride, offset, bandwidth, edge, rows)
    else:
        at = packed_start + column * edge * dimensions
        distance_rows(
            x,
            x_start + row * edge * dimensions,
            height,
            dimensions,
            packed,
            at,
            vectors,
            edge,
            offset,
            bandwidth,
            rows,
        )
    forbid_outside(rows, height, width, vectors, offset, bandwidth, edge, counts)
    shear(rows, height, vectors, offset, bandwidth, edge, diagonals)


@jit
def wait_for(flags: Array, index: int) -> bool:
    """Whether the flag was seen set within a bounded number of looks."""
    for _ in range(SPINS_BEFORE_YIELD):  # noqa: SIM110  (Numba does not compile any())
        if load_acquire(flags, index) != 0:
            return True
    return False


@kernel
def forward_worker(
    is_cost: bool,
    x: Array,
    x_stride: int,
    y: Array,
    y_stride: int,
    m_padded: int,
    dimensions: int,
    x_lengths: Array,
    y_lengths: Array,
    gamma: float,
    bandwidth: int,
    edge: int,
    kept: int,
    padded_rows: int,
    padded_columns: int,
    radius: int,
    tickets: Array,
    tile_rows: Array,
    tile_columns: Array,
    by_tile: bool,
    save: bool,
    value: Array,
    bottom_f: Array,
    bottom_n: Array,
    right_f: Array,
    right_n: Array,
    saved_stride: int,
    corners_f: Array,
    corners_n: Array,
    corners_stride: int,
    packed: Array,
    packed_stride: int,
    flags: Array,
    resume: Array,
    budget: int,
    worker: int,
    scratch: Array,
    scratch_n: Array,
) -> bool:
    """Take tickets until none is left; True (call again) after a slice of work, or to wait for a tile.

    With ``by_tile`` a ticket is one tile, else one pair. When nothing is saved, the edges of each tile
    overwrite those of the tile above or left of it.
    """
    batch = x_lengths.size
    tiles = tile_rows.size
    lanes = lanes_of(scratch)
    span = edge + 3 * lanes
    rows = scratch[: (edge + 4 * lanes) * (edge + lanes)]
    used = rows.size
    diagonals = scratch[used : used + (2 * edge + 3 * lanes) * (edge + lanes)]
    used += diagonals.size
    line_f = scratch[used : used + 3 * span]
    scale = math.log2(math.e) / gamma
    scratch[0] = scale
    scale_high = np.float64(scratch[0])
    scale_low = scale - scale_high

    total = batch * tiles if by_tile else batch
    while True:
        ticket, first_tile = resume[2 * worker], resume[2 * worker + 1]
        resume[2 * worker] = -1
        if ticket < 0:
            if budget <= 0:
                return True
            ticket = atomic_next(tickets, 0)
            if ticket >= total:
                return False
            first_tile = ticket // batch if by_tile else 0
        pair = ticket % batch
        last_tile = first_tile + 1 if by_tile else tiles
        height_all, width_all = x_lengths[pair], y_lengths[pair]
        rows_of_tiles = (height_all + edge - 1) // edge
        columns_of_tiles = (width_all + edge - 1) // edge
        slot = pair if by_tile else worker
        saved_start = (pair if save or by_tile else worker) * saved_stride

        if by_tile:
            row, column = tile_rows[first_tile], tile_columns[first_tile]
            ready = True
            for dr, dc in ((1, 0), (0, 1), (1, 1)):
                if ready and tile_in_band(row - dr, column - dc, rows_of_tiles, columns_of_tiles, radius):
                    index = (pair * padded_rows + row - dr) * padded_columns + column - dc
                    ready = wait_for(flags, index)
            if not ready:
                resume[2 * worker], resume[2 * worker + 1] = ticket, first_tile
                return True

        for tile in range(first_tile, last_tile):
            if budget <= 0:
                resume[2 * worker], resume[2 * worker + 1] = ticket, tile
                return True
            row, column = tile_rows[tile], tile_columns[tile]
            if row >= rows_of_tiles or column >= columns_of_tiles:
                continue
            height = min(edge, height_all - row * edge)
            width = min(edge, width_all - column * edge)
            budget -= (height * width + edge) * (dimensions + 8)
            has_top = tile_in_band(row - 1, column, rows_of_tiles, columns_of_tiles, radius)
            has_left = tile_in_band(row, column - 1, rows_of_tiles, columns_of_tiles, radius)
            has_corner = tile_in_band(row - 1, column - 1, rows_of_tiles, columns_of_tiles, radius)
            offset = (row - column) * edge
            if not has_top and not is_cost:
                pack_columns(
                    y,
                    pair * y_stride + column * edge * dimensions,
                    width,
                    dimensions,
                    edge,
                    packed,
                    slot * packed_stride + column * edge * dimensions,
                )
            full_height, full_width = height, width
            height, width = banded_extent(height, width, offset, bandwidth)
            tile_costs(
                is_cost,
                x,
                pair * x_stride,
                dimensions,
                m_padded,
                row,
                column,
                height,
                width,
                edge,
                bandwidth,
                packed,
                slot * packed_stride,
                rows,
                diagonals,
                scratch_n,
            )
            top, left, bottom, right = -1, -1, -1, -1
            corner_f, corner_n = 0.0, zero_exponent(scratch_n)
            if row == 0 and column == 0:
                corner_f, corner_n = 1.0, 0
            if save:
                here = saved_start + saved_slot(row, column, kept, padded_columns, radius) * edge
                bottom, right = here, here
                if has_top:
                    top = saved_start + saved_slot(row - 1, column, kept, padded_columns, radius) * edge
                if has_left:
                    left = saved_start + saved_slot(row, column - 1, kept, padded_columns, radius) * edge
                if has_corner:
                    at = (
                        saved_start
                        + saved_slot(row - 1, column - 1, kept, padded_columns, radius) * edge
                        + edge
                        - 1
                    )
                    corner_f, corner_n = bottom_f[at], bottom_n[at]
            else:
                bottom = saved_start + column * edge
                right = saved_start + row * edge
                if has_top:
                    top = bottom
                if has_left:
                    left = right
                at = slot * corners_stride + row
                if has_corner and has_left:
                    corner_f, corner_n = corners_f[at], corners_n[at]
                elif has_corner:  # the tile on the left, outside the band, has overwritten nothing
                    corner_f, corner_n = bottom_f[bottom - 1], bottom_n[bottom - 1]
                if has_top:
                    corners_f[at] = bottom_f[top + full_width - 1]
                    corners_n[at] = bottom_n[top + full_width - 1]
                else:
                    corners_f[at] = 0
                    corners_n[at] = zero_exponent(scratch_n)
            if row == rows_of_tiles - 1:
                bottom = -1
            if column == columns_of_tiles - 1:
                right = -1
            f, n = walk(
                diagonals,
                edge,
                height,
                width,
                offset,
                bandwidth,
                largest_cost_of(scale_high, (rows_of_tiles + columns_of_tiles) * edge, line_f),
                scale_high,
                scale_low,
                line_f,
                scratch_n,
                bottom_f,
                bottom_n,
                top,
                right_f,
                right_n,
                left,
                corner_f,
                corner_n,
                bottom_f,
                bottom_n,
                bottom if height == full_height else -1,
                right_f,
                right_n,
                right,
                False,
                diagonals,
                diagonals,
                diagonals,
            )
            # The rest of the edges lies outside the band.
            if bottom >= 0:
                for b in range(width if height == full_height else 0, full_width):
                    bottom_f[bottom + b] = 0
                    bottom_n[bottom + b] = zero_exponent(scratch_n)
            if right >= 0:
                for a in range(height, full_height):
                    right_f[right + a] = 0
                    right_n[right + a] = zero_exponent(scratch_n)
            if row == rows_of_tiles - 1 and column == columns_of_tiles - 1:
                if f == 0:
                    value[pair] = math.inf
                else:
                    value[pair] = gamma * (np.float64(n) * math.log(2.0) - math.log(np.float64(f)))
            if by_tile:
                store_release(flags, (pair * padded_rows + row) * padded_columns + column, 1)


@kernel
def backward_worker(
    is_cost: bool,
    x: Array,
    x_stride: int,
    y: Array,
    y_stride: int,
    m_padded: int,
    dimensions: int,
    x_lengths: Array,
    y_lengths: Array,
    gamma: float,
    bandwidth: int,
    edge: int,
    kept: int,
    padded_rows: int,
    padded_columns: int,
    radius: int,
    tickets: Array,
    tile_rows: Array,
    tile_columns: Array,
    by_tile: bool,
    gradient: Array,
    value: Array,
    bottom_f: Array,
    bottom_n: Array,
    right_f: Array,
    right_n: Array,
    saved_stride: int,
    upward: Array,
    leftward: Array,
    cornerward: Array,
    packed: Array,
    packed_stride: int,
    flags: Array,
    resume: Array,
    budget: int,
    worker: int,
    scratch: Array,
    scratch_n: Array,
    smallest: float,
    need_x: bool,
    need_y: bool,
    gx: Array,
    gx_stride: int,
    gy: Array,
    gy_stride: int,
) -> bool:
    """Take tickets until none is left; True (call again) after a slice of work, or to wait for a tile.

    Tiles come in the reverse of the forward's order. Each is recomputed from its saved top and left
    boundary, then swept by eq. (8); ``upward``, ``leftward`` and ``cornerward`` carry the mass from tile to
    tile. With ``is_cost`` the result goes to ``gx``, the gradient of the cost matrix. ``gx`` and ``gy`` come
    zeroed.
    """
    batch = x_lengths.size
    tiles = tile_rows.size
    lanes = lanes_of(scratch)
    span = edge + 3 * lanes
    plane = (2 * edge + 3 * lanes) * (edge + lanes)
    rows = scratch[: (edge + 4 * lanes) * (edge + lanes)]
    used = rows.size
    diagonals = scratch[used : used + plane]
    used += plane
    line_f = scratch[used : used + 3 * span]
    used += 3 * span
    share_up = scratch[used : used + plane]
    used += plane
    share_left = scratch[used : used + plane]
    used += plane
    share_diagonal = scratch[used : used + plane]
    used += plane
    flow_up = scratch[used : used + 3 * span]
    used += 3 * span
    flow_left = scratch[used : used + 3 * span]
    used += 3 * span
    flow_diagonal = scratch[used : used + 3 * span]
    used += 3 * span
    below = scratch[used : used + edge]
    used += edge
    beside = scratch[used : used + edge]
    used += edge
    # The last part holds either the lane-wise partial sums or four blocks of padded rows.
    partial = scratch[used:]
    block = edge * ((dimensions + lanes - 1) // lanes * lanes)
    line_n = scratch_n[: 3 * span]
    occupied = scratch_n[3 * span :]
    scale = math.log2(math.e) / gamma
    scratch[0] = scale
    scale_high = np.float64(scratch[0])
    scale_low = scale - scale_high

    total = batch * tiles if by_tile else batch
    while True:
        ticket, first_tile = resume[2 * worker], resume[2 * worker + 1]
        resume[2 * worker] = -1
        if ticket < 0:
            if budget <= 0:
                return True
            ticket = atomic_next(tickets, 0)
            if ticket >= total:
                return False
            first_tile = ticket // batch if by_tile else 0
        pair = ticket % batch
        last_tile = first_tile + 1 if by_tile else tiles
        height_all, width_all = x_lengths[pair], y_lengths[pair]
        rows_of_tiles = (height_all + edge - 1) // edge
        columns_of_tiles = (width_all + edge - 1) // edge
        slot = pair if by_tile else worker
        saved_start = pair * saved_stride
        upward_start = slot * padded_columns * edge
        leftward_start = slot * padded_rows * edge
        corner_start = slot * (padded_rows + padded_columns) + padded_rows

        if math.isnan(value[pair]):
            if first_tile == 0:
                if is_cost:
                    for i in range(height_all):
                        for j in range(width_all):
                            gx[pair * gx_stride + i * m_padded + j] = math.nan
                if need_x and not is_cost:
                    for k in range(height_all * dimensions):
                        gx[pair * gx_stride + k] = math.nan
                if need_y and not is_cost:
                    for k in range(width_all * dimensions):
                        gy[pair * gy_stride + k] = math.nan
                budget -= height_all * (width_all if is_cost else dimensions)
            continue
        if math.isinf(value[pair]) or gradient[pair] == 0:
            continue

        if by_tile:
            row, column = tile_rows[first_tile], tile_columns[first_tile]
            ready = True
            for dr, dc in ((1, 0), (0, 1), (1, 1)):
                if ready and tile_in_band(row + dr, column + dc, rows_of_tiles, columns_of_tiles, radius):
                    ready = wait_for(flags, (pair * padded_rows + row + dr) * padded_columns + column + dc)
            if not ready:
                resume[2 * worker], resume[2 * worker + 1] = ticket, first_tile
                return True

        for tile in range(first_tile, last_tile):
            if budget <= 0:
                resume[2 * worker], resume[2 * worker + 1] = ticket, tile
                return True
            row, column = tile_rows[tile], tile_columns[tile]
            if row >= rows_of_tiles or column >= columns_of_tiles:
                continue
            height = min(edge, height_all - row * edge)
            width = min(edge, width_all - column * edge)
            budget -= (height * width + edge) * (dimensions + 8)
            offset = (row - column) * edge
            has_below = tile_in_band(row + 1, column, rows_of_tiles, columns_of_tiles, radius)
            has_beside = tile_in_band(row, column + 1, rows_of_tiles, columns_of_tiles, radius)
            for b in range(width):
                below[b] = upward[upward_start + column * edge + b] if has_below else 0
            for a in range(height):
                beside[a] = leftward[leftward_start + row * edge + a] if has_beside else 0
            corner = corner_start + column - row
            if tile_in_band(row + 1, column + 1, rows_of_tiles, columns_of_tiles, radius):
                below[width - 1] = below[width - 1] + cornerward[corner]
            if row == rows_of_tiles - 1 and column == columns_of_tiles - 1:
                below[width - 1] = 1
            pack = not has_below
            if pack and not is_cost:
                pack_columns(
                    y,
                    pair * y_stride + column * edge * dimensions,
                    width,
                    dimensions,
                    edge,
                    packed,
                    slot * packed_stride + column * edge * dimensions,
                )
            to_above = upward[upward_start + column * edge : upward_start + column * edge + width]
            to_left = leftward[leftward_start + row * edge : leftward_start + row * edge + height]
            for b in range(width):
                to_above[b] = 0
            for a in range(height):
                to_left[a] = 0
            cornerward[corner] = 0
            # Mass moves up and left only: what lies below and right of all inflow has none.
            reach_below, reach_beside = width, height
            while reach_below > 0 and below[reach_below - 1] == 0:
                reach_below -= 1
            while reach_beside > 0 and beside[reach_beside - 1] == 0:
                reach_beside -= 1
            if reach_beside == 0:
                width = reach_below
            elif reach_below == 0:
                height = reach_beside
            height, width = banded_extent(height, width, offset, bandwidth)
            if reach_below + reach_beside > 0:
                tile_costs(
                    is_cost,
                    x,
                    pair * x_stride,
                    dimensions,
                    m_padded,
                    row,
                    column,
                    height,
                    width,
                    edge,
                    bandwidth,
                    packed,
                    slot * packed_stride,
                    rows,
                    diagonals,
                    scratch_n,
                )
                top, left = -1, -1
                corner_f, corner_n = 0.0, zero_exponent(scratch_n)
                if row == 0 and column == 0:
                    corner_f, corner_n = 1.0, 0
                if tile_in_band(row - 1, column, rows_of_tiles, columns_of_tiles, radius):
                    top = saved_start + saved_slot(row - 1, column, kept, padded_columns, radius) * edge
                if tile_in_band(row, column - 1, rows_of_tiles, columns_of_tiles, radius):
                    left = saved_start + saved_slot(row, column - 1, kept, padded_columns, radius) * edge
                if tile_in_band(row - 1, column - 1, rows_of_tiles, columns_of_tiles, radius):
                    at = (
                        saved_start
                        + saved_slot(row - 1, column - 1, kept, padded_columns, radius) * edge
                        + edge
                        - 1
                    )
                    corner_f, corner_n = bottom_f[at], bottom_n[at]
                walk(
                    diagonals,
                    edge,
                    height,
                    width,
                    offset,
                    bandwidth,
                    largest_cost_of(scale_high, (rows_of_tiles + columns_of_tiles) * edge, line_f),
                    scale_high,
                    scale_low,
                    line_f,
                    line_n,
                    bottom_f,
                    bottom_n,
                    top,
                    right_f,
                    right_n,
                    left,
                    corner_f,
                    corner_n,
                    bottom_f,
                    bottom_n,
                    -1,
                    right_f,
                    right_n,
                    -1,
                    True,
                    share_up,
                    share_left,
                    share_diagonal,
                )
                vectors = (width + lanes - 1) // lanes
                if height < edge or width < edge or abs(offset) + edge > bandwidth:
                    clear_margins(diagonals, height, vectors, offset, bandwidth, edge)
                cornerward[corner] = sweep(
                    edge,
                    height,
                    width,
                    offset,
                    bandwidth,
                    smallest,
                    share_up,
                    share_left,
                    share_diagonal,
                    flow_up,
                    flow_left,
                    flow_diagonal,
                    below,
                    beside,
                    diagonals,
                    to_above,
                    to_left,
                )
                unshear(diagonals, height, vectors, offset, bandwidth, edge, rows)
                if is_cost:
                    start = pair * gx_stride + row * edge * m_padded + column * edge
                    write_alignment(
                        rows, edge, height, width, offset, bandwidth, gradient[pair], gx, start, m_padded
                    )
                elif dimensions <= LARGEST_LANE_WISE_DIMENSION:
                    gradient_along_columns(
                        rows,
                        edge,
                        height,
                        width,
                        offset,
                        bandwidth,
                        dimensions,
                        x,
                        pair * x_stride + row * edge * dimensions,
                        packed,
                        slot * packed_stride + column * edge * dimensions,
                        2 * gradient[pair],
                        partial,
                        need_x,
                        need_y,
                        gx,
                        pair * gx_stride + row * edge * dimensions,
                        gy,
                        pair * gy_stride + column * edge * dimensions,
                    )
                else:
                    gradient_along_dimensions(
                        rows,
                        edge,
                        height,
                        width,
                        offset,
                        bandwidth,
                        dimensions,
                        x,
                        pair * x_stride + row * edge * dimensions,
                        y,
                        pair * y_stride + column * edge * dimensions,
                        2 * gradient[pair],
                        partial[:block],
                        partial[block : 2 * block],
                        partial[2 * block : 3 * block],
                        partial[3 * block : 4 * block],
                        occupied,
                        need_x,
                        need_y,
                        gx,
                        pair * gx_stride + row * edge * dimensions,
                        gy,
                        pair * gy_stride + column * edge * dimensions,
                    )
            if by_tile:
                store_release(flags, (pair * padded_rows + row) * padded_columns + column, 1)


# ------------------------------------------------------------------------------------------- range of costs
@jit
def farthest(points: Array, start: int, count: int, dimensions: int, centre: Array, at: int) -> float:
    """The largest squared distance of ``count`` points from the centre; NaN passed over."""
    lanes = lanes_of(points)
    whole = dimensions - dimensions % lanes
    largest = 0.0
    for i in range(count):
        row = start + i * dimensions
        total = vsplat(points, 0.0)
        for d in range(0, whole, lanes):
            difference = vload(points, row + d) - vload(centre, at + d)
            total = vfma(difference, difference, total)
        square = vsum(total) if whole > 0 else 0.0
        for d in range(whole, dimensions):
            rest = points[row + d] - centre[at + d]
            square += rest * rest
        if square > largest:
            largest = square
    return largest


@kernel
def largest_distance_worker(
    x: Array,
    x_stride: int,
    y: Array,
    y_stride: int,
    dimensions: int,
    x_lengths: Array,
    y_lengths: Array,
    tickets: Array,
    centres: Array,
    largest: Array,
    budget: int,
    worker: int,
) -> bool:
    """A bound of each pair's distances in O((N + M) D): (max |x - c| + max |y - c|)^2 about a centre c.

    NaN is passed over: it poisons the pair in any arithmetic. True (call again) after a slice of work.
    """
    lanes = lanes_of(x)
    whole = dimensions - dimensions % lanes
    at = worker * dimensions
    while budget > 0:
        pair = atomic_next(tickets, 0)
        if pair >= x_lengths.size:
            return False
        x_start, y_start = pair * x_stride, pair * y_stride
        rows, columns = x_lengths[pair], y_lengths[pair]
        budget -= 8 * (rows + columns) * dimensions
        for d in range(dimensions):
            centres[at + d] = 0
        for i in range(rows):
            row = x_start + i * dimensions
            for d in range(0, whole, lanes):
                vstore(centres, at + d, vload(centres, at + d) + vload(x, row + d))
            for d in range(whole, dimensions):
                centres[at + d] = centres[at + d] + x[row + d]
        for d in range(dimensions):
            mean = centres[at + d] / rows
            centres[at + d] = mean if math.isfinite(mean) else 0
        x_square = farthest(x, x_start, rows, dimensions, centres, at)
        y_square = farthest(y, y_start, columns, dimensions, centres, at)
        # A thousandth more than covers the rounding of these sums.
        largest[pair] = 1.001 * (math.sqrt(x_square) + math.sqrt(y_square)) ** 2
    return True


@kernel
def largest_cost_worker(
    cost: Array,
    stride: int,
    m_padded: int,
    x_lengths: Array,
    y_lengths: Array,
    bandwidth: int,
    rows: int,
    tickets: Array,
    largest: Array,
    budget: int,
) -> bool:
    """The largest finite |cost| in the band of each of ``rows`` blocks of 64 rows of every pair.

    True (call again) after a slice of work.
    """
    while budget > 0:
        ticket = atomic_next(tickets, 0)
        if ticket >= x_lengths.size * rows:
            return False
        pair, block = ticket // rows, ticket % rows
        budget -= 8 * 64 * m_padded
        found = 0.0
        for i in range(block * 64, min(x_lengths[pair], block * 64 + 64)):
            start = pair * stride + i * m_padded
            for j in range(max(0, i - bandwidth), min(y_lengths[pair], i + bandwidth + 1)):
                magnitude = abs(cost[start + j])
                if magnitude > found and magnitude < math.inf:
                    found = magnitude
        largest[ticket] = found
    return True
