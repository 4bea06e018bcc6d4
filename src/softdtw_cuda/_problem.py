"""Problem: what is to be computed. `_validation` makes it; everything after it reads it, unchecked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._distances import SQUARED_EUCLIDEAN, Metric, Sides
from ._sums import gather

NO_BAND = -1

OPERANDS = 9
"""Fields of a Problem that backends read: the arguments of the operators."""


class Problem(NamedTuple):
    """B pairs of series, or B cost matrices, with the options of Soft-DTW.

    The first `OPERANDS` fields are what backends read, in the order of the operators' arguments.

    Attributes:
        x: (B or 1, N, D) series, or (B, N, M) costs where y is None. One series stands for all pairs. With
            `pairs`, any number of series, (K, N, D).
        y: (B or 1, M, D) series; with `pairs` (L, M, D).
        x_lengths, y_lengths: (B,) int64 on the device of x; None where no series is padded. With `pairs` one
            length for each series, (K,) and (L,).
        gamma: temperature, greater than 0 and finite.
        bandwidth: Sakoe-Chiba radius, or `NO_BAND`.
        need_x, need_y: the gradients that may be asked for. Without any, no state is saved.
        pairs: None, or (B, 2) int32 on the device of x: which series of x and which of y each pair has.
        metric: what the costs of x and y are.
        fused: costs are made inside the kernel, as squared Euclidean distances.
        sides: the series that the values are differentiated by. The value of a series with itself has the
            same gradient on both sides, so that one of them, in full, is enough; the gradient's own
            derivatives take both sides all the same.
    """

    x: Tensor
    y: Tensor | None
    x_lengths: Tensor | None
    y_lengths: Tensor | None
    gamma: float
    bandwidth: int
    need_x: bool = False
    need_y: bool = False
    pairs: Tensor | None = None
    metric: Metric = SQUARED_EUCLIDEAN
    fused: bool = True
    sides: Sides = "both"

    @property
    def batch(self) -> int:
        """Number of pairs."""
        if self.pairs is not None:
            return self.pairs.shape[0]
        if self.y is None or self.x.shape[0] != 1:
            return self.x.shape[0]
        return self.y.shape[0]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.x, self.y, self.x_lengths, self.y_lengths, self.pairs

    @property
    def operands(self) -> tuple[Any, ...]:
        """The arguments of the operators."""
        return self[:OPERANDS]

    @property
    def n(self) -> int:
        return self.x.shape[1]

    @property
    def m(self) -> int:
        return self.x.shape[2] if self.y is None else self.y.shape[1]

    @property
    def value_dtype(self) -> torch.dtype:
        return value_dtype(self.x.dtype)

    @property
    def needs_gradient(self) -> bool:
        return self.need_x or self.need_y

    def no_gradient(self) -> Tensor:
        """What stands for a gradient that is not needed."""
        return self.x.new_empty(0, dtype=self.value_dtype)

    def gradient_dtype(self, side: Tensor) -> torch.dtype:
        """Of the gradients, one per pair, of `side`; those of a series in several pairs are to be summed."""
        return side.dtype if self.pairs is None and side.shape[0] == self.batch else self.value_dtype

    def as_gradient(self, gradient: Tensor, side: Tensor | None, needed: bool) -> Tensor:
        """Gradients, one per pair, of `side` in their type; `no_gradient` where they are not needed."""
        if side is None or not needed:
            return self.no_gradient()
        return gradient.to(self.gradient_dtype(side))

    def gathered(self) -> Problem:
        """The same pairs with a copy of each pair's own series."""
        if self.pairs is None:
            return self

        def own(series: Tensor, lengths: Tensor | None, index: Tensor) -> tuple[Tensor, Tensor | None]:
            """The series of each pair, and their lengths."""
            if index.device.type == "cpu":  # checked
                return gather(series, index), None if lengths is None else gather(lengths, index)
            inside = (index >= 0) & (index < series.shape[0])
            index = index.clamp(0, series.shape[0] - 1)
            known = series.shape[1] if lengths is None else lengths[index]
            return gather(series, index), torch.where(inside, known, 0)  # no length, and the value NaN

        first, second = self.pairs.long().unbind(1)
        x, x_lengths = own(self.x, self.x_lengths, first)
        y, y_lengths = self.y, self.y_lengths
        if y is not None:
            y, y_lengths = own(y, y_lengths, second)
        return self._replace(x=x, y=y, x_lengths=x_lengths, y_lengths=y_lengths, pairs=None)


class Direction(NamedTuple):
    """A direction Omega on the costs of a problem: their change, or what is summed along the alignment.

    Attributes:
        kind: "tangents": 2 (x_i - y_j).(a_i - b_j), the change of squared Euclidean costs with the series;
            "matrix": a itself; "features": the squared Euclidean distances of a and b; "position":
            (i / N_b - j / M_b)^2 with the lengths of each sample, i and j counted from 1.
        a: (B or 1, N, D) tangent of x, one per pair, or None for zeros; (B or 1, N, M) matrix; (B or 1, N, F)
            features.
        b: (B or 1, M, D) tangent of y or None; (B or 1, M, F) features.
        need_a, need_b: the gradients of a and b that may be asked for. Tangents have none here: Omega is
            linear in them, so that theirs are first derivatives of the values.
    """

    kind: str
    a: Tensor | None = None
    b: Tensor | None = None
    need_a: bool = False
    need_b: bool = False


def problem_and_direction(fields: Sequence[Any]) -> tuple[Problem, Direction]:
    """What the arguments of an operator of second order are the fields of."""
    return Problem(*fields[:OPERANDS]), Direction(*fields[OPERANDS:])


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the values for series or costs of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32
