"""Running a test's work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_threads(work: Callable[[int], None], count: int) -> None:
    """work(0) to work(count - 1), started together, each in a thread; the first failure is raised here."""
    barrier = threading.Barrier(count, timeout=60)

    def start(index: int) -> None:
        barrier.wait()
        work(index)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(start, index) for index in range(count)]:
            done.result()
