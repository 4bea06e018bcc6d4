"""Soft-DTW between many series: a list of pairs, or all pairs of two sets."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from . import _autograd
from ._autograd import PairRange
from ._backends import backend
from ._distances import DistanceFunction, with_embedding
from ._free_memory import free_memory
from ._lengths import Lengths
from ._migration import explains_arguments
from ._options import check_flag, check_memory_limit
from ._problem import Problem
from ._series import TensorOrArray, as_batch, in_kind
from ._sums import gather
from ._torch_compat import in_transform
from ._validation import check_all_pairs, check_pairs
from .functional import half_self

CELLS_OF_A_STEP = {"cuda": 1 << 33, "cpu": 1 << 28}
"""Of a progress bar: some 10 ms of a GPU, some 0.2 s of a CPU."""
BYTES_OF_A_STEP = 64
"""Of each time step, for what a launch needs besides state and gradients: rows handed from strip to strip."""


@explains_arguments
def softdtw_pairs(
    x: Tensor,
    y: Tensor | None,
    pairs: Tensor | Sequence[Sequence[int]],
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    normalize: bool = False,
    dist: str | DistanceFunction = "sqeuclidean",
    fused: bool | None = None,
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
    memory_limit: int | None = None,
    progress: bool = False,
) -> Tensor:
    """Soft-DTW between listed pairs of series, differentiable in both sets.

    No series is copied: the kernels read each pair's indices. (Metrics without a fused path, and
    ``fused=False``, build the cost matrices of as many pairs at a time as memory_limit allows.)

    Args:
        x: (K, N, D).
        y: (L, M, D), or None for pairs of series of x.
        pairs: (P, 2) integers, a tensor or a list: the index into x and the index into y of each pair, in any
            order, repeated or not. Indices in a CUDA tensor are checked by the kernel, not by the host: one
            out of range gives NaN for its pair.
        x_lengths, y_lengths: (K,) and (L,) true lengths of the series.
        memory_limit: bytes to work with besides inputs and results. What does not fit is split, and
            computed a second time for the gradient instead of kept. None: a quarter of what the device has
            free. On the fused path the limit does not change a bit of values and gradients; elsewhere last
            bits of gradients depend on it, so set it where runs are to be compared bit by bit. Under
            torch.compile and torch.func all pairs are computed together, whatever the limit, and with
            create_graph=True every part keeps its state.
        progress: show a progress bar of the values. With gradients it moves when a part is finished that fits
            into memory_limit.
        gamma, bandwidth, normalize, dist, fused: as in :func:`softdtw`.

    Returns:
        (P,) values. The gradients of pairs that share a series are summed in the order of the list.

    Raises:
        TypeError, ValueError: as :func:`softdtw`, and for indices out of range.

    Examples:
        >>> x, y = torch.randn(5, 50, 3), torch.randn(7, 60, 3)
        >>> softdtw_pairs(x, y, [[0, 6], [4, 1], [0, 2]], gamma=0.1).shape
        torch.Size([3])
    """
    normalize = check_flag("normalize", normalize)
    limit, progress = check_memory_limit(memory_limit), check_flag("progress", progress)
    problem = check_pairs(x, y, pairs, gamma, bandwidth, dist, fused, x_lengths, y_lengths)
    listed, problem = problem.pairs, problem._replace(pairs=None)
    assert listed is not None

    def list_range(start: int, stop: int) -> Tensor:
        return listed[start:stop]

    value = pair_values(problem, listed.shape[0], list_range, limit, progress)
    if normalize:
        first, second = listed.unbind(1)
        value = value - (
            _self_terms(problem, True, first, limit) + _self_terms(problem, False, second, limit)
        )
    return value


@explains_arguments
def softdtw_cdist(
    x: TensorOrArray | Sequence[TensorOrArray],
    y: TensorOrArray | Sequence[TensorOrArray] | None = None,
    *,
    gamma: float = 1.0,
    bandwidth: int | None = None,
    normalize: bool = False,
    dist: str | DistanceFunction = "sqeuclidean",
    fused: bool | None = None,
    x_lengths: Lengths | None = None,
    y_lengths: Lengths | None = None,
    memory_limit: int | None = None,
    progress: bool = False,
) -> TensorOrArray:
    """Soft-DTW between every series of x and every series of y, differentiable in both.

    One launch for as many pairs as memory_limit allows; no series is copied.
    Lists are padded to their longest series: compute one that is much longer than the others in a call of
    its own.

    Args:
        x: (K, N, D), a tensor or a NumPy array, or a list of K series (N_k, D) of unequal lengths.
        y: (L, M, D), or a list, likewise. None compares x with itself, and computes each unordered pair once.
        x_lengths, y_lengths: (K,) and (L,) true lengths of padded series; a list has its own.
        gamma, bandwidth, normalize, dist, fused: as in :func:`softdtw`.
        memory_limit, progress: as in :func:`softdtw_pairs`.

    Returns:
        (K, L) values; (K, K), symmetric, without y. A NumPy array where x is of arrays, otherwise a tensor.

    Raises:
        TypeError, ValueError: as :func:`softdtw`.

    Examples:
        >>> x, y = torch.randn(5, 50, 3), torch.randn(7, 60, 3)
        >>> softdtw_cdist(x, y, gamma=0.1).shape
        torch.Size([5, 7])
    """
    normalize = check_flag("normalize", normalize)
    limit, progress = check_memory_limit(memory_limit), check_flag("progress", progress)
    first, x_lengths = as_batch("x", x, x_lengths)
    second = None
    if y is not None:
        second, y_lengths = as_batch("y", y, y_lengths)
    problem = check_all_pairs(first, second, gamma, bandwidth, dist, fused, x_lengths, y_lengths)
    # Of a distance that is not known to be symmetric both orders are computed.
    symmetric = y is None and problem.metric.is_named
    value = (symmetric_values if symmetric else grid_values)(problem, limit, progress)
    if normalize:
        x_self = half_selves(problem, True, limit)
        y_self = x_self if y is None else half_selves(problem, False, limit)
        value = value - (x_self.unsqueeze(1) + y_self.unsqueeze(0))  # symmetric where values are
    return cast(TensorOrArray, in_kind(value, x, value.device))


def _self_terms(problem: Problem, first: bool, index: Tensor, limit: int | None) -> Tensor:
    """Half of the Soft-DTW of each pair's series to itself; of all series where there are fewer of them."""
    side = problem.x if first else problem.y
    assert side is not None
    if index.shape[0] < side.shape[0]:
        return half_selves(problem, first, limit, index)
    return gather(half_selves(problem, first, limit), index.long().clamp(0, side.shape[0] - 1))


def half_selves(problem: Problem, first: bool, limit: int | None, index: Tensor | None = None) -> Tensor:
    """Half of the Soft-DTW to itself of each series of a side, or of those that `index` (P,) names."""

    def diagonal(own: Problem) -> Tensor:
        def diagonal_range(start: int, stop: int) -> Tensor:
            if index is None:
                which = torch.arange(start, stop, dtype=torch.int32, device=own.x.device)
            else:
                which = index[start:stop]
            return torch.stack([which, which], 1)

        return pair_values(own, own.x.shape[0] if index is None else index.shape[0], diagonal_range, limit)

    return half_self(problem, first, diagonal)


def grid_values(problem: Problem, limit: int | None, progress: bool = False) -> Tensor:
    """(K, L) values of every series of x with every series of y."""
    assert problem.y is not None
    rows, columns = problem.x.shape[0], problem.y.shape[0]
    device = problem.x.device

    def grid_range(start: int, stop: int) -> Tensor:
        index = torch.arange(start, stop, device=device)
        return torch.stack([index // max(columns, 1), index % max(columns, 1)], 1).int()

    return pair_values(problem, rows * columns, grid_range, limit, progress).view(rows, columns)


def symmetric_values(problem: Problem, limit: int | None, progress: bool = False) -> Tensor:
    """(K, K) values of x with itself: the pairs from the diagonal on, row after row, and their mirror."""
    size, device = problem.x.shape[0], problem.x.device
    rows = torch.arange(size, device=device)
    starts = rows * size - rows * (rows - 1) // 2  # where a row begins in the list

    def triangle_range(start: int, stop: int) -> Tensor:
        index = torch.arange(start, stop, device=device)
        row = torch.searchsorted(starts, index, right=True) - 1
        return torch.stack([row, index - starts[row] + row], 1).int()

    value = pair_values(problem, size * (size + 1) // 2, triangle_range, limit, progress)
    upper, lower = torch.minimum(rows, rows.view(-1, 1)), torch.maximum(rows, rows.view(-1, 1))
    return value[starts[upper] + lower - upper]


def tile_values(
    problem: Problem, rows: slice, columns: slice, limit: int | None, mirrored: bool = False
) -> Tensor:
    """(R, C) values of some series of x with some of y, with the bits they have in the table of all pairs.

    With `mirrored` the tile is on the diagonal of the table of x with itself, and symmetric.
    """
    assert problem.y is not None
    tile = problem._replace(
        x=problem.x[rows],
        y=problem.y[columns],
        x_lengths=None if problem.x_lengths is None else problem.x_lengths[rows],
        y_lengths=None if problem.y_lengths is None else problem.y_lengths[columns],
    )
    return symmetric_values(tile, limit) if mirrored else grid_values(tile, limit)


def pair_values(
    problem: Problem, count: int, pairs_of: PairRange, limit: int | None, progress: bool = False
) -> Tensor:
    """(count,) values of the pairs that `pairs_of` names, as many at a time as the limit allows."""
    x, y = problem.x, problem.y
    assert y is not None
    if count == 0:
        return ((x.sum() + y.sum()) * 0).to(problem.value_dtype).expand(0)
    records = torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)
    if problem.fused:  # embedded once, not for every pair
        problem = with_embedding(problem)
    # torch's compiler and its transforms see all pairs together: what to compute again is theirs to decide.
    if torch.compiler.is_compiling() or in_transform():
        return _values_in_parts(problem, count, count, pairs_of)
    part = pairs_at_a_time(problem, records, limit)
    if not progress:
        return _values_in_parts(problem, count, part, pairs_of)
    if not records:  # otherwise smaller parts would be computed again for the gradient
        part = min(part, max(1, CELLS_OF_A_STEP.get(x.device.type, 1 << 28) // (problem.n * problem.m)))
    with tqdm(total=count, desc="pairs", unit="pair", unit_scale=True) as bar:

        def shown_range(start: int, stop: int) -> Tensor:
            if start > bar.n:  # all before are finished; what a backward computes again is not counted
                _advance(bar, start, x.device)
            return pairs_of(start, stop)

        value = _values_in_parts(problem, count, part, shown_range)
        _advance(bar, count, x.device)
    return value


def _advance(bar: tqdm[Any], finished: int, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a bar shows what is done, not what is launched
    bar.update(finished - bar.n)


def _values_in_parts(problem: Problem, count: int, part: int, pairs_of: PairRange) -> Tensor:
    if problem.fused:
        return _autograd.values_in_parts(problem, count, part, pairs_of)

    def part_values(x: Tensor, y: Tensor, start: int) -> Tensor:
        pairs = pairs_of(start, min(start + part, count))
        return _autograd.values(problem._replace(x=x, y=y, pairs=pairs).gathered())

    assert problem.y is not None
    if part >= count:
        return part_values(problem.x, problem.y, 0)
    each = part_values
    if torch.is_grad_enabled():  # the first checkpoint imports torch.compile, a second or two
        each = functools.partial(checkpoint, part_values, use_reentrant=False)
    return torch.cat([each(problem.x, problem.y, start) for start in range(0, count, part)])


def pairs_at_a_time(problem: Problem, records: bool, limit: int | None) -> int:
    """How many pairs fit into the limit."""
    assert problem.y is not None
    n, m, d = problem.n, problem.m, problem.x.shape[2]
    device, is_double = problem.x.device, problem.value_dtype == torch.float64
    number, numbers = 8 if is_double else 4, (n + m) * d
    size = (n + m) * BYTES_OF_A_STEP
    if not problem.fused:
        size += 6 * n * m * number  # costs, what they are made of, and their gradient
    else:
        state = 0
        if records:
            one = problem._replace(pairs=torch.empty((1, 2), dtype=torch.int32), need_x=True, need_y=True)
            state = backend(device.type).state_bytes(one)
            size += state + 2 * numbers * number
        if device.type == "cpu" and not is_double:
            # All may be beyond the range of float32 arithmetic. Their series are then copied, in float32 and
            # float64, and computed again in float64, with a state and gradients of that.
            size += 12 * numbers + (2 * state + 16 * numbers if records else 0)
    return max(1, (free_memory(device) if limit is None else limit) // size)
