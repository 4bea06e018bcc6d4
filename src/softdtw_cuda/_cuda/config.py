"""Launch choices as pure functions of shape, dtype and device: nothing here needs a GPU.

A *plan* names the kernels of a call and their build-time constants; a *layout* says where in one buffer of
bytes each array lies. `state` is what the forward hands to the backward:

    [counters | progress | order of grad_y | hand-off rows]   scratch: all ones before and after each call
    [range flags]                                             all ones before the forward
    [pair 0: lane states, bottom rows, room for a rerun | pair 1: ... ]

Narrow kernels (32-bit exponents) flag the pairs that are beyond their range; a second launch reruns those
with wide arithmetic and ends immediately when there are none, so nothing waits for the host. Wide states of
such a pair, and the row that its wide words need besides, live in that pair's own part of the state.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .kernel import (
    ANY_ROWS,
    COST,
    DIRECT,
    INPUT_CODES,
    MATRIX,
    PAIR,
    TENSOR,
    TILED,
    UNIVARIATE,
    UNIVARIATE_SOURCE,
    WHOLE_QUADS,
    WHOLE_SLICES,
    WIDE_SOURCE,
    Kernel,
    padded,
)

DIRECT_UP_TO = 16
"""Feature counts up to this use direct differences, which keep every digit of nearly equal series; above, the
matrix product on tensor cores costs less than the differences would."""

FEATURES_AT_A_TIME = 64
MANY_FEATURES_AT_A_TIME = 128
"""Features that tensor cores take whole; the larger where shared memory holds all of them."""
FEATURES_OF_A_SLICE = 32
"""More features are taken in slices, so small that registers hold the next one while this one is at work."""

LONGEST_STRIP = 64
"""Rows of a strip whose lanes have two rows each."""
TILE = 32
ROW_WORD = 16
"""Bytes of a hand-off word; wide numbers take two, in two sets of rows."""

PAIRS_PER_PROCESSOR = 3
"""From so many on, a warp for each pair is quicker than a block for each strip. Time against that on an H200,
L = 64 to 1024, D = 2 to 16, forward + backward: 264 pairs 0.73 to 1.22, 528 pairs 0.46 to 0.87, 2048 and more
0.25 to 0.6; forward alone 1.0 to 1.45, 0.76 to 1.07, 0.5 to 0.75. That was with plain sums for D > 4; with
compensated ones, D = 8 and 16, 396 pairs take 0.86 to 1.12 of the time, forward alone 0.98 to 1.41, and 528
pairs of 128 steps and more 0.67 to 0.88 and 0.55 to 1.14."""

MATRICES_PER_PROCESSOR = 3
"""The same for cost matrices. Time against that on an H200, forward + backward, L = 128 and 512: 264 of them
1.13 and 1.33, 528 0.64 and 0.72, 1056 0.47 and 0.57; 4096 of L = 128 0.45, 512 of L = 1024 0.86."""

WIDE_ROWS_PER_LANE = 2
WIDE_CHECKPOINT = 256
WIDE_SUBWALK = 16
"""Wide states take twice the bytes of narrow ones, so they are kept a quarter as often; see `pair_bytes`."""


class Device(NamedTuple):
    """What launch choices depend on."""

    shared_bytes: int = 232448
    """Largest shared memory of a block."""
    capability: tuple[int, int] = (9, 0)
    processors: int = 132


@dataclass(frozen=True, eq=False)
class Plan:
    """The kernels of a call: `main`, and `rerun` for the pairs that main flags (None when main is wide).

    Equal only to itself: `choose` makes each once, and calls look things up by it.
    """

    main: Kernel
    rerun: Kernel | None

    def row_bytes(self, n: int, m: int) -> int:
        """Of one hand-off row, and two words for each of its strips: none where every pair is one strip."""
        several = self.main.strips(n) > 1 or (self.rerun is not None and self.rerun.strips(n) > 1)
        return (m + 2 * self.main.strips(n)) * ROW_WORD if several else 0

    def more_row(self, n: int, m: int, bandwidth: int, save: bool) -> int:
        """Where in a pair's part the second row of a rerun begins."""
        return self.rerun.pair_bytes(n, m, bandwidth) if save and self.rerun is not None else 0

    def pair_bytes(self, n: int, m: int, bandwidth: int, save: bool) -> int:
        """Bytes of one pair's part: what the main kernel saves, or what a rerun needs in its place."""
        saved = self.main.pair_bytes(n, m, bandwidth) if save else 0
        if self.rerun is None:
            return saved
        needed = self.more_row(n, m, bandwidth, save) + self.row_bytes(n, m)
        return padded(torch.sym_max(saved, needed))


def _wide_kernel(mode: int, input_code: int) -> Kernel:
    return Kernel(
        source=WIDE_SOURCE,
        mode=mode,
        input_code=input_code,
        banded=True,
        lane_rows=WIDE_ROWS_PER_LANE,
        checkpoint=WIDE_CHECKPOINT,
        subwalk=WIDE_SUBWALK,
    )


def wide_companion(kernel: Kernel) -> Kernel:
    """The kernel that reruns what `kernel` flags."""
    return _wide_kernel(COST if kernel.mode == COST else DIRECT, kernel.input_code)


@functools.lru_cache(maxsize=256)
def choose(
    mode_is_cost: bool,
    d: int,
    dtype: torch.dtype,
    banded: bool,
    short: bool,
    aligned: bool,
    device: Device,
    many: bool = False,
) -> Plan:
    """The plan for feature count d.

    Args:
        mode_is_cost: a cost matrix is given; d does not matter.
        d: number of features.
        dtype: of the inputs.
        banded: there is a Sakoe-Chiba band.
        short: no series of x is longer than 32, so half a strip would be idle.
        aligned: rows of x and y begin at multiples of 16 bytes, provided that d fills its slices.
        device: what the kernels will run on.
        many: there are enough pairs to give each a warp of its own.
    """
    code = INPUT_CODES[dtype]
    wide = _wide_kernel(COST if mode_is_cost else DIRECT, code)
    if dtype == torch.float64 or (device.capability < (8, 0) and not mode_is_cost and d > DIRECT_UP_TO):
        return Plan(wide, None)
    # Two rows per lane share a shuffle and a poll; they need the shared memory of a data-centre card.
    roomy = device.shared_bytes >= 227 * 1024
    rows = 2 if roomy and not short else 1
    if many and not banded and (mode_is_cost or 1 < d <= DIRECT_UP_TO):
        kernel = Kernel(
            MATRIX if mode_is_cost else PAIR,
            COST if mode_is_cost else DIRECT,
            code,
            mode_is_cost,  # its cells can be forbidden, too
            1 if short else 2,
            checkpoint=32,
            packed=not short,
            dims=1 if mode_is_cost else next(dims for dims in (2, 4, 8, 16) if d <= dims),
        )
        return Plan(kernel, wide)
    if not mode_is_cost and d == 1:
        kernel = Kernel(
            UNIVARIATE_SOURCE,
            UNIVARIATE,
            code,
            banded,
            1 if short else 2,
            # A checkpoint as often as the backward can keep shares: no step is walked more than once there.
            # Packed, these are about as many bytes as every 48 steps would take unpacked.
            checkpoint=64 if short or banded else 32,
            subwalk=32,
            packed=not (short or banded),
        )
        return Plan(kernel, wide)
    checkpoint = 64 if device.shared_bytes >= 160 * 1024 else 32

    def tiled(mode: int, dims: int, blocks: int, sliced: bool = False) -> Kernel:
        return Kernel(
            TILED,
            mode,
            code,
            banded or mode == COST,
            rows,
            checkpoint=checkpoint,
            dims=dims,
            sliced=sliced,
            fit=_fit(d, dims) if mode == TENSOR and aligned else ANY_ROWS,
            forward_blocks=blocks,
        )

    blocks = 3 if rows == 2 else 4
    if mode_is_cost:
        kernel = tiled(COST, 1, blocks)
    elif d <= DIRECT_UP_TO:
        kernel = tiled(DIRECT, 4 if d <= 4 else 8 if d <= 8 else 16, blocks)
    elif d <= FEATURES_AT_A_TIME:
        kernel = tiled(TENSOR, 32 if d <= 32 else FEATURES_AT_A_TIME, blocks)
    else:
        kernel = tiled(TENSOR, MANY_FEATURES_AT_A_TIME, 2)
        if d > MANY_FEATURES_AT_A_TIME or kernel.backward_shared > device.shared_bytes:
            kernel = tiled(TENSOR, FEATURES_OF_A_SLICE, 2, sliced=True)
    if kernel.backward_shared > device.shared_bytes:
        return Plan(wide, None)
    return Plan(kernel, wide)


def _fit(d: int, dims: int) -> int:
    return WHOLE_SLICES if d % dims == 0 else WHOLE_QUADS if d % 4 == 0 else ANY_ROWS


@functools.cache
def weakest_device() -> Device:
    """Properties that hold for every visible GPU, so that a plan never depends on which one runs it."""
    if not torch.cuda.is_available():
        return Device()
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Device(
        shared_bytes=min(int(getattr(p, "shared_memory_per_block_optin", 49152)) for p in devices),
        capability=min((p.major, p.minor) for p in devices),
        processors=min(p.multi_processor_count for p in devices),
    )


@dataclass(frozen=True)
class Layout:
    """Byte offsets in the buffer of a forward; what it saves of it is the state.

    The first `scratch` bytes are all ones before and after each call: two ticket counters, the progress of
    reruns, the order of grad_y and a hand-off row per pair of several strips. Before the forward all bytes up
    to `pairs` are ones. Wide words take a second row per pair, `more_row_bytes` apart: in the scratch, or for
    reruns in the pair's own part.
    """

    progress: int
    grad_y_order: int
    rows: int
    row_bytes: int
    more_rows: int
    more_row_bytes: int
    scratch: int
    range_flags: int
    pairs: int
    pair_bytes: int
    total: int


def layout_of(plan: Plan, batch: int, n: int, m: int, bandwidth: int, save: bool) -> Layout:
    """Layout of the forward's buffer: the state when `save`, else scratch of O(m) per pair."""
    progress = 16
    grad_y_order = progress + batch * 16
    rows = padded(grad_y_order + (batch * ((m + TILE - 1) // TILE) * 4 if save else 0))
    row_bytes = plan.row_bytes(n, m)
    range_flags = scratch = rows + batch * row_bytes * (2 if plan.rerun is None else 1)
    pairs = padded(range_flags + (batch + 1) * 4, 128)
    pair_bytes = plan.pair_bytes(n, m, bandwidth, save)
    if plan.rerun is None:
        more_rows, more_row_bytes = rows + batch * row_bytes, row_bytes
    else:  # a rerun clears it itself
        more_rows, more_row_bytes = pairs + plan.more_row(n, m, bandwidth, save), pair_bytes
    return Layout(
        progress=progress,
        grad_y_order=grad_y_order,
        rows=rows,
        row_bytes=row_bytes,
        more_rows=more_rows,
        more_row_bytes=more_row_bytes,
        scratch=scratch,
        range_flags=range_flags,
        pairs=pairs,
        pair_bytes=pair_bytes,
        total=pairs + batch * pair_bytes,
    )


NEVER_LATER = 2**30
"""A start lag that no strip has: all begin at their last column."""


def start_lag_of(kernel: Kernel, batch: int, n: int, device: Device) -> int:
    """A strip of the backward begins where the one so many before it in the walk found alignment weight, or
    with 1 where the one before it sent weight on.

    The fewer, the less is done for nothing; the more, the longer a strip can prepare for what is on its way,
    which counts while there is room for more blocks than have work.
    """
    if kernel.source == TILED:
        return 1 if batch >= device.processors else 2
    # One warp prepares nothing meanwhile: it waits for weight, or walks as long as it takes to where that is.
    strips = kernel.strips(n)
    return 1 if strips > 2 and batch * strips >= 4 * device.processors else NEVER_LATER


def fused_plan(
    n: int, d: int, dtype: torch.dtype, bandwidth: int, aligned: bool = True, *, batch: int = 1
) -> Plan:
    """The plan for `batch` pairs of series of up to n rows and d features; bandwidth -1 means no band.

    Alignment changes how rows are read, not what is saved. A graph traced with symbolic sizes keeps its d.
    """
    device = weakest_device()
    many = bool(batch >= PAIRS_PER_PROCESSOR * device.processors)
    return choose(False, int(d), dtype, bool(bandwidth >= 0), _is_short(n), aligned, device, many)


def cost_plan(n: int, dtype: torch.dtype, bandwidth: int, *, batch: int = 1) -> Plan:
    """The plan for `batch` cost matrices of n rows."""
    device = weakest_device()
    many = bool(batch >= MATRICES_PER_PROCESSOR * device.processors)
    return choose(True, 1, dtype, bool(bandwidth >= 0), _is_short(n), True, device, many)


def _is_short(n: Any) -> bool:
    return bool(n <= 32)


MOST_CELLS_WITH_GRADIENT = 2**21
MOST_STEPS_WITH_GRADIENT = 2**10
MOST_NUMBERS_WITH_GRADIENT = 2**20
"""Of a problem whose forward computes the gradient with the value. Up to here the host takes longer than the
GPU, and a backward of one product in the place of launches shortens a step."""


def gradient_with_value(batch: int, n: int, m: int, d: int) -> bool:
    """Whether pairs have few cells, few steps to take one after the other, and few gradients to keep.

    These take the place of checkpoints, and no more memory, except for pairs of one strip, which take one
    launch for both passes.
    """
    return bool(
        n + m <= MOST_STEPS_WITH_GRADIENT
        and batch * n * m <= MOST_CELLS_WITH_GRADIENT
        and batch * (n + m) * d <= MOST_NUMBERS_WITH_GRADIENT
        and (n <= LONGEST_STRIP or 8 * (n + m) * d <= n * m)
    )
