"""Kernels compiled by Numba, kept on disk from one process to the next.

Numba's own cache names a function by the file that it stands in, so that a changed callee elsewhere leaves
stale code, loads what others may have written, and raises when the disk is full. This one names a kernel by
all sources of this package and stores it through `_cache_folder`. It uses private names of Numba; where they
are missing or have changed, kernels are compiled by every process.
"""

# Numba and llvmlite are annotated in parts or not at all, differently from one version to the next.
# mypy: disable-error-code="import-untyped, no-untyped-call, attr-defined, misc"

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import sys
from pathlib import Path
from typing import Any

import llvmlite
import numba

from .._cache_folder import cache_folder, read_cached, write_cached

try:
    from numba.core.caching import NullCache
    from numba.core.compiler import CompileResult
    from numba.core.serialize import dumps

    AVAILABLE = True
except ImportError:
    AVAILABLE = False


@functools.cache
def source_stamp() -> bytes:
    """Changes with any source of this package, and with whatever compiles it."""
    stamp = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        stamp.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    versions = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag)
    stamp.update(repr(versions).encode())
    return stamp.digest()


if AVAILABLE:

    class _Cache(NullCache):
        """What a Numba dispatcher calls before and after it compiles a signature."""

        def __init__(self, function: Any) -> None:
            self._name = function.__name__

        def _path(self, signature: Any, codegen: Any) -> Path | None:
            folder = cache_folder()
            if folder is None:
                return None
            key = source_stamp() + repr((self._name, signature, codegen.magic_tuple())).encode()
            return folder / f"{self._name}-{hashlib.sha256(key).hexdigest()}.numba"

        def load_overload(self, signature: Any, target: Any) -> Any:
            try:
                target.refresh()
                path = self._path(signature, target.codegen())
                content = None if path is None else read_cached(path)
                return None if content is None else CompileResult._rebuild(target, *pickle.loads(content))
            except Exception:  # whatever it is, the kernel can be compiled
                return None

        def save_overload(self, signature: Any, compiled: Any) -> None:
            with contextlib.suppress(Exception):  # the kernel is compiled and can be called
                path = self._path(signature, compiled.codegen)
                # Code with addresses of this process in it would be of no use to another.
                if path is not None and not compiled.lifted and not compiled.library.has_dynamic_globals:
                    write_cached(path, dumps(compiled._reduce()))


def keep(dispatcher: Any) -> None:
    """Load the kernel's compiled code from disk where it is there, and store it where it is not."""
    if AVAILABLE and hasattr(dispatcher, "_cache"):
        dispatcher._cache = _Cache(dispatcher.py_func)
