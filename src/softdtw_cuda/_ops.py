"""The registered operators, for compiled graphs: schemas, kernels, shapes for tracing.

Their arguments are the fields of a Problem that backends read, and those of a Direction, in order.
`_autograd` registers their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._backends import compute, state_bytes
from ._problem import BACKWARD, EXPECTED, EXPECTED_BACKWARD, FORWARD, Operator, Problem
from ._torch_compat import operator_library
from ._validation import check_operands

_SAVED = "Tensor grad, Tensor value, Tensor state, "
_PROBLEM = (
    "Tensor x, Tensor? y, Tensor? x_lengths, Tensor? y_lengths, "
    "float gamma, int bandwidth, bool need_x, bool need_y, Tensor? pairs"
)
_DIRECTION = ", str kind, Tensor? a, Tensor? b, bool need_a, bool need_b"


def _schema(operator: Operator, results: int) -> str:
    saved = _SAVED if operator.is_backward else ""
    rest = _DIRECTION if operator.has_direction else "=None"
    return f"({saved}{_PROBLEM}{rest}) -> ({', '.join(['Tensor'] * results)})"


def _kernel(operator: Operator) -> Callable[..., Any]:
    def kernel(*arguments: Any) -> Any:
        problem, direction, saved = operator.parts(arguments)
        check_operands(problem, direction)
        if operator.is_backward:
            _check_saved(problem, *saved)
        return compute(operator, problem, direction, saved)

    return kernel


def _shapes(operator: Operator) -> Callable[..., tuple[Tensor, ...]]:
    """What the kernel returns, without its numbers."""

    def forward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
        problem, direction, _ = operator.parts(arguments)
        saves = problem.needs_gradient or (direction is not None and direction.needs_gradient)
        size = state_bytes(problem, direction) if saves else 0
        numbers = 1 if direction is None else 2  # values, and before them <E, Omega>
        return (
            *(problem.x.new_empty(problem.batch, dtype=problem.value_dtype) for _ in range(numbers)),
            problem.x.new_empty(size, dtype=torch.uint8),
        )

    def backward_shapes(*arguments: Any) -> tuple[Tensor, ...]:
        problem, direction, _ = operator.parts(arguments)
        sides = [(problem.x, problem.need_x), (problem.y, problem.need_y)]
        if direction is not None:
            sides += [(direction.a, direction.need_a), (direction.b, direction.need_b)]
        return tuple(_per_pair(problem, side, needed) for side, needed in sides)

    return backward_shapes if operator.is_backward else forward_shapes


def _check_saved(problem: Problem, grad: Tensor, value: Tensor, state: Tensor) -> None:
    """Raise where these are not of the problem."""
    if grad.shape == value.shape == (problem.batch,) and state.dtype == torch.uint8:
        return
    raise ValueError(
        f"softdtw_cuda: an operator got grad {tuple(grad.shape)}, value {tuple(value.shape)} and a state of "
        f"{state.dtype}, expected ({problem.batch},) twice and the torch.uint8 of its forward."
    )


def _per_pair(problem: Problem, side: Tensor | None, needed: bool) -> Tensor:
    if side is None or not needed:
        return problem.no_gradient()
    return side.new_empty((problem.batch, *side.shape[1:]), dtype=problem.gradient_dtype(side))


def _register(library: torch.library.Library) -> None:
    for operator, results in ((FORWARD, 2), (BACKWARD, 2), (EXPECTED, 3), (EXPECTED_BACKWARD, 4)):
        library.define(operator.name + _schema(operator, results), tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(operator.name, _kernel(operator), "CompositeExplicitAutograd")
        torch.library.register_fake(f"softdtw_cuda::{operator.name}", _shapes(operator), lib=library)


library = operator_library("softdtw_cuda")
"""None where the operators have been registered by an earlier import of the package."""
if library is not None:
    _register(library)
