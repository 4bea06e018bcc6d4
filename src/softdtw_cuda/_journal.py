"""Output files that are filled tile by tile, and a journal of the tiles that are finished.

Beside `d.npy` lies the folder `d.npy.journal`:

- `job.json` says what is computed: inputs (by a hash of their content), options, tiles. A job whose
  description differs is refused, since its tiles would not go together with those that are there.
- `finished-R.log`, one for each process R, has a line for each finished tile: its number and a checksum of
  it and of the description. A line that a crash has torn fails its checksum and is ignored.

The order of writes makes it safe to stop at any moment. Output files are filled with NaN (or −1), written out
under another name, and renamed once `job.json` is written out; those of an earlier job are removed before its
journal. So an output file without a journal is somebody's own, and a journal without its output files is an
early stop. A line is appended when what it speaks of is written out.

Several processes, on several machines, write into one file, each its own bytes. Processes of a run that was
given up may still be at it: if the job is the same they write the same bytes, and if it is not the files
are others, under the same name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

FORMAT = 1
"""Of the journal; a change of its files or of the meaning of a tile's number changes it."""
CHUNK = 1 << 23
"""Bytes read or written in one go."""


class Output(NamedTuple):
    """An array in a file, and what stands in it where nothing is finished."""

    path: Path
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    fill: float

    @property
    def size(self) -> int:
        """Bytes."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


def hash_array(array: np.ndarray) -> str:
    """Of shape, type and content, read in parts, so that memory-mapped arrays stay on disk."""
    state = hashlib.blake2b(f"{array.shape} {array.dtype.str}".encode(), digest_size=16)
    rows = max(1, CHUNK // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        state.update(np.ascontiguousarray(array[start : start + rows]).data)
    return state.hexdigest()


class Journal:
    """Writes tiles into output files and lists them. One process makes it with `begin`, each has its own.

    Args:
        outputs: the first one names the journal.
        job: description of the job, of what JSON has. Numbers, strings, lists and dictionaries.
        process: number of this process, for the name of its list.
    """

    def __init__(self, outputs: Sequence[Output], job: Mapping[str, object], process: int) -> None:
        self.outputs = list(outputs)
        self.job = json.loads(json.dumps({"format": FORMAT, **job}))
        self.folder = _folder_of(self.outputs[0].path)
        self._seal = json.dumps(self.job, sort_keys=True).encode()
        self._process = process
        self._files: list[BinaryIO] = []
        self._starts: list[int] = []
        self._log: BinaryIO | None = None
        self._lock: BinaryIO | None = None

    def begin(self, overwrite: bool = False, restarted: bool = False) -> set[int]:
        """Find what is finished, or make the files; to be called by one process, before the others `open`.

        Args:
            overwrite: make the files again, whatever is there.
            restarted: an earlier start of this run may have overwritten already. What is of this job is kept.

        Raises:
            BlockingIOError: another run has begun and not ended.
            FileExistsError: an output file exists and is not of this job.
            OSError: naming the file and what to do about it, for a full disk among others.
        """
        if not self.folder.parent.is_dir():
            raise FileNotFoundError(
                errno.ENOENT, "there is no such folder for the output; make it first", str(self.folder.parent)
            )
        existing = [each.path for each in self.outputs if each.path.exists()]
        for path in existing:
            if not path.is_file():
                raise FileExistsError(
                    errno.EEXIST, "the output exists and is no file; choose another name", str(path)
                )
        if existing and not overwrite and _read_job(self.folder) is None:
            raise FileExistsError(
                errno.EEXIST,
                f"the output exists and has no journal ({self.folder.name}), so nothing says what is in it; "
                "choose another name, or allow to overwrite it",
                str(existing[0]),
            )
        self._acquire_lock()
        written = _read_job(self.folder)
        if restarted and written == self.job and all(map(_holds, self.outputs)):
            overwrite = False
        if existing and not overwrite and written is not None:
            if written != self.job:
                raise FileExistsError(
                    errno.EEXIST,
                    f"the output belongs to another job: {difference(written, self.job)}; choose another "
                    "name, or allow to overwrite it",
                    str(existing[0]),
                )
            for each in self.outputs:
                if each.path.exists() and not _holds(each):
                    raise FileExistsError(
                        errno.EEXIST,
                        f"the output is no longer an array of shape {each.shape} and type {each.dtype}, as "
                        "its journal says; choose another name, or allow to overwrite it",
                        str(each.path),
                    )
            if len(existing) == len(self.outputs):
                return self.read_finished()
        self._create()
        return set()

    def open(self) -> None:
        """Get ready to write; after `begin` of whichever process."""
        for each in self.outputs:
            with open(each.path, "rb") as header:
                _read_header(header)
                self._starts.append(header.tell())
            # For writing alone: where it may read, too, an NFS client reads the page around the bytes and
            # writes all of it back, with what other machines have changed in it since.
            handle = os.open(each.path, os.O_WRONLY | getattr(os, "O_BINARY", 0))
            self._files.append(open(handle, "wb", buffering=0))  # noqa: SIM115  # closed by close()
        path = self.folder / f"finished-{self._process}.log"
        self._log = open(path, "ab", buffering=0)  # noqa: SIM115
        if self._log.tell():
            _write(self._log, b"\n", path)  # ends what a crash may have torn
        _sync_folder(self.folder)

    def close(self) -> None:
        for file in (*self._files, self._log, self._lock):
            if file is not None:
                file.close()
        self._files, self._starts, self._log, self._lock = [], [], None, None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, output: int, rows: slice, columns: slice, values: np.ndarray) -> None:
        """Values of a rectangle of an output, which `finish` will write out."""
        spec, file, start = self.outputs[output], self._files[output], self._starts[output]
        values = np.ascontiguousarray(values, dtype=spec.dtype)
        width, item = spec.shape[1], spec.dtype.itemsize
        if columns.stop - columns.start == width:  # whole rows lie one behind the other
            values = values.reshape(1, -1)
        for k, row in enumerate(values):
            file.seek(start + ((rows.start + k) * width + columns.start) * item)
            _write(file, row.data.cast("B"), spec.path)

    def finish(self, tiles: Iterable[int]) -> None:
        """These tiles are written: write them out, and then say so."""
        lines = b"".join(self._line(tile) for tile in tiles)
        if not lines:
            return
        assert self._log is not None
        for spec, file in zip(self.outputs, self._files, strict=True):
            with _explained(spec.path):
                os.fsync(file.fileno())
        path = self.folder / f"finished-{self._process}.log"
        _write(self._log, lines, path)
        with _explained(path):
            os.fsync(self._log.fileno())

    def read_finished(self) -> set[int]:
        """Tiles that some process has finished."""
        finished = set()
        for path in self.folder.glob("finished-*.log"):
            for line in path.read_bytes().split(b"\n"):
                number = line.split(b" ")[0]
                if number.isdigit() and line + b"\n" == self._line(int(number)):
                    finished.add(int(number))
        return finished

    def _line(self, tile: int) -> bytes:
        return b"%d %08x\n" % (tile, zlib.crc32(b"%d " % tile + self._seal))

    def _create(self) -> None:
        for each in self.outputs:
            each.path.unlink(missing_ok=True)
        _sync_folder(self.folder.parent)
        for old in self.folder.glob("finished-*.log"):
            old.unlink()
        (self.folder / "job.json").unlink(missing_ok=True)
        _sync_folder(self.folder)
        drafts = [each.path.with_name(each.path.name + ".draft") for each in self.outputs]
        try:
            for each, draft in zip(self.outputs, drafts, strict=True):
                _fill(each, draft)
            description = self.folder / "job.json.draft"
            with _explained(description), open(description, "wb") as file:
                file.write(json.dumps(self.job, indent=1).encode())
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            for draft in drafts:
                with contextlib.suppress(OSError):
                    draft.unlink()
            raise
        os.replace(description, self.folder / "job.json")
        _sync_folder(self.folder)
        for each, draft in zip(self.outputs, drafts, strict=True):
            os.replace(draft, each.path)
        _sync_folder(self.folder.parent)

    def _acquire_lock(self) -> None:
        """For as long as this process lives: two runs must not begin at the same time."""
        with _explained(self.folder):
            self.folder.mkdir(exist_ok=True)
        try:
            import fcntl
        except ImportError:  # Windows
            return
        path = self.folder / "lock"
        self._lock = open(path, "wb")  # noqa: SIM115  # held until close()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                "another run is writing this output; wait for it, or stop it",
                str(self.outputs[0].path),
            ) from None


def _folder_of(path: Path) -> Path:
    path = path.absolute()  # "." has no name
    return path.with_name(path.name + ".journal")


def _read_job(folder: Path) -> dict[str, Any] | None:
    try:
        job = json.loads((folder / "job.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return job if isinstance(job, dict) else None


def difference(written: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """The first thing that two descriptions disagree about, for a person."""
    for key in (*asked, *written):
        then, now = written.get(key), asked.get(key)
        if then == now:
            continue
        if isinstance(then, dict) and isinstance(now, dict):
            return f"{key}: {difference(then, now)}"
        return f"{key} was {then!r}, is {now!r}"
    return "no difference"


def _read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of the array in a .npy file; the file then stands at its first number."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)


def _holds(output: Output) -> bool:
    """Whether the file has such an array, whole."""
    try:
        with open(output.path, "rb") as file:
            shape, fortran, dtype = _read_header(file)
            rest = os.fstat(file.fileno()).st_size - file.tell()
    except (OSError, ValueError):
        return False
    return (shape, fortran, dtype, rest) == (output.shape, False, output.dtype, output.size)


def _fill(output: Output, path: Path) -> None:
    """Make the file. Every byte is written, so that a disk that is too small shows here, not hours later."""
    header = {"descr": output.dtype.str, "fortran_order": False, "shape": output.shape}
    chunk = np.full(CHUNK // output.dtype.itemsize, output.fill, output.dtype).data.cast("B")
    with _explained(path, output.size), open(path, "wb", buffering=0) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, output.size, CHUNK):
            _write(file, chunk[: output.size - start], path)
        os.fsync(file.fileno())


def _write(file: BinaryIO, data: bytes | memoryview, path: Path) -> None:
    view = memoryview(data)
    with _explained(path):
        while len(view):
            view = view[file.write(view) :]


@contextlib.contextmanager
def _explained(path: Path, needed: int | None = None) -> Iterator[None]:
    """Adds to an error of the file system which file it is about, and to that of a full disk what to do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:  # said already
            raise
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(path.parent).free
            size = f"{needed:,} bytes are needed and " if needed else ""
            reason += (
                f": {size}{free:,} bytes are free; make room and run the same again, what is finished is kept"
            )
        raise OSError(error.errno, reason, str(path)) from error


def _sync_folder(folder: Path) -> None:
    """Write out which files the folder has."""
    if os.name == "nt":  # a folder cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems have no such thing
            raise
    finally:
        os.close(handle)
