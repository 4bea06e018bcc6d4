"""Launch choices as pure functions of shape, dtype and device: nothing here needs a GPU.

A *plan* names the kernels of a call and their build-time constants; a *layout* says where in one buffer of
bytes each array lies. `state` is what the forward hands to the backward:

    [counters | progress | order of grad_y | hand-off rows]   scratch: all ones before and after each call
    [range flags]                                             all ones before the forward
    [pair 0: lane states, bottom rows | pair 1: ... ]

Narrow kernels (32-bit exponents) flag the pairs that are beyond their range; a second launch reruns those
with wide arithmetic and ends immediately when there are none, so nothing waits for the host. Wide states of
such a pair, and the row that its wide words need besides, live in that pair's own part of the state.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

INPUT_CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}

COST, DIRECT, UNIVARIATE, TENSOR = 0, 1, 2, 3
"""The kernels' MODE: a given cost matrix, direct differences, D = 1, tensor cores."""

FORWARD, BACKWARD, RERUN, FORWARD_BACKWARD = "forward", "backward", "rerun", "forward_backward"
"""Parts of a source: kernels that are compiled and launched by themselves."""

TILED, UNIVARIATE_SOURCE, PAIR, MATRIX, WIDE_SOURCE = "tiled", "univariate", "pair", "matrix", "wide"
"""Sources: costs made tile by tile beside the walk; one warp per strip for D = 1; one warp per pair; one warp
per cost matrix; wide numbers."""

DIRECT_UP_TO = 16
"""Feature counts up to this use direct differences, which keep every digit of nearly equal series; above, the
matrix product on tensor cores costs less than the differences would."""

FEATURES_AT_A_TIME = 64
MANY_FEATURES_AT_A_TIME = 128
"""Features that tensor cores take whole; the larger where shared memory holds all of them."""
FEATURES_OF_A_SLICE = 32
"""More features are taken in slices, so small that registers hold the next one while this one is at work."""

MOST_CENTRES = 1024
"""Features whose centres a sliced kernel keeps."""

ANY_ROWS, WHOLE_QUADS, WHOLE_SLICES = 0, 1, 2
"""The kernels' FIT: how rows of features can be read."""

LONGEST_STRIP = 64
"""Rows of a strip whose lanes have two rows each."""
TILE = 32
ROW_WORD = 16
"""Bytes of a hand-off word; wide numbers take two, in two sets of rows."""

PACKED_LANE_BYTES = 22
"""What a checkpoint of two rows of a lane takes when it is packed."""

PAIR_WINDOW = 128
"""Columns of y that a warp which walks a whole pair has in shared memory."""

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


@dataclass(frozen=True)
class Device:
    """What launch choices depend on."""

    shared_bytes: int = 232448
    """Largest shared memory of a block."""
    capability: tuple[int, int] = (9, 0)
    processors: int = 132


@dataclass(frozen=True)
class Kernel:
    """One compiled source with its constants."""

    source: str
    mode: int
    input_code: int
    banded: bool
    lane_rows: int
    checkpoint: int
    subwalk: int = 0
    packed: bool = False
    dims: int = 1
    sliced: bool = False
    fit: int = 0
    forward_blocks: int = 1

    @functools.cached_property
    def tag(self) -> str:
        """A name of its own. Looked up several times per call, and quicker to hash than a dozen fields."""
        return repr(self)

    @property
    def wide(self) -> bool:
        """Double fractions and 64-bit exponents."""
        return self.source == WIDE_SOURCE

    @property
    def walks_whole_pairs(self) -> bool:
        """A block walks all strips of a pair, one after the other."""
        return self.source in (PAIR, MATRIX)

    @property
    def strip_rows(self) -> int:
        return 32 * self.lane_rows

    @property
    def parts(self) -> tuple[str, ...]:
        """The kernels in the source: `forward` and `backward`; `rerun` where flagged pairs are walked again;
        `forward_backward` for both passes over small pairs, which are float32, of one strip."""
        if self.wide:
            return FORWARD, BACKWARD, RERUN
        if self.walks_whole_pairs:
            return FORWARD, BACKWARD
        has_both = self.input_code == 0 and self.mode != COST and not self.sliced and self.dims <= 32
        return (FORWARD, BACKWARD, FORWARD_BACKWARD) if has_both else (FORWARD, BACKWARD)

    def name(self, part: str) -> str:
        """Of one of `parts` in the source."""
        return f"{self.source}_{part}"

    def threads(self, part: str) -> int:
        """Of a block of one of `parts`."""
        if self.source != TILED:
            return 32
        return 160 if part == FORWARD else 512

    def shared(self, part: str) -> int:
        """Bytes of shared memory of a block of one of `parts`."""
        return self.forward_shared if part == FORWARD else self.backward_shared

    @property
    def forward_shared(self) -> int:
        return _forward_shared(self).size

    @property
    def backward_shared(self) -> int:
        return _backward_shared(self).size

    @property
    def word_bytes(self) -> int:
        """A scaled number: fraction and exponent."""
        return 16 if self.wide else 8

    def defines(self) -> dict[str, int]:
        """Macros that the sources expect."""
        macros = {
            "MODE": self.mode,
            "INPUT": self.input_code,
            "BANDED": int(self.banded),
            "LANE_ROWS": self.lane_rows,
            "CHECKPOINT": self.checkpoint,
            "FORWARD_SHARED": self.forward_shared,
            "BACKWARD_SHARED": self.backward_shared,
        }
        if self.source == PAIR:
            macros |= {"DIMS": self.dims, "PACKED": int(self.packed)}
        elif self.source == MATRIX:
            macros["PACKED"] = int(self.packed)
        elif self.source == TILED:
            macros |= {"DIMS": self.dims, "SLICED": int(self.sliced), "FIT": self.fit}
            macros["FORWARD_BLOCKS"] = self.forward_blocks
        else:
            macros["SUBWALK"] = self.subwalk
        if self.source == UNIVARIATE_SOURCE:
            macros["PACKED"] = int(self.packed)
        return macros

    def strips(self, n: int) -> int:
        """Strips of a series of n rows."""
        return (n + self.strip_rows - 1) // self.strip_rows

    def checkpoints(self, m: int, bandwidth: int) -> int:
        """Checkpoints kept of a strip, whose steps run from its first column to its last plus its rows.

        The first is where the walk starts, and is not kept.
        """
        every = (m + self.strip_rows - 2) // self.checkpoint
        if bandwidth < 0:
            return every
        narrow: int = torch.sym_min(every, (2 * bandwidth + 2 * self.strip_rows) // self.checkpoint + 1)
        return narrow

    def bound_columns(self, m: int, bandwidth: int) -> int:
        """Columns of a strip's bottom row."""
        columns: int = m if bandwidth < 0 else torch.sym_min(m, 2 * bandwidth + 1)
        return columns

    def states_bytes(self, n: int, m: int, bandwidth: int) -> int:
        """Lane states of one pair: two anti-diagonals per checkpoint of each strip."""
        each = 32 * PACKED_LANE_BYTES if self.packed else 2 * self.strip_rows * self.word_bytes
        return self.strips(n) * self.checkpoints(m, bandwidth) * each

    def pair_bytes(self, n: int, m: int, bandwidth: int) -> int:
        """Everything saved of one pair: states, then the bottom row of each strip but the last."""
        bounds = (self.strips(n) - 1) * self.bound_columns(m, bandwidth) * self.word_bytes
        return (self.states_bytes(n, m, bandwidth) + bounds + 15) // 16 * 16


def _padded(size: int, to: int = 16) -> int:
    return (size + to - 1) // to * to


# ---- shared memory: the structures of the kernels, member by member, which static assertions there compare


@dataclass(frozen=True)
class _Type:
    """Size and alignment of a C++ type."""

    size: int
    alignment: int

    def __mul__(self, count: int) -> _Type:
        """An array."""
        return _Type(self.size * count, self.alignment)

    def aligned(self, to: int) -> _Type:
        """A member with `alignas(to)`."""
        return _Type(self.size, max(self.alignment, to))


_WORD = _Type(4, 4)
"""float, i32, u32"""
_FEATURES = _Type(16, 8)
_ORDER = _WORD * 2


def _struct(*members: _Type, alignment: int = 1) -> _Type:
    size = 0
    for member in members:
        size = _padded(size, member.alignment) + member.size
        alignment = max(alignment, member.alignment)
    return _Type(_padded(size, alignment), alignment)


_STRIP = _struct(_WORD * 11, _Type(3, 1))
_SCHEDULE = _struct(_STRIP, _WORD * 10, _Type(2, 1))


def _vector(k: Kernel, reals: int) -> _Type:
    """Numbers of a lane that are read in one access."""
    size = (8 if k.wide else 4) * reals
    return _Type(size, size)


def _planes(k: Kernel, rows: int) -> _Type:
    """Rows of features as operands of tensor cores, in two planes for float32."""
    planes = 2 if k.input_code == 0 else 1
    return (_Type(2, 2) * (planes * rows * (k.dims + 8))).aligned(16)


def _normalization(k: Kernel) -> _Type:
    if k.mode != TENSOR:
        return _WORD
    own = (
        (_WORD * MOST_CENTRES).aligned(16) if k.sliced else _struct(_planes(k, k.strip_rows), _WORD * k.dims)
    )
    return _struct(own, _WORD * k.strip_rows, _WORD, _FEATURES.aligned(16))


def _cost_shared(k: Kernel) -> _Type:
    if k.mode == COST:
        return _WORD
    if k.mode == DIRECT:
        return _WORD * (32 * k.dims)
    if not k.sliced:
        return _struct(_planes(k, 32), _WORD * 32)
    return _struct(_planes(k, 2 * 32), _WORD * 32, _planes(k, 2 * k.strip_rows), _WORD * k.dims)


def _grad_shared(k: Kernel) -> _Type:
    if k.mode == COST:
        return _WORD
    if k.mode == DIRECT:
        return _WORD * ((k.strip_rows + 32) * k.dims + 4 * k.strip_rows * (k.dims + 1))
    if not k.sliced:
        return _struct(_planes(k, 32))
    return _struct(_planes(k, 2 * k.strip_rows), _WORD * k.dims, _planes(k, 2 * 32))


def _ring(k: Kernel, chunks: int) -> _Type:
    """Steps of all rows of a strip."""
    stride = k.strip_rows + (4 if k.mode == TENSOR else 2)
    return (_WORD * (chunks * 32 * stride)).aligned(16)


def _window(k: Kernel, columns: int) -> _Type:
    """Columns of y, in vectors of up to four features."""
    return _vector(k, min(k.dims, 4)) * (columns * max(k.dims // 4, 1))


def _wide_costs(k: Kernel) -> _Type:
    """Costs of eight steps."""
    return _vector(k, k.lane_rows) * (8 * 32)


def _forward_shared(k: Kernel) -> _Type:
    rows = _vector(k, 2) * 64
    if k.source == PAIR:
        return _struct(_window(k, PAIR_WINDOW), rows, alignment=64)
    if k.source == MATRIX:
        return _struct(_vector(k, k.lane_rows) * (32 * 33), rows, alignment=64)
    if k.source == WIDE_SOURCE:
        return _struct(rows, _wide_costs(k), alignment=64)
    if k.source == UNIVARIATE_SOURCE:
        return _struct(rows, _WORD * (k.strip_rows + 32), alignment=64)
    return _struct(_ring(k, k.lane_rows + 2), _normalization(k), _cost_shared(k), rows, _STRIP, _WORD)


def _backward_shared(k: Kernel) -> _Type:
    shares, left, state = _vector(k, 2 * k.lane_rows), _vector(k, k.lane_rows), _vector(k, 2)
    if k.source == PAIR:
        windows = _window(k, PAIR_WINDOW), _window(k, 32)
        return _struct(shares * 1024, *windows, state * 32, _WORD * 64, alignment=64)
    if k.source == MATRIX:
        return _struct(shares * (32 * 33), state * 32, _WORD * 64, alignment=64)
    if k.source != TILED:
        members = [shares * (k.subwalk * 32), *([left * (k.subwalk * 32)] if k.banded else [])]
        members += [state * (2 * k.subwalk), state * k.checkpoint]
        if k.source == WIDE_SOURCE:
            members.append(_wide_costs(k))
            members.append(state * (2 * k.strip_rows * (k.checkpoint // k.subwalk - 2)))
        else:
            members.append(_WORD * (k.strip_rows + k.checkpoint))
        return _struct(*members, alignment=64)
    chunks = k.checkpoint // 32
    slots = chunks + 1
    return _struct(
        *(_ring(k, k.lane_rows + 2 * chunks), _ring(k, k.lane_rows + 2)),
        *(shares * (slots * 1024), left * ((slots if k.banded else 1) * 1024)),
        *(_normalization(k), _cost_shared(k), _grad_shared(k), state * 32, _WORD * 64),
        *(_WORD * 8, _ORDER * 2, _SCHEDULE, _WORD),
    )


@dataclass(frozen=True, eq=False)
class Plan:
    """The kernels of a call: `main`, and `rerun` for the pairs that main flags (None when main is wide).

    Equal only to itself: `choose` makes each once, and calls look things up by it.
    """

    main: Kernel
    rerun: Kernel | None

    def row_bytes(self, n: int, m: int) -> int:
        """Of one hand-off row, and what its strips tell each other: none where every pair is one strip."""
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
        size: int = torch.sym_max(saved, self.more_row(n, m, bandwidth, save) + self.row_bytes(n, m))
        return size


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
    reruns, the order of grad_y and a hand-off row per pair of several strips. `filled` bytes are ones before
    the forward. Wide words take a second row per pair, `more_row_bytes` apart: in the scratch, or for reruns
    in the pair's own part.
    """

    progress: int
    grad_y_order: int
    rows: int
    row_bytes: int
    more_rows: int
    more_row_bytes: int
    scratch: int
    range_flags: int
    filled: int
    pairs: int
    pair_bytes: int
    total: int


def layout_of(plan: Plan, batch: int, n: int, m: int, bandwidth: int, save: bool) -> Layout:
    """Layout of the forward's buffer: the state when `save`, else scratch of O(m) per pair."""
    progress = 16
    grad_y_order = progress + batch * 16
    rows = _padded(grad_y_order + (batch * ((m + TILE - 1) // TILE) * 4 if save else 0))
    row_bytes = plan.row_bytes(n, m)
    range_flags = scratch = rows + batch * row_bytes * (2 if plan.rerun is None else 1)
    filled = range_flags + (batch + 1) * 4
    pairs = _padded(filled, 128)
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
        filled=filled,
        pairs=pairs,
        pair_bytes=pair_bytes,
        total=pairs + batch * pair_bytes,
    )


NEVER_LATER = 2**30
"""A start lag that no strip has: all begin at their last column."""


def start_lag_of(kernel: Kernel, batch: int, n: int, device: Device) -> int:
    """A strip of the backward begins where the one so many before it in the walk found alignment weight.

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
