"""Launches as the driver gets them, without a driver."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from softdtw_cuda._cuda import config, driver
from softdtw_cuda._cuda.kernel import FORWARD
from softdtw_cuda._cuda.params import Params, set_addresses

KERNEL = config.choose(False, 8, torch.float32, False, False, True, config.Device()).main
STREAM = 0x1234567890
HANDLE = 0x9876543210
MEMORY = 0xFEDCBA9876543210
WORDS = 2**33 + 5
MOST_BLOCKS = 2**31 - 1
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)
SET_WORDS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)
"""cuLaunchKernel and cuMemsetD32Async, as C declares them."""


def as_found(callback: Any) -> Any:
    """A function as ctypes finds it in a library: what it is called with is not converted to its types."""
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)


class Driver:
    """Notes what it is asked to launch, and answers `status`."""

    def __init__(self) -> None:
        self.launched: list[tuple[tuple[int, ...], int, int, int, int]] = []
        self.x: list[int | None] = []
        self.status = 0
        self.context = True
        self.callbacks: list[Any] = []
        """Kept alive."""

    def launch(self, handle: int, *arguments: Any) -> int:
        *shape, shared, stream, params_at, extra = arguments
        argument = ctypes.c_void_p.from_address(params_at).value
        assert argument is not None
        assert extra is None
        params = Params.from_address(argument)
        self.x.append(params.x)
        self.launched.append((tuple(shape), shared, stream, handle, params.blocks))
        return self.status if self.context else 201


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> tuple[driver.Gpu, Driver]:
    monkeypatch.setattr(driver, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "current_stream", lambda index: STREAM)
    gpu, fake = driver.Gpu(), Driver()
    fake.callbacks = [LAUNCH(fake.launch)]
    gpu.launch_kernel = as_found(fake.callbacks[0])
    gpu.loaded[KERNEL.tag, FORWARD, 0] = driver._Loaded(None, ctypes.c_void_p(HANDLE), 256, 4096)
    return gpu, fake


def test_a_launch_says_blocks_threads_memory_and_stream(fake: tuple[driver.Gpu, Driver]) -> None:
    gpu, seen = fake
    params = Params()
    with gpu.queue(torch.device("cuda", 0)) as queue:
        for blocks in (5, MOST_BLOCKS, 5):
            params.x = 10 * blocks
            queue.run(KERNEL, FORWARD, params, blocks)
    assert seen.launched == [
        ((blocks, 1, 1, 256, 1, 1), 4096, STREAM, HANDLE, blocks) for blocks in (5, MOST_BLOCKS, 5)
    ]
    assert seen.x == [50, 10 * MOST_BLOCKS, 50]


def test_the_tensors_device_is_current_while_launching(
    fake: tuple[driver.Gpu, Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, _ = fake
    chosen: list[int] = []
    monkeypatch.setattr(driver, "set_device", chosen.append)

    def fail() -> None:
        with gpu.queue(torch.device("cuda", 1)):
            assert chosen == [1]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert chosen == [1, 0]
    with gpu.queue(torch.device("cuda", 0)):
        pass
    assert chosen == [1, 0]


def test_threads_launch_side_by_side(fake: tuple[driver.Gpu, Driver]) -> None:
    gpu, seen = fake

    def work(first: int) -> None:
        with gpu.queue(torch.device("cuda", 0)) as queue:
            for blocks in range(first, first + 500):
                queue.run(KERNEL, FORWARD, Params(), blocks)

    threads = [threading.Thread(target=work, args=(1 + 500 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(shape[0] for shape, *_ in seen.launched) == list(range(1, 2001))
    assert all(shape[0] == blocks for shape, *_, blocks in seen.launched)


def test_a_refused_launch_raises(fake: tuple[driver.Gpu, Driver]) -> None:
    gpu, seen = fake
    seen.status = 700
    with (
        gpu.queue(torch.device("cuda", 0)) as queue,
        pytest.raises(RuntimeError, match="refused a launch with error 700"),
    ):
        queue.run(KERNEL, FORWARD, Params(), 1)


def test_a_thread_without_a_context_gets_one(
    fake: tuple[driver.Gpu, Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, seen = fake
    entered = []
    works = True

    class Device:
        def __init__(self, index: int) -> None:
            self._index = index

        def set_current(self) -> None:
            entered.append(self._index)
            seen.context = works

    def set_words(address: int, word: int, count: int, stream: int) -> int:
        assert (address, word, count, stream) == (MEMORY, 0xFFFFFFFF, WORDS, STREAM)
        return 0 if seen.context else 201

    monkeypatch.setattr("cuda.core.Device", Device)
    seen.callbacks.append(SET_WORDS(set_words))
    gpu.set_words = as_found(seen.callbacks[-1])
    with gpu.queue(torch.device("cuda", 0)) as queue:
        call: Callable[[], object]
        for call in (
            lambda: queue.run(KERNEL, FORWARD, Params(), 5),
            lambda: queue.fill_with_ones(MEMORY, 4 * WORDS),
        ):
            seen.context = False
            call()
            call()
            assert entered == [0]
            entered.clear()
        seen.context = works = False
        with pytest.raises(RuntimeError, match="refused a launch with error 201"):
            queue.fill_with_ones(MEMORY, 4 * WORDS)


def test_addresses_are_set_in_the_order_of_the_fields() -> None:
    p = Params()
    names = [name for name, kind, *_ in Params._fields_ if kind is ctypes.c_void_p]
    set_addresses(p, 0, *range(1, len(names) + 1))
    assert [getattr(p, name) for name in names] == list(range(1, len(names) + 1))
    assert p.x_stride == 0
