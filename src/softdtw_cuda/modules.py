"""The loss as a module."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor, nn

from ._distances import DistanceFunction
from ._reduction import REDUCTIONS, Reduction
from ._validation import Lengths, check_bandwidth, check_flag, check_fused, check_gamma, check_metric
from .functional import softdtw_reduced


def _refuse_reduction(reduction: object) -> NoReturn:
    raise ValueError(f"reduction is {reduction!r}, expected 'none', 'mean' or 'sum'.")


class SoftDTW(nn.Module):
    """Soft-DTW as a loss module.

    Args:
        gamma: temperature, greater than 0.
        bandwidth: Sakoe-Chiba radius, None for no band.
        normalize: return the divergence, which is zero for x = y.
        dist: "sqeuclidean", "euclidean", "cityblock", "cosine", or a callable (x, y) -> (B, N, M).
        fused: True demands the path without an N x M table, False builds the cost matrix, None picks.
        reduction: "none" returns (B,) values, "mean" and "sum" a scalar.

    See :func:`softdtw_cuda.softdtw` for shapes, types and errors. The options are attributes and may be
    changed.

    Raises:
        TypeError, ValueError: for options that no call could accept, already when the module is made.

    Example:
        >>> loss_fn = SoftDTW(gamma=0.1, reduction="mean")
        >>> loss_fn(torch.randn(8, 50, 3, requires_grad=True), torch.randn(8, 60, 3)).backward()
    """

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        bandwidth: int | None = None,
        normalize: bool = False,
        dist: str | DistanceFunction = "sqeuclidean",
        fused: bool | None = None,
        reduction: Reduction = "none",
    ) -> None:
        super().__init__()
        check_bandwidth(bandwidth)
        check_flag("normalize", normalize)
        check_fused(fused, check_metric(dist), kernel_missing=None)
        if reduction not in REDUCTIONS:
            _refuse_reduction(reduction)
        self.gamma = check_gamma(gamma)
        self.bandwidth = bandwidth
        self.normalize = normalize
        self.dist = dist
        self.fused = fused
        self.reduction = reduction

    def forward(
        self, x: Tensor, y: Tensor, x_lengths: Lengths | None = None, y_lengths: Lengths | None = None
    ) -> Tensor:
        """Loss of x (B, N, D) against y (B, M, D), with optional true lengths of each series."""
        if self.reduction not in REDUCTIONS:
            _refuse_reduction(self.reduction)
        return softdtw_reduced(
            x,
            y,
            self.gamma,
            self.bandwidth,
            self.normalize,
            self.dist,
            self.fused,
            x_lengths,
            y_lengths,
            self.reduction,
        )

    def extra_repr(self) -> str:
        dist = self.dist if isinstance(self.dist, str) else getattr(self.dist, "__name__", repr(self.dist))
        options = [f"gamma={self.gamma:g}"]
        if self.bandwidth is not None:
            options.append(f"bandwidth={self.bandwidth}")
        if self.normalize:
            options.append("normalize=True")
        options.append(f"dist={dist!r}")
        if self.fused is not None:
            options.append(f"fused={self.fused}")
        options.append(f"reduction={self.reduction!r}")
        return ", ".join(options)
