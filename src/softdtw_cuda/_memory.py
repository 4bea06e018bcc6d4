"""Tensors whose memory holds their numbers, which kernels read there."""

from __future__ import annotations

from torch import Tensor


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy where torch has put off a sign or zeros that memory does not show."""
    return tensor.clone() if tensor.is_neg() or tensor._is_zerotensor() else tensor


class NotInMemory(Exception):
    """A kernel was given what must go through `in_memory` first, or what a transform has wrapped."""
