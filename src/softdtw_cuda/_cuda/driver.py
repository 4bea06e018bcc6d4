"""The GPU as the launcher sees it: torch's memory, kernels loaded once, launches on torch's current stream.

The two driver calls that every launch makes go through ctypes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import config
from .compile import binary_of
from .config import AT_ONCE, BACKWARD, FORWARD, REDO, Kernel
from .params import Params

_LOADED_WITH = {REDO: (FORWARD,), AT_ONCE: (FORWARD, BACKWARD)}
"""Other calls on the same kernel need these; they may come in the capture of a graph, where nothing can be
loaded."""
_MOST_LAUNCHES_KEPT = 1024
_NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT"""


class _Loaded(NamedTuple):
    """What a launch needs of a part of a kernel on one device; `module` keeps the handle alive."""

    module: Any
    handle: int
    threads: int
    shared: int


class _LaunchConfig(ctypes.Structure):
    """The driver's `CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _Launch(NamedTuple):
    """A launch but for its argument; `config` keeps what lies at `config_at` alive."""

    config: _LaunchConfig
    config_at: int
    handle: int


class Launch(NamedTuple):
    """A launch, to be made again with the driver's `arguments`; the others keep alive what these point to."""

    made_of: _Launch
    argument: ctypes.c_void_p
    arguments: tuple[int, int, int, None]


_LaunchKey = tuple[str, str, int, int, int]
"""A kernel's tag and part, how many blocks, device and stream."""


class Queue:
    """torch's current stream of a device, which is current until `close`."""

    __slots__ = ("_gpu", "_here", "index", "stream")

    def __init__(self, gpu: Gpu, index: int) -> None:
        self._gpu, self.index = gpu, index
        self._here: int = torch._C._cuda_getDevice()
        if self._here != index:
            torch._C._cuda_setDevice(index)
        self.stream: int = torch._C._cuda_getCurrentRawStream(index)

    def fill_with_ones(self, address: int, count: int) -> None:
        """Sets `count` bytes (a multiple of 4) to 255."""
        self._gpu.fill_with_ones(address, count, self.index, self.stream)

    def run(self, kernel: Kernel, part: str, params: Params, blocks: int) -> None:
        """Launches a part of a kernel."""
        self._gpu.launch(self.prepare(kernel, part, params, blocks), self.index)

    def prepare(self, kernel: Kernel, part: str, params: Params, blocks: int) -> Launch:
        """Makes a launch ready, to be repeated as long as its `params` live; they may change in between."""
        params.blocks = blocks
        key = kernel.tag, part, blocks, self.index, self.stream
        made_of = self._gpu.launches.get(key)
        if made_of is None:
            made_of = self._load(kernel, part, blocks, bool(params.save))
            self._gpu.keep(key, made_of)
        _, config_at, handle = made_of
        argument = ctypes.c_void_p(ctypes.addressof(params))
        return Launch(made_of, argument, (config_at, handle, ctypes.addressof(argument), None))

    def _load(self, kernel: Kernel, part: str, blocks: int, save: bool) -> _Launch:
        loaded = self._gpu.loaded.get((kernel.tag, part, self.index))
        if loaded is None:
            loaded = self._gpu.load(kernel, part, self.index, save)
        grid, block = (blocks, 1, 1), (loaded.threads, 1, 1)
        config = _LaunchConfig(grid, block, loaded.shared, self.stream, None, 0)
        return _Launch(config, ctypes.addressof(config), loaded.handle)

    def close(self) -> None:
        """Makes the device that was current before current again."""
        if self._here != self.index:
            torch._C._cuda_setDevice(self._here)


class Gpu:
    """What the launcher needs of a GPU: memory, the current stream, kernels. Tests put an emulator here."""

    def __init__(self) -> None:
        self.loaded: dict[tuple[str, str, int], _Loaded] = {}
        self.launches: dict[_LaunchKey, _Launch] = {}
        self.launch_kernel: Any = None
        self.set_words: Any = None
        self._loading = threading.RLock()
        self._compiling: dict[tuple[Kernel, str, str], Future[bytes]] = {}

    def empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory from torch's caching allocator."""
        return torch.empty(shape, dtype=dtype, device=device)

    # The quickest of torch's ways to get memory like a tensor's, without a function of Python's around them.
    empty_like = staticmethod(torch.empty_like)
    new_strided = staticmethod(Tensor.new_empty_strided)

    in_capture = staticmethod(torch.cuda.is_current_stream_capturing)

    def zeros(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same, cleared."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def queue(self, device: torch.device) -> Queue:
        """torch's current stream of `device`, to be closed when the launches are made."""
        if self.launch_kernel is None:
            self._open_driver()
        return Queue(self, device.index)

    def stream_on(self, index: int) -> int | None:
        """torch's current stream of a device; None if another device is current."""
        if torch._C._cuda_getDevice() != index:
            return None
        stream: int = torch._C._cuda_getCurrentRawStream(index)
        return stream

    def launch(self, launch: Launch, index: int) -> None:
        """Launches on device `index`, which is current."""
        status = self.launch_kernel(*launch.arguments)
        if status:
            self.ask_again(status, index, self.launch_kernel, *launch.arguments)

    def fill_with_ones(self, address: int, count: int, index: int, stream: int) -> None:
        """Sets `count` bytes (a multiple of 4) to 255."""
        status = self.set_words(address, 0xFFFFFFFF, count // 4, stream)
        if status:
            self.ask_again(status, index, self.set_words, address, 0xFFFFFFFF, count // 4, stream)

    def ask_again(self, status: int, index: int, function: Callable[..., int], *arguments: Any) -> None:
        """Calls the driver again with a context, if it has refused for want of one.

        The driver, unlike torch, makes none current by itself: new threads have none, autograd's among them.
        """
        if status == _NO_CONTEXT:
            from cuda.core import Device

            Device(index).set_current()
            status = function(*arguments)
        if status:
            raise RuntimeError(f"softdtw_cuda: the CUDA driver refused a launch with error {status}")

    def keep(self, key: _LaunchKey, launch: _Launch) -> None:
        """For the next call like this one."""
        if len(self.launches) >= _MOST_LAUNCHES_KEPT:
            self.launches.clear()
        self.launches[key] = launch

    def load(self, kernel: Kernel, part: str, index: int, save: bool) -> _Loaded:
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
            made = _Loaded(module, int(handle), kernel.threads(part), shared)
            for other in _LOADED_WITH.get(part, ()):
                self.load(kernel, other, index, save=False)
            self.loaded[kernel.tag, part, index] = made
            return made

    def _binary(self, kernel: Kernel, part: str, architecture: str, save: bool, index: int = 0) -> bytes:
        """Compiles a part of a kernel or reads it, and begins with what will be needed right after it."""
        companion = config.wide_companion(kernel)
        parts = [part]
        if part == AT_ONCE:
            parts += _LOADED_WITH[part]
        elif part == FORWARD and save:
            parts.append(BACKWARD)
        needed = [(kernel, of) for of in parts]
        if companion != kernel:
            needed += [(companion, of if of == FORWARD else REDO) for of in parts]
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
        launch = library.cuLaunchKernelEx
        launch.argtypes = [ctypes.c_void_p] * 4
        set_words = library.cuMemsetD32Async
        set_words.argtypes = [ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]
        self.set_words, self.launch_kernel = set_words, launch
