"""Memory that a call may take where the user sets no limit."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import NamedTuple

import torch

SHARE_OF_FREE_MEMORY = 0.25
"""Of the device's, that a call takes at most unless the user says otherwise: others work there, too."""


def free_memory(device: torch.device) -> int:
    """Bytes that a call may take where the user sets no limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = min([_available_on_host(), *(group.free() for group in _limited_groups())])
    return int(free * SHARE_OF_FREE_MEMORY)


def _available_on_host(meminfo: str = "/proc/meminfo") -> int:
    """What the host has free, and what it takes for files that it can read again."""
    try:
        with open(meminfo) as file:
            return 1024 * int(file.read().split("MemAvailable:")[1].split()[0])
    except (OSError, IndexError):  # not Linux
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):  # not on this platform
            return 4 << 30


class _Files(NamedTuple):
    """What a version of Linux's control groups calls the files of a group's memory."""

    limit: str
    used: str
    for_files: str
    """The line of memory.stat that says what of it is taken for files that can be read again."""


_VERSIONS = {
    "": _Files("memory.max", "memory.current", "inactive_file"),
    "memory": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controllers in /proc/self/cgroup: version 2 has one tree for all, version 1 one for memory."""


class _Group(NamedTuple):
    """A control group, as containers and batch systems make them, with a limit of memory."""

    folder: Path
    files: _Files
    limit: int

    def free(self) -> int:
        """Bytes below the limit."""
        used = int((self.folder / self.files.used).read_text())
        stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return max(0, self.limit - used + int(stat.get(self.files.for_files, 0)))


@functools.cache
def _limited_groups(groups: str = "/proc/self/cgroup", tree: str = "/sys/fs/cgroup") -> list[_Group]:
    """The groups of this process that have a limit: its own, and those around it."""
    found = []
    try:
        lines = Path(groups).read_text().splitlines()
    except OSError:  # not Linux
        return []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in _VERSIONS:
            continue
        files, root = _VERSIONS[controllers], Path(tree, controllers)
        own = root / path.lstrip("/")
        # In a container the path may be that of the host, and the root the container's own group.
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            limit = _number_in(folder / files.limit)
            if limit is not None:
                found.append(_Group(folder, files, limit))
    return found


def _number_in(file: Path) -> int | None:
    """The limit in a file; None where there is none, or it is beyond all memory, as version 1 says it."""
    try:
        limit = int(file.read_text())
    except (OSError, ValueError):
        return None
    return limit if limit < 1 << 60 else None
