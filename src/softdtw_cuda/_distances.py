"""Differentiable cost matrices for the metrics that have no fused path, and for `fused=False`.

Each function maps x (B or 1, N, D) and y (B or 1, M, D) to (B, N, M) and never builds an (B, N, M, D) tensor.
The recurrence divides costs by gamma, so their last bits matter: float32 products are taken in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from ._torch_compat import cdist_gradient as _cdist_gradient
from ._torch_compat import holds_mapped_grad, is_differentiated, outer_forward_mode, save, saved_primals
from ._vmap import fold, rows

if TYPE_CHECKING:
    from ._problem import Problem

Sides = Literal["both", "x", "y"]

FLOATS = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))

DistanceFunction = Callable[[Tensor, Tensor], Tensor]


Embedding = Callable[[Tensor, bool], Tensor]
"""Maps one side, the first or not, to series whose squared Euclidean distances are those of a metric."""


class Metric(NamedTuple):
    """What a `dist` stands for. Only the named metrics are known to be symmetric and to broadcast. Their cost
    takes `Problem.sides` as a third argument.

    `embedding` turns the series of a fused metric into such that fused kernels can take; None: they can.
    """

    name: str
    cost: Callable[..., Tensor]
    fused: bool
    is_named: bool
    embedding: Embedding | None = None


def name_of(distance: DistanceFunction) -> str:
    """A function's name, or the class of an object that is called like one."""
    return str(getattr(distance, "__name__", type(distance).__name__))


def _finite(series: Tensor) -> Tensor:
    """Zeros for infinite numbers: their costs are +inf, and 0 * inf would be NaN where a gradient is zero."""
    return series.nan_to_num(math.nan, 0.0, 0.0)


def _centre(x: Tensor, y: Tensor) -> Tensor:
    """A point (B or 1, 1, D) amid the data of each pair, which keeps offsets from cancelling in products.

    Taken from one sample each, never over the batch: a NaN is its own sample's affair.
    """
    return _finite(y if y.shape[0] == 1 else x).mean(1, keepdim=True)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    # The meta device has no autocast.
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def sqeuclidean_gradient(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradient of the squared Euclidean costs wrt x, one for each sample: 2 sum_j grad_ij (x_i - y_j).

    Args:
        grad: (B, N, M) gradient wrt the costs.
        x, y: (B or 1, N, D) and (B or 1, M, D).
    """
    dtype = x.dtype
    if is_differentiated():  # a product's own backward may run under autocast, which leaves float64 alone
        grad, x, y = grad.double(), x.double(), y.double()
    centre = _centre(x, y)
    with _without_autocast(x.device.type):
        x, y = _finite(x - centre), _finite(y - centre)
        gradient = 2 * (grad.sum(2, keepdim=True) * x - torch.matmul(grad, y))
    return gradient.to(dtype)


def sqeuclidean_tangent(x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """Change of the squared Euclidean costs with tangents a of x and b of y: 2 (x_i - y_j).(a_i - b_j)."""
    with _without_autocast(x.device.type):
        x, y = x.double(), y.double()
        centre = _centre(x, y)
        x, y = _finite(x - centre), _finite(y - centre)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        if a is not None:
            a = a.double()
            total = total + ((x * a).sum(2, keepdim=True) - torch.matmul(a, y.mT))
        if b is not None:
            b = b.double()
            total = total + ((y * b).sum(2).unsqueeze(1) - torch.matmul(x, b.mT))
        return 2 * total


def _sqeuclidean_cost(x: Tensor, y: Tensor) -> Tensor:
    """|x_i|^2 + |y_j|^2 - 2 x_i.y_j in float64 around a common centre.

    The centre changes no distance and takes away the cancellation that a common offset causes. What is left
    is float64 rounding, which disappears when the costs are rounded to float32. float64 input has no wider
    type to hide in, so it takes direct differences.
    """
    if x.dtype == torch.float64:
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()
    wide_x, wide_y = x.double(), y.double()
    centre = _centre(wide_x, wide_y)
    wide_x, wide_y = wide_x - centre, wide_y - centre
    square_x = wide_x.square().sum(2).unsqueeze(2)
    square_y = wide_y.square().sum(2).unsqueeze(1)
    product = torch.matmul(_finite(wide_x), _finite(wide_y).transpose(1, 2))
    return (square_x + square_y).sub_(product, alpha=2).clamp_(min=0).to(x.dtype)


def _euclidean_gradient(grad: Tensor, x: Tensor, y: Tensor, cost: Tensor | None) -> Tensor:
    assert cost is not None
    if not is_differentiated():
        return _cdist_gradient(grad, _finite(x), _finite(y), 2.0, cost)
    zero = cost == 0
    return sqeuclidean_gradient((0.5 * grad / cost.masked_fill(zero, 1.0)).masked_fill(zero, 0.0), x, y)


def _euclidean_tangent(
    x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None, cost: Tensor | None
) -> Tensor:
    assert cost is not None
    zero = cost == 0
    slope = 0.5 * sqeuclidean_tangent(x, y, a, b) / cost.masked_fill(zero, 1.0)
    return slope.masked_fill(zero, 0.0)


def _sign_sum_of(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([(grad * sign).sum(2) for sign in _signs(x, y)], 2)


class _SignSum(torch.autograd.Function):
    """sum_j grad_ij sign(x_i - y_j), linear in grad and flat in x and y; one feature at a time.

    Its graph keeps x and y where that of `_sign_sum_of` keeps all signs.
    """

    generate_vmap_rule = True

    forward = staticmethod(_sign_sum_of)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        save(ctx, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, y = ctx.saved_tensors
        return _cityblock_tangent(x, y, grad, None), None, None

    @staticmethod
    def jvp(ctx: Any, grad: Tensor, *_: object) -> Tensor:
        with outer_forward_mode():
            return _sign_sum(grad, *saved_primals(ctx))


_sign_sum: Callable[[Tensor, Tensor, Tensor], Tensor] = _SignSum.apply


def _signs(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """sign(x_id - y_jd) as (B or 1, N, M), for each d."""
    for column_x, column_y in zip(x.unbind(2), y.unbind(2), strict=True):
        yield torch.sign(column_x.unsqueeze(2) - column_y.unsqueeze(1))


def _cityblock_gradient(grad: Tensor, x: Tensor, y: Tensor, cost: Tensor | None) -> Tensor:
    assert cost is not None
    if not is_differentiated():
        return _cdist_gradient(grad, x, y, 1.0, cost)
    # Of a batch of gradients torch records nothing that a Function does.
    return (_sign_sum_of if holds_mapped_grad(grad) else _sign_sum)(grad, x, y)


def _cityblock_tangent(
    x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None, cost: Tensor | None = None
) -> Tensor:
    total = torch.zeros((), dtype=x.dtype, device=x.device)
    for d, sign in enumerate(_signs(x, y)):
        if a is not None:
            total = total + sign * a[:, :, d].unsqueeze(2)
        if b is not None:
            total = total - sign * b[:, :, d].unsqueeze(1)
    return total


def _product_tangent(x: Tensor, y: Tensor, a: Tensor | None, b: Tensor | None, cost: Tensor | None) -> Tensor:
    terms = [] if a is None else [torch.matmul(a, y.mT)]
    terms += [] if b is None else [torch.matmul(x, b.mT)]
    return sum(terms[1:], terms[0])


class _Rule(NamedTuple):
    """A function of pairs of time steps with its derivatives, which themselves can be differentiated.

    Attributes:
        cost: (x, y) -> (B, N, M).
        gradient: (grad, x, y, cost) -> gradient of x, one per pair. That of y is had with the sides swapped.
        tangent: (x, y, a, b, cost) -> change of the costs with tangents a of x and b of y; None for zeros.
        keeps_cost: the derivatives read the costs.
    """

    cost: Callable[[Tensor, Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    tangent: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
    keeps_cost: bool


_RULES = {
    "sqeuclidean": _Rule(
        _sqeuclidean_cost,
        lambda grad, x, y, cost: sqeuclidean_gradient(grad, x, y),
        lambda x, y, a, b, cost: sqeuclidean_tangent(x, y, a, b),
        keeps_cost=False,
    ),
    "euclidean": _Rule(
        lambda x, y: torch.cdist(x, y, p=2.0, compute_mode="donot_use_mm_for_euclid_dist"),
        _euclidean_gradient,
        _euclidean_tangent,
        keeps_cost=True,
    ),
    "cityblock": _Rule(
        lambda x, y: torch.cdist(x, y, p=1.0), _cityblock_gradient, _cityblock_tangent, keeps_cost=True
    ),
    "product": _Rule(
        lambda x, y: torch.matmul(x, y.transpose(1, 2)),
        lambda grad, x, y, cost: torch.matmul(grad, y),
        _product_tangent,
        keeps_cost=False,
    ),
}


class _Pairwise(torch.autograd.Function):
    """Costs of x and y by a rule, or of x with itself; without jvp and vmap, which torch.compile refuses.

    The costs of x with itself are symmetric, and so is all that is ever propagated back to them, but for
    rounding. One side in full is then the gradient: that which `sides` names.
    """

    @staticmethod
    def forward(name: str, sides: str, x: Tensor, y: Tensor | None) -> Tensor:
        return _RULES[name].cost(x, x if y is None else y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.name, ctx.sides, x, y = inputs
        save(ctx, x, y, output if _RULES[ctx.name].keeps_cost else None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor | None, Tensor | None]:
        x, y, cost = ctx.saved_tensors
        rule = _RULES[ctx.name]
        grad_x = grad_y = None
        if y is None:
            grad = grad.mT if ctx.sides == "y" else grad
            if is_differentiated():  # derivatives of the gradient come from both sides
                grad = 0.5 * (grad + grad.mT)
                cost = None if cost is None else 0.5 * (cost + cost.mT)
            grad_x = 2 * rule.gradient(grad, x, x, cost)
        else:
            if ctx.needs_input_grad[2]:
                grad_x = rule.gradient(grad, x, y, cost).sum_to_size(x.shape)
            if ctx.needs_input_grad[3]:
                swapped = None if cost is None else cost.mT
                grad_y = rule.gradient(grad.mT, y, x, swapped).sum_to_size(y.shape)
        return None, None, grad_x, grad_y


class _PairwiseInTransforms(_Pairwise):
    """The same, with forward mode and vmap."""

    @staticmethod
    def jvp(ctx: Any, _: object, __: object, a: Tensor | None, b: Tensor | None) -> Tensor:
        with outer_forward_mode():
            x, y, cost = saved_primals(ctx)
            y, b = (x, a) if y is None else (y, b)
            return _RULES[ctx.name].tangent(x, y, a, b, cost).to(x.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], name: str, sides: str, x: Tensor, y: Tensor | None) -> Any:
        size, (x_dim, y_dim) = info.batch_size, in_dims[2:]
        batch = rows(x, x_dim) if y is None else max(rows(x, x_dim), rows(y, y_dim))
        folded_x, folded_y = fold(x, x_dim, size, batch), fold(y, y_dim, size, batch)
        function: Any = _PairwiseInTransforms
        cost: Tensor = function.apply(name, sides, folded_x, folded_y)
        return cost.unflatten(0, (size, batch)), 0


def _pairwise(name: str, x: Tensor, y: Tensor, sides: Sides) -> Tensor:
    function: Any = _Pairwise if torch.compiler.is_compiling() else _PairwiseInTransforms
    cost: Tensor = function.apply(name, sides, x, y if sides == "both" else None)
    return cost


def sqeuclidean(x: Tensor, y: Tensor, sides: Sides = "both") -> Tensor:
    """Sum over d of (x_id - y_jd)^2."""
    return _pairwise("sqeuclidean", x, y, sides)


def euclidean(x: Tensor, y: Tensor, sides: Sides = "both") -> Tensor:
    """Square root of the squared Euclidean distance; where two points coincide its derivatives are zero."""
    return _pairwise("euclidean", x, y, sides)


def cityblock(x: Tensor, y: Tensor, sides: Sides = "both") -> Tensor:
    """Sum over d of |x_id - y_jd|."""
    return _pairwise("cityblock", x, y, sides)


def _unit(x: Tensor) -> Tensor:
    square = x.square().sum(2, keepdim=True)
    zero = square == 0
    return x * torch.rsqrt(square.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)


def cosine(x: Tensor, y: Tensor, sides: Sides = "both") -> Tensor:
    """1 - cos of the angle; a zero vector is at distance 1 from everything, with a zero gradient."""
    unit_x, unit_y = _unit(x.double()), _unit(y.double())
    if sides == "both":
        product = torch.matmul(unit_x, unit_y.transpose(1, 2))
    else:
        product = _pairwise("product", unit_x, unit_y, sides)
    return (1 - product).to(x.dtype)


def embed_for_cosine(x: Tensor, first: bool) -> Tensor:
    """Rows of length sqrt(1/2): the square of their distance is 1 - cos.

    A zero vector has no direction. It gets one of its own, another on the first side than on the second, so
    that it is at right angles to everything there, zero vectors included. That takes two more features;
    more zeros follow where they let kernels read four features at a time.
    """
    # Its gradient in one piece: the terms of a divergence then cancel to the last bit where they should.
    x = x.view_as(x)
    # A norm has no second derivative at zero.
    none = (x == 0).all(2, keepdim=True)
    norm = torch.linalg.vector_norm(x.masked_fill(none, 1.0), dim=2, keepdim=True, dtype=torch.float64)
    zero = none | (norm == 0)
    scale = (math.sqrt(0.5) / norm.masked_fill(zero, 1.0)).masked_fill(zero, 0.0)
    own = zero.to(x.dtype) * math.sqrt(0.5)
    nothing = torch.zeros_like(own)
    columns = [own, nothing] if first else [nothing, own]
    features = x.shape[2] + 2
    if features > 16:
        columns += [nothing] * (-features % 4)
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
        return problem._replace(x=problem.metric.cost(x, y, problem.sides), y=None, sides="both")
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
