"""What becomes of the values of a batch."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

Reduction = Literal["none", "mean", "sum"]
REDUCTIONS = get_args(Reduction)


def reduced(value: Tensor, reduction: Reduction) -> Tensor:
    """The mean or the sum of the values, or themselves."""
    return value if reduction == "none" else value.mean() if reduction == "mean" else value.sum()
