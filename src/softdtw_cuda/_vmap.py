"""vmap without a loop: a mapped dimension of size V becomes part of the batch, V * B pairs in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._problem import Direction, Problem


def fold(tensor: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    """The tensor of all V * B pairs; one (1, ...) that is not mapped and stands for all pairs stays so.

    Args:
        tensor: (B or 1, ...), with a dimension of size V more at `dim` if that is not None.
    """
    if tensor is None:
        return None
    if dim is None:
        if tensor.dim() > 1 and tensor.shape[0] == 1:
            return tensor
        tensor = tensor.unsqueeze(0)
    else:
        tensor = tensor.movedim(dim, 0)
    return tensor.expand(size, batch, *tensor.shape[2:]).reshape(size * batch, *tensor.shape[2:])


def rows(tensor: Tensor, dim: int | None) -> int:
    """The size of the batch dimension, which is the first that is not mapped."""
    return tensor.shape[0] if dim is None else tensor.movedim(dim, 0).shape[1]


def fold_problem(size: int, dims: Any, problem: Problem) -> tuple[Problem, int]:
    """The problem of all V * B pairs, and B; `dims` is a Problem of the mapped dimensions."""
    if problem.pairs is not None:
        return _fold_pairs(size, dims, problem)
    batch = rows(problem.x, dims.x)
    if problem.y is not None:
        batch = max(batch, rows(problem.y, dims.y))
    folded = problem.with_tensors(
        fold(tensor, dim, size, batch) for tensor, dim in zip(problem.tensors, dims.tensors, strict=True)
    )
    x = folded.x
    if folded.batch != size * batch:  # nothing of the problem is mapped
        folded = folded._replace(x=x.expand(size * batch, -1, -1))
    return folded, batch


def _fold_pairs(size: int, dims: Any, problem: Problem) -> tuple[Problem, int]:
    """The problem of V lists of pairs, each with series of its own or with those of all."""

    def mapped_first(tensor: Tensor | None, dim: int | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)

    problem = problem.with_tensors(map(mapped_first, problem.tensors, dims.tensors))
    x, y, pairs = problem.x, problem.y, problem.pairs
    assert y is not None
    assert pairs is not None
    map_index = torch.arange(size, dtype=torch.int32, device=pairs.device).view(size, 1)

    def series_of_pairs(
        side: Tensor, lengths: Tensor | None, column: int
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Series (V * K, ...) and their lengths, and which of them the pairs have."""
        maps = size if lengths is not None and lengths.shape[0] > side.shape[0] else side.shape[0]
        all_series = side.expand(maps, *side.shape[1:]).flatten(0, 1)
        all_lengths = None if lengths is None else lengths.expand(maps, -1).flatten()
        index = pairs[..., column]
        if maps > 1:  # an index that is none in its own map is none of another, either
            inside = (index >= 0) & (index < side.shape[1])
            index = torch.where(inside, index + map_index * side.shape[1], -1)
        return all_series, all_lengths, index.expand(size, -1).flatten()

    first, first_lengths, first_index = series_of_pairs(x, problem.x_lengths, 0)
    second, second_lengths, second_index = series_of_pairs(y, problem.y_lengths, 1)
    return problem._replace(
        x=first,
        y=second,
        x_lengths=first_lengths,
        y_lengths=second_lengths,
        pairs=torch.stack([first_index, second_index], 1),
    ), pairs.shape[1]


def fold_numbers(size: int, dim: int | None, batch: int, numbers: Tensor) -> Tensor:
    """(V, B) or (B,) numbers as (V * B,)."""
    moved = numbers if dim is None else numbers.movedim(dim, 0)
    return moved.expand(size, batch).reshape(size * batch)


def fold_direction(size: int, dims: Any, batch: int, direction: Direction | None) -> Direction | None:
    if direction is None:
        return None
    a, b = fold(direction.a, dims.a, size, batch), fold(direction.b, dims.b, size, batch)
    return direction._replace(a=a, b=b)


def unfold(
    size: int, batch: int, per_pair: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Gradients of V * B pairs as (V, B, ...), and where the mapped dimension is."""
    sides = tuple(side if side.dim() == 1 else side.unflatten(0, (size, batch)) for side in per_pair)
    return sides, tuple(None if side.dim() == 1 else 0 for side in per_pair)
