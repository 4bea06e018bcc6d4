"""Launches as the driver gets them, without a driver."""

from __future__ import annotations

import ctypes
import gc
import threading

import pytest
import torch

from softdtw_cuda._cuda import config, driver
from softdtw_cuda._cuda.config import FORWARD
from softdtw_cuda._cuda.params import Params, set_addresses

KERNEL = config.choose(False, 8, torch.float32, False, False, True, config.Device()).main
STREAM = 0x1234567890


class Driver:
    """Notes what it is asked to launch, and answers `status`."""

    def __init__(self) -> None:
        self.launched: list[tuple[tuple[int, ...], int, int, int, int]] = []
        self.x: list[int | None] = []
        self.status = 0
        self.context = True

    def launch(self, config_at: int, handle: int, arguments: int, extra: None) -> int:
        given = driver._LaunchConfig.from_address(config_at)
        argument = ctypes.c_void_p.from_address(arguments).value
        assert argument is not None
        assert extra is None
        assert (given.attributes, given.attribute_count) == (None, 0)
        params = Params.from_address(argument)
        self.x.append(params.x)
        shape = (*given.grid, *given.block)
        self.launched.append((shape, given.shared, given.stream, handle, params.blocks))
        return self.status if self.context else 201


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> tuple[driver.Gpu, Driver]:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    gpu, fake = driver.Gpu(), Driver()
    gpu.launch_kernel = fake.launch
    gpu.loaded[KERNEL.tag, FORWARD, 0] = driver._Loaded(None, 77, 256, 4096)
    return gpu, fake


def test_layout_of_the_drivers_own_structure() -> None:
    fields = [name for name, _ in driver._LaunchConfig._fields_]
    # CUlaunchConfig of cuda.h, on every 64-bit platform.
    assert [getattr(driver._LaunchConfig, name).offset for name in fields] == [0, 12, 24, 32, 40, 48]
    assert ctypes.sizeof(driver._LaunchConfig) == 56


def test_a_launch_says_blocks_threads_memory_and_stream(fake: tuple[driver.Gpu, Driver]) -> None:
    gpu, seen = fake
    queue = gpu.queue(torch.device("cuda", 0))
    for blocks in (5, 6, 5):
        queue.run(KERNEL, FORWARD, Params(), blocks)
    assert seen.launched == [((blocks, 1, 1, 256, 1, 1), 4096, STREAM, 77, blocks) for blocks in (5, 6, 5)]


def test_a_prepared_launch_takes_what_its_params_say_by_then(fake: tuple[driver.Gpu, Driver]) -> None:
    gpu, seen = fake
    queue = gpu.queue(torch.device("cuda", 0))
    params = Params()
    launch = queue.prepare(KERNEL, FORWARD, params, 5)
    assert not seen.launched
    for value in (1, 2):
        params.x = value
        gpu.launch(launch, 0)
    assert seen.launched == [((5, 1, 1, 256, 1, 1), 4096, STREAM, 77, 5)] * 2
    assert seen.x == [1, 2]


def test_a_prepared_launch_outlives_what_it_was_made_of(fake: tuple[driver.Gpu, Driver]) -> None:
    gpu, seen = fake
    queue = gpu.queue(torch.device("cuda", 0))
    params = Params()
    launches = [queue.prepare(KERNEL, FORWARD, params, blocks) for blocks in range(1, 200)]
    gpu.launches.clear()
    gc.collect()
    others = [driver._LaunchConfig() for _ in range(500)]  # where freed ones were
    for launch in launches:
        gpu.launch(launch, 0)
    assert [shape[0] for shape, *_ in seen.launched] == list(range(1, 200))
    assert len(others) == 500


def test_launches_kept_are_bounded(fake: tuple[driver.Gpu, Driver]) -> None:
    gpu, seen = fake
    queue = gpu.queue(torch.device("cuda", 0))
    for blocks in range(1, 3001):
        queue.run(KERNEL, FORWARD, Params(), blocks)
        assert len(gpu.launches) <= driver._MOST_LAUNCHES_KEPT
    assert [shape[0] for shape, *_ in seen.launched] == list(range(1, 3001))


def test_threads_that_clear_and_keep_at_once(fake: tuple[driver.Gpu, Driver]) -> None:
    gpu, seen = fake
    queue = gpu.queue(torch.device("cuda", 0))

    def work(first: int) -> None:
        for blocks in range(first, first + 2000):
            queue.run(KERNEL, FORWARD, Params(), blocks)

    threads = [threading.Thread(target=work, args=(1 + 2000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(shape[0] for shape, *_ in seen.launched) == list(range(1, 8001))
    assert all(shape[0] == blocks for shape, *_, blocks in seen.launched)


def test_a_refused_launch_raises(fake: tuple[driver.Gpu, Driver]) -> None:
    gpu, seen = fake
    seen.status = 700
    with pytest.raises(RuntimeError, match="refused a launch with error 700"):
        gpu.queue(torch.device("cuda", 0)).run(KERNEL, FORWARD, Params(), 1)


def test_a_thread_without_a_context_gets_one(
    fake: tuple[driver.Gpu, Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, seen = fake
    entered = []

    class Device:
        def __init__(self, index: int) -> None:
            self._index = index

        def set_current(self) -> None:
            entered.append(self._index)
            seen.context = self._index == 3

    def set_words(address: int, word: int, count: int, stream: int) -> int:
        assert (address, word, count, stream) == (64, 0xFFFFFFFF, 5, STREAM)
        return 0 if seen.context else 201

    monkeypatch.setattr("cuda.core.Device", Device)
    gpu.set_words = set_words
    launch = gpu.queue(torch.device("cuda", 0)).prepare(KERNEL, FORWARD, Params(), 5)
    for asking in (lambda: gpu.launch(launch, 3), lambda: gpu.fill_with_ones(64, 20, 3, STREAM)):
        seen.context = False
        asking()
        asking()
        assert entered == [3]
        entered.clear()
    seen.context = False
    with pytest.raises(RuntimeError, match="refused a launch with error 201"):
        gpu.launch(launch, 4)


def test_addresses_are_set_in_the_order_of_the_fields() -> None:
    p = Params()
    names = [name for name, kind in Params._fields_ if kind is ctypes.c_void_p]
    set_addresses(p, 0, *range(1, len(names) + 1), -1, -2)
    assert [getattr(p, name) for name in names] == list(range(1, len(names) + 1))
    assert (p.x_stride, p.y_stride, p.pair_bytes) == (-1, -2, 0)
