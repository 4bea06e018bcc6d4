"""Threads of the CPU kernels: a pool for each process, which follows torch's number of threads."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

SMALLEST_SHARE = 600_000
"""Cells times (dimensions + 8) for each thread below which waking another costs more than it gains."""

_waking = threading.local()
"""`now` in a thread that is handing out work."""

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


class _Call:
    """The work of one call, until it is done or somebody fails."""

    def __init__(self, work: Callable[[int], bool]) -> None:
        self._work = work
        self.stopped = False
        self.errors: list[BaseException] = []

    def loop(self, worker: int) -> None:
        try:
            while not self.stopped and self._work(worker):
                _give_way()
        except BaseException:
            self.stopped = True
            raise


class _Helper:
    """A worker's place in a call: a thread of the pool takes it, or the caller closes it, whichever is first.

    No lock is held while Python code runs: an interrupt can then not leave one locked.
    """

    def __init__(self, call: _Call, worker: int) -> None:
        self._call = call
        self._worker = worker
        self._owner: dict[None, str] = {}
        self._finished = False
        self._latch = threading.Lock()
        self._latch.acquire()

    def __call__(self) -> None:
        if self._owner.setdefault(None, "helper") != "helper":
            return
        try:
            self._call.loop(self._worker)
        except BaseException as error:
            self._call.errors.append(error)
        finally:
            self._finished = True
            self._latch.release()

    def wait(self) -> None:
        """Until it has left the call for good. After an interrupt, call it again."""
        if self._owner.setdefault(None, "caller") == "caller":
            return  # it has not begun, and will not
        while not self._finished:
            self._latch.acquire(timeout=0.1)


def _wake(helpers: list[_Helper]) -> None:
    """Hands each helper to a thread of the pool.

    At exit, or where no thread can be started, the work is left to those who are there. So it is for a call
    from a signal's handler or a finalizer that runs inside this function: the pool's locks are held then.
    """
    if getattr(_waking, "now", False):
        return
    _waking.now = True
    try:
        with contextlib.suppress(RuntimeError):
            for helper in helpers:
                _executor().submit(helper)
    finally:
        _waking.now = False


def run(threads: int, work: Callable[[int], bool]) -> None:
    """Call ``work(k)`` on ``threads`` threads, this one included, again for as long as it returns True.

    A worker returns True after a slice of its work, so that Python can handle signals, or when the tile it
    waits for is still under way. That tile's ticket was drawn earlier, so its worker has started: waiting
    ends even when the pool is busy and this thread is alone.

    Whatever is raised, by a worker or by a signal's handler, ends all workers after their slices. It leaves
    this function when the last of them has finished, however many more interrupts arrive meanwhile.
    """
    call = _Call(work)
    if threads == 1:
        call.loop(0)
        return
    helpers = [_Helper(call, worker) for worker in range(1, threads)]
    interrupt: BaseException | None = None
    try:
        _wake(helpers)
        call.loop(0)
    except BaseException as raised:
        call.stopped = True
        interrupt = raised
    while True:
        try:
            for helper in helpers:
                helper.wait()
            break
        except BaseException as raised:
            call.stopped = True
            interrupt = interrupt or raised
    error = interrupt or next(iter(call.errors), None)
    if error is not None:
        try:
            raise error
        finally:
            del error, interrupt  # each refers to this frame, and so to all memory of the call


def threads_for(work: int) -> int:
    """How many threads are worth waking, work in the unit of `SMALLEST_SHARE`."""
    return max(1, min(torch.get_num_threads(), work // SMALLEST_SHARE))
