"""The alignment of one tile, eq. (8) of ``docs/math.md``, from the shares that the walk stored."""

from __future__ import annotations

from .arguments import Array, Border, Directions, Tile
from .compile import jit
from .geometry import diagonal_range, first_diagonal
from .vectors import lanes_of, vbroadcast, vfrom_above, vload, vselect, vsplat, vstore


@jit
def sweep(
    tile: Tile,
    smallest: float,
    shares: Directions,
    flow: Directions,
    inflow: Border,
    alignment: Array,
    outflow: Border,
) -> float:
    """Eq. (8) over one tile, the anti-diagonals in reverse.

    `inflow` is the alignment weight that enters the bottom row and the right column from outside. What leaves
    the top row and the left column is added to `outflow`; what leaves for the tile above-left is returned.
    Weight below `smallest` is dropped. The weight that the last three anti-diagonals send on is in `flow`.
    """
    lanes = lanes_of(alignment)
    pitch = tile.edge + lanes
    span = tile.edge + 3 * lanes
    height, width = tile.height, tile.width
    flow_up, flow_left, flow_diagonal = flow.up, flow.left, flow.diagonal
    to_above, to_left = outflow.row, outflow.column
    zero = vsplat(alignment, 0.0)
    threshold = vsplat(alignment, smallest)
    here, after, after2 = 0, span, 2 * span
    for k in range(0, 3 * span, lanes):
        vstore(flow_up, k, zero)
        vstore(flow_left, k, zero)
        vstore(flow_diagonal, k, zero)
    to_corner = flow_up[0]

    for s in range(height + width - 2, first_diagonal(tile) - 1, -1):
        low, high = diagonal_range(s, tile)
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
            flow_up[after + lanes + b] = inflow.row[b]
        a = s - width + 1
        if a >= 0 and low <= high and high == width - 1:
            flow_left[after + lanes + width] = inflow.column[a]
        next_left = vbroadcast(flow_left, after + lanes + stop)
        next_diagonal = vbroadcast(flow_diagonal, after2 + lanes + stop)
        for b in range(stop - lanes, first - 1, -lanes):
            left_here = vload(flow_left, after + lanes + b)
            diagonal_here = vload(flow_diagonal, after2 + lanes + b)
            weight = vload(flow_up, after + lanes + b) + vfrom_above(left_here, next_left)
            weight = weight + vfrom_above(diagonal_here, next_diagonal)
            next_left, next_diagonal = left_here, diagonal_here
            weight = vselect(weight < threshold, zero, weight)
            vstore(alignment, s * pitch + b, weight)
            vstore(flow_up, here + lanes + b, weight * vload(shares.up, s * pitch + b))
            vstore(flow_left, here + lanes + b, weight * vload(shares.left, s * pitch + b))
            vstore(flow_diagonal, here + lanes + b, weight * vload(shares.diagonal, s * pitch + b))
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
