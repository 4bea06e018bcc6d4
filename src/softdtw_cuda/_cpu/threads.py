"""Threads of the CPU kernels: a pool for each process, which follows torch's number of threads."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

SMALLEST_SHARE = 600_000
"""Cells times (dimensions + 8) for each thread below which waking another costs more than it gains."""

_executors: dict[int, ThreadPoolExecutor] = {}
_executors_lock = threading.Lock()


def _executor() -> ThreadPoolExecutor:
    # Keyed by process: a fork inherits the object but not its threads.
    process = os.getpid()
    executor = _executors.get(process)
    if executor is None:
        with _executors_lock:
            executor = _executors.get(process)
            if executor is None:
                _executors.clear()
                executor = ThreadPoolExecutor(
                    max(1, os.cpu_count() or 1, torch.get_num_threads()), "softdtw-cpu"
                )
                _executors[process] = executor
    return executor


def _replace_lock_after_fork() -> None:
    global _executors_lock
    _executors_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_lock_after_fork)

_give_way: Callable[[], None] = getattr(os, "sched_yield", functools.partial(time.sleep, 0))


def run(threads: int, work: Callable[[int], bool]) -> None:
    """Call ``work(k)`` on ``threads`` threads, this one included, again for as long as it returns True.

    A worker returns True when the tile it waits for is still under way. That tile's ticket was drawn
    earlier, so its worker has started: waiting ends even when the pool is busy and this thread is alone.
    """
    if threads == 1:
        while work(0):
            _give_way()
        return
    failed = threading.Event()

    def loop(worker: int) -> None:
        try:
            while work(worker) and not failed.is_set():
                _give_way()
        except BaseException:
            failed.set()
            raise

    helpers: list[Future[None]] = []
    try:
        helpers = [_executor().submit(loop, k) for k in range(1, threads)]
        loop(0)
    finally:
        started = [helper for helper in helpers if not helper.cancel()]
        for helper in started:
            helper.exception()
    for helper in started:
        helper.result()


def threads_for(work: int) -> int:
    """How many threads are worth waking, work in the unit of `SMALLEST_SHARE`."""
    return max(1, min(torch.get_num_threads(), work // SMALLEST_SHARE))
