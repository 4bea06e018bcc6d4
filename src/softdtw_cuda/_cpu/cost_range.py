"""The largest cost of each pair, or a bound of it: whether float32's exponents can hold its values."""

from __future__ import annotations

import math

from .arguments import Array, Series
from .atomics import atomic_next
from .compile import jit, kernel
from .vectors import lanes_of, vfma, vload, vselect, vsplat, vstore, vsum


@jit
def all_near(points: Array, start: int, count: int, centre: float, square: float) -> bool:
    """Whether (number - centre)^2 is below ``square`` for all of ``count`` numbers."""
    lanes = lanes_of(points)
    full = start + count - count % lanes
    middle, limit = vsplat(points, centre), vsplat(points, square)
    near = vsplat(points, 0.0)
    far = vsplat(points, 1.0)
    found = near
    for at in range(start, full, lanes):
        difference = vload(points, at) - middle
        found = vselect(difference * difference < limit, found, far)
    for at in range(full, start + count):
        difference = points[at] - centre
        if not difference * difference < square:
            return False
    return vsum(found) == 0  # type: ignore[no-any-return]  # what an Array holds is Any


@jit
def farthest(points: Array, start: int, count: int, dimensions: int, centre: Array, at: int) -> float:
    """The largest squared distance of ``count`` points from the centre; NaN passed over."""
    lanes = lanes_of(points)
    full = dimensions - dimensions % lanes
    largest = 0.0
    for i in range(count):
        row = start + i * dimensions
        total = vsplat(points, 0.0)
        for d in range(0, full, lanes):
            difference = vload(points, row + d) - vload(centre, at + d)
            total = vfma(difference, difference, total)
        square = vsum(total) if full > 0 else 0.0
        for d in range(full, dimensions):
            rest = points[row + d] - centre[at + d]
            square += rest * rest
        if square > largest:
            largest = square
    return largest


@kernel
def largest_distance_worker(
    series: Series,
    limits: Array,
    tickets: Array,
    centres: Array,
    largest: Array,
    budget: int,
    worker: int,
) -> bool:
    """A bound of each pair's distances in O((N + M) D): (max |x - c| + max |y - c|)^2 about a centre c.

    Half of the pair's limit is bound enough where all numbers are near the first one. NaN is passed over: it
    poisons the pair in any arithmetic. True (call again) after a slice of work.
    """
    x, y, dimensions = series.x, series.y, series.dimensions
    lanes = lanes_of(x)
    full = dimensions - dimensions % lanes
    at = worker * dimensions
    while budget > 0:
        pair = atomic_next(tickets, 0)
        if pair >= series.x_lengths.size:
            return False
        x_start, y_start = series.x_offsets[pair], series.y_offsets[pair]
        rows, columns = series.x_lengths[pair], series.y_lengths[pair]
        budget -= 8 * (rows + columns) * dimensions
        # Two numbers near the first differ by up to twice as much: D (2 r)^2 = limit / 2.
        first, square = x[x_start], limits[pair] / (8 * dimensions)
        if all_near(x, x_start, rows * dimensions, first, square) and all_near(
            y, y_start, columns * dimensions, first, square
        ):
            largest[pair] = limits[pair] / 2
            continue
        for d in range(dimensions):
            centres[at + d] = 0
        for i in range(rows):
            row = x_start + i * dimensions
            for d in range(0, full, lanes):
                vstore(centres, at + d, vload(centres, at + d) + vload(x, row + d))
            for d in range(full, dimensions):
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
    series: Series, bandwidth: int, rows: int, tickets: Array, largest: Array, budget: int
) -> bool:
    """The largest finite |cost| in the band of each of ``rows`` blocks of 64 rows of every pair.

    True (call again) after a slice of work.
    """
    cost, x_lengths, y_lengths = series.x, series.x_lengths, series.y_lengths
    while budget > 0:
        ticket = atomic_next(tickets, 0)
        if ticket >= x_lengths.size * rows:
            return False
        pair, block = ticket // rows, ticket % rows
        budget -= 8 * 64 * series.columns
        found = 0.0
        for i in range(block * 64, min(x_lengths[pair], block * 64 + 64)):
            start = series.x_offsets[pair] + i * series.columns
            for j in range(max(0, i - bandwidth), min(y_lengths[pair], i + bandwidth + 1)):
                magnitude = abs(cost[start + j])
                if magnitude > found and magnitude < math.inf:
                    found = magnitude
        largest[ticket] = found
    return True
