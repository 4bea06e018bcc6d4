"""Tensors whose memory holds their numbers, which kernels read there."""

from __future__ import annotations

from torch import Tensor


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where torch has put off a sign or zeros that memory does not show."""
    return tensor.clone() if tensor.is_neg() or tensor._is_zerotensor() else tensor


class NotInMemory(RuntimeError):
    """A kernel was given what must go through `in_memory` first, or what a transform has wrapped."""

    def __init__(self) -> None:
        super().__init__(
            "softdtw_cuda: x or y has no memory of its own, as if it had been kept beyond a torch.func "
            "transform, or freed; return it from the transform instead."
        )
