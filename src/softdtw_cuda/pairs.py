"""Soft-DTW between many series: all pairs of two sets."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _autograd
from ._distances import DistanceFunction, with_embedding
from ._problem import Problem
from ._validation import Lengths, check_all_pairs, check_flag, explains_arguments
from .functional import half_self


@explains_arguments
def softdtw_cdist(
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
    """Soft-DTW between every series of x and every series of y, differentiable in both.

    One broadcast call for each series of the smaller set, so no series is ever copied.

    Args:
        x: (K, N, D).
        y: (L, M, D).
        x_lengths, y_lengths: (K,) and (L,) true lengths.
        gamma, bandwidth, normalize, dist, fused: as in :func:`softdtw`.

    Returns:
        (K, L) values.

    Raises:
        TypeError, ValueError: as :func:`softdtw`.

    Examples:
        >>> x, y = torch.randn(5, 50, 3), torch.randn(7, 60, 3)
        >>> softdtw_cdist(x, y, gamma=0.1).shape
        torch.Size([5, 7])
    """
    normalize = check_flag("normalize", normalize)
    problem = check_all_pairs(x, y, gamma, bandwidth, dist, fused, x_lengths, y_lengths)
    value = _all_values(problem)
    if normalize:
        x_self, y_self = half_self(problem, first=True), half_self(problem, first=False)
        value = value - x_self.unsqueeze(1) - y_self.unsqueeze(0)
    return value


def _all_values(problem: Problem) -> Tensor:
    """(K, L) values, by one broadcast call for each series of the smaller set."""
    x, y = problem.x, problem.y
    assert y is not None
    rows, columns = x.shape[0], y.shape[0]
    if rows == 0 or columns == 0:
        no_values = (x.sum() + y.sum()) * 0
        return no_values.to(problem.value_dtype).expand(rows, columns)
    if problem.fused:  # embedded once, not for every pair
        problem = with_embedding(problem)
        x, y = problem.x, problem.y
        assert y is not None

    def lengths_of(lengths: Tensor | None, k: int, count: int) -> Tensor | None:
        return None if lengths is None else lengths[k].expand(count).contiguous()

    if rows <= columns:
        each = [
            problem._replace(x=one, x_lengths=lengths_of(problem.x_lengths, k, columns))
            for k, one in enumerate(x.split(1))
        ]
    else:
        each = [
            problem._replace(y=one, y_lengths=lengths_of(problem.y_lengths, k, rows))
            for k, one in enumerate(y.split(1))
        ]
    return torch.stack([_autograd.values(one) for one in each], 0 if rows <= columns else 1)
