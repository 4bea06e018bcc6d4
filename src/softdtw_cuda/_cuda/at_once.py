"""Small pairs, whose host is busier than their GPU: values and gradients by one call, with little Python.

Who makes a `SmallPairs` has looked at shapes and options; launches are kept from call to call. Every
function that is called costs more than it seems: between two steps of a training loop the caches get cold.
"""

from __future__ import annotations

import contextlib

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
_MOST_READY = 8

_Addresses = tuple[int, ...]
"""Of x and y, elements from one sample of x, and of y, to the next, of scratch, result, grad_x and grad_y."""


class _Ready:
    """The launches of a call, ready to be made again."""

    __slots__ = ("last", "main", "passes", "redo")

    def __init__(self, call: Call, device: torch.device, scan: bool, weight: float) -> None:
        self.main = main = Params.from_buffer_copy(call.params)
        main.save, main.scan, main.weight = 1, scan, weight
        self.redo = Params.from_buffer_copy(main)
        set_redo_counts(self.redo, call)
        plan = call.plan
        parts = (AT_ONCE,) if call.alone else (FORWARD, BACKWARD)
        queue = launch.gpu.queue(device)
        try:
            self.passes = tuple(queue.prepare(plan.main, part, main, call.blocks) for part in parts)
            self.last: Launch | None = None
            if plan.redo is not None:
                self.last = queue.prepare(plan.redo, REDO, self.redo, call.redo_blocks)
        finally:
            queue.close()


class _Kept:
    """What is kept from call to call on one stream.

    Pairs of one strip (`alone`) take one launch for both passes. The last launch, after narrow kernels,
    redoes flagged samples and, if they are few, reduces `values` at the end of the scratch, which takes
    `floats`; a launch for both passes then prepares the last one's scratch, too, and nothing need be `filled`
    before it. A training loop mostly has memory that it had before, in turns: launches are `ready` for the
    addresses that they point to.
    """

    __slots__ = ("_call", "_weight", "alone", "filled", "floats", "ready", "scratch", "values")

    def __init__(self, call: Call, batch: int, reduction: Reduction) -> None:
        few = batch <= _MOST_PAIRS_FOR_A_WARP
        in_kernel = few and call.plan.redo is not None and reduction != "none"
        layout = call.layout
        self._call, self._weight = call, 1.0 / batch if reduction == "mean" else 1.0
        self.alone, self.scratch = call.alone, layout.scratch
        self.filled = 0 if call.alone and few else layout.filled
        self.values = layout.total if in_kernel else 0
        self.floats = (layout.total // 4 + (batch if in_kernel else 0),)
        self.ready: dict[_Addresses, _Ready] = {}

    def pointed_at(self, addresses: _Addresses, device: torch.device) -> _Ready:
        """Launches for addresses for which there are none: new ones, or those that were used longest ago."""
        ready = None
        if len(self.ready) >= _MOST_READY:
            # Another thread may be quicker.
            with contextlib.suppress(KeyError, RuntimeError, StopIteration):
                ready = self.ready.pop(next(iter(self.ready)))
        if ready is None:
            ready = _Ready(self._call, device, not self.filled, self._weight)
        x, y, x_stride, y_stride, start, result, grad_x, grad_y = addresses
        inputs = x, y, 0, 0, x_stride, y_stride
        value, total = (start + self.values, result) if self.values else (result, 0)
        point(ready.main, self._call, inputs, start, value, total, 0, grad_x, grad_y)
        point(ready.redo, self._call, inputs, start, value, total, 0, grad_x, grad_y, True)
        return ready


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
        self._kept: dict[tuple[int, bool], _Kept] = {}

    def __call__(
        self, x: Tensor, y: Tensor, need_x: bool, need_y: bool
    ) -> tuple[Tensor, tuple[Tensor | None, Tensor | None], int, bool]:
        """Values of x (B, N, D) against y (B, M, D), or their mean or sum, and the gradients of that.

        The stream comes with them, and whether the call was captured in a graph.

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
        aligned = not (x_at | y_at | (x_stride | y_stride) * 4) % 16
        kept = self._kept.get((stream, aligned))
        if kept is None:
            kept = self._keep(stream, aligned)
        grad_x = grad_y = None
        if need_x:
            grad_x = gpu.empty_like(x) if dense else gpu.empty(x.shape, torch.float32, x.device)
        if need_y:
            grad_y = gpu.empty_like(y) if dense else gpu.empty(y.shape, torch.float32, x.device)
        buffer = gpu.new_strided(x, kept.floats, (1,))
        result = gpu.new_strided(x, (), ()) if kept.values else gpu.new_strided(x, (self._batch,), (1,))
        start = buffer.data_ptr()
        addresses = (
            x_at,
            y_at,
            x_stride,
            y_stride,
            start,
            result.data_ptr(),
            0 if grad_x is None else grad_x.data_ptr(),
            0 if grad_y is None else grad_y.data_ptr(),
        )
        ready = kept.ready.pop(addresses, None)  # so that no other thread has it
        if ready is None:
            ready = kept.pointed_at(addresses, x.device)
        if kept.filled:
            gpu.fill_with_ones(start, kept.filled, index, stream)
        gpu.launch(ready.passes[0], index)
        if not kept.alone:
            gpu.fill_with_ones(start, kept.scratch, index, stream)
            gpu.launch(ready.passes[1], index)
        if ready.last is not None:
            gpu.launch(ready.last, index)
        kept.ready[addresses] = ready
        captured = stream != 0 and gpu.in_capture()  # on 0 nothing can be
        result = result if kept.values else reduced(result, self._reduction)
        return result, (grad_x, grad_y), stream, captured

    def _keep(self, stream: int, aligned: bool) -> _Kept:
        call = fused_call(*self._shape, torch.float32, self._gamma, self._bandwidth, aligned, True)
        if len(self._kept) >= _MOST_STREAMS_KEPT:
            self._kept.clear()
        return self._kept.setdefault((stream, aligned), _Kept(call, self._batch, self._reduction))
