"""The registered operators, for compiled graphs: schemas, kernels, shapes for tracing.

Their arguments are the first nine fields of a Problem, in order. `_autograd` registers their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._backends import backend
from ._problem import Problem
from ._torch_compat import operator_library
from ._validation import check_host_indices

_PROBLEM = (
    "Tensor x, Tensor? y, Tensor? x_lengths, Tensor? y_lengths, "
    "float gamma, int bandwidth, bool need_x, bool need_y, Tensor? pairs=None"
)


def _forward(*fields: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*fields)
    check_host_indices(problem)
    return backend(problem.x.device.type).forward(problem)


def _backward(grad: Tensor, value: Tensor, state: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*fields)
    return backend(problem.x.device.type).backward(problem, grad, value, state)


def _forward_shapes(*fields: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*fields)
    size = backend(problem.x.device.type).state_bytes(problem) if problem.needs_gradient else 0
    value = problem.x.new_empty(problem.batch, dtype=problem.value_dtype)
    return value, problem.x.new_empty(size, dtype=torch.uint8)


def _backward_shapes(grad: Tensor, value: Tensor, state: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*fields)

    def per_pair(side: Tensor | None, needed: bool) -> Tensor:
        if side is None or not needed:
            return problem.no_gradient()
        shape = (problem.batch, *side.shape[1:])
        return side.new_empty(shape, dtype=problem.gradient_dtype(side))

    return per_pair(problem.x, problem.need_x), per_pair(problem.y, problem.need_y)


def _register(library: torch.library.Library) -> None:
    tags = (torch.Tag.pt2_compliant_tag,)
    library.define(f"forward({_PROBLEM}) -> (Tensor, Tensor)", tags=tags)
    library.define(
        f"backward(Tensor grad, Tensor value, Tensor state, {_PROBLEM}) -> (Tensor, Tensor)", tags=tags
    )
    library.impl("forward", _forward, "CompositeExplicitAutograd")
    library.impl("backward", _backward, "CompositeExplicitAutograd")
    torch.library.register_fake("softdtw_cuda::forward", _forward_shapes, lib=library)
    torch.library.register_fake("softdtw_cuda::backward", _backward_shapes, lib=library)


library = operator_library("softdtw_cuda")
"""None where the operators have been registered by an earlier import of the package."""
if library is not None:
    _register(library)
