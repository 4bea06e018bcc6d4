"""Differentiable cost matrices for the metrics that have no fused path, and for `fused=False`.

Each function maps x (B or 1, N, D) and y (B or 1, M, D) to (B, N, M) and never builds an (B, N, M, D) tensor.
The recurrence divides costs by gamma, so their last bits matter: float32 products are taken in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._problem import Problem

FLOATS = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))

DistanceFunction = Callable[[Tensor, Tensor], Tensor]


Embedding = Callable[[Tensor, bool], Tensor]
"""Maps one side, the first or not, to series whose squared Euclidean distances are those of a metric."""


class Metric(NamedTuple):
    """What a `dist` stands for. Only the named metrics are known to be symmetric and to broadcast.

    `embedding` turns the series of a fused metric into such that fused kernels can take; None: they can.
    """

    name: str
    cost: DistanceFunction
    fused: bool
    is_named: bool
    embedding: Embedding | None = None


def name_of(distance: DistanceFunction) -> str:
    """A function's name, or the class of an object that is called like one."""
    return str(getattr(distance, "__name__", type(distance).__name__))


def _centre(x: Tensor, y: Tensor) -> Tensor:
    """A point (B or 1, 1, D) amid the data of each pair, which keeps offsets from cancelling in products.

    Taken from one sample each, never over the batch: a NaN is its own sample's affair.
    """
    return (y if y.shape[0] == 1 else x).mean(1, keepdim=True)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # the meta device has none


def sqeuclidean_gradient(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradient of the squared Euclidean costs wrt x, one for each sample: 2 sum_j grad_ij (x_i - y_j).

    Args:
        grad: (B, N, M) gradient wrt the costs.
        x, y: (B or 1, N, D) and (B or 1, M, D).
    """
    centre = _centre(x, y)
    with _without_autocast(x.device.type):
        return 2 * (grad.sum(2, keepdim=True) * (x - centre) - torch.matmul(grad, y - centre))


class _SquaredEuclidean(torch.autograd.Function):
    """|x_i|^2 + |y_j|^2 - 2 x_i.y_j in float64 around a common centre; the backward is two matrix products.

    The centre changes no distance and takes away the cancellation that a common offset causes. What is left
    is float64 rounding, which disappears when the costs are rounded to float32. float64 input has no wider
    type to hide in, so it takes direct differences.
    """

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()
        wide_x, wide_y = x.double(), y.double()
        centre = _centre(wide_x, wide_y)
        wide_x, wide_y = wide_x - centre, wide_y - centre
        square_x = wide_x.square().sum(2).unsqueeze(2)
        square_y = wide_y.square().sum(2).unsqueeze(1)
        product = torch.matmul(wide_x, wide_y.transpose(1, 2))
        return (square_x + square_y).sub_(product, alpha=2).clamp_(min=0).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        grad_x = grad_y = None
        if ctx.needs_input_grad[0]:
            grad_x = sqeuclidean_gradient(grad, x, y).sum_to_size(x.shape)
        if ctx.needs_input_grad[1]:
            grad_y = sqeuclidean_gradient(grad.transpose(1, 2), y, x).sum_to_size(y.shape)
        return grad_x, grad_y


_sqeuclidean: DistanceFunction = _SquaredEuclidean.apply


def sqeuclidean(x: Tensor, y: Tensor) -> Tensor:
    """Sum over d of (x_id - y_jd)^2."""
    return _sqeuclidean(x, y)


def euclidean(x: Tensor, y: Tensor) -> Tensor:
    """Square root of the squared Euclidean distance; where two points coincide the gradient is zero."""
    return torch.cdist(x, y, p=2.0, compute_mode="donot_use_mm_for_euclid_dist")


def cityblock(x: Tensor, y: Tensor) -> Tensor:
    """Sum over d of |x_id - y_jd|."""
    return torch.cdist(x, y, p=1.0)


def _unit(x: Tensor) -> Tensor:
    square = x.square().sum(2, keepdim=True)
    zero = square == 0
    return x * torch.rsqrt(square.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """1 - cos of the angle; a zero vector is at distance 1 from everything, with a zero gradient."""
    product = torch.matmul(_unit(x.double()), _unit(y.double()).transpose(1, 2))
    return (1 - product).to(x.dtype)


def embed_for_cosine(x: Tensor, first: bool) -> Tensor:
    """Rows of length sqrt(1/2): the square of their distance is 1 - cos.

    A zero vector has no direction. It gets one of its own, another on the first side than on the second, so
    that it is at right angles to everything there, zero vectors included. That takes two more features;
    more zeros follow where they let kernels read four features at a time.
    """
    # Its gradient in one piece: the terms of a divergence then cancel to the last bit where they should.
    x = x.view_as(x)
    norm = torch.linalg.vector_norm(x, dim=2, keepdim=True, dtype=torch.float64)
    zero = norm == 0
    scale = (math.sqrt(0.5) / norm.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)
    own = zero.to(x.dtype) * math.sqrt(0.5)
    none = torch.zeros_like(own)
    columns = [own, none] if first else [none, own]
    features = x.shape[2] + 2
    if features > 16:
        columns += [none] * (-features % 4)
    return torch.cat([(x * scale).to(x.dtype), *columns], 2)


SQUARED_EUCLIDEAN = Metric("sqeuclidean", sqeuclidean, fused=True, is_named=True)

METRICS: dict[str, Metric] = {
    "sqeuclidean": SQUARED_EUCLIDEAN,
    "euclidean": Metric("euclidean", euclidean, fused=False, is_named=True),
    "cityblock": Metric("cityblock", cityblock, fused=False, is_named=True),
    "cosine": Metric("cosine", cosine, fused=True, is_named=True, embedding=embed_for_cosine),
}


def fill_padding(series: Tensor, lengths: Tensor) -> Tensor:
    """Copy of series (1 or B, N, D) whose padding repeats the first step, so that NaN there cannot spread.

    Not zeros: the padding takes part in the mean that distances are centred around.
    """
    inside = torch.arange(series.shape[1], device=series.device) < lengths.view(-1, 1)
    return torch.where(inside.unsqueeze(2), series, series[:, :1].detach())


def _prepared(problem: Problem) -> tuple[Tensor, Tensor]:
    """x and y, in float32 if they are narrower, with finite numbers in the padding."""
    x, y = problem.x, problem.y
    assert y is not None
    # First of all, so that the gradient of a broadcast side is summed before it is rounded.
    if x.dtype in (torch.float16, torch.bfloat16):
        x, y = x.float(), y.float()
    # NaN in the padding would come back through the distance's own gradient, as 0 * NaN.
    if problem.x_lengths is not None:
        x = fill_padding(x, problem.x_lengths)
    if problem.y_lengths is not None:
        y = fill_padding(y, problem.y_lengths)
    return x, y


def with_costs(problem: Problem) -> Problem:
    """The problem with its (B, N, M) cost matrix, float32 for narrower input, in the place of its series."""
    x, y = _prepared(problem)
    if problem.metric.is_named:
        return problem._replace(x=problem.metric.cost(x, y), y=None)
    batch = problem.batch
    x, y = x.expand(batch, -1, -1), y.expand(batch, -1, -1)
    cost = problem.metric.cost(x, y)
    _check_result(cost, batch, x, y, problem.metric.name)
    return problem._replace(x=cost, y=None)


def with_embedding(problem: Problem) -> Problem:
    """The problem with series whose squared Euclidean distances are those of its metric."""
    embedding = problem.metric.embedding
    if embedding is None:
        return problem
    x, y = _prepared(problem)
    return problem._replace(x=embedding(x, True), y=embedding(y, False), metric=SQUARED_EUCLIDEAN)


def _check_result(cost: object, batch: int, x: Tensor, y: Tensor, name: str) -> None:
    """Raise where a user's distance did not return a cost matrix for x and y."""
    if not isinstance(cost, Tensor):
        raise TypeError(
            f"dist {name} returned {type(cost).__name__}, expected a torch.Tensor of shape (B, N, M)."
        )
    expected = (batch, x.shape[1], y.shape[1])
    if tuple(cost.shape) != expected:
        raise ValueError(
            f"dist {name} returned shape {tuple(cost.shape)} for x {tuple(x.shape)} and y {tuple(y.shape)}, "
            f"expected (B, N, M) = {expected}: one cost for each pair of time steps."
        )
    if cost.dtype not in FLOATS:
        raise TypeError(
            f"dist {name} returned dtype {cost.dtype}, expected a float type; let it return costs.float()."
        )
    if cost.device != x.device:
        raise ValueError(
            f"dist {name} returned a tensor on {cost.device}, expected {x.device}, where x and y are."
        )
