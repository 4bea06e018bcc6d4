"""The alignment of one tile, eq. (8) of ``docs/math.md``, from the shares that the walk stored."""

from __future__ import annotations

from .arguments import Array, Border, Directions, Tile
from .compile import jit
from .geometry import diagonal_range, first_diagonal
from .vectors import lanes_of, vbroadcast, vfrom_above, vload, vselect, vsplat, vstore


@jit
def clear(flow: Directions, start: int, stop: int) -> None:
    """Zero the weight of these slots."""
    lanes = lanes_of(flow.up)
    zero = vsplat(flow.up, 0.0)
    for k in range(start, stop, lanes):
        vstore(flow.up, k, zero)
        vstore(flow.left, k, zero)
        vstore(flow.diagonal, k, zero)


@jit
def enter(flow: Directions, inflow: Border, after: int, s: int, low: int, high: int, tile: Tile) -> None:
    """What comes from outside into the cells of anti-diagonal s in the tile's last row and column."""
    lanes = lanes_of(flow.up)
    b = s - tile.height + 1
    if b >= low and b <= high:
        flow.up[after + lanes + b] = inflow.row[b]
    a = s - tile.width + 1
    if a >= 0 and low <= high and high == tile.width - 1:
        flow.left[after + lanes + tile.width] = inflow.column[a]


@jit
def leave(flow: Directions, outflow: Border, here: int, s: int, low: int, high: int, tile: Tile) -> float:
    """Add what leaves the tile's first row and column to `outflow`; what leaves for the corner."""
    lanes = lanes_of(flow.up)
    to_above, to_left = outflow.row, outflow.column
    to_corner = flow.up[0] - flow.up[0]
    if s < tile.width and high == s and low <= high:
        to_above[s] = to_above[s] + flow.up[here + lanes + s]
        if s > 0:
            to_above[s - 1] = to_above[s - 1] + flow.diagonal[here + lanes + s]
    if s < tile.height and low == 0 and low <= high:
        to_left[s] = to_left[s] + flow.left[here + lanes]
        if s > 0:
            to_left[s - 1] = to_left[s - 1] + flow.diagonal[here + lanes]
        else:
            to_corner = flow.diagonal[here + lanes]
    return to_corner  # type: ignore[no-any-return]  # what an Array holds is Any


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
    zero = vsplat(alignment, 0.0)
    threshold = vsplat(alignment, smallest)
    here, after, after2 = 0, span, 2 * span
    clear(flow, 0, 3 * span)
    to_corner = flow.up[0]

    for s in range(height + width - 2, first_diagonal(tile) - 1, -1):
        low, high = diagonal_range(s, tile)
        if low > high:  # the band has not entered the tile yet, or has left it
            first, stop = 0, 0
            clear(flow, here, here + span)
        else:
            first = low // lanes * lanes
            stop = high // lanes * lanes + lanes
        enter(flow, inflow, after, s, low, high, tile)
        next_left = vbroadcast(flow.left, after + lanes + stop)
        next_diagonal = vbroadcast(flow.diagonal, after2 + lanes + stop)
        for b in range(stop - lanes, first - 1, -lanes):
            left_here = vload(flow.left, after + lanes + b)
            diagonal_here = vload(flow.diagonal, after2 + lanes + b)
            weight = vload(flow.up, after + lanes + b) + vfrom_above(left_here, next_left)
            weight = weight + vfrom_above(diagonal_here, next_diagonal)
            next_left, next_diagonal = left_here, diagonal_here
            weight = vselect(weight < threshold, zero, weight)
            vstore(alignment, s * pitch + b, weight)
            vstore(flow.up, here + lanes + b, weight * vload(shares.up, s * pitch + b))
            vstore(flow.left, here + lanes + b, weight * vload(shares.left, s * pitch + b))
            vstore(flow.diagonal, here + lanes + b, weight * vload(shares.diagonal, s * pitch + b))
        # What the previous two anti-diagonals read beside the vectors just written.
        clear(flow, here + first, here + first + lanes)
        flow.left[here + lanes + stop] = 0
        flow.diagonal[here + lanes + stop] = 0
        to_corner = leave(flow, outflow, here, s, low, high, tile)
        here, after, after2 = after2, here, after
    return to_corner  # type: ignore[no-any-return]  # what an Array holds is Any
