"""The launcher's GPU, played by the emulator: guarded memory, kernels run on the host in random orders."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softdtw_cuda._cuda import compile as compiling
from softdtw_cuda._cuda import config
from softdtw_cuda._cuda.kernel import AnyKernel
from softdtw_cuda._cuda.params import Params

from .emulator import EmulatedModule, Flush, GuardedBuffer, build

KERNELS = Path(compiling.__file__).parent / "kernels"

# The launches here are small, so a quick build matters more than quick code.
_FLAGS = ("-O1", "-g1")


def guarded(tensor: Tensor, name: str, flush: Flush = "end") -> Tensor:
    """A copy of `tensor` between inaccessible pages."""
    if not tensor.numel():
        return tensor
    shape, dtype = tensor.shape, tensor.dtype
    plain = tensor.contiguous().reshape(-1).view(torch.uint8)
    buffer = GuardedBuffer(plain.numpy().copy(), name, flush=flush)
    return torch.from_numpy(buffer.array).view(dtype).view(shape)


class EmulatedGpu:
    """Stands in for `softdtw_cuda._cuda.driver.Gpu`.

    Args:
        seed: of the random orders in which warps and blocks run.
        resident: blocks that run at the same time.
        relaxed: let plain stores become visible late.
        flush: the side on which allocations touch their guard.
        races: fail on accesses that nothing puts in order.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        resident: int = 4,
        relaxed: bool = False,
        flush: Flush = "end",
        races: bool = False,
    ) -> None:
        self._random = random.Random(seed)
        self._resident, self._relaxed, self._flush, self._races = resident, relaxed, flush, races
        self.launched: list[tuple[AnyKernel, str]] = []
        self.left = 0

    def empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Used memory: NaN, or for words whose ones mean something, zeros or anything."""
        made = torch.empty(shape, dtype=dtype)
        if dtype == torch.uint8:
            junk = self._random.choice([bytes(made.numel()), self._random.randbytes(made.numel())])
            made = torch.frombuffer(bytearray(junk), dtype=torch.uint8) if junk else made
        elif made.numel():
            made.view(-1).view(torch.uint8).fill_(255)
        return guarded(made, f"allocation {tuple(made.shape)} {dtype}", self._flush)

    def zeros(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        made = self.empty(shape, dtype, device)
        return made.zero_()

    def queue(self, device: torch.device) -> EmulatedGpu:
        return self

    def __enter__(self) -> EmulatedGpu:
        return self

    def __exit__(self, *error: object) -> None:
        self.left += 1

    def fill_with_ones(self, address: int, count: int) -> None:
        ctypes.memset(address, 255, count)

    def run(self, kernel: AnyKernel, part: str, params: Params, blocks: int) -> None:
        self.launched.append((kernel, part))
        params.blocks = blocks
        module(kernel, self._races, config.weakest_device().capability).launch(
            kernel.name(part),
            params,
            blocks=blocks,
            threads=kernel.threads(part),
            shared_bytes=kernel.shared(part),
            seed=self._random.getrandbits(32),
            resident=self._resident,
            relaxed=self._relaxed,
            first_flush=self._flush,
        )


def module(kernel: AnyKernel, races: bool, capability: tuple[int, int]) -> EmulatedModule:
    """The kernel's source built for the host, as it is for a GPU of that compute capability."""
    # Sources differ before 8.0 and from 10.0 on.
    architecture = 750 if capability < (8, 0) else 1000 if capability >= (10, 0) else 900
    defines = {**kernel.defines(), **compiling.debug_macros(), "__CUDA_ARCH__": architecture}
    return build([KERNELS / f"{kernel.source}.cu"], defines, races=races, flags=_FLAGS)


def build_all(wanted: Iterable[tuple[AnyKernel, bool, tuple[int, int]]]) -> None:
    """Builds modules side by side, so that the tests which need them find them made."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(module, *each) for each in dict.fromkeys(wanted)]:
            done.result()
