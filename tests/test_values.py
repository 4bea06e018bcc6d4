"""Known values, identities, and all paths by enumeration."""

from __future__ import annotations

import math

import pytest
import torch

from softdtw_cuda import (
    softdtw,
    softdtw_alignment,
    softdtw_cdist,
    softdtw_divergence,
    softdtw_from_cost,
)
from tests.oracle import assert_within_float64, delannoy, enumerate_paths


def column(*values: float, device: str = "cpu", dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)


def costs(batch: int, n: int, m: int, device: str) -> torch.Tensor:
    return torch.randn(batch, n, m, dtype=torch.float64).square().to(device)


DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-6)], ids=["float64", "float32"]
)
FUSED = pytest.mark.parametrize("fused", [True, False], ids=["fused", "cost"])


@DTYPES
@FUSED
class TestLiteralValues:
    def test_zeros_against_ones(self, device: str, dtype: torch.dtype, tolerance: float, fused: bool) -> None:
        x, y = torch.zeros(10, 8, dtype=dtype, device=device), torch.ones(12, 8, dtype=dtype, device=device)
        assert softdtw(x, y, fused=fused).item() == pytest.approx(91.98061035, rel=tolerance)
        assert softdtw(x, y, fused=fused, normalize=True).item() == pytest.approx(107.89006617, rel=tolerance)

    def test_zeros_against_themselves(
        self, device: str, dtype: torch.dtype, tolerance: float, fused: bool
    ) -> None:
        x = torch.zeros(10, 8, dtype=dtype, device=device)
        assert softdtw(x, x, fused=fused).item() == pytest.approx(-math.log(1462563), rel=tolerance)
        assert delannoy(9, 9) == 1462563

    def test_all_pairs(self, device: str, dtype: torch.dtype, tolerance: float, fused: bool) -> None:
        x = torch.stack((column(1, 2, 2, 3, dtype=dtype), column(1, 2, 3, 4, dtype=dtype))).to(device)
        value = softdtw_cdist(x, x, gamma=0.01, fused=fused)
        expected = torch.tensor([[-0.01 * math.log(3), 1.0], [1.0, 0.0]])
        torch.testing.assert_close(value.cpu().float(), expected, rtol=0, atol=1e-6)

    def test_value_and_gradient(self, device: str, dtype: torch.dtype, tolerance: float, fused: bool) -> None:
        x = column(1, 2, 3, device=device, dtype=dtype).requires_grad_()
        value = softdtw(x, column(3, 4, -3, device=device, dtype=dtype), fused=fused)
        value.backward()
        assert value.item() == pytest.approx(41.1876273, rel=max(tolerance, 2e-9))
        expected = torch.tensor([-4.0001, -2.2852, 10.1643])
        torch.testing.assert_close(x.grad.flatten().cpu().float(), expected, rtol=0, atol=5e-5)

    def test_ramps(self, device: str, dtype: torch.dtype, tolerance: float, fused: bool) -> None:
        x = torch.arange(1.0, 11.0, dtype=dtype, device=device).unsqueeze(1)
        assert softdtw(x, x + 10, fused=fused).item() == pytest.approx(767.43894417, rel=tolerance)


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("m", range(1, 6))
@pytest.mark.parametrize("bandwidth", [None, 1, 2])
@pytest.mark.parametrize("gamma", [0.1, 1.0, 5.0])
def test_every_path(device: str, n: int, m: int, bandwidth: int | None, gamma: float) -> None:
    if bandwidth is not None and abs(n - m) > bandwidth:
        with pytest.raises(ValueError, match="bandwidth"):
            softdtw_from_cost(costs(1, n, m, device), bandwidth=bandwidth)
        return
    # Negative costs included: users' matrices may be log-likelihoods.
    cost = torch.randn(1, n, m, dtype=torch.float64)
    value, alignment = enumerate_paths(cost[0], gamma, -1 if bandwidth is None else bandwidth)
    measured = softdtw_from_cost(cost.to(device), gamma=gamma, bandwidth=bandwidth)
    assert measured.item() == pytest.approx(value, rel=1e-12, abs=1e-12)
    measured_alignment = softdtw_alignment(cost=cost.to(device), gamma=gamma, bandwidth=bandwidth)
    torch.testing.assert_close(measured_alignment[0].cpu(), alignment, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 9), (9, 1), (40, 33), (33, 70), (130, 129)])
class TestIdentities:
    def test_scaling(self, device: str, n: int, m: int) -> None:
        cost = costs(2, n, m, device)
        scaled = 0.3 * softdtw_from_cost(cost / 0.3, gamma=1.0)
        assert_within_float64(softdtw_from_cost(cost, gamma=0.3), scaled.cpu())

    def test_transpose_and_reversal(self, device: str, n: int, m: int) -> None:
        cost = costs(2, n, m, device)
        value = softdtw_from_cost(cost, gamma=0.7).cpu()
        assert_within_float64(softdtw_from_cost(cost.transpose(1, 2), gamma=0.7), value)
        assert_within_float64(softdtw_from_cost(cost.flip(1, 2), gamma=0.7), value)
        alignment = softdtw_alignment(cost=cost, gamma=0.7).cpu()
        assert_within_float64(softdtw_alignment(cost=cost.flip(1, 2), gamma=0.7).flip(1, 2), alignment)

    def test_zero_cost_counts_paths(self, device: str, n: int, m: int) -> None:
        value = softdtw_from_cost(torch.zeros(1, n, m, dtype=torch.float64, device=device), gamma=2.0)
        assert value.item() == pytest.approx(-2.0 * math.log(delannoy(n - 1, m - 1)), rel=1e-12, abs=1e-12)

    def test_between_dtw_and_its_lower_bound(self, device: str, n: int, m: int) -> None:
        cost = costs(1, n, m, "cpu")[0]
        hard = torch.full((n + 1, m + 1), math.inf, dtype=torch.float64)
        hard[0, 0] = 0
        for i in range(n):
            for j in range(m):
                hard[i + 1, j + 1] = cost[i, j] + min(hard[i, j], hard[i, j + 1], hard[i + 1, j])
        gamma = 0.4
        value = softdtw_from_cost(cost.to(device), gamma=gamma).item()
        dtw = hard[n, m].item()
        assert dtw - gamma * math.log(delannoy(n - 1, m - 1)) - 1e-9 <= value <= dtw + 1e-9

    def test_alignment_weight_is_conserved(self, device: str, n: int, m: int) -> None:
        alignment = softdtw_alignment(cost=costs(1, n, m, device), gamma=0.5)[0].cpu()
        assert alignment.min() >= 0
        assert alignment.max() <= 1 + 1e-12
        assert alignment[0, 0] == pytest.approx(1, abs=1e-12)
        assert alignment[-1, -1] == pytest.approx(1, abs=1e-12)
        assert (alignment.sum(0) >= 1 - 1e-12).all()
        assert (alignment.sum(1) >= 1 - 1e-12).all()
        assert max(n, m) - 1e-9 <= alignment.sum() <= n + m - 1 + 1e-9

    def test_adding_a_constant(self, device: str, n: int, m: int) -> None:
        cost = costs(1, n, m, device)
        shift = torch.zeros((), dtype=torch.float64, device=device, requires_grad=True)
        softdtw_from_cost(cost + shift, gamma=0.5).sum().backward()
        total = softdtw_alignment(cost=cost, gamma=0.5).sum()
        assert shift.grad.item() == pytest.approx(total.item(), rel=1e-12)

    def test_energy_minus_entropy(self, device: str, n: int, m: int) -> None:
        """sdtw = <E, D> - gamma * entropy, and the entropy is -d sdtw / d gamma."""
        cost, gamma, h = costs(1, n, m, device), 0.5, 1e-5
        alignment = softdtw_alignment(cost=cost, gamma=gamma)
        up, down = (softdtw_from_cost(cost, gamma=gamma + side).item() for side in (h, -h))
        entropy = -(up - down) / (2 * h)
        expected = (alignment * cost).sum().item() - gamma * entropy
        assert softdtw_from_cost(cost, gamma=gamma).item() == pytest.approx(expected, rel=1e-7, abs=1e-7)

    def test_divergence_of_a_series_with_itself(self, device: str, n: int, m: int) -> None:
        x = torch.randn(2, n, 3, dtype=torch.float64, device=device, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        value = softdtw_divergence(x, y, gamma=0.5)
        value.sum().backward()
        assert (value == 0).all()
        assert (x.grad == 0).all()
        assert (y.grad == 0).all()


def test_anti_diagonals_and_the_weight_that_jumps_them_sum_to_one(device: str) -> None:
    """Every path crosses anti-diagonal k or jumps it by a diagonal step: the two probabilities sum to 1."""
    n, m, gamma = 37, 23, 0.5
    cost = costs(1, n, m, device)
    alignment = softdtw_alignment(cost=cost, gamma=gamma)[0].cpu()
    rows, columns = torch.meshgrid(torch.arange(n), torch.arange(m), indexing="ij")
    for k in (1, 7, 22, 30, 57):
        on = alignment[rows + columns == k].sum().item()
        # Forbidding the cells of anti-diagonal k leaves exactly the paths that jump it.
        forbidden = torch.where((rows + columns == k).to(device), math.inf, cost[0])
        jumping = softdtw_from_cost(forbidden, gamma=gamma) - softdtw_from_cost(cost[0], gamma=gamma)
        assert on + math.exp(-jumping.item() / gamma) == pytest.approx(1, abs=1e-10)


def test_constant_cost(device: str) -> None:
    """A constant c costs c times the path length, and paths of every length are counted by binomials."""
    n, m, c, gamma = 9, 14, 0.8, 0.6
    # Paths with k diagonal steps: (n + m - 2 - k)! / (k! (n - 1 - k)! (m - 1 - k)!), of n + m - 1 - k cells.
    total = math.fsum(
        math.comb(n + m - 2 - k, k)
        * math.comb(n + m - 2 - 2 * k, n - 1 - k)
        * math.exp(-c * (n + m - 1 - k) / gamma)
        for k in range(min(n, m))
    )
    value = softdtw_from_cost(torch.full((n, m), c, dtype=torch.float64, device=device), gamma=gamma)
    assert value.item() == pytest.approx(-gamma * math.log(total), rel=1e-12)


def test_band_zero_is_the_trace(device: str) -> None:
    cost = costs(3, 21, 21, device).requires_grad_()
    value = softdtw_from_cost(cost, bandwidth=0)
    assert_within_float64(value, cost.detach().cpu().diagonal(dim1=1, dim2=2).sum(1))
    value.sum().backward()
    assert torch.equal(cost.grad.cpu(), torch.eye(21, dtype=torch.float64).expand(3, 21, 21))


def test_one_row_is_the_plain_sum(device: str) -> None:
    cost = costs(3, 1, 50, device)
    assert_within_float64(softdtw_from_cost(cost), cost.cpu().sum((1, 2)))
    assert_within_float64(softdtw_from_cost(cost.transpose(1, 2)), cost.cpu().sum((1, 2)))


@pytest.mark.parametrize("bandwidth", [3, 30, 200])
def test_a_band_is_a_matrix_with_the_rest_forbidden(device: str, bandwidth: int) -> None:
    cost = costs(2, 150, 148, device)
    rows, columns = torch.meshgrid(torch.arange(150), torch.arange(148), indexing="ij")
    inside = ((rows - columns).abs() <= bandwidth).to(device)
    forbidden = cost.masked_fill(~inside, math.inf)
    value = softdtw_from_cost(forbidden, gamma=0.3).cpu()
    # NaN outside: cells out of the band are neither computed nor read.
    unread = cost.masked_fill(~inside, math.nan).requires_grad_()
    measured = softdtw_from_cost(unread, gamma=0.3, bandwidth=bandwidth)
    assert_within_float64(measured, value)
    measured.sum().backward()
    assert (unread.grad[:, ~inside] == 0).all()
    assert_within_float64(unread.grad, softdtw_alignment(cost=forbidden, gamma=0.3).cpu())


def test_known_distances(device: str) -> None:
    """One time step each, where Soft-DTW is the distance itself."""
    x = torch.tensor([[3.0, 0.0]], dtype=torch.float64, device=device)
    y = torch.tensor([[0.0, 4.0]], dtype=torch.float64, device=device)
    assert softdtw(x, y, dist="sqeuclidean").item() == pytest.approx(25)
    assert softdtw(x, y, dist="euclidean").item() == pytest.approx(5)
    assert softdtw(x, y, dist="cityblock").item() == pytest.approx(7)
    assert softdtw(x, y, dist="cosine").item() == pytest.approx(1)
    assert softdtw(x, 2 * x, dist="cosine").item() == pytest.approx(0, abs=1e-15)
    assert softdtw(x, -x, dist="cosine").item() == pytest.approx(2)
