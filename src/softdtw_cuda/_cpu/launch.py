"""The CPU backend: launches the kernels, and chooses between narrow and wide arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._problem import Problem
from .._torch_compat import materialized
from .arguments import Array, Edges, Flow, Gradients, Schedule
from .backward import backward_worker, scale_worker
from .compile import compile_for
from .config import gradient_with_value, saved_bytes, saved_edge_cells
from .cost_range import largest_cost_worker, largest_distance_worker
from .forward import forward_worker
from .problem import Arrays, arrays_of, order_of_tiles
from .scratch import Needs, borrow_array, borrow_memory, empty, give_back, zeros
from .threads import run, threads_for

LOG2_E = 1.4426950408889634

SLICE = 200_000_000
"""Cells times (dimensions + 8) after which a worker returns so that signals are handled: 10 to 20 ms of a
forward on one 2020s core, which a call from Python (30 us) does not slow."""
BACKWARD_SLICE = SLICE // 4
"""A cell of the backward takes up to four times as long."""


# ---------------------------------------------------------------------------------------------------- ranges
def _largest_costs(arrays: Arrays, n: int) -> Array:
    """The largest finite |cost| of each pair."""
    blocks = -(-n // 64)
    largest = np.zeros(arrays.pairs * blocks)
    arguments = (arrays.series, arrays.tiles.bandwidth, blocks, np.zeros(1, np.int64), largest, SLICE)
    compiled = compile_for(largest_cost_worker, arrays.dtype, arguments)
    run(threads_for(3 * arrays.cells), lambda worker: compiled(*arguments))
    return largest.reshape(arrays.pairs, blocks).max(1)


def _largest_distances(arrays: Arrays, n: int, limits: Array) -> Array:
    """A bound of each pair's squared distances, not far from the largest one if that is beyond the limit."""
    pairs, dimensions = arrays.pairs, arrays.series.dimensions
    threads = min(threads_for(16 * pairs * (n + arrays.series.columns) * dimensions), pairs)
    centres: Array = np.empty(threads * dimensions, arrays.float_type)
    largest = np.zeros(pairs)
    arguments = (arrays.series, limits, np.zeros(1, np.int64), centres, largest, SLICE)
    compiled = compile_for(largest_distance_worker, arrays.dtype, (*arguments, 0))
    run(threads, lambda worker: compiled(*arguments, worker))
    return largest


def _needs_wide(arrays: Arrays, n: int) -> Array:
    """Which float32 samples could leave 32-bit exponents: |s| < 2^22 a cell, |n| < 2^29 a path."""
    scale = LOG2_E / arrays.series.gamma
    if not scale < 2.0**127:  # no float32: it would make NaN of a cost of zero
        return np.ones(arrays.pairs, np.bool_)
    path = arrays.series.x_lengths + arrays.series.y_lengths
    limits = np.minimum(2.0**22, 2.0**29 / np.maximum(path, 1)) / scale
    largest = _largest_costs(arrays, n) if arrays.series.is_cost else _largest_distances(arrays, n, limits)
    wide: Array = ~(largest < limits)
    return wide


# --------------------------------------------------------------------------------------------------- kernels
def _by_tile(arrays: Arrays, threads: int) -> bool:
    """Whether pairs are so few that threads have to share them."""
    return threads > 1 and arrays.pairs < 2 * threads and arrays.tiles.rows * arrays.tiles.kept > 1


def plan(arrays: Arrays, backward: bool, cell: int) -> tuple[int, int, Schedule]:
    """Number of threads, of places where a pair's memory can be, and the schedule, for the work of a cell."""
    tiles = arrays.tiles
    threads = threads_for(arrays.cells * cell)
    by_tile = _by_tile(arrays, threads)
    threads = threads if by_tile else min(threads, arrays.pairs)
    schedule = Schedule(
        *order_of_tiles(tiles.rows, tiles.columns, tiles.radius, by_tile, backward),
        by_tile,
        np.zeros(1, np.int64),
        np.zeros(arrays.pairs * tiles.rows * tiles.kept if by_tile else 1, np.int32),
        np.full(2 * threads, -1, np.int64),
        BACKWARD_SLICE if backward else SLICE,
    )
    return threads, arrays.pairs if by_tile else threads, schedule


def launch_workers(
    worker: Any,
    arrays: Arrays,
    threads: int,
    slots: int,
    arguments: tuple[Any, ...],
    *,
    backward: bool,
    features: int | None = None,
) -> None:
    """Run the workers, each with memory of its own and, beside it, the transposed columns of y for each slot.

    `features` are those of a direction, of second order.
    """
    float_type, dimensions, dual = arrays.float_type, arrays.series.dimensions, features is not None
    largest = max(dimensions, features or 0)
    needs = Needs(arrays.tiles.edge, arrays.lanes, largest, backward, dual, float_type, arrays.int_type)
    packed_size = slots * arrays.tiles.columns * arrays.tiles.edge * (dimensions + (features or 0))
    memory = borrow_memory(needs, threads)
    packed = borrow_array(packed_size, float_type)

    def all_arguments(k: int) -> tuple[Any, ...]:
        return *arguments, memory[k], packed[0], k

    compiled = compile_for(worker, arrays.dtype, all_arguments(0))
    run(threads, lambda k: compiled(*all_arguments(k)))
    give_back(needs, memory)
    give_back((packed_size, float_type), packed)


def saved_edges(state: Tensor, arrays: Arrays, n: int, bandwidth: int) -> Edges:
    """The edges of all tiles in the bytes of a state."""
    stride = int(saved_edge_cells(n, arrays.series.columns, bandwidth))
    content = state.numpy()
    floats: Array = content.view(arrays.float_type)
    integers: Array = content.view(arrays.int_type)
    size = arrays.pairs * stride
    return Edges(
        floats[:size],
        integers[size : 2 * size],
        floats[2 * size : 3 * size],
        integers[3 * size : 4 * size],
        floats[:0],
        integers[:0],
        stride,
        True,
    )


def overwritten_edges(arrays: Arrays, slots: int) -> Edges:
    """Memory for one row and one column of tiles."""
    tiles = arrays.tiles
    stride = max(tiles.rows, tiles.columns) * tiles.edge
    floats: Array = np.empty((2, slots * stride), arrays.float_type)
    integers: Array = np.empty((2, slots * stride), arrays.int_type)
    corner_f: Array = np.empty(slots * tiles.rows, arrays.float_type)
    corner_n: Array = np.empty(slots * tiles.rows, arrays.int_type)
    return Edges(floats[0], integers[0], floats[1], integers[1], corner_f, corner_n, stride, False)


def smallest_weight(dtype: torch.dtype) -> float:
    """Alignment weight below which a cell is pruned; docs/math.md bounds what that does to a gradient."""
    return 2.0**-64 if dtype == torch.float32 else 2.0**-900


def gradients_of(
    arrays: Arrays, grad: Tensor, value: Tensor, need: tuple[bool, bool], sides: tuple[Tensor, Tensor]
) -> Gradients:
    """Where the gradients of two sides go, and what they are made of; a side without need is empty."""
    strides = [side.shape[1] * side.shape[2] if side.dim() == 3 else 0 for side in sides]
    return Gradients(
        grad.numpy(),
        value.numpy(),
        smallest_weight(arrays.dtype),
        *need,
        sides[0].view(-1).numpy(),
        strides[0],
        sides[1].view(-1).numpy(),
        strides[1],
    )


def flow_of(arrays: Arrays, slots: int) -> Flow:
    """Memory for the weight between tiles."""
    tiles = arrays.tiles
    return Flow(
        np.empty(slots * tiles.columns * tiles.edge, arrays.float_type),
        np.empty(slots * tiles.rows * tiles.edge, arrays.float_type),
        np.empty(slots * (tiles.rows + tiles.columns), arrays.float_type),
    )


def _forward(arrays: Arrays, n: int, bandwidth: int, save: bool) -> tuple[Tensor, Tensor]:
    threads, slots, schedule = plan(arrays, False, arrays.series.dimensions + 8)
    value = torch.empty(arrays.pairs, dtype=arrays.dtype, device="cpu")
    size = saved_bytes(arrays.pairs, n, arrays.series.columns, arrays.dtype, bandwidth) if save else 0
    # Tiles at the edges leave bytes unwritten; equal calls give equal states all the same.
    state = zeros([size], torch.uint8)
    edges = saved_edges(state, arrays, n, bandwidth) if save else overwritten_edges(arrays, slots)
    arguments = (arrays.series, arrays.tiles, schedule, edges, value.numpy())
    launch_workers(forward_worker, arrays, threads, slots, arguments, backward=False)
    return value, state


def _backward(
    arrays: Arrays,
    problem: Problem,
    grad: Tensor,
    value: Tensor,
    state: Tensor | None,
    gx: Tensor,
    gy: Tensor,
) -> None:
    """Gradients into gx and gy; without a state, of pairs of one tile, also the values."""
    threads, slots, schedule = plan(arrays, True, arrays.series.dimensions + 8)
    if state is None:
        edges = overwritten_edges(arrays, slots)
    else:
        edges = saved_edges(state.contiguous(), arrays, problem.n, problem.bandwidth)
        value = value.detach().to(arrays.dtype).contiguous()
    grad = materialized(grad.detach()).to(arrays.dtype).contiguous()
    gradients = gradients_of(arrays, grad, value, (problem.need_x, problem.need_y), (gx, gy))
    flow = flow_of(arrays, slots)
    arguments = (arrays.series, arrays.tiles, schedule, edges, gradients, flow, state is None)
    launch_workers(backward_worker, arrays, threads, slots, arguments, backward=True)


# --------------------------------------------------------------------------------------------------- backend
def computed_type(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 and bfloat16."""
    return dtype if dtype == torch.float64 else torch.float32


def computed(tensor: Tensor) -> Tensor:
    """In the type that the kernels compute in."""
    tensor = materialized(tensor)
    return tensor.to(computed_type(tensor.dtype))


def computable(problem: Problem) -> Problem:
    y = None if problem.y is None else computed(problem.y)
    return problem._replace(x=computed(problem.x), y=y)


def _wide_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Some rows in float64. Not by torch, whose threads wait for more to do on the cores of the kernels."""
    rows: Array = tensor.detach().numpy()[index.numpy()]
    return torch.from_numpy(rows.astype(np.float64))


def picked(problem: Problem, samples: Tensor) -> Problem:
    """The chosen samples in float64, which has a wide exponent; a broadcast side stays one series."""
    first = second = samples
    if problem.pairs is not None:
        first, second = problem.pairs[samples].long().unbind(1)

    def side(tensor: Tensor, index: Tensor) -> Tensor:
        if problem.pairs is None and tensor.shape[0] < problem.batch:
            return tensor.to(torch.float64)
        return _wide_rows(tensor, index)

    return problem._replace(
        x=side(problem.x, first),
        y=None if problem.y is None else side(problem.y, second),
        x_lengths=None if problem.x_lengths is None else problem.x_lengths[first],
        y_lengths=None if problem.y_lengths is None else problem.y_lengths[second],
        pairs=None,
    )


def beyond_range(arrays: Arrays, n: int) -> Tensor:
    """The samples that need wide exponents."""
    if arrays.dtype == torch.float64:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.from_numpy(np.flatnonzero(_needs_wide(arrays, n)))


def has_gradient_with_value(problem: Problem) -> bool:
    """Whether the state is the gradients, one per pair."""
    return problem.y is not None and gradient_with_value(problem.n, problem.m)


def state_bytes(problem: Problem) -> int:
    """Size of the state that `forward` saves."""
    if has_gradient_with_value(problem):
        steps = (problem.n if problem.need_x else 0) + (problem.m if problem.need_y else 0)
        return computed_type(problem.x.dtype).itemsize * problem.batch * steps * problem.x.shape[2]
    return saved_bytes(problem.batch, problem.n, problem.m, problem.x.dtype, problem.bandwidth)


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Values (B,) and saved state. A cost of -inf gives NaN."""
    problem = computable(problem)
    if problem.needs_gradient and has_gradient_with_value(problem):
        return _forward_backward(problem)
    arrays = arrays_of(problem)
    value, state = _forward(arrays, problem.n, problem.bandwidth, problem.needs_gradient)
    samples = beyond_range(arrays, problem.n)
    if len(samples):
        wide = picked(problem, samples)._replace(need_x=False, need_y=False)
        value[samples] = forward(wide)[0].to(value.dtype)
    return value, state


def _kept_gradients(problem: Problem, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and y in the bytes of a state; empty those that its forward did not need.

    A backward needs the same ones or fewer: of a state of one gradient, that one.
    """
    n, m, d = problem.n, problem.m, problem.x.shape[2]
    numbers = state.view(problem.x.dtype)
    pairs_x = pairs_y = problem.batch
    if numbers.numel() < problem.batch * (n + m) * d:
        pairs_x, pairs_y = pairs_x * problem.need_x, pairs_y * problem.need_y
    start = numbers.storage_offset()
    gx = numbers.as_strided((pairs_x, n, d), (n * d, d, 1), start)  # half the time of splits and views
    gy = numbers.as_strided((pairs_y, m, d), (m * d, d, 1), start + pairs_x * n * d)
    return gx, gy


def _forward_backward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Values, and as the state the gradients for a `grad` of 1."""
    arrays = arrays_of(problem)
    value = torch.empty(arrays.pairs, dtype=arrays.dtype, device="cpu")
    ones = torch.ones(arrays.pairs, dtype=arrays.dtype, device="cpu")
    state = empty([state_bytes(problem)], torch.uint8)
    gx, gy = _kept_gradients(problem, state)
    _backward(arrays, problem, ones, value, None, gx, gy)
    samples = beyond_range(arrays, problem.n)
    if len(samples):
        wide = picked(problem, samples)
        wide_value, wide_state = forward(wide)
        value[samples] = wide_value.to(value.dtype)
        wide_gradients = backward(wide, ones[samples].double(), wide_value, wide_state)
        for kept, computed_wide in zip((gx, gy), wide_gradients, strict=True):
            if kept.numel():
                kept[samples] = computed_wide.to(kept.dtype)
    return value, state


def scaled(gradient: Tensor, grad: Tensor) -> Tensor:
    """A gradient that a forward kept, times `grad`.

    By threads of this library: those of a torch operation wait for more to do, for several ms, on the cores
    that the next forward needs.
    """
    scaled = empty(gradient.shape, gradient.dtype)
    if gradient.numel():
        factors = materialized(grad.detach()).to(gradient.dtype).contiguous().numpy()
        arrays = gradient.view(-1).numpy(), factors, scaled.view(-1).numpy(), np.zeros(1, np.int64)
        compiled = compile_for(scale_worker, gradient.dtype, arrays)
        run(threads_for(gradient.numel()), lambda worker: compiled(*arrays))
    return scaled


def backward(problem: Problem, grad: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients, one per pair."""
    asked = problem
    problem = computable(problem)
    if has_gradient_with_value(problem):
        assert asked.y is not None
        kept = zip(
            _kept_gradients(problem, state), (asked.x, asked.y), (asked.need_x, asked.need_y), strict=True
        )
        gx, gy = (
            scaled(gradient, grad).to(asked.gradient_dtype(side)) if needed else asked.no_gradient()
            for gradient, side, needed in kept
        )
        return gx, gy
    arrays = arrays_of(problem)
    pairs, (n, width) = arrays.pairs, problem.x.shape[1:]
    gx = zeros((pairs, n, width) if problem.need_x else (0,), problem.x.dtype)
    gy = zeros((pairs, problem.m, width) if problem.need_y else (0,), problem.x.dtype)
    samples = beyond_range(arrays, n)
    # A zero gradient makes the kernel pass over the samples that the wide kernels will compute.
    narrow = grad.index_fill(0, samples, 0.0) if len(samples) else grad
    _backward(arrays, problem, narrow, value, state, gx, gy)
    if len(samples):
        wide = picked(problem, samples)
        # The saved state is narrow: these few samples run forward once more.
        wide_gx, wide_gy = backward(wide, grad[samples].to(torch.float64), *forward(wide))
        if problem.need_x:
            gx.numpy()[samples.numpy()] = wide_gx.numpy()
        if problem.need_y:
            gy.numpy()[samples.numpy()] = wide_gy.numpy()
    return asked.as_gradient(gx, asked.x, asked.need_x), asked.as_gradient(gy, asked.y, asked.need_y)
