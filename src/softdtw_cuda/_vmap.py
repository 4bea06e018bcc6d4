"""vmap without a loop: a mapped dimension of size V becomes part of the batch, V * B pairs in one launch."""

from __future__ import annotations

from torch import Tensor


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
