"""The alignment of one tile and its derivative, eqs. (8), (11) and (15) of ``docs/math.md``.

The derivative is swept times gamma: a cell sends its predecessor k the weight p_k E and the slope
p_k gamma E-dot + p_k mu_k E, so that a small gamma makes no large numbers. p_k mu_k is made of the exchanges
of eq. (15): what one predecessor gains another loses, to the last bit.
"""

from __future__ import annotations

from .arguments import Array, Border, Directions, DualShares, Tile
from .compile import jit
from .geometry import diagonal_range, first_diagonal
from .sweep import clear, enter, leave
from .vectors import lanes_of, vbroadcast, vfma, vfrom_above, vload, vselect, vsplat, vstore


@jit
def dual_sweep(
    tile: Tile,
    smallest: float,
    kept: DualShares,
    flow: Directions,
    slope_flow: Directions,
    inflow: Border,
    slope_inflow: Border,
    alignment: Array,
    slope: Array,
    outflow: Border,
    slope_outflow: Border,
) -> tuple[float, float]:
    """E and gamma E-dot of one tile, the anti-diagonals in reverse; what leaves for the tile above-left.

    Arguments as those of `sweep`, once for the weight and once for its slope. Where weight is dropped, so is
    its slope.
    """
    lanes = lanes_of(alignment)
    pitch = tile.edge + lanes
    span = tile.edge + 3 * lanes
    height, width = tile.height, tile.width
    zero = vsplat(alignment, 0.0)
    threshold = vsplat(alignment, smallest)
    here, after, after2 = 0, span, 2 * span
    clear(flow, 0, 3 * span)
    clear(slope_flow, 0, 3 * span)
    to_corner, slope_to_corner = flow.up[0], slope_flow.up[0]

    for s in range(height + width - 2, first_diagonal(tile) - 1, -1):
        low, high = diagonal_range(s, tile)
        if low > high:  # the band has not entered the tile yet, or has left it
            first, stop = 0, 0
            clear(flow, here, here + span)
            clear(slope_flow, here, here + span)
        else:
            first = low // lanes * lanes
            stop = high // lanes * lanes + lanes
        enter(flow, inflow, after, s, low, high, tile)
        enter(slope_flow, slope_inflow, after, s, low, high, tile)
        next_left = vbroadcast(flow.left, after + lanes + stop)
        next_diagonal = vbroadcast(flow.diagonal, after2 + lanes + stop)
        next_left_slope = vbroadcast(slope_flow.left, after + lanes + stop)
        next_diagonal_slope = vbroadcast(slope_flow.diagonal, after2 + lanes + stop)
        for b in range(stop - lanes, first - 1, -lanes):
            left_here = vload(flow.left, after + lanes + b)
            diagonal_here = vload(flow.diagonal, after2 + lanes + b)
            weight = vload(flow.up, after + lanes + b) + vfrom_above(left_here, next_left)
            weight = weight + vfrom_above(diagonal_here, next_diagonal)
            next_left, next_diagonal = left_here, diagonal_here
            left_here = vload(slope_flow.left, after + lanes + b)
            diagonal_here = vload(slope_flow.diagonal, after2 + lanes + b)
            change = vload(slope_flow.up, after + lanes + b) + vfrom_above(left_here, next_left_slope)
            change = change + vfrom_above(diagonal_here, next_diagonal_slope)
            next_left_slope, next_diagonal_slope = left_here, diagonal_here

            dropped = weight < threshold
            weight = vselect(dropped, zero, weight)
            change = vselect(dropped, zero, change)
            at = s * pitch + b
            vstore(alignment, at, weight)
            vstore(slope, at, change)
            up, left = vload(kept.shares.up, at), vload(kept.shares.left, at)
            diagonal = vload(kept.shares.diagonal, at)
            above, beside = vload(kept.above, at), vload(kept.beside, at)
            left_to_up = up * left * (beside - above)
            up_to_diagonal = up * diagonal * above
            left_to_diagonal = left * diagonal * beside
            vstore(flow.up, here + lanes + b, weight * up)
            vstore(flow.left, here + lanes + b, weight * left)
            vstore(flow.diagonal, here + lanes + b, weight * diagonal)
            gain = left_to_up - up_to_diagonal
            vstore(slope_flow.up, here + lanes + b, vfma(weight, gain, up * change))
            gain = zero - left_to_up - left_to_diagonal
            vstore(slope_flow.left, here + lanes + b, vfma(weight, gain, left * change))
            gain = up_to_diagonal + left_to_diagonal
            vstore(slope_flow.diagonal, here + lanes + b, vfma(weight, gain, diagonal * change))
        # What the previous two anti-diagonals read beside the vectors just written.
        clear(flow, here + first, here + first + lanes)
        clear(slope_flow, here + first, here + first + lanes)
        flow.left[here + lanes + stop] = 0
        flow.diagonal[here + lanes + stop] = 0
        slope_flow.left[here + lanes + stop] = 0
        slope_flow.diagonal[here + lanes + stop] = 0
        to_corner = leave(flow, outflow, here, s, low, high, tile)
        slope_to_corner = leave(slope_flow, slope_outflow, here, s, low, high, tile)
        here, after, after2 = after2, here, after
    return to_corner, slope_to_corner
