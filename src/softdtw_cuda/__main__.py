"""The command line: `python -m softdtw_cuda cdist x.npy --out d.npy`, the same under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch.distributed.rendezvous import rendezvous

from . import distributed
from ._distances import METRICS
from ._fit_journal import FitJournal
from ._journal import CHUNK
from ._kmeans import Options, Progress, describe_fit, k_means
from ._options import check_bandwidth, check_count, check_gamma, check_real
from ._problem import value_dtype
from ._processes import (
    ProcessFailed,
    check_device,
    default_group,
    in_every_process,
    is_restarted,
    on_first,
    own_device,
)
from ._series import Array, as_batch

DESCRIPTION = """\
Soft-DTW between many time series that lie in .npy files (numpy.save makes them).

An input file has the shape (series, time steps), or (series, time steps, features) for several features a
step. It is memory-mapped: it may be larger than the memory. float32 is the usual type.
"""

EPILOG = """\
examples:
  python -m softdtw_cuda cdist x.npy --out d.npy             all pairs of one set
  python -m softdtw_cuda cdist x.npy y.npy --out d.npy       each of x with each of y
  python -m softdtw_cuda knn x.npy y.npy -k 10 --out values.npy --indices indices.npy
  python -m softdtw_cuda kmeans x.npy -k 10 --centers c.npy --labels l.npy
  torchrun --nproc-per-node 4 -m softdtw_cuda cdist x.npy --out d.npy
                                                             the same on 4 GPUs, or 4 processes of the CPU

If it stops, for whatever reason, give the same command again: what is finished is kept, in the output file
and in a folder beside it (d.npy.journal; of kmeans, c.npy.journal has the last round), and the result is the
same, bit for bit. Delete that folder when you have the result. Until then numpy.load("d.npy", mmap_mode="r")
reads what is there: NaN is not finished.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status, 0 where all is well."""
    parsed = _parser().parse_args(arguments)
    in_group = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.distributed.is_initialized()
    try:
        if in_group:
            _join_group()
        parsed.run(parsed)
    except KeyboardInterrupt:
        print("softdtw_cuda: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except ProcessFailed:
        return 1  # that process says why
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"softdtw_cuda: error: {_message(error)}", file=sys.stderr)
        return 1
    finally:
        if in_group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return 0


def _join_group() -> None:
    """The processes of torchrun meet.

    After a restart torchrun's store still has the addresses of the processes that it ended, under the names
    where gloo looks for them. So process 0 chooses a new prefix each time, and tells it to whoever asks: a
    process asks with a number of its own, which no earlier one had.
    """
    store, rank, size = next(rendezvous("env://"))
    meeting = uuid.uuid4().hex
    if rank == 0:
        missing = set(range(1, size))
        while missing:
            for other in tuple(missing):
                if store.check([f"asks/{other}"]):
                    store.set(f"answer/{store.get(f'asks/{other}').decode()}", meeting)
                if store.check([f"has/{meeting}/{other}"]):
                    missing.remove(other)
            time.sleep(0.01)
    else:
        number = uuid.uuid4().hex
        store.set(f"asks/{rank}", number)
        meeting = store.get(f"answer/{number}").decode()
        store.set(f"has/{meeting}/{rank}", "")
    # Values go into files, not to each other, so gloo serves GPUs, too: it needs none of their memory and
    # notices when a process is gone. Processes that are done wait for the slowest, which may take longer than
    # torch's thirty minutes.
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.PrefixStore(meeting, store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timedelta(days=30),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m softdtw_cuda",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    cdist = commands.add_parser(
        "cdist",
        help="all pairs of two sets, or of one with itself",
        description="All pairs of two sets, or of one with itself: the table of their values of Soft-DTW, or "
        "with --normalize of its divergence.",
        allow_abbrev=False,
    )
    cdist.add_argument("x", type=Path, metavar="X.npy", help="the series")
    cdist.add_argument("y", type=Path, metavar="Y.npy", nargs="?", help="the others; left out: X with itself")
    cdist.add_argument("--out", type=Path, required=True, metavar="D.npy", help="the values, (X, Y)")
    cdist.set_defaults(run=_cdist)
    knn = commands.add_parser(
        "knn",
        help="the nearest series of each query",
        description="The nearest series of each query, by Soft-DTW, or with --normalize by its divergence. "
        "Every pair is computed, none is kept but the nearest.",
        allow_abbrev=False,
    )
    knn.add_argument("x", type=Path, metavar="X.npy", help="the queries")
    knn.add_argument(
        "y", type=Path, metavar="Y.npy", nargs="?", help="the database; left out: X, each without itself"
    )
    knn.add_argument("-k", type=int, default=1, help="how many neighbours (default: %(default)s)")
    knn.add_argument(
        "--out", type=Path, required=True, metavar="V.npy", help="their values, (X, k), ascending"
    )
    knn.add_argument(
        "--indices", type=Path, required=True, metavar="I.npy", help="their places in the database, (X, k)"
    )
    knn.set_defaults(run=_knn)
    for command in (cdist, knn):
        command.add_argument(
            "--normalize",
            action="store_true",
            help="the divergence: 0 between a series and itself, never negative",
        )
        command.add_argument("--y-lengths", type=Path, metavar="N.npy", help="true lengths of those of Y")
    kmeans = commands.add_parser(
        "kmeans",
        help="clusters of series, with a barycenter each",
        description="Clusters of series, with a barycenter each, under the divergence of Soft-DTW, or with "
        "--no-normalize under Soft-DTW itself.",
        allow_abbrev=False,
    )
    kmeans.add_argument("x", type=Path, metavar="X.npy", help="the series, which have to fit into the memory")
    kmeans.add_argument("-k", type=int, default=8, help="how many clusters (default: %(default)s)")
    kmeans.add_argument(
        "--centers", type=Path, required=True, metavar="C.npy", help="their barycenters, (k, steps, features)"
    )
    kmeans.add_argument(
        "--labels", type=Path, required=True, metavar="L.npy", help="the cluster of each series, from 0 on"
    )
    kmeans.add_argument("--rounds", type=int, default=50, help="at most (default: %(default)s)")
    kmeans.add_argument(
        "--tol",
        type=float,
        default=1e-4,
        help="stop at a round that gains less, relatively (default: %(default)s)",
    )
    kmeans.add_argument(
        "--starts", type=int, default=1, help="runs, of which the best is kept (default: %(default)s)"
    )
    kmeans.add_argument("--seed", type=int, default=0, help="of the k-means++ starts (default: %(default)s)")
    kmeans.add_argument(
        "--no-normalize",
        dest="normalize",
        action="store_false",
        help="Soft-DTW itself in place of its divergence",
    )
    kmeans.set_defaults(run=_kmeans, y=None, y_lengths=None)
    for command in (cdist, knn, kmeans):
        _add_options(command)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gamma",
        type=float,
        default=1.0,
        help="smoothing; small values come close to DTW (default: %(default)s)",
    )
    parser.add_argument(
        "--bandwidth", type=int, metavar="R", help="compare steps at most R apart (Sakoe-Chiba; default: all)"
    )
    parser.add_argument(
        "--dist", choices=sorted(METRICS), default="sqeuclidean", help="between steps (default: %(default)s)"
    )
    parser.add_argument(
        "--x-lengths",
        type=Path,
        metavar="N.npy",
        help="true lengths of the series of X, where they are padded",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu or cuda; default: a GPU for each process if there is one"
    )
    parser.add_argument("--overwrite", action="store_true", help="start again if the output exists")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")


def _cdist(parsed: argparse.Namespace) -> None:
    inputs = _inputs(parsed, [parsed.out])
    distributed.cdist(
        inputs.x,
        inputs.y,
        x_lengths=inputs.x_lengths,
        y_lengths=inputs.y_lengths,
        out=parsed.out,
        device=inputs.device,
        **_options(parsed),
    )


def _knn(parsed: argparse.Namespace) -> None:
    inputs = _inputs(parsed, [parsed.out, parsed.indices])
    distributed.knn(
        inputs.x,
        inputs.y,
        parsed.k,
        query_lengths=inputs.x_lengths,
        database_lengths=inputs.y_lengths,
        exclude_self=inputs.y is None,
        out=(parsed.out, parsed.indices),
        device=inputs.device,
        **_options(parsed),
    )


def _kmeans(parsed: argparse.Namespace) -> None:
    outputs = [parsed.centers, parsed.labels]
    inputs = _inputs(parsed, outputs)
    with in_every_process():
        if outputs[0].resolve() == outputs[1].resolve():
            raise ValueError(f"{outputs[0]} is named twice, expected a file for centers and one for labels.")
        k, starts, rounds = (check_count(name, getattr(parsed, name)) for name in ("k", "starts", "rounds"))
        tol = check_real("tol", parsed.tol, positive=False)
        options = Options(check_gamma(parsed.gamma), parsed.bandwidth, parsed.normalize, parsed.dist)
        check_bandwidth(parsed.bandwidth)
        if k > len(inputs.x):
            raise ValueError(f"k is {k} but {parsed.x} has {len(inputs.x)} series, expected at most as many.")
        batch, _ = as_batch("x", inputs.x, None)
        series = batch.to(inputs.device, value_dtype(batch.dtype))
        lengths = None if inputs.x_lengths is None else inputs.x_lengths.tolist()
        arguments: dict[str, Any] = {
            "init": "k-means++",
            "n_init": starts,
            "max_iter": rounds,
            "tol": tol,
            "random": np.random.RandomState(parsed.seed),
        }
        job = describe_fit(series, lengths, k, options, **arguments)
    is_first = default_group().rank == 0
    with FitJournal(outputs, job, starts) as journal:

        def begin() -> Progress | None:
            sizes = k * series[0].nbytes, 8 * len(series)
            for path, size in zip(outputs, sizes, strict=True):  # what cannot be written shows here
                with _draft(path) as file:
                    file.write(bytes(HEADER_BYTES + size))
                    file.flush()
                    os.fsync(file.fileno())
            return journal.begin(parsed.overwrite, is_restarted())

        def keep(progress: Progress) -> None:
            with in_every_process():
                if is_first:
                    journal.keep(progress)

        reached = on_first(begin)
        is_finished = reached is not None and journal.is_complete(reached)
        found = k_means(
            series,
            lengths,
            k,
            options,
            **arguments,
            progress=parsed.progress and not is_finished,
            processes=default_group(),
            reached=reached,
            keep=keep,
        )
        with in_every_process():
            if is_first:
                if is_finished and parsed.progress:
                    print(f"{parsed.centers}: already finished", file=sys.stderr)
                _save(parsed.centers, found.centers.numpy(force=True))
                _save(parsed.labels, found.labels)
                print(f"{found.rounds} rounds, sum of the distances {found.inertia:.8g}")


HEADER_BYTES = 128
"""Of a .npy file."""


@contextmanager
def _draft(path: Path) -> Iterator[BinaryIO]:
    """A file beside the output, which is removed in the end; errors name the output."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
    except OSError as error:
        raise OSError(error.errno, f"the output cannot be written: {error.strerror}", str(path)) from error
    finally:
        with suppress(OSError):
            part.unlink()


def _save(path: Path, array: Array) -> None:
    """All of the file or nothing of it."""
    with _draft(path) as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())
        os.replace(file.name, path)


def _options(parsed: argparse.Namespace) -> dict[str, Any]:
    names = ("gamma", "bandwidth", "normalize", "dist", "overwrite", "progress")
    return {name: getattr(parsed, name) for name in names}


class _Inputs(NamedTuple):
    x: Array
    y: Array | None
    x_lengths: Any
    y_lengths: Any
    device: torch.device


def _inputs(parsed: argparse.Namespace, outputs: Sequence[Path]) -> _Inputs:
    """The files, and where to compute; what one process cannot find ends all of them."""
    with in_every_process():
        given = [path for path in (parsed.x, parsed.y, parsed.x_lengths, parsed.y_lengths) if path]
        for path in outputs:
            if path.resolve() in [each.resolve() for each in given]:
                raise ValueError(f"{path} is an input and an output, expected another name for the output.")
        x, y = _load(parsed.x), None if parsed.y is None else _load(parsed.y)
        x_lengths = _load_lengths(parsed.x_lengths, parsed.x, x)
        y_lengths = _load_lengths(parsed.y_lengths, parsed.y, y)
        device = own_device() if parsed.device == "auto" else check_device(parsed.device, "--device")
        _check_finite(parsed.x, x, x_lengths)
        if y is not None:
            _check_finite(parsed.y, y, y_lengths)
    return _Inputs(x, y, x_lengths, y_lengths, device)


def _check_finite(path: Path, array: Array, lengths: Array | None) -> None:
    """Of the output NaN would say that it is not finished. Padding may be anything."""
    rows = max(1, CHUNK // array[:1].nbytes)
    steps = np.arange(array.shape[1])
    for start in range(0, len(array), rows):
        finite = np.all(np.isfinite(array[start : start + rows]), axis=2)
        if lengths is not None:
            finite |= steps >= lengths[start : start + rows, None]
        whole = np.all(finite, axis=1)
        if not whole.all():
            raise ValueError(
                f"{path} has NaN or infinite values, in series {start + int(whole.argmin())} first, expected "
                "finite ones; drop such series."
            )


def _load(path: Path) -> Array:
    """(series, time, features), memory-mapped."""
    array = _load_array(path)
    if array.ndim not in (2, 3):
        raise ValueError(
            f"{path} has shape {array.shape}, expected (series, time steps) or (series, time steps, "
            "features)."
        )
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise TypeError(
            f"{path} has the type {array.dtype}, expected float32 or float64; convert it: "
            f"numpy.save({str(path)!r}, array.astype('float32'))."
        )
    if 0 in array.shape:
        raise ValueError(
            f"{path} has shape {array.shape}, expected at least one series of at least one time step."
        )
    return array if array.ndim == 3 else array[:, :, None]


def _load_lengths(path: Path | None, series_path: Path | None, series: Array | None) -> Array | None:
    if path is None:
        return None
    array = _load_array(path)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{path} has shape {array.shape} and type {array.dtype}, expected integers, one for each series."
        )
    if series is None:
        raise ValueError(f"{path} has lengths for the second set, but there is none; leave it out.")
    lengths = np.asarray(array, dtype=np.int64)
    if len(lengths) != len(series):
        raise ValueError(
            f"{path} has {len(lengths)} lengths and {series_path} {len(series)} series, expected as many."
        )
    steps = series.shape[1]
    wrong = np.flatnonzero((lengths < 1) | (lengths > steps))
    if len(wrong):
        raise ValueError(
            f"{path} has {lengths[wrong[0]]} for series {wrong[0]}, expected a length from 1 to {steps}, the "
            f"steps of {series_path}."
        )
    return lengths


def _load_array(path: Path) -> Array:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(2, "there is no such file", str(path)) from None
    except (ValueError, EOFError) as error:
        with path.open("rb") as file:
            begins = file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX
        reason = f" ({error})" if begins else ""  # of any other file NumPy says that it may be a pickle
        raise ValueError(
            f"{path} is no .npy file of numbers{reason}; numpy.save makes one, series of unequal lengths are "
            "padded to one length first."
        ) from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is an .npz archive, expected a .npy file; numpy.save makes one.")
    return array


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
