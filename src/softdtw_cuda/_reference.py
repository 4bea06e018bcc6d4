"""The oracle: Soft-DTW in plain torch, from the recurrence and nothing else.

Equations (1) to (3) of docs/math.md, vectorised over the batch and over one anti-diagonal at a time. It runs
on any device and in any float type and is differentiable as often as autograd likes, because every step is an
out-of-place torch operation. Tests compare the kernels with it; devices that have no kernel run on it.

It keeps every anti-diagonal for autograd, so it needs a few dozen bytes per cell: right, not fast.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ._distances import sqeuclidean, sqeuclidean_gradient


def softmin(terms: Tensor, gamma: float) -> Tensor:
    """Equation (2) over the first dimension; where all are +inf the result is +inf and its gradient zero."""
    smallest = terms.detach().amin(0)
    unreachable = smallest == math.inf
    # exp(-(inf - inf)) would be NaN: shift by a finite number where nothing is reachable.
    shift = smallest.masked_fill(unreachable, 0.0)
    total = torch.exp((shift - terms) / gamma).sum(0)
    # log(0) has an infinite slope that would turn zero gradients into NaN: keep it out of the graph.
    finite = shift - gamma * torch.log(total.masked_fill(unreachable, 1.0))
    return finite.masked_fill(unreachable, math.inf)


def valid_cells(
    n: int, m: int, bandwidth: int, x_lengths: Tensor | None, y_lengths: Tensor | None, device: torch.device
) -> Tensor | None:
    """Boolean (1 or B, N, M) mask of the cells inside band and lengths; None where that is every cell."""
    row = torch.arange(n, device=device).view(1, n, 1)
    column = torch.arange(m, device=device).view(1, 1, m)
    mask: Tensor | None = None
    if bandwidth >= 0:
        mask = (row - column).abs() <= bandwidth
    if x_lengths is not None:
        inside = row < x_lengths.view(-1, 1, 1)
        mask = inside if mask is None else mask & inside
    if y_lengths is not None:
        inside = column < y_lengths.view(-1, 1, 1)
        mask = inside if mask is None else mask & inside
    return mask


def softdtw_from_cost(
    cost: Tensor,
    gamma: float,
    bandwidth: int = -1,
    x_lengths: Tensor | None = None,
    y_lengths: Tensor | None = None,
) -> Tensor:
    """Soft-DTW of cost matrices.

    Args:
        cost: (B, N, M), any float type; +inf forbids a cell.
        gamma: temperature, > 0.
        bandwidth: Sakoe-Chiba radius; -1 for none.
        x_lengths, y_lengths: (B,) integers on cost's device, or None. A length outside 1..N (or 1..M) and a
            band without a path give NaN for that sample.

    Returns:
        (B,) values in cost's type. A value of +inf (no path of finite cost) has a zero gradient.
    """
    batch, n, m = cost.shape
    cost = _forbid_outside(cost, bandwidth, x_lengths, y_lengths)
    previous = before_previous = cost.new_full((batch, n), math.inf)
    diagonals: list[Tensor] = []
    for k, diagonal_cost in enumerate(_anti_diagonals(cost)):
        reachable = softmin(_predecessors(k, previous, before_previous), gamma)
        before_previous, previous = previous, diagonal_cost + reachable
        if x_lengths is not None or y_lengths is not None:
            diagonals.append(previous)

    if not diagonals:
        value = previous[:, n - 1]
    else:
        rows, columns, broken = _ends(batch, n, m, bandwidth, x_lengths, y_lengths, cost.device)
        sample = torch.arange(batch, device=cost.device)
        value = torch.stack(diagonals, 1)[sample, rows + columns - 2, rows - 1]
        value = value.masked_fill(broken, math.nan)
    return torch.where(value == math.inf, value.detach(), value)


def _forbid_outside(
    cost: Tensor, bandwidth: int, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> Tensor:
    mask = valid_cells(cost.shape[1], cost.shape[2], bandwidth, x_lengths, y_lengths, cost.device)
    return cost if mask is None else torch.where(mask, cost, math.inf)


def _anti_diagonals(cost: Tensor) -> tuple[Tensor, ...]:
    """N + M - 1 tensors (B, N): entry i of tensor k is cell (i, k - i), +inf outside the matrix.

    Pads each row to N + M cells and reads the same memory with rows one cell shorter: row i moves right by i.
    """
    batch, n, m = cost.shape
    padded = F.pad(cost, (0, n), value=math.inf).reshape(batch, n * (n + m))
    return padded[:, : n * (n + m - 1)].reshape(batch, n, n + m - 1).unbind(2)


def _predecessors(k: int, previous: Tensor, before_previous: Tensor) -> Tensor:
    """R_{i-1,j-1}, R_{i-1,j} and R_{i,j-1}, as (3, B, N), for anti-diagonal k, from the two before it."""
    # The first cell's diagonal predecessor is R_00 = 0; every other boundary value is +inf.
    diagonal = F.pad(before_previous[:, :-1], (1, 0), value=0.0 if k == 0 else math.inf)
    up = F.pad(previous[:, :-1], (1, 0), value=math.inf)
    return torch.stack((diagonal, up, previous))


def _ends(
    batch: int,
    n: int,
    m: int,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each sample's last row and column, counted from 1, and whether the sample makes no sense."""
    rows = x_lengths.long() if x_lengths is not None else torch.full((batch,), n, device=device)
    columns = y_lengths.long() if y_lengths is not None else torch.full((batch,), m, device=device)
    broken = (rows < 1) | (rows > n) | (columns < 1) | (columns > m)
    if bandwidth >= 0:
        broken = broken | ((rows - columns).abs() > bandwidth)
    return rows.clamp(1, n), columns.clamp(1, m), broken


def sqeuclidean_cost(x: Tensor, y: Tensor) -> Tensor:
    """Squared Euclidean distances (B, N, M) by direct differences; needs (B, N, M, D) memory."""
    return (x.unsqueeze(2) - y.unsqueeze(1)).square().sum(3)


def softdtw(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int = -1,
    x_lengths: Tensor | None = None,
    y_lengths: Tensor | None = None,
) -> Tensor:
    """Soft-DTW of series x (B, N, D) and y (B, M, D) under the squared Euclidean distance; (B,) values."""
    if x_lengths is not None:
        x = fill_padding(x, x_lengths)
    if y_lengths is not None:
        y = fill_padding(y, y_lengths)
    return softdtw_from_cost(sqeuclidean_cost(x, y), gamma, bandwidth, x_lengths, y_lengths)


def fill_padding(series: Tensor, lengths: Tensor) -> Tensor:
    """Copy of series (1 or B, N, D) whose padding repeats the first step, so that NaN there cannot spread.

    Not zeros: the padding takes part in the mean that distances are centred around.
    """
    inside = torch.arange(series.shape[1], device=series.device) < lengths.view(-1, 1)
    return torch.where(inside.unsqueeze(2), series, series[:, :1].detach())


def alignment_from_cost(
    cost: Tensor,
    gamma: float,
    bandwidth: int = -1,
    x_lengths: Tensor | None = None,
    y_lengths: Tensor | None = None,
) -> Tensor:
    """E = d sdtw / d cost (B, N, M) by equations (7) and (8); no autograd, which operators cannot use."""
    batch, n, m = cost.shape
    cost = _forbid_outside(cost, bandwidth, x_lengths, y_lengths)
    previous = before_previous = cost.new_full((batch, n), math.inf)
    shares: list[Tensor] = []
    for k, diagonal_cost in enumerate(_anti_diagonals(cost)):
        terms = _predecessors(k, previous, before_previous)
        reachable = softmin(terms, gamma)
        # A share of what cannot be reached is zero, not exp(inf - inf).
        share = torch.exp((reachable - terms) / gamma)
        shares.append(share.masked_fill(reachable == math.inf, 0.0))
        before_previous, previous = previous, diagonal_cost + reachable

    rows, columns, _ = _ends(batch, n, m, bandwidth, x_lengths, y_lengths, cost.device)
    seed_row = torch.arange(n, device=cost.device) == (rows - 1).unsqueeze(1)
    nothing = cost.new_zeros(batch, n)
    none = cost.new_zeros(3, batch, n)
    mass = after = nothing
    next_share = after_share = none
    masses: list[Tensor] = []
    for k in range(n + m - 2, -1, -1):
        to_diagonal = F.pad((after * after_share[0])[:, 1:], (0, 1))
        to_up = F.pad((mass * next_share[1])[:, 1:], (0, 1))
        to_left = mass * next_share[2]
        seed = (seed_row & (rows + columns - 2 == k).unsqueeze(1)).to(cost.dtype)
        mass, after = to_diagonal + to_up + to_left + seed, mass
        next_share, after_share = shares[k], next_share
        masses.append(mass)
    masses.reverse()
    row = torch.arange(n, device=cost.device).view(n, 1)
    column = torch.arange(m, device=cost.device).view(1, m)
    return torch.stack(masses, 2).gather(2, (row + column).expand(batch, n, m))


# The operators of _ops.py, for devices without a kernel. They save nothing and walk the recurrence again. In
# log space float32 loses the digits that the gradient needs, so they take float64 where the device has it.


def value_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the values for series or costs of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _nothing(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype, device=like.device)


def cost_forward(
    cost: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """softdtw_cuda::cost_forward without a kernel."""
    with torch.no_grad():
        value = softdtw_from_cost(_widen(cost), gamma, bandwidth, x_lengths, y_lengths)
    return value.to(value_dtype(cost.dtype)), _nothing(cost, torch.uint8)


def cost_backward(
    grad: Tensor,
    cost: Tensor,
    value: Tensor,
    state: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
) -> Tensor:
    """softdtw_cuda::cost_backward without a kernel."""
    alignment = alignment_from_cost(_widen(cost), gamma, bandwidth, x_lengths, y_lengths)
    inside = valid_cells(cost.shape[1], cost.shape[2], -1, x_lengths, y_lengths, cost.device)
    gradient = alignment * grad.view(-1, 1, 1)
    # The sweep carries a NaN only as far as it met one; the whole sample's gradient is unknown.
    gradient = gradient.masked_fill(value.isnan().view(-1, 1, 1), math.nan)
    if inside is not None:
        gradient = gradient.masked_fill(~inside, 0.0)
    return gradient.masked_fill((value == math.inf).view(-1, 1, 1), 0.0).to(cost.dtype)


def _wide_pair(
    x: Tensor, y: Tensor, x_lengths: Tensor | None, y_lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, y = _widen(x.detach()), _widen(y.detach())
    if x_lengths is not None:
        x = fill_padding(x, x_lengths)
    if y_lengths is not None:
        y = fill_padding(y, y_lengths)
    return x, y


def fused_forward(
    x: Tensor,
    y: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """softdtw_cuda::fused_forward without a kernel."""
    cost = sqeuclidean(*_wide_pair(x, y, x_lengths, y_lengths))
    value, state = cost_forward(cost, gamma, bandwidth, x_lengths, y_lengths, save)
    return value.to(value_dtype(x.dtype)), state


def fused_backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    value: Tensor,
    state: Tensor,
    gamma: float,
    bandwidth: int,
    x_lengths: Tensor | None,
    y_lengths: Tensor | None,
    need_x: bool,
    need_y: bool,
) -> tuple[Tensor, Tensor]:
    """softdtw_cuda::fused_backward without a kernel."""
    wide_x, wide_y = _wide_pair(x, y, x_lengths, y_lengths)
    cost = sqeuclidean(wide_x, wide_y)
    alignment = cost_backward(grad, cost, value, state, gamma, bandwidth, x_lengths, y_lengths)

    def gradient(alignment: Tensor, wide: Tensor, other: Tensor, series: Tensor) -> Tensor:
        broadcast = series.shape[0] != value.shape[0]
        dtype = value_dtype(series.dtype) if broadcast else series.dtype
        return sqeuclidean_gradient(alignment, wide, other).to(dtype)

    grad_x = gradient(alignment, wide_x, wide_y, x) if need_x else _nothing(x, x.dtype)
    grad_y = gradient(alignment.transpose(1, 2), wide_y, wide_x, y) if need_y else _nothing(y, y.dtype)
    return grad_x, grad_y
