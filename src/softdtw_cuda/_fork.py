"""Forks wait for locks that a child would otherwise inherit locked, by a thread that it does not have."""

from __future__ import annotations

import contextlib
import os
from typing import Any

LONGEST_WAIT_SECONDS = 60.0
"""Then the fork goes on: whoever holds the lock may be waiting for the thread that forks."""


def wait_before_fork(lock: Any) -> None:
    """Make forks wait until the ``threading.RLock`` is free; parent and child then find it free."""

    def release() -> None:
        with contextlib.suppress(RuntimeError):  # the wait was too long, or interrupted
            lock.release()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lambda: lock.acquire(timeout=LONGEST_WAIT_SECONDS),
            after_in_parent=release,
            after_in_child=release,
        )
