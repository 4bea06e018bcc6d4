"""The oracle: Soft-DTW in plain torch, from the recurrence and nothing else.

Equations (1) to (3) of docs/math.md, vectorised over the batch and over one anti-diagonal at a time. It runs
on any device and in any float type and is differentiable as often as autograd likes, because every step is an
out-of-place torch operation. Tests compare the kernels with it; devices that have no kernel run on it.

It keeps every anti-diagonal for autograd, so it needs a few dozen bytes per cell: accurate, not fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ._distances import fill_padding, sqeuclidean, sqeuclidean_gradient, sqeuclidean_tangent
from ._problem import Direction, Problem


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


def _anti_diagonals(cost: Tensor, outside: float = math.inf) -> tuple[Tensor, ...]:
    """N + M - 1 tensors (B, N): entry i of tensor k is cell (i, k - i), `outside` beyond the matrix.

    Pads each row to N + M cells and reads the same memory with rows one cell shorter: row i moves right by i.
    """
    batch, n, m = cost.shape
    padded = F.pad(cost, (0, n), value=outside).reshape(batch, n * (n + m))
    skewed = padded[:, : n * (n + m - 1)].view(batch, n, n + m - 1)
    return skewed.movedim(2, 0).contiguous().unbind(0)


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
    weight = after = nothing
    next_share = after_share = none
    weights: list[Tensor] = []
    for k in range(n + m - 2, -1, -1):
        to_diagonal = F.pad((after * after_share[0])[:, 1:], (0, 1))
        to_up = F.pad((weight * next_share[1])[:, 1:], (0, 1))
        to_left = weight * next_share[2]
        seed = (seed_row & (rows + columns - 2 == k).unsqueeze(1)).to(cost.dtype)
        weight, after = to_diagonal + to_up + to_left + seed, weight
        next_share, after_share = shares[k], next_share
        weights.append(weight)
    return _from_anti_diagonals(weights[::-1], m)


def _from_anti_diagonals(diagonals: list[Tensor], m: int) -> Tensor:
    """(B, N, M) out of N + M - 1 tensors (B, N), the inverse of `_anti_diagonals`."""
    n = diagonals[0].shape[1]
    row = torch.arange(n, device=diagonals[0].device).view(n, 1)
    column = torch.arange(m, device=diagonals[0].device).view(1, m)
    return torch.stack(diagonals)[row + column, :, row].movedim(2, 0).contiguous()


def dual_from_cost(
    cost: Tensor,
    omega: Tensor,
    gamma: float,
    bandwidth: int = -1,
    x_lengths: Tensor | None = None,
    y_lengths: Tensor | None = None,
    rounded: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """<E, omega> (B,), the alignment E and its derivative along `omega`, (B, N, M), by (12) to (15).

    `omega` (B or 1, N, M) is a direction on the costs; what it is in forbidden cells changes nothing.
    `rounded` rounds the shares of (7), say to float32: an error that nobody who stores them so can avoid.
    """
    batch, n, m = cost.shape
    cost = _forbid_outside(cost, bandwidth, x_lengths, y_lengths)
    omega = torch.where(cost == math.inf, 0.0, omega)
    previous = before_previous = cost.new_full((batch, n), math.inf)
    u = v = cost.new_zeros(batch, n)
    shares: list[Tensor] = []
    share_slopes: list[Tensor] = []
    for k, (diagonal_cost, change) in enumerate(
        zip(_anti_diagonals(cost), _anti_diagonals(omega, outside=0.0), strict=True)
    ):
        terms = _predecessors(k, previous, before_previous)
        reachable = softmin(terms, gamma)
        unreachable = reachable == math.inf
        share = torch.exp((reachable - terms) / gamma).masked_fill(unreachable, 0.0)
        share = share if rounded is None else rounded(share)
        before_previous, previous = previous, diagonal_cost + reachable

        # U and V are differences of one field. A cell that no path reaches has any value in it, here its
        # diagonal neighbour's: its neighbours' differences to each other must go on adding up.
        diagonal, up, left = share[0].masked_fill(unreachable, 1.0), share[1], share[2]
        above = F.pad(v[:, :-1], (1, 0))
        beside = u
        turn = beside - above
        slope_up = left * turn - diagonal * above
        slope_left = -up * turn - diagonal * beside
        slope_diagonal = up * above + left * beside
        shares.append(share)
        share_slopes.append(share * torch.stack((slope_diagonal, slope_up, slope_left)) / gamma)
        row = torch.arange(n, device=cost.device)
        u = (change + slope_up).masked_fill((row == 0) | (row > k) | (row <= k - m), 0.0)
        v = (change + slope_left).masked_fill((row >= k) | (row <= k - m), 0.0)

    rows, columns, _ = _ends(batch, n, m, bandwidth, x_lengths, y_lengths, cost.device)
    seed_row = torch.arange(n, device=cost.device) == (rows - 1).unsqueeze(1)
    none = cost.new_zeros(3, batch, n)
    # What flows out of the last two anti-diagonals: to the diagonal, upper and left neighbours.
    flow = after_flow = slope_flow = after_slope_flow = none
    weights: list[Tensor] = []
    weight_slopes: list[Tensor] = []
    for k in range(n + m - 2, -1, -1):
        seed = (seed_row & (rows + columns - 2 == k).unsqueeze(1)).to(cost.dtype)
        weight = _arriving(flow, after_flow) + seed
        weight_slope = _arriving(slope_flow, after_slope_flow)
        after_flow, flow = flow, weight * shares[k]
        after_slope_flow, slope_flow = slope_flow, weight_slope * shares[k] + weight * share_slopes[k]
        weights.append(weight)
        weight_slopes.append(weight_slope)
    alignment = _from_anti_diagonals(weights[::-1], m)
    return (alignment * omega).sum((1, 2)), alignment, _from_anti_diagonals(weight_slopes[::-1], m)


def _arriving(flow: Tensor, after_flow: Tensor) -> Tensor:
    """(B, N) sums of what the flows (3, B, N) of the next two anti-diagonals bring to each cell."""
    from_diagonal = F.pad(after_flow[0][:, 1:], (0, 1))
    from_below = F.pad(flow[1][:, 1:], (0, 1))
    return from_diagonal + from_below + flow[2]


# The Backend protocol, for devices without a kernel. Nothing is saved: the backward walks the matrix again.
# In log space float32 loses the digits that the gradient needs, so it takes float64 where the device has it.


def _widen(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _costs(problem: Problem) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Wide costs (B, N, M), and the wide series that they were made of, if any."""
    x, y = _widen(problem.x), problem.y
    if y is None:
        return x, None, None
    y = _widen(y)
    if problem.x_lengths is not None:
        x = fill_padding(x, problem.x_lengths)
    if problem.y_lengths is not None:
        y = fill_padding(y, problem.y_lengths)
    return sqeuclidean(x, y), x, y


def _options(problem: Problem) -> tuple[float, int, Tensor | None, Tensor | None]:
    return problem.gamma, problem.bandwidth, problem.x_lengths, problem.y_lengths


def forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Values (B,), and an empty state."""
    problem = problem.gathered()
    with torch.no_grad():
        value = softdtw_from_cost(_costs(problem)[0], *_options(problem))
    return value.to(problem.value_dtype), problem.x.new_empty(0, dtype=torch.uint8)


def state_bytes(problem: Problem) -> int:
    """Nothing is saved."""
    return 0


def _settled(problem: Problem, table: Tensor, grad: Tensor, value: Tensor) -> Tensor:
    """grad_b times the table (B, N, M), zero in the padding and for infinite values."""
    inside = valid_cells(problem.n, problem.m, -1, problem.x_lengths, problem.y_lengths, table.device)
    gradient = table * grad.view(-1, 1, 1)
    # The sweep carries a NaN only as far as it met one; the whole sample's gradient is unknown.
    gradient = gradient.masked_fill(value.isnan().view(-1, 1, 1), math.nan)
    if inside is not None:
        gradient = gradient.masked_fill(~inside, 0.0)
    return gradient.masked_fill((value == math.inf).view(-1, 1, 1), 0.0)


def _series_gradients(gradient: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and y, one per pair, for that of their squared Euclidean distances."""
    return sqeuclidean_gradient(gradient, x, y), sqeuclidean_gradient(gradient.transpose(1, 2), y, x)


def backward(problem: Problem, grad: Tensor, value: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients, one per pair."""
    x_dtype = problem.gradient_dtype(problem.x)
    y_dtype = x_dtype if problem.y is None else problem.gradient_dtype(problem.y)
    problem = problem.gathered()
    with torch.no_grad():
        cost, x, y = _costs(problem)
        alignment = alignment_from_cost(cost, *_options(problem))
        gradient = _settled(problem, alignment, grad, value)
        if x is None or y is None or problem.y is None:
            return gradient.to(x_dtype), problem.no_gradient()
        grad_x = grad_y = problem.no_gradient()
        if problem.need_x:
            grad_x = sqeuclidean_gradient(gradient, x, y).to(x_dtype)
        if problem.need_y:
            by_column = gradient.transpose(1, 2)
            grad_y = sqeuclidean_gradient(by_column, y, x).to(y_dtype)
    return grad_x, grad_y


# Second order. E and its derivative are tables here; only their contractions leave.


def _sides(
    problem: Problem, direction: Direction, x: Tensor | None, y: Tensor | None
) -> tuple[Tensor, Tensor]:
    """a and b of the direction, wide, with finite numbers in the padding; zeros for None."""
    sides = []
    for side, series, lengths in ((direction.a, x, problem.x_lengths), (direction.b, y, problem.y_lengths)):
        if side is None:
            assert series is not None
            sides.append(torch.zeros_like(series))
        else:
            sides.append(_widen(side) if lengths is None else fill_padding(_widen(side), lengths))
    return sides[0], sides[1]


def _omega(problem: Problem, direction: Direction, x: Tensor | None, y: Tensor | None) -> Tensor:
    """The direction, wide, (B or 1, N, M); x and y are the wide series of the problem."""
    if direction.kind == "matrix":
        assert direction.a is not None
        return _widen(direction.a)
    if direction.kind == "position":
        row, column = (
            torch.arange(1, size + 1, device=problem.x.device).view(shape)
            for size, shape in ((problem.n, (1, -1, 1)), (problem.m, (1, 1, -1)))
        )
        rows, columns, _ = _ends(
            problem.batch, problem.n, problem.m, -1, problem.x_lengths, problem.y_lengths, problem.x.device
        )
        return (_widen(row) / rows.view(-1, 1, 1) - _widen(column) / columns.view(-1, 1, 1)).square()
    a, b = _sides(problem, direction, x, y)
    if direction.kind == "features":
        return sqeuclidean(a, b)
    assert x is not None
    assert y is not None
    return sqeuclidean_tangent(x, y, a, b)


def expected(problem: Problem, direction: Direction) -> tuple[Tensor, Tensor, Tensor]:
    """<E, Omega> and values (B,), and an empty state."""
    problem = problem.gathered()
    with torch.no_grad():
        cost, x, y = _costs(problem)
        value = softdtw_from_cost(cost, *_options(problem))
        alignment = alignment_from_cost(cost, *_options(problem))
        omega = _omega(problem, direction, x, y)
        # What omega is where no path goes, NaN or infinite, changes nothing.
        dot = torch.where(alignment == 0, alignment, alignment * omega).sum((1, 2))
    dot = dot.masked_fill(value.isnan(), math.nan).masked_fill(value == math.inf, 0.0)
    dtype = problem.value_dtype
    return dot.to(dtype), value.to(dtype), problem.x.new_empty(0, dtype=torch.uint8)


def expected_state_bytes(problem: Problem, direction: Direction) -> int:
    """Nothing is saved."""
    return 0


def expected_backward(
    problem: Problem, direction: Direction, grad: Tensor, value: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients, one per pair."""
    asked, problem = problem, problem.gathered()
    with torch.no_grad():
        cost, x, y = _costs(problem)
        _, *tables = dual_from_cost(cost, _omega(problem, direction, x, y), *_options(problem))
        alignment, slope = (_settled(problem, table, grad, value) for table in tables)
        grad_x = grad_y = grad_a = grad_b = alignment
        if x is None or y is None or problem.y is None:
            grad_x = slope
        else:
            grad_x, grad_y = _series_gradients(slope, x, y)
        if direction.kind == "matrix":
            grad_a = alignment
        elif direction.kind == "features":
            grad_a, grad_b = _series_gradients(alignment, *_sides(problem, direction, x, y))
        elif direction.kind == "tangents":  # Omega changes with the series as well
            more_x, more_y = _series_gradients(alignment, *_sides(problem, direction, x, y))
            grad_x, grad_y = grad_x + more_x, grad_y + more_y

    return (
        asked.as_gradient(grad_x, asked.x, asked.need_x),
        asked.as_gradient(grad_y, asked.y, asked.need_y),
        asked.as_gradient(grad_a, direction.a, direction.need_a),
        asked.as_gradient(grad_b, direction.b, direction.need_b),
    )
