"""Who computes which tile, and when.

The forward visits a tile after the tiles above, left and above-left; the backward after those below, right
and below-right. One ticket is a pair, or, when pairs are few, one tile of one pair in such an order. Every
sum has the same order either way, so results depend neither on the choice nor on the number of threads.

A worker returns after a slice of work, so that the interpreter can handle signals. Its ticket and tile are
kept in ``resume``; everything else that it needs to go on is in memory already.
"""

from __future__ import annotations

from .arguments import Array, Grid, Schedule, Tiles
from .atomics import atomic_next, load_acquire, store_release
from .compile import jit
from .geometry import saved_slot, tile_in_band

SPINS_BEFORE_YIELD = 2000
NONE_LEFT = -1
SLICE_OVER = -2


@jit
def next_ticket(schedule: Schedule, pairs: int, budget: int, worker: int) -> tuple[int, int]:
    """The ticket and tile that were put back, or a new ticket and its first tile.

    The ticket is `NONE_LEFT` or `SLICE_OVER` where there is none to work on.
    """
    ticket, tile = schedule.resume[2 * worker], schedule.resume[2 * worker + 1]
    schedule.resume[2 * worker] = -1
    if ticket >= 0:
        return ticket, tile
    if budget <= 0:
        return SLICE_OVER, 0
    ticket = atomic_next(schedule.tickets, 0)
    if ticket >= (pairs * schedule.tile_rows.size if schedule.by_tile else pairs):
        return NONE_LEFT, 0
    return ticket, ticket // pairs if schedule.by_tile else 0


@jit
def put_back(schedule: Schedule, ticket: int, tile: int, worker: int) -> None:
    """The worker goes on with this tile when it is called again."""
    schedule.resume[2 * worker] = ticket
    schedule.resume[2 * worker + 1] = tile


@jit
def _flag(tiles: Tiles, pair: int, row: int, column: int) -> int:
    return pair * tiles.rows * tiles.kept + saved_slot(row, column, tiles)


@jit
def _seen_set(flags: Array, index: int) -> bool:
    """Whether the flag was seen set within a bounded number of looks."""
    for _ in range(SPINS_BEFORE_YIELD):  # noqa: SIM110  (Numba does not compile any())
        if load_acquire(flags, index) != 0:
            return True
    return False


@jit
def is_ready(
    schedule: Schedule, tiles: Tiles, grid: Grid, pair: int, row: int, column: int, direction: int
) -> bool:
    """Whether the three tiles on the side of `direction` (-1: above and left) were seen finished."""
    for dr, dc in ((1, 0), (0, 1), (1, 1)):
        other_row, other_column = row + direction * dr, column + direction * dc
        flag = _flag(tiles, pair, other_row, other_column)
        if tile_in_band(grid, other_row, other_column) and not _seen_set(schedule.finished, flag):
            return False
    return True


@jit
def finish(schedule: Schedule, tiles: Tiles, pair: int, row: int, column: int) -> None:
    """What the tile wrote can be read by other workers."""
    if schedule.by_tile:
        store_release(schedule.finished, _flag(tiles, pair, row, column), 1)
