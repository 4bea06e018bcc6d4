"""Lengths of padded series, and bands, which have to leave them a path."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import SupportsIndex

import torch
from torch import Tensor

from ._torch_compat import can_be_read

Lengths = Tensor | Sequence[int] | int
"""Per-sample lengths as a user may pass them; a plain int only for unbatched input."""

INTEGERS = frozenset((torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8))


def check_lengths(
    lengths: Lengths | None, name: str, rows: int, batch: int, size: int, device: torch.device, batched: bool
) -> tuple[Tensor | None, list[int] | None]:
    """Lengths as (batch,) int64 on `device`, and as a list unless the host would have to wait for a GPU.

    Args:
        rows: batch size of the tensor the lengths belong to, 1 where it is broadcast.
        size: its padded length.
    """
    if lengths is None:
        return None, None
    if isinstance(lengths, Tensor):
        given = _check_length_tensor(lengths, name, rows, batch, device, batched)
        if not can_be_read(lengths):
            if given.dtype != torch.int64 or given.device != device:
                # On its way to a GPU a copy in pageable memory, as below, even where the lengths are pinned.
                given = given.to(torch.int64, copy=given.device != device).to(device, non_blocking=True)
            return (given if given.shape[0] == batch else given.expand(batch)).contiguous(), None
        host = given.tolist()
    else:
        host = _check_length_list(lengths, name, rows, batch, batched)
    if host and not (min(host) >= 1 and max(host) <= size):
        sample = next(b for b, length in enumerate(host) if not 1 <= length <= size)
        raise ValueError(
            f"{name}[{sample}] is {host[sample]}, expected a length from 1 to {size}, the padded length; "
            "drop empty series, and pad the batch to its longest series."
        )
    if len(host) != batch:
        host = host * batch
    tensor = torch.tensor(host, dtype=torch.int64, device="cpu")
    if device.type != "cpu":
        # A fresh tensor in pageable memory: the driver has its copy when this returns, and nothing waits.
        tensor = tensor.to(device, non_blocking=True)
    return tensor, host


def _check_length_tensor(
    lengths: Tensor, name: str, rows: int, batch: int, device: torch.device, batched: bool
) -> Tensor:
    if lengths.dtype == torch.bool:
        raise _mask_error(name, lengths.dtype)
    if lengths.dtype not in INTEGERS:
        raise TypeError(
            f"{name} has dtype {lengths.dtype}, expected an integer type; convert it with {name}.long()."
        )
    if lengths.device != device and lengths.device.type != "cpu":
        fix = f"move it with {name}.to({str(device)!r})"
        if lengths.device.type == "meta":
            fix = "a meta tensor has no numbers, so it cannot be moved: make it on the CPU"
        raise ValueError(
            f"{name} is on {lengths.device}, expected {device} (where the series are) or the CPU; {fix}."
        )
    given = lengths.reshape(1) if lengths.dim() == 0 and not batched else lengths
    if given.dim() != 1 or (given.shape[0] != batch and given.shape[0] != rows):
        raise _length_shape_error(name, tuple(lengths.shape), batch)
    return given


def _mask_error(name: str, dtype: object) -> TypeError:
    return TypeError(
        f"{name} has dtype {dtype}, expected integers; a mask of shape (batch, time) that is True inside the "
        "series gives lengths by mask.sum(1)."
    )


def _check_length_list(
    lengths: Sequence[int] | int, name: str, rows: int, batch: int, batched: bool
) -> list[int]:
    if str(getattr(lengths, "dtype", "")) == "bool":
        raise _mask_error(name, "bool")
    if not batched and isinstance(lengths, SupportsIndex) and not isinstance(lengths, bool):
        lengths = [operator.index(lengths)]
    try:
        given = list(lengths)  # type: ignore[arg-type]  # an int raises
        # A set has no order and a dict no numbers; a bool is a flag.
        if isinstance(lengths, (Set, Mapping)) or any(isinstance(length, bool) for length in given):
            raise TypeError
        host = [operator.index(length) for length in given]
    except TypeError:
        raise TypeError(
            f"{name} must be an integer tensor or a list of integers, got {lengths!r}; pass one length for "
            "each series, for example [20, 17, 31]."
        ) from None
    if len(host) != batch and len(host) != rows:  # `in` takes no symbolic sizes
        raise _length_shape_error(name, (len(host),), batch)
    return host


def _length_shape_error(name: str, shape: tuple[int, ...], batch: int) -> ValueError:
    return ValueError(
        f"{name} has shape {shape}, expected one length for each of the {batch} sample(s): shape ({batch},)."
    )


def check_band(bandwidth: int, rows: list[int] | None, columns: list[int] | None) -> None:
    """Raise where the band leaves a sample without a path.

    rows and columns are the lengths of each sample; None where they are on a device and are not read: the
    kernel gives NaN for a sample without a path.
    """
    if bandwidth < 0 or rows is None or columns is None:
        return
    needed = [abs(n - m) for n, m in zip(rows, columns, strict=True)]
    if not needed or max(needed) <= bandwidth:
        return
    sample = next(b for b, radius in enumerate(needed) if radius > bandwidth)
    raise ValueError(
        f"bandwidth={bandwidth} leaves sample {sample} without a path: its lengths are {rows[sample]} and "
        f"{columns[sample]}, so the smallest radius that works for it is {needed[sample]}, and {max(needed)} "
        "works for the whole batch; pass that, or None for no band."
    )


def check_band_of_all_pairs(
    bandwidth: int, rows: list[int] | None, columns: list[int] | None, names: tuple[str, str]
) -> None:
    """Raise where the band leaves some pair of a row and a column without a path."""
    if bandwidth < 0 or not rows or not columns:
        return
    short_x, long_x = min(rows), max(rows)
    short_y, long_y = min(columns), max(columns)
    needed = max(long_x - short_y, long_y - short_x)
    if needed <= bandwidth:
        return
    i, j = (long_x, short_y) if needed == long_x - short_y else (short_x, long_y)
    raise ValueError(
        f"bandwidth={bandwidth} leaves the pair {names[0]}[{rows.index(i)}], {names[1]}[{columns.index(j)}] "
        f"without a path: their lengths are {i} and {j}, and the smallest radius that works for all pairs is "
        f"{needed}; pass that, or None for no band."
    )
