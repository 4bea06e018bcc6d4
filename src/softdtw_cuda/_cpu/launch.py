"""Launcher of the CPU kernels: memory, threads, and the choice between narrow and wide arithmetic.

Every function takes plain CPU tensors; shapes and lengths have been checked by the caller.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softdtw_cuda._cpu import kernels
from softdtw_cuda._cpu.config import (
    cost_state_bytes,
    fused_state_bytes,
    saved_columns,
    saved_edge_cells,
    tile_edge,
    tile_radius,
)
from softdtw_cuda._cpu.intrinsics import VECTOR_BYTES

__all__ = [
    "cost_backward",
    "cost_forward",
    "cost_state_bytes",
    "fused_backward",
    "fused_forward",
    "fused_state_bytes",
]

Array = Any

SMALLEST_SHARED_WORK = 300_000
"""Cells times (dimensions + 8) below which waking another thread costs more than it gains."""
LARGEST_KEPT_BYTES = 8 << 20
NOTICE_AFTER_SECONDS = 2.0
LOG2_E = 1.4426950408889634


# -------------------------------------------------------------------------------------------------- threads
_executors: dict[int, ThreadPoolExecutor] = {}
_executors_lock = threading.Lock()


def _executor() -> ThreadPoolExecutor:
    # Keyed by process: a fork inherits the object but not its threads.
    process = os.getpid()
    executor = _executors.get(process)
    if executor is None:
        with _executors_lock:
            executor = _executors.get(process)
            if executor is None:
                _executors.clear()
                executor = ThreadPoolExecutor(
                    max(1, os.cpu_count() or 1, torch.get_num_threads()), "softdtw-cpu"
                )
                _executors[process] = executor
    return executor


def _replace_lock_after_fork() -> None:
    global _executors_lock
    _executors_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_lock_after_fork)

_give_way: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


def _run(threads: int, work: Callable[[int], bool]) -> None:
    """Call ``work(k)`` on ``threads`` threads, this one included, again for as long as it returns True.

    A worker returns True when the tile it waits for is still under way. That tile's ticket was drawn
    earlier, so its worker has started: waiting ends even when the pool is busy and this thread is alone.
    """
    failed = threading.Event()

    def loop(worker: int) -> None:
        try:
            while work(worker) and not failed.is_set():
                _give_way()
        except BaseException:
            failed.set()
            raise

    helpers: list[Future[None]] = []
    try:
        helpers = [_executor().submit(loop, k) for k in range(1, threads)]
        loop(0)
    finally:
        started = [helper for helper in helpers if not helper.cancel()]
        for helper in started:
            helper.exception()
    for helper in started:
        helper.result()


def _threads_for(work: int) -> int:
    return 1 if work < SMALLEST_SHARED_WORK else max(1, torch.get_num_threads())


# --------------------------------------------------------------------------------------- compilation notice
_notice_given = False


@contextlib.contextmanager
def _compiling(dispatcher: Any, probe: Array) -> Iterator[None]:
    """Say once on stderr that kernels are being compiled, if that takes long."""
    global _notice_given
    kind = str(probe.dtype)
    if kind in _compiled.setdefault(dispatcher.__name__, set()) or _notice_given:
        yield
        return

    def notice() -> None:
        global _notice_given
        if not _notice_given:
            _notice_given = True
            sys.stderr.write(
                "softdtw_cuda: compiling the CPU kernels; this happens once and is cached on disk.\n"
            )
            sys.stderr.flush()

    timer = threading.Timer(NOTICE_AFTER_SECONDS, notice)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    _compiled[dispatcher.__name__].add(kind)


_compiled: dict[str, set[str]] = {}


# -------------------------------------------------------------------------------------------------- scratch
_scratch: dict[tuple[type, int], list[Array]] = {}


def _aligned(size: int, dtype: type) -> Array:
    """An array on a cache line's boundary: vectors that straddle two lines cost twice as much."""
    raw = np.empty(size * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size * np.dtype(dtype).itemsize].view(dtype)


@contextlib.contextmanager
def _borrowed(count: int, size: int, dtype: type) -> Iterator[list[Array]]:
    """``count`` arrays that go back to a small store: fresh pages cost more than small problems."""
    store = _scratch.setdefault((dtype, size), [])
    arrays = []
    for _ in range(count):
        try:
            arrays.append(store.pop())
        except IndexError:
            arrays.append(_aligned(size, dtype))
    try:
        yield arrays
    finally:
        if len(_scratch) > 16:
            _scratch.clear()
        for array in arrays:
            if len(store) < 2 * torch.get_num_threads() and array.nbytes < LARGEST_KEPT_BYTES:
                store.append(array)


# ------------------------------------------------------------------------------------------------- geometry
class _Tiles(NamedTuple):
    edge: int
    radius: int
    rows: int
    columns: int
    kept: int
    bandwidth: int


@functools.lru_cache(maxsize=256)
def _tiles(n: int, m: int, dtype: torch.dtype, bandwidth: int) -> _Tiles:
    edge = tile_edge(dtype)
    bandwidth = min(bandwidth, n + m)  # all that it can mean; indices are added to it
    rows, columns = -(-n // edge), -(-m // edge)
    radius = rows + columns if bandwidth < 0 else tile_radius(bandwidth, edge)
    kept = int(saved_columns(m, bandwidth, edge))
    return _Tiles(edge, radius, rows, columns, kept, kernels.UNBANDED if bandwidth < 0 else bandwidth)


@functools.lru_cache(maxsize=64)
def _order(rows: int, columns: int, radius: int, by_diagonal: bool, reverse: bool) -> tuple[Array, Array]:
    """Rows and columns of the tiles in the band, every tile after those that it waits for."""
    row, column = np.divmod(np.arange(rows * columns, dtype=np.int64), columns)
    inside = np.abs(row - column) <= radius
    row, column = row[inside], column[inside]
    if by_diagonal:
        order = np.argsort(row + column, kind="stable")
        row, column = row[order], column[order]
    if reverse:
        row, column = row[::-1], column[::-1]
    return np.ascontiguousarray(row), np.ascontiguousarray(column)


def _flat(tensor: Tensor) -> tuple[Array, int]:
    """The tensor's memory as a flat array and the distance between samples (0 for a broadcast one)."""
    batch, rows, columns = tensor.shape
    if tensor.stride(2) != 1 or tensor.stride(1) != columns:
        tensor = tensor.contiguous()
    stride = 0 if batch == 1 else tensor.stride(0)
    if stride < 0:
        tensor = tensor.contiguous()
        stride = tensor.stride(0)
    flat = torch.as_strided(tensor.detach(), ((batch - 1) * stride + rows * columns,), (1,))
    return flat.numpy(), stride


def _lengths(lengths: Tensor | None, batch: int, full: int) -> Array:
    if lengths is None:
        return np.full(batch, full, np.int64)
    return lengths.detach().to(torch.int64).contiguous().numpy()


class _Problem(NamedTuple):
    """One batch as the kernels see it; ``x`` is the cost matrix when ``is_cost``."""

    is_cost: bool
    x: Array
    x_stride: int
    y: Array
    y_stride: int
    m: int
    d: int
    x_lengths: Array
    y_lengths: Array
    gamma: float
    tiles: _Tiles
    batch: int
    dtype: torch.dtype

    @property
    def float_type(self) -> type:
        return np.float64 if self.dtype == torch.float64 else np.float32

    @property
    def int_type(self) -> type:
        return np.int64 if self.dtype == torch.float64 else np.int32

    @property
    def lanes(self) -> int:
        return VECTOR_BYTES // (8 if self.dtype == torch.float64 else 4)

    @property
    def cells(self) -> int:
        return self.batch * self.tiles.rows * self.tiles.kept * self.tiles.edge**2

    def common(self) -> tuple[Any, ...]:
        t = self.tiles
        return (
            self.is_cost,
            self.x,
            self.x_stride,
            self.y,
            self.y_stride,
            self.m,
            self.d,
            self.x_lengths,
            self.y_lengths,
            self.gamma,
            t.bandwidth,
            t.edge,
            t.kept,
            t.rows,
            t.columns,
            t.radius,
        )


def _fused_problem(
    x: Tensor, y: Tensor, gamma: float, bandwidth: int, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> _Problem:
    batch, n, m, d = max(x.shape[0], y.shape[0]), x.shape[1], y.shape[1], x.shape[2]
    flat_x, x_stride = _flat(x)
    flat_y, y_stride = _flat(y)
    lengths = _lengths(x_lengths, batch, n), _lengths(y_lengths, batch, m)
    tiles = _tiles(n, m, x.dtype, bandwidth)
    return _Problem(
        False, flat_x, x_stride, flat_y, y_stride, m, d, *lengths, float(gamma), tiles, batch, x.dtype
    )


def _cost_problem(
    cost: Tensor, gamma: float, bandwidth: int, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> _Problem:
    batch, n, m = cost.shape
    flat, stride = _flat(cost)
    lengths = _lengths(x_lengths, batch, n), _lengths(y_lengths, batch, m)
    tiles = _tiles(n, m, cost.dtype, bandwidth)
    return _Problem(True, flat, stride, flat, 0, m, 0, *lengths, float(gamma), tiles, batch, cost.dtype)


def _needs_wide(problem: _Problem, n: int) -> Array:
    """Which float32 samples could leave 32-bit exponents: |s| < 2^22 a cell, |n| < 2^29 a path."""
    threads = _threads_for(problem.cells // 8)
    tickets = np.zeros(1, np.int64)
    if problem.is_cost:
        blocks = -(-n // 64)
        largest = np.zeros(problem.batch * blocks)

        def work(worker: int) -> bool:
            kernels.largest_cost_worker(
                problem.x,
                problem.x_stride,
                problem.m,
                problem.x_lengths,
                problem.y_lengths,
                problem.tiles.bandwidth,
                blocks,
                tickets,
                largest,
            )
            return False

        with _compiling(kernels.largest_cost_worker, problem.x):
            _run(threads, work)
        largest = largest.reshape(problem.batch, blocks).max(1)
    else:
        threads = min(threads, problem.batch)
        centres: Array = np.empty(threads * problem.d, problem.float_type)
        largest = np.zeros(problem.batch)

        def work(worker: int) -> bool:
            kernels.largest_distance_worker(
                problem.x,
                problem.x_stride,
                problem.y,
                problem.y_stride,
                problem.d,
                problem.x_lengths,
                problem.y_lengths,
                tickets,
                centres,
                largest,
                worker,
            )
            return False

        with _compiling(kernels.largest_distance_worker, problem.x):
            _run(threads, work)
    steps = largest * (LOG2_E / problem.gamma)
    path = problem.x_lengths + problem.y_lengths
    wide: Array = ~((steps < 2.0**22) & (steps * path < 2.0**29))
    return wide


# -------------------------------------------------------------------------------------------------- kernels
def _scratch_sizes(problem: _Problem, backward: bool) -> tuple[int, int]:
    edge, lanes = problem.tiles.edge, problem.lanes
    span, plane = edge + 3 * lanes, (2 * edge + 3 * lanes) * (edge + lanes)
    floats = (edge + 4 * lanes) * (edge + lanes) + plane + 3 * span
    integers = 3 * span
    if backward:
        padded = -(-problem.d // lanes) * lanes
        floats += 3 * plane + 9 * span + 2 * edge + max((edge + 1) * lanes, 4 * edge * padded)
        integers += 2 * (edge // 4) ** 2
    return floats, integers


def _split_state(
    state: Array, problem: _Problem, n: int, bandwidth: int
) -> tuple[Array, Array, Array, Array, int]:
    """bottom f, bottom n, right f, right n out of the state's bytes, and the cells a pair takes in each."""
    cells = int(saved_edge_cells(n, problem.m, problem.dtype, bandwidth))
    floats, integers = state.view(problem.float_type), state.view(problem.int_type)
    quarter = problem.batch * cells
    return (
        floats[:quarter],
        integers[quarter : 2 * quarter],
        floats[2 * quarter : 3 * quarter],
        integers[3 * quarter : 4 * quarter],
        cells,
    )


def _by_tile(problem: _Problem, threads: int) -> bool:
    return threads > 1 and problem.batch < 2 * threads and problem.tiles.rows * problem.tiles.kept > 1


def _forward(problem: _Problem, n: int, bandwidth: int, save: bool) -> tuple[Tensor, Tensor]:
    tiles = problem.tiles
    threads = _threads_for(problem.cells * (problem.d + 8))
    by_tile = _by_tile(problem, threads)
    threads = threads if by_tile else min(threads, problem.batch)
    slots = problem.batch if by_tile else threads
    value = torch.empty(problem.batch, dtype=problem.dtype)
    if save:
        state = torch.empty(
            cost_state_bytes(problem.batch, n, problem.m, problem.dtype, bandwidth), dtype=torch.uint8
        )
        bottom_f, bottom_n, right_f, right_n, saved = _split_state(state.numpy(), problem, n, bandwidth)
    else:
        state = torch.empty(0, dtype=torch.uint8)
        saved = max(tiles.rows, tiles.columns) * tiles.edge
        bottom_f, right_f = np.empty((2, slots * saved), problem.float_type)
        bottom_n, right_n = np.empty((2, slots * saved), problem.int_type)
    corners_f: Array = np.empty(slots * tiles.rows, problem.float_type)
    corners_n: Array = np.empty(slots * tiles.rows, problem.int_type)
    packed_stride = tiles.columns * tiles.edge * problem.d
    rows, columns = _order(tiles.rows, tiles.columns, tiles.radius, by_tile, False)
    tickets = np.zeros(1, np.int64)
    pending = np.full(threads, -1, np.int64)
    flags = np.zeros(problem.batch * tiles.rows * tiles.columns if by_tile else 1, np.int32)
    floats, integers = _scratch_sizes(problem, False)
    value_array = value.numpy()
    kernel: Any = kernels.forward_worker
    common: tuple[Any, ...] = problem.common()
    with (
        _borrowed(threads, floats, problem.float_type) as scratch,
        _borrowed(threads, integers, problem.int_type) as scratch_n,
        _borrowed(1, slots * packed_stride, problem.float_type) as (packed,),
    ):

        def work(worker: int) -> bool:
            again: bool = kernel(
                *common,
                tickets,
                rows,
                columns,
                by_tile,
                save,
                value_array,
                bottom_f,
                bottom_n,
                right_f,
                right_n,
                saved,
                corners_f,
                corners_n,
                tiles.rows,
                packed,
                packed_stride,
                flags,
                pending,
                worker,
                scratch[worker],
                scratch_n[worker],
            )
            return again

        with _compiling(kernels.forward_worker, problem.x):
            _run(threads, work)
    return value, state


def _backward(
    problem: _Problem,
    n: int,
    bandwidth: int,
    grad: Tensor,
    value: Tensor,
    state: Tensor,
    need_x: bool,
    need_y: bool,
    gx: Array,
    gx_stride: int,
    gy: Array,
    gy_stride: int,
) -> None:
    tiles = problem.tiles
    threads = _threads_for(problem.cells * (problem.d + 8))
    by_tile = _by_tile(problem, threads)
    threads = threads if by_tile else min(threads, problem.batch)
    slots = problem.batch if by_tile else threads
    bottom_f, bottom_n, right_f, right_n, saved = _split_state(
        state.contiguous().numpy(), problem, n, bandwidth
    )
    upward: Array = np.empty(slots * tiles.columns * tiles.edge, problem.float_type)
    leftward: Array = np.empty(slots * tiles.rows * tiles.edge, problem.float_type)
    cornerward: Array = np.empty(slots * (tiles.rows + tiles.columns), problem.float_type)
    packed_stride = tiles.columns * tiles.edge * problem.d
    rows, columns = _order(tiles.rows, tiles.columns, tiles.radius, by_tile, True)
    tickets = np.zeros(1, np.int64)
    pending = np.full(threads, -1, np.int64)
    flags = np.zeros(problem.batch * tiles.rows * tiles.columns if by_tile else 1, np.int32)
    floats, integers = _scratch_sizes(problem, True)
    gradient = grad.detach().to(problem.dtype).contiguous().numpy()
    values = value.detach().to(problem.dtype).contiguous().numpy()
    # Mass too small to matter beside any other makes denormal numbers, which are slow.
    smallest = 2.0**-100 if problem.dtype == torch.float32 else 2.0**-900
    kernel: Any = kernels.backward_worker
    common: tuple[Any, ...] = problem.common()
    with (
        _borrowed(threads, floats, problem.float_type) as scratch,
        _borrowed(threads, integers, problem.int_type) as scratch_n,
        _borrowed(1, slots * packed_stride, problem.float_type) as (packed,),
    ):

        def work(worker: int) -> bool:
            again: bool = kernel(
                *common,
                tickets,
                rows,
                columns,
                by_tile,
                gradient,
                values,
                bottom_f,
                bottom_n,
                right_f,
                right_n,
                saved,
                upward,
                leftward,
                cornerward,
                packed,
                packed_stride,
                flags,
                pending,
                worker,
                scratch[worker],
                scratch_n[worker],
                smallest,
                need_x,
                need_y,
                gx,
                gx_stride,
                gy,
                gy_stride,
            )
            return again

        with _compiling(kernels.backward_worker, problem.x):
            _run(threads, work)


def _picked(tensor: Tensor | None, samples: Tensor) -> Tensor | None:
    """The chosen samples of a batch; a broadcast one stays as it is."""
    if tensor is None or (tensor.dim() > 1 and tensor.shape[0] == 1):
        return tensor
    return tensor[samples]


def _float64(tensor: Tensor, samples: Tensor) -> Tensor:
    picked = _picked(tensor, samples)
    assert picked is not None
    return picked.to(torch.float64)


# ------------------------------------------------------------------------------------------------ operators
def _computed(tensor: Tensor) -> Tensor:
    """float16 and bfloat16 are computed in float32."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float32)


def fused_forward(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Squared Euclidean Soft-DTW of x (Bx, N, D) and y (By, M, D): value (B,) and saved state."""
    x, y = _computed(x), _computed(y)
    problem = _fused_problem(x, y, gamma, bandwidth, x_lengths, y_lengths)
    value, state = _forward(problem, x.shape[1], bandwidth, save)
    if x.dtype == torch.float32:
        wide = _needs_wide(problem, x.shape[1])
        if wide.any():
            samples = torch.from_numpy(np.flatnonzero(wide))
            value[samples] = fused_forward(
                _float64(x, samples),
                _float64(y, samples),
                gamma,
                bandwidth,
                _picked(x_lengths, samples),
                _picked(y_lengths, samples),
                False,
            )[0].to(value.dtype)
    return value, state


def fused_backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    value: Tensor,
    state: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    need_x: bool,
    need_y: bool,
) -> tuple[Tensor, Tensor]:
    """Per-sample gradients (B, N, D) and (B, M, D), zero in the padding; empty for a side not needed."""
    types = tuple(
        torch.promote_types(t.dtype, torch.float32) if t.shape[0] < grad.shape[0] else t.dtype for t in (x, y)
    )
    x, y = _computed(x), _computed(y)
    problem = _fused_problem(x, y, gamma, bandwidth, x_lengths, y_lengths)
    n, m, d = x.shape[1], y.shape[1], x.shape[2]
    gx = torch.zeros((problem.batch, n, d) if need_x else (0,), dtype=x.dtype)
    gy = torch.zeros((problem.batch, m, d) if need_y else (0,), dtype=x.dtype)
    wide = _needs_wide(problem, n) if x.dtype == torch.float32 else np.zeros(problem.batch, bool)
    # A zero gradient makes the kernel pass over the samples that the wide kernels will compute.
    narrow_grad = torch.where(torch.from_numpy(wide), 0.0, grad) if wide.any() else grad
    _backward(
        problem,
        n,
        bandwidth,
        narrow_grad,
        value,
        state,
        need_x,
        need_y,
        gx.view(-1).numpy(),
        n * d,
        gy.view(-1).numpy(),
        m * d,
    )
    if wide.any():
        samples = torch.from_numpy(np.flatnonzero(wide))
        picked = _float64(x, samples), _float64(y, samples)
        lengths = _picked(x_lengths, samples), _picked(y_lengths, samples)
        # The saved state is narrow: these few samples run forward once more.
        wide_value, wide_state = fused_forward(*picked, gamma, bandwidth, *lengths, True)
        wide_gx, wide_gy = fused_backward(
            grad[samples].to(torch.float64),
            *picked,
            wide_value,
            wide_state,
            gamma,
            bandwidth,
            *lengths,
            need_x,
            need_y,
        )
        if need_x:
            gx[samples] = wide_gx.to(gx.dtype)
        if need_y:
            gy[samples] = wide_gy.to(gy.dtype)
    return gx.to(types[0]), gy.to(types[1])


def cost_forward(
    cost: Tensor, gamma: float, bandwidth: int, x_lengths: Tensor | None, y_lengths: Tensor | None, save: bool
) -> tuple[Tensor, Tensor]:
    """Soft-DTW of a cost matrix (B, N, M): value (B,) and saved state. A cost of -inf gives NaN."""
    cost = _computed(cost)
    problem = _cost_problem(cost, gamma, bandwidth, x_lengths, y_lengths)
    value, state = _forward(problem, cost.shape[1], bandwidth, save)
    if cost.dtype == torch.float32:
        wide = _needs_wide(problem, cost.shape[1])
        if wide.any():
            samples = torch.from_numpy(np.flatnonzero(wide))
            lengths = _picked(x_lengths, samples), _picked(y_lengths, samples)
            wide_value, _ = cost_forward(cost[samples].to(torch.float64), gamma, bandwidth, *lengths, False)
            value[samples] = wide_value.to(value.dtype)
    return value, state


def cost_backward(
    grad: Tensor,
    cost: Tensor,
    value: Tensor,
    state: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
) -> Tensor:
    """grad_b E_b, the gradient of the cost matrix (B, N, M); zero in the padding."""
    dtype = cost.dtype
    cost = _computed(cost)
    problem = _cost_problem(cost, gamma, bandwidth, x_lengths, y_lengths)
    n = cost.shape[1]
    gcost = torch.zeros(cost.shape, dtype=cost.dtype)
    wide = _needs_wide(problem, n) if cost.dtype == torch.float32 else np.zeros(problem.batch, bool)
    narrow_grad = torch.where(torch.from_numpy(wide), 0.0, grad) if wide.any() else grad
    flat = gcost.view(-1).numpy()
    _backward(problem, n, bandwidth, narrow_grad, value, state, True, False, flat, n * problem.m, flat, 0)
    if wide.any():
        samples = torch.from_numpy(np.flatnonzero(wide))
        picked = cost[samples].to(torch.float64)
        lengths = _picked(x_lengths, samples), _picked(y_lengths, samples)
        wide_value, wide_state = cost_forward(picked, gamma, bandwidth, *lengths, True)
        gcost[samples] = cost_backward(
            grad[samples].to(torch.float64), picked, wide_value, wide_state, gamma, bandwidth, *lengths
        ).to(gcost.dtype)
    return gcost.to(dtype)
