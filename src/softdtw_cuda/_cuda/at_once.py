"""Small pairs, whose host is busier than their GPU: values and gradients by one call, with little Python.

Shapes and options are looked at once, by who makes a `SmallPairs`; launches are kept from call to call. Every
function that is called costs more than it seems: between two steps of a training loop the caches get cold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._memory import NotInMemory
from .._reduction import Reduction, reduced
from . import launch
from .config import AT_ONCE, BACKWARD, FORWARD, REDO
from .driver import Launch
from .launch import Call, fused_call, point, rows_contiguous, set_redo_counts
from .params import Params

_MOST_PAIRS_FOR_A_WARP = 1024
"""So many values can be added up, and so many flags looked through, by one warp."""
_MOST_STREAMS_KEPT = 64


class _Ready:
    """The launches of a call, ready to be made again.

    Pairs of one strip (`alone`) take one launch for both passes. The last launch, after narrow kernels,
    redoes flagged samples and, if they are few, reduces `values` at the end of the scratch; a launch for both
    passes then prepares the last one's scratch, too, and nothing need be `filled` before it. In a training
    loop torch often gives the same memory again: `addresses` are those that `main` and `redo` point to.
    """

    __slots__ = (
        *("addresses", "alone", "call", "filled", "floats", "last", "main", "passes", "redo", "scratch"),
        *("stream", "values"),
    )

    def __init__(self, call: Call, device: torch.device, batch: int, reduction: Reduction) -> None:
        few = batch <= _MOST_PAIRS_FOR_A_WARP
        in_kernel = few and call.plan.redo is not None and reduction != "none"
        self.call, self.alone, self.scratch = call, call.alone, call.layout.scratch
        self.main = main = Params.from_buffer_copy(call.params)
        main.save = 1
        main.weight = 1.0 / batch if reduction == "mean" else 1.0
        main.scan = call.alone and few
        self.filled = 0 if main.scan else call.layout.filled
        self.redo = Params.from_buffer_copy(main)
        set_redo_counts(self.redo, call)
        values = call.layout.total
        self.values = values if in_kernel else 0
        self.floats = values // 4 + batch if in_kernel else values // 4
        self.addresses: tuple[int, ...] = ()

        queue = launch.gpu.queue(device)
        try:
            self.stream = queue.stream
            parts = (AT_ONCE,) if call.alone else (FORWARD, BACKWARD)
            plan = call.plan
            self.passes = tuple(queue.prepare(plan.main, part, main, call.blocks) for part in parts)
            self.last: Launch | None = None
            if plan.redo is not None:
                self.last = queue.prepare(plan.redo, REDO, self.redo, call.redo_blocks)
        finally:
            queue.close()

    def point(self, addresses: tuple[int, ...]) -> None:
        x, y, x_stride, y_stride, start, result, grad_x, grad_y = addresses
        inputs = x, y, 0, 0, x_stride, y_stride
        value, total = (start + self.values, result) if self.values else (result, 0)
        point(self.main, self.call, inputs, start, value, total, 0, grad_x, grad_y)
        point(self.redo, self.call, inputs, start, value, total, 0, grad_x, grad_y, True)
        self.addresses = addresses


class SmallPairs:
    """Computes for float32 pairs of one shape, on one device, with one set of options."""

    __slots__ = ("_bandwidth", "_batch", "_gamma", "_index", "_kept", "_reduction", "_shape", "_strides")

    def __init__(
        self,
        x_shape: torch.Size,
        y_shape: torch.Size,
        index: int,
        gamma: float,
        bandwidth: int,
        reduction: Reduction,
    ) -> None:
        (self._batch, n, d), m = x_shape, y_shape[1]
        self._shape, self._strides = (self._batch, n, m, d), (n * d, m * d)
        self._index, self._gamma, self._bandwidth, self._reduction = index, gamma, bandwidth, reduction
        self._kept: dict[tuple[int, bool], list[_Ready]] = {}

    def __call__(
        self, x: Tensor, y: Tensor, need_x: bool, need_y: bool
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
        """Values of x (B, N, D) against y (B, M, D), or their mean or sum, and the gradients of that.

        Raises:
            NotInMemory: if x or y must be copied first.
        """
        gpu, index = launch.gpu, self._index
        stream = gpu.stream_on(index)
        if stream is None:
            with torch.cuda.device(index):
                return self(x, y, need_x, need_y)
        try:
            x_at, y_at = x.data_ptr(), y.data_ptr()
        except RuntimeError as error:
            raise NotInMemory from error
        if not x_at or not y_at or x.is_neg() or y.is_neg() or x._is_zerotensor() or y._is_zerotensor():
            raise NotInMemory
        x_stride, y_stride = self._strides
        dense = x.is_contiguous() and y.is_contiguous()
        if not dense:
            x, y = rows_contiguous(x), rows_contiguous(y)
            x_at, y_at, x_stride, y_stride = x.data_ptr(), y.data_ptr(), x.stride()[0], y.stride()[0]
        key = stream, not (x_at | y_at | (x_stride | y_stride) * 4) % 16
        kept = self._kept.get(key)
        if kept is None:
            kept = self._keep(key)
        try:
            ready = kept.pop()  # so that no other thread has it
        except IndexError:
            ready = None
        if ready is None:  # not up there: what is raised and caught on the way would hold on to this frame
            call = fused_call(*self._shape, torch.float32, self._gamma, self._bandwidth, key[1], True)
            ready = _Ready(call, x.device, self._batch, self._reduction)
        values = ready.values
        grad_x = grad_y = None
        if need_x:
            grad_x = gpu.empty_like(x) if dense else gpu.empty(x.shape, torch.float32, x.device)
        if need_y:
            grad_y = gpu.empty_like(y) if dense else gpu.empty(y.shape, torch.float32, x.device)
        buffer = gpu.new_empty(x, (ready.floats,))
        result = gpu.new_strided(x, (), ()) if values else gpu.new_empty(x, (self._batch,))
        addresses = (
            x_at,
            y_at,
            x_stride,
            y_stride,
            buffer.data_ptr(),
            result.data_ptr(),
            0 if grad_x is None else grad_x.data_ptr(),
            0 if grad_y is None else grad_y.data_ptr(),
        )
        if addresses != ready.addresses:
            ready.point(addresses)
        if ready.filled:
            gpu.fill_with_ones(addresses[4], ready.filled, index, stream)
        gpu.launch(ready.passes[0], index)
        if not ready.alone:
            gpu.fill_with_ones(addresses[4], ready.scratch, index, stream)
            gpu.launch(ready.passes[1], index)
        if ready.last is not None:
            gpu.launch(ready.last, index)
        kept.append(ready)
        return result if values else reduced(result, self._reduction), (grad_x, grad_y)

    def _keep(self, key: tuple[int, bool]) -> list[_Ready]:
        if len(self._kept) >= _MOST_STREAMS_KEPT:
            self._kept.clear()
        return self._kept.setdefault(key, [])
