"""The command line: `python -m softdtw_cuda cdist x.npy --out d.npy`, the same under torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import distributed
from ._distances import METRICS
from ._series import Array

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
  torchrun --nproc-per-node 4 -m softdtw_cuda cdist x.npy --out d.npy
                                                             the same on 4 GPUs, or 4 processes of the CPU

If it stops, for whatever reason, give the same command again: what is finished is kept, in the output
file and in a folder beside it (d.npy.journal), and the result is the same, bit for bit. Delete that folder
when you have the result. Until then numpy.load("d.npy", mmap_mode="r") reads what is there: NaN is not
finished.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status, 0 where all is well."""
    parsed = _parser().parse_args(arguments)
    in_group = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.distributed.is_initialized()
    try:
        device = distributed.own_device() if parsed.device == "auto" else torch.device(parsed.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if in_group:
            # torchrun ends the others where a process fails. Processes that are done wait for the slowest,
            # which may take longer than torch's ten or thirty minutes.
            torch.distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=30)
            )
        parsed.run(parsed, device)
    except KeyboardInterrupt:
        print("softdtw_cuda: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        if int(os.environ.get("RANK", "0")) == 0 or not isinstance(error, (TypeError, ValueError)):
            print(f"softdtw_cuda: error: {_message(error)}", file=sys.stderr)
        return 1
    finally:
        if in_group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return 0


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
        "cdist", help="all pairs of two sets, or of one with itself", allow_abbrev=False
    )
    cdist.add_argument("x", type=Path, metavar="X.npy", help="the series")
    cdist.add_argument("y", type=Path, metavar="Y.npy", nargs="?", help="the others; left out: X with itself")
    cdist.add_argument("--out", type=Path, required=True, metavar="D.npy", help="the values, (X, Y)")
    cdist.set_defaults(run=_cdist)
    knn = commands.add_parser("knn", help="the nearest series of each query", allow_abbrev=False)
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
        "--normalize",
        action="store_true",
        help="the divergence: 0 between a series and itself, never negative",
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
    parser.add_argument("--y-lengths", type=Path, metavar="N.npy", help="those of Y")
    parser.add_argument(
        "--device", default="auto", help="cpu or cuda; default: a GPU for each process if there is one"
    )
    parser.add_argument("--overwrite", action="store_true", help="start again if the output exists")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")


def _cdist(parsed: argparse.Namespace, device: torch.device) -> None:
    x, y = _load(parsed.x), None if parsed.y is None else _load(parsed.y)
    distributed.cdist(
        x,
        y,
        x_lengths=_load_lengths(parsed.x_lengths),
        y_lengths=_load_lengths(parsed.y_lengths),
        out=parsed.out,
        **_options(parsed, device),
    )


def _knn(parsed: argparse.Namespace, device: torch.device) -> None:
    x, y = _load(parsed.x), None if parsed.y is None else _load(parsed.y)
    distributed.knn(
        x,
        y,
        parsed.k,
        query_lengths=_load_lengths(parsed.x_lengths),
        database_lengths=_load_lengths(parsed.y_lengths),
        exclude_self=y is None,
        out=(parsed.out, parsed.indices),
        **_options(parsed, device),
    )


def _options(parsed: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    # torchrun gives the whole command again after a failure: what the first run wrote is to be kept then.
    first = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0
    return {
        "gamma": parsed.gamma,
        "bandwidth": parsed.bandwidth,
        "normalize": parsed.normalize,
        "dist": parsed.dist,
        "device": device,
        "overwrite": parsed.overwrite and first,
        "progress": parsed.progress,
    }


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
    return array if array.ndim == 3 else array[:, :, None]


def _load_lengths(path: Path | None) -> Any:
    if path is None:
        return None
    array = _load_array(path)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{path} has shape {array.shape} and type {array.dtype}, expected integers, one for each series."
        )
    return np.asarray(array, dtype=np.int64)


def _load_array(path: Path) -> Array:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(2, "there is no such file", str(path)) from None
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is no .npy file of numbers ({error}); numpy.save makes one, series of unequal "
            "lengths are padded to one length first."
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
