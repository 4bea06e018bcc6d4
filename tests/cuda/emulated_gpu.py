"""The launcher's GPU, played by the emulator: guarded memory, kernels run on the host in random orders."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import softdtw_cuda._cuda.compile
from softdtw_cuda._cuda.config import Kernel
from softdtw_cuda._cuda.params import Params

from .emulator import EmulatedModule, GuardedBuffer, build

KERNELS = Path(softdtw_cuda._cuda.compile.__file__).parent / "kernels"

_NUMPY = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.uint8: np.uint8,
    torch.int32: np.int32,
}


def guarded(tensor: Tensor, name: str, flush: str = "end") -> Tensor:
    """A copy of `tensor` between inaccessible pages."""
    shape, dtype = tensor.shape, tensor.dtype
    plain = tensor.contiguous().view(torch.uint8 if tensor.numel() else dtype).reshape(-1)
    if not tensor.numel():
        return tensor
    buffer = GuardedBuffer(plain.numpy().copy(), name, flush=flush)  # type: ignore[arg-type]
    return torch.from_numpy(buffer.array).view(dtype).view(shape)


class EmulatedGpu:
    """Stands in for `softdtw_cuda._cuda.launch.Gpu`."""

    def __init__(
        self, seed: int = 0, *, resident: int = 4, relaxed: bool = False, flush: str = "end"
    ) -> None:
        self._random = random.Random(seed)
        self._resident, self._relaxed, self._flush = resident, relaxed, flush
        self.launched: list[tuple[Kernel, bool]] = []

    def empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory full of NaN, so that what is not written shows."""
        made = torch.empty(shape, dtype=dtype)
        if made.numel():
            made.view(torch.uint8).fill_(255)
        return guarded(made, f"allocation {tuple(made.shape)} {dtype}", self._flush)

    def zeros(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = self.empty(shape, dtype, device)
        return made.zero_()

    def run(self, kernel: Kernel, backward: bool, params: Params, blocks: int, device: torch.device) -> None:
        self.launched.append((kernel, backward))
        module(kernel).launch(
            kernel.backward_name if backward else kernel.forward_name,
            params,
            blocks=blocks,
            threads=kernel.backward_threads if backward else kernel.forward_threads,
            shared_bytes=kernel.backward_shared if backward else kernel.forward_shared,
            seed=self._random.getrandbits(32),
            resident=self._resident,
            relaxed=self._relaxed,
            first_flush=self._flush,  # type: ignore[arg-type]
        )


def module(kernel: Kernel) -> EmulatedModule:
    """The kernel's source built for the host."""
    return build([KERNELS / f"{kernel.source}.cu"], kernel.defines())
