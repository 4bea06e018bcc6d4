"""The public functions on batches of pairs."""

from __future__ import annotations

from torch import Tensor

from . import _autograd
from ._distances import DistanceFunction
from ._problem import Problem
from ._torch_compat import in_forward_mode
from ._validation import Lengths, check_cost, check_flag, check_series, explains_arguments


@explains_arguments
def softdtw(
    x: Tensor,
    y: Tensor,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    normalize: bool = False,
    dist: str | DistanceFunction = "sqeuclidean",
    fused: bool | None = None,
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Soft-DTW between two batches of series, differentiable in both.

    Args:
        x: (B, N, D), or (N, D) for one series; float64, float32, bfloat16 or float16.
        y: (B, M, D), or (M, D). N and M may differ. One of x, y may have batch size 1: it is compared with
            every series of the other and not copied.
        gamma: temperature, greater than 0. Small values come close to DTW, large ones blur the alignment.
        bandwidth: Sakoe-Chiba radius: only cells with |i - j| <= bandwidth are visited. None for no band.
        normalize: return the divergence, see :func:`softdtw_divergence`.
        dist: "sqeuclidean", "euclidean", "cityblock", "cosine", or a callable (x, y) -> (B, N, M) of
            differentiable torch operations. It gets float32 tensors for bfloat16 and float16 input.
        fused: True demands the path that keeps no N x M table ("sqeuclidean" and "cosine" only), False builds
            the cost matrix, None picks.
        x_lengths, y_lengths: true lengths of padded series, (B,) integers as a tensor or a list. What lies in
            the padding changes nothing and gets a zero gradient. Lengths in a CUDA tensor are checked by the
            kernel, not by the host: a bad one gives NaN for its sample.

    Returns:
        (B,) values, 0-dim for unbatched input: float64 for float64 input, otherwise float32. Gradients come
        in the type of the input.

    Raises:
        TypeError, ValueError: naming the argument, what came, what was expected and how to fix it.
        RuntimeError: fused=True where there is no kernel; differentiating a gradient.

    Under torch.autocast the loss computes in the types above all the same. Where autocast left x and y in
    different types, both are taken in float32.

    Example:
        >>> x, y = torch.randn(8, 50, 3, requires_grad=True), torch.randn(8, 60, 3)
        >>> softdtw(x, y, gamma=0.1).mean().backward()
    """
    problem, batched = check_series(x, y, gamma, bandwidth, dist, fused, x_lengths, y_lengths)
    value = divergence(problem) if check_flag("normalize", normalize) else _autograd.values(problem)
    return value if batched else value[0]


@explains_arguments
def softdtw_divergence(
    x: Tensor,
    y: Tensor,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    dist: str | DistanceFunction = "sqeuclidean",
    fused: bool | None = None,
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Soft-DTW divergence: sdtw(x, y) - (sdtw(x, x) + sdtw(y, y)) / 2.

    Zero for x = y, with a zero gradient there, and never meaningfully below zero for "sqeuclidean", where
    plain Soft-DTW can be negative. Works for N != M and with lengths. Arguments, shapes and errors as
    :func:`softdtw`.

    Example:
        >>> x, y = torch.randn(8, 50, 3), torch.randn(8, 60, 3)
        >>> softdtw_divergence(x, y, gamma=0.1).shape
        torch.Size([8])
    """
    return softdtw(
        x,
        y,
        gamma=gamma,
        bandwidth=bandwidth,
        normalize=True,
        dist=dist,
        fused=fused,
        x_lengths=x_lengths,
        y_lengths=y_lengths,
    )


@explains_arguments
def softdtw_from_cost(
    cost: Tensor,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Soft-DTW of cost matrices of your own, differentiable in the costs.

    Args:
        cost: (B, N, M), or (N, M). Negative costs are allowed, +inf forbids a cell. Where every path is
            forbidden the value is +inf and the gradient zero.
        gamma, bandwidth, x_lengths, y_lengths: as in :func:`softdtw`; x_lengths counts rows, y_lengths
            columns.

    Returns:
        (B,) values, 0-dim for an unbatched matrix. The gradient wrt cost is the soft alignment.

    Raises:
        TypeError, ValueError: naming the argument, what came, what was expected and how to fix it.

    Example:
        >>> cost = torch.rand(8, 50, 60, requires_grad=True)
        >>> softdtw_from_cost(cost, gamma=0.1).sum().backward()
    """
    problem, batched = check_cost(cost, gamma, bandwidth, x_lengths, y_lengths)
    value = _autograd.values(problem)
    return value if batched else value[0]


@explains_arguments
def softdtw_alignment(
    x: Tensor | None = None,
    y: Tensor | None = None,
    *,
    cost: Tensor | None = None,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    dist: str | DistanceFunction = "sqeuclidean",
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Soft alignment E of two series, or of a cost matrix: the expected path under Soft-DTW's distribution.

    E_ij is the derivative of Soft-DTW wrt the cost of matching step i with step j, and the probability that a
    random warping path passes through (i, j). It is 1 in both corners and 0 in the padding.

    Args:
        x, y: (B, N, D) and (B, M, D), or (N, D) and (M, D).
        cost: (B, N, M) or (N, M), instead of x and y.
        gamma, bandwidth, dist, x_lengths, y_lengths: as in :func:`softdtw`.

    Returns:
        (B, N, M), or (N, M) for unbatched input. The result cannot be differentiated yet: doing so raises.

    Raises:
        TypeError, ValueError: as :func:`softdtw`, and where neither or both of (x, y) and cost are given.

    Example:
        >>> x, y = torch.randn(50, 3), torch.randn(60, 3)
        >>> softdtw_alignment(x, y, gamma=0.1).shape
        torch.Size([50, 60])
    """
    if cost is not None:
        if x is not None or y is not None:
            raise TypeError("softdtw_alignment takes x and y, or cost, got both; leave one of them out.")
        problem, batched = check_cost(cost, gamma, bandwidth, x_lengths, y_lengths)
    else:
        if x is None or y is None:
            got = "y alone" if y is not None else "neither" if x is None else "x alone"
            raise TypeError(
                f"softdtw_alignment takes x and y, or cost, got {got}; pass two series or cost=..."
            )
        problem, batched = check_series(x, y, gamma, bandwidth, dist, False, x_lengths, y_lengths)
    alignment = _autograd.alignment(problem)
    return alignment if batched else alignment[0]


def divergence(problem: Problem) -> Tensor:
    """(B,) values of the divergence."""
    return _autograd.values(problem) - half_self(problem, first=True) - half_self(problem, first=False)


def half_self(problem: Problem, first: bool) -> Tensor:
    """sdtw(x, x) / 2 for each series x of the problem's `first` or second side."""
    assert problem.y is not None
    series, lengths = (problem.x, problem.x_lengths) if first else (problem.y, problem.y_lengths)
    if lengths is not None and lengths.shape[0] != series.shape[0]:
        series = series.expand(lengths.shape[0], -1, -1)
    problem = problem._replace(x=series, y=series, x_lengths=lengths, y_lengths=lengths)
    # In forward mode a tangent has both sides.
    if not problem.metric.is_named or in_forward_mode():
        return 0.5 * _autograd.values(problem)
    # The named distances are symmetric, so both sides of sdtw(x, x) have the same gradient: take one of them
    # in full instead of half of each. It is half the work, and makes the gradient of the divergence exactly
    # zero at x = y, since sdtw(x, y) is differentiated on that side by the same arithmetic.
    value = _autograd.values(problem._replace(sides="x" if first else "y"))
    return value - 0.5 * value.detach() if problem.fused else 0.5 * value
