"""Says that kernels are being compiled, when the user has to wait for it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

NOTICE_AFTER_SECONDS = 2.0

_notice_given = False


@contextlib.contextmanager
def compiling(dispatcher: Any, probe: Any) -> Iterator[None]:
    """Say once on stderr that kernels are being compiled, if that takes long."""
    global _notice_given
    kind = probe.dtype
    if kind in _compiled.setdefault(dispatcher.__name__, set()) or _notice_given:
        yield
        return

    def notice() -> None:
        global _notice_given
        if not _notice_given:
            _notice_given = True
            sys.stderr.write(
                "softdtw_cuda: compiling the CPU kernels; this happens once and is cached on disk.\n"
            )
            sys.stderr.flush()

    timer = threading.Timer(NOTICE_AFTER_SECONDS, notice)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    _compiled[dispatcher.__name__].add(kind)


_compiled: dict[str, set[Any]] = {}
