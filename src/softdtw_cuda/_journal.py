"""Output files that are filled tile by tile, and a journal of the tiles that are finished.

Beside `d.npy` lies the folder `d.npy.journal`:

- `job.json` says what is computed: inputs (by a hash of their content), options, tiles. A job whose
  description differs is refused, since its tiles would not go together with those that are there. It also
  has a random name for the files that were made together: of a job with two outputs the second one has such
  a folder, too, so that neither is taken for finished once another job has used it.
- `finished-R.log`, one for each process R, has a line for each finished tile: its number and a checksum of
  it and of the description. A line that a crash has torn fails its checksum and is ignored.

The order of writes makes it safe to stop at any moment. Output files are filled with NaN (or −1), written out
under another name, and renamed once every `job.json` is written out; those of an earlier job are removed
before its journal. So an output file without a journal is somebody's own, and a journal without its output
files is an early stop. A line is appended when what it speaks of is written out.

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
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

FORMAT = 2
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

    @property
    def folder(self) -> Path:
        return folder_of(self.path)


class _Written(NamedTuple):
    """What a `job.json` says: the job, and the name of the files that were made together."""

    job: dict[str, Any]
    files: str


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
        outputs: the first one's journal has the lists.
        job: description of the job, of what JSON has. Numbers, strings, lists and dictionaries.
        process: number of this process, for the name of its list.
    """

    def __init__(self, outputs: Sequence[Output], job: Mapping[str, object], process: int) -> None:
        self.outputs = list(outputs)
        self.folder = self.outputs[0].folder
        others = [os.path.relpath(each.path.resolve(), self.folder.parent) for each in self.outputs[1:]]
        self.job = json.loads(json.dumps({"format": FORMAT, **job, "other outputs": others}))
        self._seal = json.dumps(self.job, sort_keys=True).encode()
        self._process = process
        self._files: list[BinaryIO] = []
        self._starts: list[int] = []
        self._log: BinaryIO | None = None
        self._locks: list[BinaryIO] = []

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
        existing = []
        for each in self.outputs:
            folder = each.folder.parent
            if not folder.is_dir():
                raise FileNotFoundError(
                    errno.ENOENT, "there is no such folder for the output; make it first", str(folder)
                )
            if not each.path.exists():
                continue
            existing.append(each)
            if not each.path.is_file():
                raise FileExistsError(
                    errno.EEXIST, "the output exists and is no file; choose another name", str(each.path)
                )
            if not overwrite:
                self._check_journal(each)
        for each in self.outputs:
            self._locks.append(lock(each.path))
        if restarted and self._is_complete():
            overwrite = False
        if not overwrite:
            for each in existing:
                self._check_journal(each)
            if len(existing) == len(self.outputs):
                return self.read_finished()
        self._create()
        return set()

    def _check_journal(self, output: Output) -> None:
        """Raise where an output that exists was not made by this job, together with the first output."""
        written, first = _read_job(output.folder), _read_job(self.folder)
        if written is None:
            problem = (
                f"the output exists and has no journal ({output.folder.name}), so nothing says what is in it"
            )
        elif written.job != self.job:
            problem = f"the output belongs to another job: {difference(written.job, self.job)}"
        elif first is None or written.files != first.files:
            problem = f"the output was made together with another file than {self.outputs[0].path}"
        elif not _holds(output):
            problem = (
                f"the output is no longer an array of shape {output.shape} and type {output.dtype}, as its "
                "journal says"
            )
        else:
            return
        raise FileExistsError(
            errno.EEXIST, f"{problem}; choose another name, or allow to overwrite it", str(output.path)
        )

    def _is_complete(self) -> bool:
        """Whether all outputs are there, and are those of this job."""
        written = [_read_job(each.folder) for each in self.outputs]
        first = written[0]
        same = first is not None and first.job == self.job and all(each == first for each in written)
        return same and all(map(_holds, self.outputs))

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
        for file in (*self._files, self._log, *self._locks):
            if file is not None:
                file.close()
        self._files, self._starts, self._log, self._locks = [], [], None, []

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
            _sync_folder(each.folder.parent)
        for each in self.outputs:
            for old in each.folder.glob("finished-*.log"):
                old.unlink()
            (each.folder / "job.json").unlink(missing_ok=True)
            _sync_folder(each.folder)
        drafts = [each.path.with_name(each.path.name + ".draft") for each in self.outputs]
        description = json.dumps({**self.job, "files": uuid.uuid4().hex}, indent=1).encode()
        try:
            for each, draft in zip(self.outputs, drafts, strict=True):
                _fill(each, draft)
            for each in self.outputs:
                write_whole(each.folder / "job.json", description)
        except BaseException:
            for draft in drafts:
                with contextlib.suppress(OSError):
                    draft.unlink()
            raise
        for each, draft in zip(self.outputs, drafts, strict=True):
            os.replace(draft, each.path)
            _sync_folder(each.folder.parent)


def lock(output: Path) -> BinaryIO:
    """Make the output's journal, and let nobody else write the output until the returned file is closed.

    Raises:
        BlockingIOError: another run has done so.
    """
    folder = folder_of(output)
    with _explained(folder):
        folder.mkdir(exist_ok=True)
    file = open(folder / "lock", "wb")  # noqa: SIM115  # held by the caller
    try:
        import fcntl
    except ImportError:  # Windows
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BlockingIOError(
            errno.EWOULDBLOCK, "another run is writing this output; wait for it, or stop it", str(output)
        ) from None
    return file


def folder_of(path: Path) -> Path:
    """The journal of an output."""
    path = path.absolute()  # "." has no name
    return path.with_name(path.name + ".journal")


def write_whole(path: Path, content: bytes) -> None:
    """All of a small file or nothing of it, written out."""
    draft = path.with_name(path.name + ".draft")
    try:
        with _explained(path, len(content)), open(draft, "wb", buffering=0) as file:
            _write_all(file, content)
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    _sync_folder(path.parent)


def _read_job(folder: Path) -> _Written | None:
    try:
        job = json.loads((folder / "job.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return _Written(job, str(job.pop("files", ""))) if isinstance(job, dict) else None


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
    with _explained(output.path, output.size):
        try:
            with open(path, "wb", buffering=0) as file:
                np.lib.format.write_array_header_1_0(file, header)
                for start in range(0, output.size, CHUNK):
                    _write_all(file, chunk[: output.size - start])
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)  # its bytes are free again where the message counts them
            raise


def _write(file: BinaryIO, data: bytes | memoryview, path: Path) -> None:
    with _explained(path):
        _write_all(file, data)


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
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
