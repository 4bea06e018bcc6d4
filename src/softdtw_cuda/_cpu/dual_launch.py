"""Second order on the CPU: launches the dual kernels, in narrow or wide arithmetic as `launch` does."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .._problem import Direction, Problem
from .._torch_compat import materialized
from .arguments import FEATURES, MATRIX, POSITION, TANGENTS, DualEdges, DualFlow, Omega
from .config import dual_saved_bytes
from .dual_backward import dual_backward_worker
from .dual_forward import dual_forward_worker
from .launch import (
    beyond_range,
    computable,
    computed,
    flow_of,
    gradients_of,
    launch_workers,
    overwritten_edges,
    picked,
    plan,
    saved_edges,
)
from .problem import Arrays, arrays_of, series_of
from .scratch import zeros

KINDS = {"tangents": TANGENTS, "matrix": MATRIX, "features": FEATURES, "position": POSITION}


def _omega(arrays: Arrays, problem: Problem, direction: Direction) -> Omega:
    """The direction as the kernels see it. Tangents that are None are one series of zeros for all pairs."""
    kind = KINDS[direction.kind]
    a, b = direction.a, direction.b
    if kind == TANGENTS:
        assert problem.y is not None
        a = problem.x.new_zeros(1, *problem.x.shape[1:]) if a is None else a
        b = problem.y.new_zeros(1, *problem.y.shape[1:]) if b is None else b
    elif kind == POSITION:
        a = b = problem.x.new_zeros(1, 1, 0)
    assert a is not None
    a = computed(a).to(arrays.dtype)
    b = None if b is None else computed(b).to(arrays.dtype)
    return Omega(kind, series_of(a, b, arrays.series))


def _picked_direction(direction: Direction, samples: Tensor, batch: int) -> Direction:
    """What the direction is for the chosen samples."""

    def side(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[0] < batch else tensor[samples]

    return direction._replace(a=side(direction.a), b=side(direction.b))


def _scratch_sizes(arrays: Arrays, features: int, backward: bool) -> tuple[int, int]:
    """Floats and integers that a worker needs."""
    edge, lanes = arrays.tiles.edge, arrays.lanes
    span, plane = 3 * (edge + 3 * lanes), (2 * edge + 3 * lanes) * (edge + lanes)
    floats = (edge + 4 * lanes) * (edge + lanes) + 2 * plane + 4 * span
    integers = span
    if backward:
        padded = -(-max(arrays.series.dimensions, features) // lanes) * lanes
        floats += (edge + 4 * lanes) * (edge + lanes) + 5 * plane + 6 * span + 4 * edge
        floats += max((edge + 1) * lanes, 4 * edge * padded)
        integers += 2 * (edge // 4) ** 2
    return floats, integers


def _dual_edges(arrays: Arrays, problem: Problem, slots: int, state: Tensor | None) -> DualEdges:
    """Edges in the bytes of a state, or memory for one row and one column of tiles."""
    sums = np.empty(slots, np.float64)
    bottom_v: np.ndarray
    right_u: np.ndarray
    if state is None:
        edges = overwritten_edges(arrays, slots)
        bottom_v, right_u = np.empty((2, slots * edges.stride), arrays.float_type)
    else:
        edges = saved_edges(state, arrays, problem.n, problem.bandwidth)
        size = arrays.pairs * edges.stride
        numbers: np.ndarray = state.numpy().view(arrays.float_type)
        bottom_v, right_u = numbers[4 * size : 5 * size], numbers[5 * size : 6 * size]
    return DualEdges(edges, bottom_v, right_u, sums)


def _forward(arrays: Arrays, problem: Problem, omega: Omega, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """<E, Omega> and values, and a state of `size` bytes, or none of 0."""
    features = omega.series.dimensions
    threads, slots, schedule = plan(arrays, False, arrays.series.dimensions + features + 16)
    dot, value = (torch.empty(arrays.pairs, dtype=arrays.dtype, device="cpu") for _ in range(2))
    # Tiles at the edges leave bytes unwritten; equal calls give equal states all the same.
    state = zeros([size], torch.uint8)
    edges = _dual_edges(arrays, problem, slots, state if size else None)
    arguments = (arrays.series, omega, arrays.tiles, schedule, edges, value.numpy(), dot.numpy())
    packed = arrays.series.dimensions + features
    sizes = _scratch_sizes(arrays, features, False)
    launch_workers(dual_forward_worker, arrays, threads, slots, sizes, packed, arguments)
    return dot, value, state


def _backward(
    arrays: Arrays,
    problem: Problem,
    direction: Direction,
    grad: Tensor,
    value: Tensor,
    state: Tensor,
    results: list[Tensor],
) -> None:
    omega = _omega(arrays, problem, direction)
    features = omega.series.dimensions
    threads, slots, schedule = plan(arrays, True, arrays.series.dimensions + features + 16)
    grad = materialized(grad.detach()).to(arrays.dtype).contiguous()
    value = value.detach().to(arrays.dtype).contiguous()
    # The sweep has E-dot times gamma.
    slope_grad = grad * min(1 / problem.gamma, torch.finfo(arrays.dtype).max)
    needs = problem.need_x, problem.need_y
    slope_gradients = gradients_of(arrays, slope_grad, value, needs, (results[0], results[1]))
    if omega.kind == TANGENTS:  # Omega changes with the series as well
        weight_gradients = gradients_of(arrays, grad, value, needs, (results[0], results[1]))
    else:
        needs = direction.need_a, direction.need_b
        weight_gradients = gradients_of(arrays, grad, value, needs, (results[2], results[3]))
    arguments = (
        arrays.series,
        omega,
        arrays.tiles,
        schedule,
        _dual_edges(arrays, problem, slots, state.contiguous()),
        slope_gradients,
        weight_gradients,
        DualFlow(flow_of(arrays, slots), flow_of(arrays, slots)),
    )
    packed = arrays.series.dimensions + features
    sizes = _scratch_sizes(arrays, features, True)
    launch_workers(dual_backward_worker, arrays, threads, slots, sizes, packed, arguments)


# --------------------------------------------------------------------------------------------------- backend
def expected_state_bytes(problem: Problem, direction: Direction) -> int:
    """Size of the state that `expected` saves."""
    return dual_saved_bytes(problem.batch, problem.n, problem.m, problem.x.dtype, problem.bandwidth)


def expected(problem: Problem, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """<E, Omega> and values (B,), and saved state."""
    save = problem.needs_gradient or direction.need_a or direction.need_b
    problem = computable(problem)
    arrays = arrays_of(problem)
    size = expected_state_bytes(problem, direction) if save else 0
    dot, value, state = _forward(arrays, problem, _omega(arrays, problem, direction), size)
    samples = beyond_range(arrays, problem.n)
    if len(samples):
        wide = picked(problem, samples)._replace(need_x=False, need_y=False)
        along = _picked_direction(direction, samples, arrays.pairs)._replace(need_a=False, need_b=False)
        wide_dot, wide_value, _ = expected(wide, along)
        dot[samples], value[samples] = wide_dot.to(dot.dtype), wide_value.to(value.dtype)
    return dot, value, state


def expected_backward(
    problem: Problem, direction: Direction, grad: Tensor, value: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients, one per pair."""
    asked = problem
    problem = computable(problem)
    arrays = arrays_of(problem)
    sides = (
        (problem.x, problem.need_x),
        (problem.y, problem.need_y),
        (direction.a, direction.need_a),
        (direction.b, direction.need_b),
    )
    results = [
        problem.x.new_zeros((arrays.pairs, *side.shape[1:]) if needed and side is not None else (0,))
        for side, needed in sides
    ]
    samples = beyond_range(arrays, problem.n)
    # A zero gradient makes the kernel pass over the samples that the wide kernels will compute.
    narrow = grad.index_fill(0, samples, 0.0) if len(samples) else grad
    _backward(arrays, problem, direction, narrow, value, state, results)
    if len(samples):
        wide, along = picked(problem, samples), _picked_direction(direction, samples, arrays.pairs)
        # The saved state is narrow: these few samples run forward once more.
        _, wide_value, wide_state = expected(wide, along)
        found = expected_backward(wide, along, grad[samples].double(), wide_value, wide_state)
        for result, computed_wide in zip(results, found, strict=True):
            if result.numel():
                result[samples] = computed_wide.to(result.dtype)
    return (
        asked.as_gradient(results[0], asked.x, asked.need_x),
        asked.as_gradient(results[1], asked.y, asked.need_y),
        asked.as_gradient(results[2], direction.a, direction.need_a),
        asked.as_gradient(results[3], direction.b, direction.need_b),
    )
