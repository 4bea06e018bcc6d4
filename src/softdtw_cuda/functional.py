"""The public functions on batches of pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from . import _autograd
from ._distances import DistanceFunction
from ._lengths import Lengths
from ._migration import explains_arguments
from ._options import check_flag
from ._problem import Direction, Problem
from ._torch_compat import in_forward_mode
from ._validation import Omega, check_cost, check_omega, check_series

DivergenceKind = Literal["soft", "sharp", "mean_cost"]


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
            A tensor of one element is read as its number: it gets no gradient, and a GPU is waited for.
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
        (B,) values, 0-dim for unbatched input, in float64 for float64 input and otherwise in float32.
        Gradients come in the type of the input. The error of a float32 value is relative to the value, or to
        gamma times N + M where that is more. With a gamma far above the costs few digits of the value are
        left, though the gradient keeps its own. A cost beyond about 1e15 gamma counts as +inf.

    Raises:
        TypeError, ValueError: naming the argument, what came, what was expected and how to fix it.
        RuntimeError: fused=True where there is no kernel; a third derivative. Second derivatives
            (create_graph=True, torch.func.hessian) and forward mode work.

    Under torch.autocast the loss computes in the types above all the same. Where autocast left x and y in
    different types, both are taken in float32.

    Examples:
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
    kind: DivergenceKind = "soft",
    gamma: float = 1.0,
    bandwidth: int | None = None,
    dist: str | DistanceFunction = "sqeuclidean",
    fused: bool | None = None,
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Divergence of two series: s(x, y) - (s(x, x) + s(y, y)) / 2, for one of three functions s.

    Zero for x = y, and never meaningfully below zero for "sqeuclidean", where plain Soft-DTW can be negative.
    Works for N != M and with lengths. The kinds are those of Blondel, Mensch and Vert, "Differentiable
    divergences between time series" (AISTATS 2021).

    Args:
        kind: "soft": s is Soft-DTW, and the gradient at x = y exactly zero. "sharp": s is
            :func:`softdtw_sharp`, the expected cost of the alignment without its entropy. "mean_cost": s is
            the mean cost over all warping paths, the limit of the others for large gamma, which it ignores.
        x, y, gamma, bandwidth, dist, fused, x_lengths, y_lengths: as in :func:`softdtw`.

    Returns:
        (B,) values, 0-dim for unbatched input. "soft" can be differentiated twice, the others once.

    Raises:
        TypeError, ValueError: as :func:`softdtw`, and for an unknown kind.
        RuntimeError: as :func:`softdtw`.

    Examples:
        >>> x, y = torch.randn(8, 50, 3), torch.randn(8, 60, 3)
        >>> softdtw_divergence(x, y, gamma=0.1).shape
        torch.Size([8])
        >>> softdtw_divergence(x, y, kind="sharp", gamma=0.1).shape
        torch.Size([8])
    """
    if kind not in ("soft", "sharp", "mean_cost"):
        raise ValueError(f"kind is {kind!r}, expected 'soft', 'sharp' or 'mean_cost'.")
    problem, batched = check_series(x, y, gamma, bandwidth, dist, fused, x_lengths, y_lengths)
    if kind == "soft":
        value = divergence(problem)
    else:
        function = sharp if kind == "sharp" else _mean_cost
        selves = [0.5 * function(with_itself(problem, first)) for first in (True, False)]
        value = function(problem) - selves[0] - selves[1]
    return value if batched else value[0]


@explains_arguments
def softdtw_expected_cost(
    x: Tensor,
    y: Tensor,
    *,
    omega: Omega = "position",
    gamma: float = 1.0,
    bandwidth: int | None = None,
    dist: str | DistanceFunction = "sqeuclidean",
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Expected cost of the soft alignment under a second cost: sum_ij E_ij omega_ij.

    E is what :func:`softdtw_alignment` returns for x and y; here neither E nor omega has to be formed. It is
    the expectation, over warping paths drawn from Soft-DTW's distribution, of the sum of omega along the
    path: how far an alignment is from the diagonal, how well a second set of features agrees, any prior on
    alignments.

    Args:
        omega: "position" for (i / N - j / M)^2 with the true lengths of each sample, i and j counted from 1;
            a tensor (N, M) or (B, N, M); or a pair of feature tensors (B or 1, N, F) and (B or 1, M, F),
            whose squared distances it is.
        x, y, gamma, bandwidth, dist, x_lengths, y_lengths: as in :func:`softdtw`. What omega holds in the
            padding and outside the band changes nothing.

    Returns:
        (B,) values, 0-dim for unbatched input, differentiable once in x, y and the tensors of omega. Zero for
        a sample that no path of finite cost goes through.

    Raises:
        TypeError, ValueError: naming the argument, what came, what was expected and how to fix it.
        RuntimeError: differentiating a gradient, which would be a third derivative of Soft-DTW.

    Costs a few times the time of :func:`softdtw` with its gradient; where a device has no second-order
    kernels, N x M tables of float64 numbers besides (see the docs page on second order).

    Examples:
        >>> x, y = torch.randn(8, 50, 3, requires_grad=True), torch.randn(8, 60, 3)
        >>> softdtw_expected_cost(x, y, gamma=0.1).mean().backward()
    """
    problem, batched = check_series(x, y, gamma, bandwidth, dist, None, x_lengths, y_lengths)
    direction = check_omega(omega, problem, batched)
    value, _ = _autograd.expected(_autograd.with_source(problem), direction)
    return value if batched else value[0]


@explains_arguments
def softdtw_sharp(
    x: Tensor,
    y: Tensor,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    dist: str | DistanceFunction = "sqeuclidean",
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Sharp Soft-DTW: the expected cost sum_ij E_ij d_ij of the soft alignment, without its entropy.

    softdtw = softdtw_sharp - gamma * softdtw_entropy. It lies between DTW, its limit for small gamma, and the
    mean cost over all paths, its limit for large gamma, and is never negative for distances.

    Args:
        x, y, gamma, bandwidth, dist, x_lengths, y_lengths: as in :func:`softdtw`.

    Returns:
        (B,) values, 0-dim for unbatched input, differentiable once; +inf where no path has a finite cost.

    Raises:
        TypeError, ValueError: as :func:`softdtw`.
        RuntimeError: differentiating a gradient.

    Time and memory as :func:`softdtw_expected_cost`.

    Examples:
        >>> x, y = torch.randn(8, 50, 3, requires_grad=True), torch.randn(8, 60, 3)
        >>> softdtw_sharp(x, y, gamma=0.1).mean().backward()
    """
    problem, batched = check_series(x, y, gamma, bandwidth, dist, None, x_lengths, y_lengths)
    value = sharp(problem)
    return value if batched else value[0]


@explains_arguments
def softdtw_entropy(
    x: Tensor,
    y: Tensor,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    dist: str | DistanceFunction = "sqeuclidean",
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
) -> Tensor:
    """Entropy, in nats, of Soft-DTW's distribution over warping paths.

    Near zero where one path stands out, the logarithm of the number of paths where all weigh the same. A
    regulariser, and a measure of how much a gamma blurs.

    It is (softdtw_sharp - softdtw) / gamma, a small difference of large numbers where gamma is small, so it
    is computed in float64 whatever the type of x and y.

    Args:
        x, y, gamma, bandwidth, dist, x_lengths, y_lengths: as in :func:`softdtw`.

    Returns:
        (B,) values, 0-dim for unbatched input, float64 for float64 input, otherwise float32, differentiable
        once. NaN where no path has a finite cost.

    Raises:
        TypeError, ValueError: as :func:`softdtw`.
        RuntimeError: differentiating a gradient.

    Examples:
        >>> x, y = torch.randn(8, 50, 3), torch.randn(8, 60, 3)
        >>> (softdtw_entropy(x, y, gamma=10.0) > softdtw_entropy(x, y, gamma=0.1)).all()
        tensor(True)
    """
    problem, batched = check_series(x, y, gamma, bandwidth, dist, None, x_lengths, y_lengths)
    assert problem.y is not None
    wide = problem._replace(x=problem.x.double(), y=problem.y.double())
    value = _autograd.values(wide)
    entropy = (sharp(wide) - value.masked_fill(value == math.inf, math.nan)) / problem.gamma
    entropy = entropy.to(problem.value_dtype)
    return entropy if batched else entropy[0]


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
            forbidden the value is +inf and the gradient zero. A cost below about -1e15 gamma gives NaN.
        gamma, bandwidth, x_lengths, y_lengths: as in :func:`softdtw`; x_lengths counts rows, y_lengths
            columns.

    Returns:
        (B,) values, 0-dim for an unbatched matrix. The gradient wrt cost is the soft alignment.

    Raises:
        TypeError, ValueError: naming the argument, what came, what was expected and how to fix it.

    Examples:
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
        (B, N, M), or (N, M) for unbatched input, differentiable once. For sums over E without forming it see
        :func:`softdtw_expected_cost`.

    Raises:
        TypeError, ValueError: as :func:`softdtw`, and where neither or both of (x, y) and cost are given.

    Examples:
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
    if problem.x is problem.y:
        # Its own gradient for each side: in one sum of all four the terms would not cancel to the last bit.
        problem = problem._replace(y=problem.x.view_as(problem.x))
    return _autograd.values(problem) - half_self(problem, first=True) - half_self(problem, first=False)


def dilate_terms(problem: Problem) -> tuple[Tensor, Tensor]:
    """(B,) shape and time terms of DILATE: Soft-DTW, and sum_ij E_ij (i - j)^2 / (N M) with true lengths."""
    assert problem.y is not None
    problem = _autograd.with_source(problem)
    # Whole numbers, which every type holds exactly; the quotient comes last.
    rows, columns = (
        torch.arange(1, size + 1, dtype=problem.value_dtype, device=problem.x.device).view(1, size, 1)
        for size in (problem.n, problem.m)
    )
    squares, _ = _autograd.expected(problem, Direction("features", rows, columns))
    n: Tensor | int = problem.n if problem.x_lengths is None else problem.x_lengths.long()
    m: Tensor | int = problem.m if problem.y_lengths is None else problem.y_lengths.long()
    return _autograd.values(problem), squares / (n * m)


def sharp(problem: Problem) -> Tensor:
    """(B,) expected costs <E, C> under the costs themselves."""
    problem = _autograd.with_source(problem)
    kind = "matrix" if problem.y is None else "features"
    value, soft = _autograd.expected(problem, Direction(kind, problem.x, problem.y))
    return torch.where(soft == math.inf, soft, value)


def _mean_cost(problem: Problem) -> Tensor:
    """(B,) mean costs of all paths of finite cost: costs of zero make each of them weigh the same."""
    problem = _autograd.with_source(problem)
    if problem.y is None:
        allowed = torch.zeros_like(problem.x).masked_fill(problem.x == math.inf, math.inf)
        value, soft = _autograd.expected(
            problem._replace(x=allowed, gamma=1.0), Direction("matrix", problem.x)
        )
        return torch.where(soft == math.inf, soft, value)
    nothing = problem.x.new_zeros(problem.batch, max(problem.n, problem.m), 1)
    uniform = problem._replace(x=nothing[:, : problem.n], y=nothing[:, : problem.m], gamma=1.0)
    return _autograd.expected(uniform, Direction("features", problem.x, problem.y))[0]


def with_itself(problem: Problem, first: bool) -> Problem:
    """The problem of each series of the `first` or second side with itself."""
    assert problem.y is not None
    series, lengths = (problem.x, problem.x_lengths) if first else (problem.y, problem.y_lengths)
    if lengths is not None and lengths.shape[0] != series.shape[0]:
        series = series.expand(lengths.shape[0], -1, -1)
    return problem._replace(x=series, y=series, x_lengths=lengths, y_lengths=lengths)


def half_self(
    problem: Problem, first: bool, values: Callable[[Problem], Tensor] = _autograd.values
) -> Tensor:
    """sdtw(x, x) / 2 for each series x of the problem's `first` or second side; `values` computes sdtw."""
    problem = with_itself(problem, first)
    # In forward mode a tangent has both sides.
    if not problem.metric.is_named or in_forward_mode():
        return 0.5 * values(problem)
    # The named distances are symmetric, so both sides of sdtw(x, x) have the same gradient: take one of them
    # in full instead of half of each. It is half the work, and makes the gradient of the divergence exactly
    # zero at x = y, since sdtw(x, y) is differentiated on that side by the same arithmetic.
    value = values(problem._replace(sides="x" if first else "y"))
    return value - 0.5 * value.detach() if problem.fused else 0.5 * value
