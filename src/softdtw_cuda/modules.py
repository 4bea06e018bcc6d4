"""The losses as modules."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from ._distances import DistanceFunction, name_of
from ._lengths import Lengths
from ._migration import explains_arguments
from ._options import check_bandwidth, check_flag, check_fused, check_gamma, check_metric, check_real
from ._validation import check_series
from .functional import dilate_terms, softdtw

Reduction = Literal["none", "mean", "sum"]


def _check_reduction(reduction: object) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}, expected 'none', 'mean' or 'sum'.")


def _reduce(value: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return value
    return value.mean() if reduction == "mean" else value.sum()


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

    Examples:
        >>> loss_fn = SoftDTW(gamma=0.1, reduction="mean")
        >>> prediction = torch.randn(8, 50, 3, requires_grad=True)
        >>> loss_fn(prediction, torch.randn(8, 60, 3)).backward()
    """

    @explains_arguments
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
        check_fused(fused, check_metric(dist), x=None)
        _check_reduction(reduction)
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
        _check_reduction(self.reduction)
        value = softdtw(
            x,
            y,
            gamma=self.gamma,
            bandwidth=self.bandwidth,
            normalize=self.normalize,
            dist=self.dist,
            fused=self.fused,
            x_lengths=x_lengths,
            y_lengths=y_lengths,
        )
        return _reduce(value, self.reduction)

    def extra_repr(self) -> str:
        dist = self.dist if isinstance(self.dist, str) else name_of(self.dist)
        options = [f"gamma={check_gamma(self.gamma):g}"]
        if self.bandwidth is not None:
            options.append(f"bandwidth={self.bandwidth}")
        if self.normalize:
            options.append("normalize=True")
        options.append(f"dist={dist!r}")
        if self.fused is not None:
            options.append(f"fused={self.fused}")
        options.append(f"reduction={self.reduction!r}")
        return ", ".join(options)


def _check_alpha(alpha: float) -> float:
    alpha = check_real("alpha", alpha, positive=False)
    if alpha > 1:
        raise ValueError(f"alpha must be a number from 0 to 1, got {alpha}; 1 is Soft-DTW, 0 the time alone.")
    return alpha


@explains_arguments
def _dilate(
    x: Tensor, y: Tensor, alpha: float, gamma: float, x_lengths: Lengths | None, y_lengths: Lengths | None
) -> Tensor:
    problem, batched = check_series(x, y, gamma, None, "sqeuclidean", None, x_lengths, y_lengths)
    alpha = _check_alpha(alpha)
    shape, time = dilate_terms(problem)
    value = alpha * shape + (1 - alpha) * time
    return value if batched else value[0]


class DilateLoss(nn.Module):
    """DILATE, a forecasting loss on shape and timing: alpha * shape + (1 - alpha) * time.

    shape is Soft-DTW under the squared Euclidean distance, time the expected distance of the soft alignment E
    from the diagonal, sum_ij E_ij (i - j)^2 / (N M), as in Le Guen and Thome, "Shape and time distortion loss
    for training deep time series forecasting models" (NeurIPS 2019). N may differ from M, and series may be
    padded: N and M are then the true lengths of each sample.

    The authors' code returns the same loss, but the gradient of a sum over the batch where the loss is a
    mean: for a batch of B series its gradients are B times as large. Compare with its
    learning rate divided by B.

    Args:
        alpha: weight of the shape, from 0 to 1.
        gamma: temperature of the alignment, greater than 0.
        reduction: "mean" and "sum" return a scalar, "none" (B,) values.

    Raises:
        TypeError, ValueError: for options that no call could accept, already when the module is made.
        RuntimeError: differentiating a gradient, which would be a third derivative of Soft-DTW.

    Examples:
        >>> loss_fn = DilateLoss(alpha=0.5, gamma=0.01)
        >>> forecast = torch.randn(8, 20, 1, requires_grad=True)
        >>> loss_fn(forecast, torch.randn(8, 20, 1)).backward()
    """

    @explains_arguments
    def __init__(self, alpha: float = 0.5, gamma: float = 0.01, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.alpha = _check_alpha(alpha)
        _check_reduction(reduction)
        self.gamma = check_gamma(gamma)
        self.reduction = reduction

    def forward(
        self, x: Tensor, y: Tensor, x_lengths: Lengths | None = None, y_lengths: Lengths | None = None
    ) -> Tensor:
        """Loss of the forecasts x (B, N, D) against y (B, M, D), with optional true lengths."""
        _check_reduction(self.reduction)
        return _reduce(_dilate(x, y, self.alpha, self.gamma, x_lengths, y_lengths), self.reduction)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:g}, gamma={check_gamma(self.gamma):g}, reduction={self.reduction!r}"
