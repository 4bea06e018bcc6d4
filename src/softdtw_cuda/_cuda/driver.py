"""The GPU as the launcher sees it: torch's memory, kernels loaded once, launches on torch's current stream.

The two driver calls that every launch makes go through ctypes, without `argtypes`, which take it twice as
long: a number goes as a C int, everything wider as an object of its C type.
"""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import addressof, byref, c_size_t, c_void_p
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch_compat import current_device, current_stream, set_device
from . import config
from .compile import binary_of
from .kernel import BACKWARD, FORWARD, FORWARD_BACKWARD, RERUN, SCALE, AnyKernel, Kernel
from .params import DualParams, Params

_NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT"""


def _loaded_with(kernel: AnyKernel, part: str) -> list[tuple[AnyKernel, str]]:
    """What other calls need that may come in the capture of a graph, where nothing can be loaded."""
    others = {RERUN: (FORWARD,), FORWARD_BACKWARD: (FORWARD, BACKWARD)}.get(part, ())
    found: list[tuple[AnyKernel, str]] = [(kernel, other) for other in others]
    if part in (BACKWARD, FORWARD_BACKWARD) and isinstance(kernel, Kernel) and kernel.may_keep_gradients:
        found.append((SCALE, BACKWARD))
    return found


class _Loaded(NamedTuple):
    """What a launch needs of a part of a kernel on one device; `module` keeps the handle alive."""

    module: Any
    handle: c_void_p
    threads: int
    shared: int


class Queue:
    """torch's current stream of a device, which is the current device inside `with`."""

    __slots__ = ("_before", "_gpu", "_stream", "index")

    def __init__(self, gpu: Gpu, index: int) -> None:
        self._gpu, self.index = gpu, index

    def __enter__(self) -> Queue:
        self._before = current_device()
        if self._before != self.index:
            set_device(self.index)
        self._stream = c_void_p(current_stream(self.index))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before != self.index:
            set_device(self._before)

    def fill_with_ones(self, address: int, count: int) -> None:
        """Sets `count` bytes (a multiple of 4) to 255."""
        function = self._gpu.set_words
        arguments = c_void_p(address), -1, c_size_t(count // 4), self._stream
        status = function(*arguments)
        if status:
            self._call_again(status, function, arguments)

    def run(self, kernel: AnyKernel, part: str, params: Params | DualParams, blocks: int) -> None:
        """Launches a part of a kernel; the driver copies `params`."""
        loaded = self._gpu.loaded.get((kernel.tag, part, self.index))
        if loaded is None:
            loaded = self._gpu.load(kernel, part, self.index, bool(params.save))
        params.blocks = blocks
        argument = c_void_p(addressof(params))
        _, handle, threads, shared = loaded
        function = self._gpu.launch_kernel
        arguments = handle, blocks, 1, 1, threads, 1, 1, shared, self._stream, byref(argument), None
        status = function(*arguments)
        if status:
            self._call_again(status, function, arguments)

    def _call_again(self, status: int, function: Any, arguments: tuple[Any, ...]) -> None:
        """After a call that was refused with `status`."""
        if status == _NO_CONTEXT:
            # The driver, unlike torch, makes no context current by itself: new threads have none, autograd's
            # among them.
            from cuda.core import Device

            Device(self.index).set_current()
            status = function(*arguments)
        if status:
            raise RuntimeError(f"softdtw_cuda: the CUDA driver refused a launch with error {status}")


class Gpu:
    """What the launcher needs of a GPU: memory, the current stream, kernels. Tests put an emulator here."""

    def __init__(self) -> None:
        self.loaded: dict[tuple[str, str, int], _Loaded] = {}
        self.launch_kernel: Any = None
        self.set_words: Any = None
        self._loading = threading.RLock()
        self._compiling: dict[tuple[AnyKernel, str, str], Future[bytes]] = {}

    def empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory from torch's caching allocator."""
        return torch.empty(shape, dtype=dtype, device=device)

    def zeros(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same, cleared."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def queue(self, device: torch.device) -> Queue:
        """torch's current stream of `device`."""
        if self.launch_kernel is None:
            self._open_driver()
        return Queue(self, device.index)

    def load(self, kernel: AnyKernel, part: str, index: int, save: bool) -> _Loaded:
        """Compiles a part of a kernel, or reads it from the cache, and loads it.

        `save` says of a forward that a backward will follow it.
        """
        with self._loading:
            found = self.loaded.get((kernel.tag, part, index))
            if found is not None:
                return found
            from cuda.bindings import driver
            from cuda.core import Device, ObjectCode

            properties = torch.cuda.get_device_properties(index)
            binary = self._binary(kernel, part, f"sm_{properties.major}{properties.minor}", save, index)
            shared = kernel.shared(part)
            with torch.cuda.device(index):
                torch.cuda.current_stream(index).query()  # torch's context is the one to load into
                Device(index).set_current()
                module = ObjectCode.from_cubin(binary)
                handle = driver.CUkernel(int(module.get_kernel(kernel.name(part)).handle))
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                (status,) = driver.cuKernelSetAttribute(attribute, shared, handle, driver.CUdevice(index))
                if status:
                    raise RuntimeError(
                        f"softdtw_cuda: {kernel.name(part)} needs {shared} bytes of shared memory, which "
                        f"{properties.name} does not give: {status}"
                    )
            made = _Loaded(module, c_void_p(int(handle)), kernel.threads(part), shared)
            for other, its in _loaded_with(kernel, part):
                self.load(other, its, index, save=False)
            self.loaded[kernel.tag, part, index] = made
            return made

    def _binary(self, kernel: AnyKernel, part: str, architecture: str, save: bool, index: int = 0) -> bytes:
        """Compiles a part of a kernel or reads it, and begins with what will be needed right after it."""
        companion = config.wide_companion(kernel) if isinstance(kernel, Kernel) else kernel
        needed = [(kernel, part), *_loaded_with(kernel, part)]
        if part == FORWARD and save:
            needed.append((kernel, BACKWARD))
        if companion != kernel:
            needed += [(companion, its if its == FORWARD else RERUN) for of, its in needed if of == kernel]
        missing = [(of, its) for of, its in dict.fromkeys(needed) if (of.tag, its, index) not in self.loaded]
        new = [(*each, architecture) for each in missing if (*each, architecture) not in self._compiling]
        if new:
            pool = ThreadPoolExecutor(len(new))
            self._compiling |= {each: pool.submit(binary_of, *each) for each in new}
            pool.shutdown(wait=False)
        return self._compiling.pop((kernel, part, architecture)).result()

    def _open_driver(self) -> None:
        """The two driver calls that every launch makes, by ctypes; the first thing to miss cuda-core."""
        try:
            import cuda.core  # noqa: F401  (to see whether it is there)
        except ImportError as error:
            raise ImportError(
                f"softdtw_cuda: tensors on a GPU need NVIDIA's cuda-core ({error}); pip install cuda-core"
            ) from error
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        self.set_words, self.launch_kernel = library.cuMemsetD32Async, library.cuLaunchKernel
