"""Compiles kernels with Numba: before any thread calls them, kept on disk, with a notice if it takes long."""

# Numba is annotated in parts or not at all, differently from one version to the next.
# mypy: disable-error-code="import-untyped, no-untyped-call, attr-defined, misc"

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numba
import numba.core.options

from .._cache_folder import cache_folder, why_not_kept
from .._fork import wait_before_fork
from . import cache

if numba.config.DISABLE_JIT:
    raise ImportError("Numba compiles nothing while NUMBA_DISABLE_JIT is set")

Function = TypeVar("Function", bound=Callable[..., Any])

OPTIONS: dict[str, Any] = {"nogil": True}
if hasattr(numba.core.options.DefaultOptions, "_nrt"):
    # Arrays belong to the caller, so that kernels need not count references to them. Numba counts with an
    # atomic operation for each array of a tuple that is passed on: half the time of the backward of second
    # order. The option is private; a Numba without it makes slower kernels.
    OPTIONS["_nrt"] = False

NOTICE_AFTER_SECONDS = 2.0

_compiled: dict[tuple[str, Any], Callable[..., bool]] = {}
_notice_given = False


def jit(function: Function) -> Function:
    """A function that kernels call, compiled into each of them."""
    return cast(Function, numba.njit(**OPTIONS)(function))


def kernel(function: Function) -> Function:
    """A function that Python calls, without the interpreter lock; its compiled code is kept on disk."""
    dispatcher = jit(function)
    cache.keep(dispatcher)
    return dispatcher


def compile_for(kernel: Any, kind: Any, arguments: tuple[Any, ...]) -> Callable[..., bool]:
    """The kernel compiled for arguments of these types, which those of one `kind` share.

    On the calling thread: an interrupt ends it, and no helper is left compiling. What is returned does not
    look at types again, as Numba's dispatcher would: for tuples that takes as long as a small problem.
    """
    key = (kernel.__name__, kind)
    compiled = _compiled.get(key)
    if compiled is None:
        with _notice():
            compiled = kernel.compile(signature_of(arguments))
        _compiled[key] = compiled
    return compiled


def signature_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numba's types of the arguments."""
    return tuple(numba.typeof(argument) for argument in arguments)


@contextlib.contextmanager
def _notice() -> Iterator[None]:
    """Say once on stderr that kernels are being compiled, if that takes long."""
    timer = threading.Timer(NOTICE_AFTER_SECONDS, _give_notice)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread can be started: at exit, or too many
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_notice() -> None:
    global _notice_given
    if _notice_given:
        return
    _notice_given = True
    reason = why_not_kept() if cache.AVAILABLE else "this version of Numba is not known"
    if reason is None:
        rest = f"they are compiled once and kept in {cache_folder()}"
    else:
        rest = (
            f"every process compiles them again, since they cannot be kept ({reason}); set "
            "SOFTDTW_CUDA_CACHE to a folder that only you can write to"
        )
    sys.stderr.write(f"softdtw_cuda: compiling or loading the CPU kernels; {rest}.\n")
    sys.stderr.flush()


# A child forked while another thread compiles would have half a kernel in Numba's tables.
with contextlib.suppress(ImportError, AttributeError):
    from numba.core.compiler_lock import global_compiler_lock

    wait_before_fork(global_compiler_lock._lock)
