"""The registered operators, for compiled graphs: schemas, kernels, shapes for tracing.

Their arguments are the fields of a Problem that backends read, and those of a Direction, in order.
`_autograd` registers their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._backends import backend, dual_backend
from ._problem import Problem, problem_and_direction
from ._torch_compat import operator_library
from ._validation import check_operands

_PROBLEM = (
    "Tensor x, Tensor? y, Tensor? x_lengths, Tensor? y_lengths, "
    "float gamma, int bandwidth, bool need_x, bool need_y, Tensor? pairs"
)
_DIRECTION = "str kind, Tensor? a, Tensor? b, bool need_a, bool need_b"


def _forward(*fields: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*fields)
    check_operands(problem)
    return backend(problem.x.device.type).forward(problem)


def _backward(grad: Tensor, value: Tensor, state: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*fields)
    check_operands(problem)
    chosen = backend(problem.x.device.type)
    _check_saved(problem, grad, value, state, chosen.state_bytes(problem))
    return chosen.backward(problem, grad, value, state)


def _expected(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, direction = problem_and_direction(fields)
    check_operands(problem, direction)
    return dual_backend(problem.x.device.type).expected(problem, direction)


def _expected_backward(
    grad: Tensor, value: Tensor, state: Tensor, *fields: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, direction = problem_and_direction(fields)
    check_operands(problem, direction)
    dual = dual_backend(problem.x.device.type)
    _check_saved(problem, grad, value, state, dual.expected_state_bytes(problem, direction))
    return dual.expected_backward(problem, direction, grad, value, state)


def _check_saved(problem: Problem, grad: Tensor, value: Tensor, state: Tensor, size: int) -> None:
    """Raise where these are not of the problem. The state may be that of more gradients than are needed."""
    if grad.shape == value.shape == (problem.batch,) and state.dtype == torch.uint8 and state.numel() >= size:
        return
    raise ValueError(
        f"softdtw_cuda: an operator got grad {tuple(grad.shape)}, value {tuple(value.shape)} and a state of "
        f"{state.numel()} bytes, expected ({problem.batch},) twice and the {size} bytes of its forward."
    )


def _forward_shapes(*fields: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*fields)
    size = backend(problem.x.device.type).state_bytes(problem) if problem.needs_gradient else 0
    value = problem.x.new_empty(problem.batch, dtype=problem.value_dtype)
    return value, problem.x.new_empty(size, dtype=torch.uint8)


def _backward_shapes(grad: Tensor, value: Tensor, state: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*fields)
    return _per_pair(problem, problem.x, problem.need_x), _per_pair(problem, problem.y, problem.need_y)


def _per_pair(problem: Problem, side: Tensor | None, needed: bool) -> Tensor:
    if side is None or not needed:
        return problem.no_gradient()
    return side.new_empty((problem.batch, *side.shape[1:]), dtype=problem.gradient_dtype(side))


def _expected_shapes(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, direction = problem_and_direction(fields)
    needed = problem.needs_gradient or direction.need_a or direction.need_b
    dual = dual_backend(problem.x.device.type)
    size = dual.expected_state_bytes(problem, direction) if needed else 0
    dot, value = (problem.x.new_empty(problem.batch, dtype=problem.value_dtype) for _ in range(2))
    return dot, value, problem.x.new_empty(size, dtype=torch.uint8)


def _expected_backward_shapes(
    grad: Tensor, value: Tensor, state: Tensor, *fields: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, direction = problem_and_direction(fields)
    return (
        _per_pair(problem, problem.x, problem.need_x),
        _per_pair(problem, problem.y, problem.need_y),
        _per_pair(problem, direction.a, direction.need_a),
        _per_pair(problem, direction.b, direction.need_b),
    )


def _register(library: torch.library.Library) -> None:
    pair, triple, four = (f"({', '.join(['Tensor'] * count)})" for count in (2, 3, 4))
    saved = "Tensor grad, Tensor value, Tensor state"
    for name, schema, kernel, shapes in (
        ("forward", f"({_PROBLEM}=None) -> {pair}", _forward, _forward_shapes),
        ("backward", f"({saved}, {_PROBLEM}=None) -> {pair}", _backward, _backward_shapes),
        ("expected", f"({_PROBLEM}, {_DIRECTION}) -> {triple}", _expected, _expected_shapes),
        (
            "expected_backward",
            f"({saved}, {_PROBLEM}, {_DIRECTION}) -> {four}",
            _expected_backward,
            _expected_backward_shapes,
        ),
    ):
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"softdtw_cuda::{name}", shapes, lib=library)


library = operator_library("softdtw_cuda")
"""None where the operators have been registered by an earlier import of the package."""
if library is not None:
    _register(library)
