"""Compiled code on disk: where it is kept, and that nobody else can have put it there.

Files and folders are made for the user alone. A file that another user owns or could have written, and
whatever lies in such a folder, is not read. Everything that fails here means "not kept", never an exception.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

_CHECKSUM_BYTES = 32
_WRITABLE_BY_OTHERS = 0o022


def cache_folder() -> Path | None:
    """$SOFTDTW_CUDA_CACHE, or the user's cache folder if there is one."""
    chosen = os.environ.get("SOFTDTW_CUDA_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "softdtw_cuda"
    except RuntimeError:  # a user id that the password file does not know
        return None


def _is_private(status: os.stat_result) -> bool:
    """Whether the user owns it and nobody else may write to it. Windows has no such owners or modes."""
    if not hasattr(os, "geteuid"):
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & _WRITABLE_BY_OTHERS


def _make_folder(folder: Path) -> None:
    """The folder and the missing ones above it, for the user alone."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def read_cached(path: Path) -> bytes | None:
    """The content of `path`; None if there is none, it is damaged, or others could have written it."""
    try:
        if not _is_private(path.parent.stat()):
            return None
        with path.open("rb") as file:
            if not _is_private(os.fstat(file.fileno())):
                return None
            stored = file.read()
    except OSError:
        return None
    checksum, content = stored[:_CHECKSUM_BYTES], stored[_CHECKSUM_BYTES:]
    return content if content and hashlib.sha256(content).digest() == checksum else None


def write_cached(path: Path, content: bytes) -> str | None:
    """Stores the content so that a reader sees all of it or nothing; why it could not, or None."""
    try:
        _make_folder(path.parent)
        if not _is_private(path.parent.stat()):
            return f"{path.parent} belongs to another user, or others may write to it"
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        return f"{path.parent}: {error.strerror or error}"
    return None


def why_not_kept() -> str | None:
    """Why nothing can be kept at the moment; None where it can."""
    folder = cache_folder()
    if folder is None:
        return "there is no home folder"
    probe = folder / f".probe-{os.getpid()}"
    reason = write_cached(probe, bytes(1 << 20))  # about what the kernels of one type take
    with contextlib.suppress(OSError):
        probe.unlink()
    return reason
