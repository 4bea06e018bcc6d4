"""Second order on the CPU: launches the dual kernels, in narrow or wide arithmetic as `launch` does."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from softdtw_cuda._cpu.arguments import (
    FEATURES,
    MATRIX,
    POSITION,
    TANGENTS,
    DualEdges,
    DualFlow,
    Flow,
    Gradients,
    Omega,
)
from softdtw_cuda._cpu.config import dual_saved_bytes
from softdtw_cuda._cpu.dual_backward import dual_backward_worker
from softdtw_cuda._cpu.dual_forward import dual_forward_worker
from softdtw_cuda._cpu.launch import (
    beyond_range,
    computable,
    computed,
    launch_workers,
    overwritten_edges,
    picked,
    plan,
    saved_edges,
    smallest_weight,
)
from softdtw_cuda._cpu.problem import Arrays, arrays_of, series_of
from softdtw_cuda._cpu.scratch import zeros
from softdtw_cuda._problem import Direction, Problem
from softdtw_cuda._torch_compat import materialized

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


def _forward(arrays: Arrays, problem: Problem, omega: Omega, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    features = omega.series.dimensions
    threads, slots, schedule = plan(arrays, False, arrays.series.dimensions + features + 16)
    dot, value = (torch.empty(arrays.pairs, dtype=arrays.dtype, device="cpu") for _ in range(2))
    # Tiles at the edges leave bytes unwritten; equal calls give equal states all the same.
    state = zeros([_state_bytes(arrays, problem) if save else 0], torch.uint8)
    edges = _dual_edges(arrays, problem, slots, state if save else None)
    arguments = (arrays.series, omega, arrays.tiles, schedule, edges, value.numpy(), dot.numpy())
    packed = arrays.series.dimensions + features
    sizes = _scratch_sizes(arrays, features, False)
    launch_workers(dual_forward_worker, arrays, threads, slots, sizes, packed, arguments)
    return dot, value, state


def _state_bytes(arrays: Arrays, problem: Problem) -> int:
    size = dual_saved_bytes(arrays.pairs, problem.n, problem.m, arrays.dtype, problem.bandwidth)
    return int(size)


def _flow(arrays: Arrays, slots: int) -> Flow:
    tiles = arrays.tiles
    return Flow(
        np.empty(slots * tiles.columns * tiles.edge, arrays.float_type),
        np.empty(slots * tiles.rows * tiles.edge, arrays.float_type),
        np.empty(slots * (tiles.rows + tiles.columns), arrays.float_type),
    )


def _gradients(
    arrays: Arrays, grad: Tensor, value: Tensor, need: tuple[bool, bool], sides: tuple[Tensor, Tensor]
) -> Gradients:
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
    slope_gradients = _gradients(arrays, slope_grad, value, needs, (results[0], results[1]))
    if omega.kind == TANGENTS:  # Omega changes with the series as well
        weight_gradients = _gradients(arrays, grad, value, needs, (results[0], results[1]))
    else:
        needs = direction.need_a, direction.need_b
        weight_gradients = _gradients(arrays, grad, value, needs, (results[2], results[3]))
    arguments = (
        arrays.series,
        omega,
        arrays.tiles,
        schedule,
        _dual_edges(arrays, problem, slots, state.contiguous()),
        slope_gradients,
        weight_gradients,
        DualFlow(_flow(arrays, slots), _flow(arrays, slots)),
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
    dot, value, state = _forward(arrays, problem, _omega(arrays, problem, direction), save)
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

    def given(gradient: Tensor, side: Tensor | None, needed: bool) -> Tensor:
        if side is None or not needed:
            return asked.no_gradient()
        return gradient.to(asked.gradient_dtype(side))

    return (
        given(results[0], asked.x, asked.need_x),
        given(results[1], asked.y, asked.need_y),
        given(results[2], direction.a, direction.need_a),
        given(results[3], direction.b, direction.need_b),
    )
