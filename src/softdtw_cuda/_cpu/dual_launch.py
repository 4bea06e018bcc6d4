"""Second order on the CPU: launches the dual kernels, in narrow or wide arithmetic as `launch` does."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    computed_type,
    flow_of,
    gradients_of,
    has_gradient_with_value,
    launch_workers,
    overwritten_edges,
    picked,
    plan,
    saved_edges,
    scaled,
)
from .problem import Arrays, arrays_of, series_of
from .scratch import empty, zeros

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


def _dual_edges(arrays: Arrays, problem: Problem, slots: int, state: Tensor | None) -> DualEdges:
    """Edges in the bytes of a state, or memory for one row and one column of tiles."""
    stride = (arrays.tiles.rows + arrays.tiles.columns) * arrays.tiles.edge + 1
    totals: np.ndarray = np.zeros(slots * stride, arrays.float_type)
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
    return DualEdges(edges, bottom_v, right_u, totals, stride)


def _forward(arrays: Arrays, problem: Problem, omega: Omega, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """<E, Omega> and values, and a state of `size` bytes, or none of 0."""
    features = omega.series.dimensions
    threads, slots, schedule = plan(arrays, False, arrays.series.dimensions + features + 16)
    dot, value = (torch.empty(arrays.pairs, dtype=arrays.dtype, device="cpu") for _ in range(2))
    # Tiles at the edges leave bytes unwritten; equal calls give equal states all the same.
    state = zeros([size], torch.uint8)
    edges = _dual_edges(arrays, problem, slots, state if size else None)
    arguments = (arrays.series, omega, arrays.tiles, schedule, edges, value.numpy(), dot.numpy())
    launch_workers(dual_forward_worker, arrays, threads, slots, arguments, backward=False, features=features)
    return dot, value, state


def _backward(
    arrays: Arrays,
    problem: Problem,
    direction: Direction,
    grad: Tensor,
    dot: Tensor,
    value: Tensor,
    state: Tensor | None,
    results: Sequence[Tensor],
) -> None:
    """Gradients into the results; without a state, of pairs of one tile, also <E, Omega> and the values."""
    omega = _omega(arrays, problem, direction)
    features = omega.series.dimensions
    threads, slots, schedule = plan(arrays, True, arrays.series.dimensions + features + 16)
    grad = materialized(grad.detach()).to(arrays.dtype).contiguous()
    if state is not None:
        value, state = value.detach().to(arrays.dtype).contiguous(), state.contiguous()
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
        _dual_edges(arrays, problem, slots, state),
        slope_gradients,
        weight_gradients,
        DualFlow(flow_of(arrays, slots), flow_of(arrays, slots)),
        state is None,
        dot.numpy(),
    )
    launch_workers(dual_backward_worker, arrays, threads, slots, arguments, backward=True, features=features)


# ------------------------------------------------------------------------------------- gradients with values
def _has_gradient_with_value(problem: Problem, direction: Direction) -> bool:
    """Whether the state is the gradients, as in first order; never where Omega is a matrix, whose gradient
    would be one for each pair. Transforms need fewer gradients in the backward than in the forward: this
    must not depend on `need_a`."""
    return has_gradient_with_value(problem) and direction.kind != "matrix"


def _sides(problem: Problem, direction: Direction) -> list[tuple[Tensor | None, bool]]:
    """What there may be gradients of, and whether they are needed."""
    return [
        (problem.x, problem.need_x),
        (problem.y, problem.need_y),
        (direction.a, direction.need_a),
        (direction.b, direction.need_b),
    ]


def _kept_shapes(problem: Problem, direction: Direction) -> list[tuple[int, ...]]:
    """Of the gradients in a state: of both series, and of both features of Omega."""
    assert problem.y is not None
    tensors = [problem.x, problem.y]
    if direction.kind == "features":
        assert direction.a is not None
        assert direction.b is not None
        tensors += [direction.a, direction.b]
    return [(problem.batch, *tensor.shape[1:]) for tensor in tensors]


def _kept_gradients(problem: Problem, direction: Direction, state: Tensor) -> list[Tensor]:
    """The gradients in the bytes of a state; empty where there is none."""
    numbers, start, kept = state.view(computed_type(problem.x.dtype)), 0, []
    for shape in _kept_shapes(problem, direction):
        size = math.prod(shape)
        kept.append(numbers[start : start + size].view(shape))
        start += size
    return kept + [numbers[:0]] * (4 - len(kept))


def _forward_backward(problem: Problem, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """<E, Omega>, values, and as the state the gradients for a `grad` of 1, NaN where they are not needed."""
    arrays = arrays_of(problem)
    dot, value = (torch.empty(arrays.pairs, dtype=arrays.dtype, device="cpu") for _ in range(2))
    ones = torch.ones(arrays.pairs, dtype=arrays.dtype, device="cpu")
    state = empty([expected_state_bytes(problem, direction)], torch.uint8)
    kept = _kept_gradients(problem, direction, state)
    needs = [needed for _, needed in _sides(problem, direction)]
    for gradient, needed in zip(kept, needs, strict=True):
        if not needed:
            gradient.numpy().fill(np.nan)
    _backward(arrays, problem, direction, ones, dot, value, None, kept)
    samples = beyond_range(arrays, problem.n)
    if len(samples):
        wide, along = picked(problem, samples), _picked_direction(direction, samples, arrays.pairs)
        wide_dot, wide_value, wide_state = expected(wide, along)
        dot[samples], value[samples] = wide_dot.to(dot.dtype), wide_value.to(value.dtype)
        found = _kept_gradients(wide, along, wide_state)
        for gradient, needed, wide_gradient in zip(kept, needs, found, strict=True):
            if needed:
                gradient[samples] = wide_gradient.to(gradient.dtype)
    return dot, value, state


# --------------------------------------------------------------------------------------------------- backend
def expected_state_bytes(problem: Problem, direction: Direction) -> int:
    """Size of the state that `expected` saves."""
    if _has_gradient_with_value(problem, direction):
        numbers: int = sum(math.prod(shape) for shape in _kept_shapes(problem, direction))
        return computed_type(problem.x.dtype).itemsize * numbers
    return dual_saved_bytes(problem.batch, problem.n, problem.m, problem.x.dtype, problem.bandwidth)


def expected(problem: Problem, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """<E, Omega> and values (B,), and saved state."""
    save = problem.needs_gradient or direction.need_a or direction.need_b
    problem = computable(problem)
    if save and _has_gradient_with_value(problem, direction):
        return _forward_backward(problem, direction)
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
    sides = _sides(asked, direction)
    if _has_gradient_with_value(problem, direction):
        kept = _kept_gradients(problem, direction, state)
        results = [
            scaled(gradient, grad) if needed else gradient
            for gradient, (_, needed) in zip(kept, sides, strict=True)
        ]
    else:
        results = _computed_gradients(problem, direction, grad, value, state)
    x, y, a, b = (
        asked.as_gradient(result, side, needed) for result, (side, needed) in zip(results, sides, strict=True)
    )
    return x, y, a, b


def _computed_gradients(
    problem: Problem, direction: Direction, grad: Tensor, value: Tensor, state: Tensor
) -> list[Tensor]:
    """The gradients, from the edges of tiles in a state."""
    arrays = arrays_of(problem)
    results = [
        problem.x.new_zeros((arrays.pairs, *side.shape[1:]) if needed and side is not None else (0,))
        for side, needed in _sides(problem, direction)
    ]
    samples = beyond_range(arrays, problem.n)
    # A zero gradient makes the kernel pass over the samples that the wide kernels will compute.
    narrow = grad.index_fill(0, samples, 0.0) if len(samples) else grad
    _backward(arrays, problem, direction, narrow, results[0].new_empty(0), value, state, results)
    if len(samples):
        wide, along = picked(problem, samples), _picked_direction(direction, samples, arrays.pairs)
        # The saved state is narrow: these few samples run forward once more.
        _, wide_value, wide_state = expected(wide, along)
        found = expected_backward(wide, along, grad[samples].double(), wide_value, wide_state)
        for result, computed_wide in zip(results, found, strict=True):
            if result.numel():
                result[samples] = computed_wide.to(result.dtype)
    return results
