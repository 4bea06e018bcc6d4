"""Tensors in, tensors out: allocates through torch, fills in `Params`, launches on torch's current stream.

Nothing here waits for the GPU or reads from it. Each call makes one buffer of bytes (laid out by `config`),
fills its front with ones, and launches; narrow kernels are followed by a launch that redoes flagged samples
and is usually over at once.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import config
from .compile import binary_of
from .config import TILE, Kernel, Layout, Plan
from .params import Params

_LOG2_E = math.log2(math.e)
_LN_2 = math.log(2.0)
_REDO_BLOCKS_PER_PROCESSOR = 4


class _Loaded(NamedTuple):
    """Handles of a kernel's functions on one device; `module` keeps them alive."""

    module: Any
    forward: int
    backward: int
    forward_shared: int
    backward_shared: int


class Gpu:
    """What the launcher needs of a GPU: memory, the current stream, kernels. Tests put an emulator here."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Kernel, int], _Loaded] = {}
        self._loading = threading.Lock()
        self._threads = threading.local()
        self._compiling: dict[Kernel, Future[bytes]] = {}
        self._launch_kernel: Any = None
        self._set_words: Any = None

    def empty(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory from torch's caching allocator."""
        return torch.empty(shape, dtype=dtype, device=device)

    def zeros(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same, cleared."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def fill_with_ones(self, buffer: Tensor, count: int) -> None:
        """Sets the first `count` bytes (a multiple of 4) to 255, on the current stream."""
        if self._set_words is None:
            buffer[:count].fill_(255)  # the first call of all, before the driver is known
            return
        index: int = buffer.device.index
        here = self._enter(index)
        stream = torch._C._cuda_getCurrentRawStream(index)
        status = self._set_words(buffer.data_ptr(), 0xFFFFFFFF, count // 4, stream)
        self._leave(here, index, status)

    def run(self, kernel: Kernel, backward: bool, params: Params, blocks: int, device: torch.device) -> None:
        """Queues a kernel on torch's current stream of `device`."""
        index: int = device.index
        loaded = self._loaded.get((kernel, index)) or self._load(kernel, index)
        if backward:
            handle, threads, shared = loaded.backward, kernel.backward_threads, loaded.backward_shared
        else:
            handle, threads, shared = loaded.forward, kernel.forward_threads, loaded.forward_shared
        arguments = ctypes.c_void_p(ctypes.addressof(params))
        here = self._enter(index)
        stream = torch._C._cuda_getCurrentRawStream(index)
        status = self._launch_kernel(
            handle, blocks, 1, 1, threads, 1, 1, shared, stream, ctypes.addressof(arguments), None
        )
        self._leave(here, index, status)

    def _enter(self, index: int) -> int:
        """Makes the device's context current; the device that was current is returned for `_leave`."""
        here: int = torch._C._cuda_getDevice()
        if here != index:
            torch._C._cuda_setDevice(index)
        elif not getattr(self._threads, "has_context", False):
            # The driver, unlike torch, makes no context current by itself: autograd's threads have none.
            from cuda.core import Device

            Device(index).set_current()
            self._threads.has_context = True
        return here

    def _leave(self, here: int, index: int, status: int) -> None:
        if here != index:
            torch._C._cuda_setDevice(here)
        if status:
            raise RuntimeError(f"softdtw_cuda: the CUDA driver refused a launch with error {status}")

    def _load(self, kernel: Kernel, index: int) -> _Loaded:
        with self._loading:
            found = self._loaded.get((kernel, index))
            if found is not None:
                return found
            try:
                from cuda.bindings import driver
                from cuda.core import Device, ObjectCode
            except ImportError as error:
                raise ImportError(
                    f"softdtw_cuda: tensors on a GPU need NVIDIA's cuda-core ({error}); pip install cuda-core"
                ) from error
            properties = torch.cuda.get_device_properties(index)
            binary = self._binary(kernel, f"sm_{properties.major}{properties.minor}")
            with torch.cuda.device(index):
                torch.cuda.current_stream(index).query()  # torch's context is the one to load into
                Device(index).set_current()
                module = ObjectCode.from_cubin(binary)
                handles = []
                for name, shared in (
                    (kernel.forward_name, kernel.forward_shared),
                    (kernel.backward_name, kernel.backward_shared),
                ):
                    handle = driver.CUkernel(int(module.get_kernel(name).handle))
                    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    (status,) = driver.cuKernelSetAttribute(attribute, shared, handle, driver.CUdevice(index))
                    if status:
                        raise RuntimeError(
                            f"softdtw_cuda: {name} needs {shared} bytes of shared memory, which "
                            f"{properties.name} does not give: {status}"
                        )
                    handles.append(int(handle))
            self._open_driver()
            made = _Loaded(module, handles[0], handles[1], kernel.forward_shared, kernel.backward_shared)
            self._loaded[kernel, index] = made
            return made

    def _binary(self, kernel: Kernel, architecture: str) -> bytes:
        """Compiles or reads a kernel; its wide companion, needed right after, is compiled beside it."""
        companion = config.wide_companion(kernel)
        if companion not in self._compiling and companion != kernel:
            with ThreadPoolExecutor(1) as pool:
                self._compiling[companion] = pool.submit(binary_of, companion, architecture)
                return binary_of(kernel, architecture)
        started = self._compiling.get(kernel)
        return binary_of(kernel, architecture) if started is None else started.result()

    def _open_driver(self) -> None:
        """The two driver calls that every launch makes, by ctypes."""
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        launch = library.cuLaunchKernel
        launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
        set_words = library.cuMemsetD32Async
        set_words.argtypes = [ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p]
        self._launch_kernel, self._set_words = launch, set_words


gpu = Gpu()


def _redo_blocks(kernel: Kernel, batch: int, n: int) -> int:
    return min(batch * kernel.strips(n), _REDO_BLOCKS_PER_PROCESSOR * config.weakest_device().processors)


class _Call(NamedTuple):
    """What depends on shapes alone, kept from call to call; `main` is a `Params` without addresses."""

    forward: Layout
    backward: Layout
    main: bytes
    blocks: int
    redo_blocks: int
    main_bounds: int
    redo_bounds: int


@functools.lru_cache(maxsize=256)
def _call(plan: Plan, batch: int, n: int, m: int, d: int, gamma: float, bandwidth: int, save: bool) -> _Call:
    forward = config.forward_layout(plan, batch, n, m, bandwidth, save)
    backward = config.backward_layout(plan, batch, n, m)

    kernel = plan.main
    p = Params()
    p.batch, p.n, p.m, p.d = batch, n, m, d
    p.bandwidth = min(bandwidth, n + m) if bandwidth >= 0 else n + m
    p.strips = kernel.strips(n)
    p.checkpoints = kernel.checkpoints(m, bandwidth)
    p.bound_columns = kernel.bound_columns(m, bandwidth)
    p.tiles = (m + TILE - 1) // TILE
    p.group = min(batch, config.PAIRS_AT_A_TIME)
    p.scale = _LOG2_E / gamma
    p.unscale = gamma * _LN_2
    p.pair_bytes = forward.pair_bytes
    redo = plan.redo or plan.main
    return _Call(
        forward,
        backward,
        bytes(p),
        batch * plan.main.strips(n),
        _redo_blocks(redo, batch, n),
        plan.main.states_bytes(n, m, bandwidth),
        redo.states_bytes(n, m, bandwidth),
    )


def _rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself if its last two dimensions are dense; its batch stride is free."""
    if tensor.is_contiguous():
        return tensor
    _, rows, columns = tensor.shape
    strides = tensor.stride()
    if (columns == 1 or strides[2] == 1) and (rows == 1 or strides[1] == columns):
        return tensor
    return tensor.contiguous()


def _batch_stride(tensor: Tensor) -> int:
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


def _aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0 and _batch_stride(tensor) * tensor.element_size() % 16 == 0


def _set_inputs(
    p: Params, x: Tensor, y: Tensor | None, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> None:
    p.x, p.x_stride = x.data_ptr(), _batch_stride(x)
    if y is not None:
        p.y, p.y_stride = y.data_ptr(), _batch_stride(y)
    if x_lengths is not None:
        p.x_lengths = x_lengths.data_ptr()
    if y_lengths is not None:
        p.y_lengths = y_lengths.data_ptr()


def _forward(
    plan: Plan,
    x: Tensor,
    y: Tensor | None,
    batch: int,
    n: int,
    m: int,
    d: int,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    device = x.device
    call = _call(plan, batch, n, m, d, gamma, bandwidth, save)
    layout = call.forward
    value = gpu.empty(batch, torch.float64 if x.dtype == torch.float64 else torch.float32, device)
    buffer = gpu.empty(layout.total, torch.uint8, device)
    gpu.fill_with_ones(buffer, layout.filled)
    base = buffer.data_ptr()
    p = Params.from_buffer_copy(call.main)
    _set_inputs(p, x, y, x_lengths, y_lengths)
    p.value = value.data_ptr()
    p.states, p.bounds = base + layout.pairs, base + layout.pairs + call.main_bounds
    p.tickets, p.health, p.ready = base, base + layout.health, base + layout.ready
    p.rows, p.row_bytes = base + layout.rows, layout.row_bytes
    p.more_rows, p.more_row_bytes = base + layout.more_rows, layout.more_row_bytes
    p.save = save
    gpu.run(plan.main, False, p, call.blocks, device)
    if plan.redo is not None:
        p.strips, p.redo, p.save = plan.redo.strips(n), 1, 0
        p.tickets = base + 4
        gpu.run(plan.redo, False, p, call.redo_blocks, device)
    return value, buffer if save else buffer.new_empty(0)


def _backward(
    plan: Plan,
    grad: Tensor,
    x: Tensor,
    y: Tensor | None,
    value: Tensor,
    state: Tensor,
    batch: int,
    n: int,
    m: int,
    d: int,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    grad_x: Tensor | None,
    grad_y: Tensor | None,
) -> None:
    device = x.device
    call = _call(plan, batch, n, m, d, gamma, bandwidth, True)
    saved, layout = call.forward, call.backward
    if grad.dtype != value.dtype:
        grad = grad.to(value.dtype)
    # The second walk of the redo writes values again; they go behind the scratch.
    value_bytes = 8 * batch if plan.redo is not None else 0
    buffer = gpu.empty(layout.total + value_bytes, torch.uint8, device)
    gpu.fill_with_ones(buffer, layout.filled)
    base, state_base = buffer.data_ptr(), state.data_ptr()
    pairs = state_base + saved.pairs
    p = Params.from_buffer_copy(call.main)
    _set_inputs(p, x, y, x_lengths, y_lengths)
    p.grad, p.grad_stride, p.value = grad.data_ptr(), grad.stride(0), value.data_ptr()
    p.states, p.bounds = pairs, pairs + call.main_bounds
    sums = []
    if grad_x is not None:
        p.grad_x = p.sum_x = grad_x.data_ptr()
        p.grad_x_wide = grad_x.dtype == torch.float32
        if grad_x.element_size() == 2 and y is not None:
            sums.append(gpu.empty(grad_x.shape, torch.float32, device))
            p.sum_x = sums[-1].data_ptr()
    if grad_y is not None:
        p.grad_y = p.sum_y = grad_y.data_ptr()
        p.grad_y_wide = grad_y.dtype == torch.float32
        if grad_y.element_size() == 2:
            sums.append(gpu.empty(grad_y.shape, torch.float32, device))
            p.sum_y = sums[-1].data_ptr()
    p.tickets, p.health, p.turns = base, state_base + saved.health, base + layout.turns
    p.rows, p.row_bytes = base + layout.rows, layout.row_bytes
    p.more_rows, p.more_row_bytes = base + layout.more_rows, layout.more_row_bytes
    gpu.run(plan.main, True, p, call.blocks, device)
    if plan.redo is not None:
        # The forward's second walk kept nothing: walk once more with wide states in the pair's own place.
        p.strips, p.redo, p.save = plan.redo.strips(n), 1, 1
        p.checkpoints = plan.redo.checkpoints(m, bandwidth)
        p.bound_columns = plan.redo.bound_columns(m, bandwidth)
        p.bounds = pairs + call.redo_bounds
        p.more_rows, p.more_row_bytes = state_base + saved.rows, saved.row_bytes
        p.tickets, p.ready, p.turns = base + 4, base + layout.ready, None
        p.value = base + layout.total
        gpu.run(plan.redo, False, p, call.redo_blocks, device)
        p.tickets, p.ready, p.turns = base + 8, base + layout.ready + 4 * batch, base + layout.turns
        p.value, p.save = value.data_ptr(), 0
        gpu.run(plan.redo, True, p, call.redo_blocks, device)


def fused_forward(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Values (B,) of x (B or 1, N, D) against y (B or 1, M, D), and the state that the backward needs."""
    x, y = _rows_contiguous(x), _rows_contiguous(y)
    n, d = x.shape[1:]
    m = y.shape[1]
    batch = y.shape[0] if x.shape[0] == 1 else x.shape[0]
    plan = config.fused_plan(n, d, x.dtype, bandwidth, _aligned(x) and _aligned(y))
    return _forward(plan, x, y, batch, n, m, d, gamma, bandwidth, x_lengths, y_lengths, save)


def fused_backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    value: Tensor,
    state: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    need_x: bool,
    need_y: bool,
) -> tuple[Tensor, Tensor]:
    """Per-sample gradients (B, N, D) and (B, M, D); empty where not needed, not 16-bit where broadcast."""
    x, y = _rows_contiguous(x), _rows_contiguous(y)
    n, d = x.shape[1:]
    m = y.shape[1]
    batch = y.shape[0] if x.shape[0] == 1 else x.shape[0]
    plan = config.fused_plan(n, d, x.dtype, bandwidth, _aligned(x) and _aligned(y))
    new = gpu.empty if x_lengths is None and y_lengths is None else gpu.zeros

    def gradient(series: Tensor, needed: bool) -> Tensor | None:
        if not needed:
            return None
        dtype = series.dtype if series.shape[0] == batch else value.dtype
        return new((batch, *series.shape[1:]), dtype, x.device)

    grad_x, grad_y = gradient(x, need_x), gradient(y, need_y)
    _backward(
        plan, grad, x, y, value, state, batch, n, m, d, gamma, bandwidth, x_lengths, y_lengths, grad_x, grad_y
    )
    nothing = x.new_empty(0)
    return nothing if grad_x is None else grad_x, nothing if grad_y is None else grad_y


def cost_forward(
    cost: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Values (B,) of cost matrices (B, N, M), and the state that the backward needs."""
    cost = _rows_contiguous(cost)
    batch, n, m = cost.shape
    plan = config.cost_plan(n, cost.dtype, bandwidth)
    return _forward(plan, cost, None, batch, n, m, 1, gamma, bandwidth, x_lengths, y_lengths, save)


def cost_backward(
    grad: Tensor,
    cost: Tensor,
    value: Tensor,
    state: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
) -> Tensor:
    """(B, N, M): grad_b times the soft alignment E of eq. (8)."""
    cost = _rows_contiguous(cost)
    batch, n, m = cost.shape
    plan = config.cost_plan(n, cost.dtype, bandwidth)
    # Cells that no kernel visits, outside the band or in the padding, are zeros.
    gradient = gpu.zeros((batch, n, m), cost.dtype, cost.device)
    _backward(
        plan,
        grad,
        cost,
        None,
        value,
        state,
        batch,
        n,
        m,
        1,
        gamma,
        bandwidth,
        x_lengths,
        y_lengths,
        gradient,
        None,
    )
    return gradient
