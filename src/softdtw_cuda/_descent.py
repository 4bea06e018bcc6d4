"""Optimisers of several independent points in one batch: Adam, L-BFGS, a truncated Newton method.

A problem has k points, each with a loss of its own. Every optimiser moves all of them in one step but decides
for each alone: step lengths, line search and trust region are (k,) tensors. Losses come from one call for all
points that are still under way; the host waits for the device once a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Hessians = Callable[[Tensor, list[bool]], Callable[[Tensor], Tensor]]
"""Points and which of them matter, to the function from vectors (k, n) to Hessian-vector products (k, n)."""


LEAST_GAIN = 0.1
"""Of a step, in roundings of the loss: gradients are more accurate than differences of losses. One rounding
would stop a float32 descent up to 7e-7 of the loss above its end, this costs one to six evaluations more."""


class Points(NamedTuple):
    """Where the k points are."""

    z: Tensor
    """(k, n)."""
    loss: Tensor
    """(k,) float64."""
    gradient: Tensor
    """(k, n)."""
    rounding: Tensor
    """(k,) float64: differences of losses that are none."""

    def where(self, mask: Tensor, other: Points) -> Points:
        """These points where the mask (k,) is true, the others elsewhere."""
        column = mask.unsqueeze(1)
        return Points(
            torch.where(column, self.z, other.z),
            torch.where(mask, self.loss, other.loss),
            torch.where(column, self.gradient, other.gradient),
            torch.where(mask, self.rounding, other.rounding),
        )


Evaluate = Callable[[Tensor, list[bool]], Points]
"""(k, n) points and which of them to evaluate; rows that are not asked for may hold anything."""


class Optimizer(Protocol):
    """What `step` has of its own between calls belongs to one descent."""

    def step(self, at: Points, active: list[bool]) -> tuple[Points, Tensor]:
        """The points after one iteration, and (k,) whether each has moved; those not active stay."""


class Adam:
    """Adam (Kingma and Ba, 2015), its step size falling like a cosine from `rate` to a tenth of it."""

    def __init__(self, evaluate: Evaluate, rate: float, steps: int) -> None:
        self.evaluate, self.rate, self.steps = evaluate, rate, steps
        self.taken = 0
        self.mean = self.square = torch.zeros(())

    def step(self, at: Points, active: list[bool]) -> tuple[Points, Tensor]:
        if self.taken == 0:
            self.mean, self.square = torch.zeros_like(at.z), torch.zeros_like(at.z)
        rate = self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * self.taken / self.steps)))
        self.taken += 1
        self.mean = torch.lerp(self.mean, at.gradient, 0.1)
        self.square = torch.lerp(self.square, at.gradient.square(), 0.001)
        spread = (self.square / (1 - 0.999**self.taken)).sqrt() + 1e-8
        z = at.z - rate / (1 - 0.9**self.taken) * self.mean / spread
        mask = _mask(active, z)
        z = torch.where(mask.unsqueeze(1), z, at.z)
        after = self.evaluate(z, active).where(mask, at)
        return after, (after.z != at.z).any(1)


class LBFGS:
    """L-BFGS (Nocedal, 1980) with the bracketing line search of Lewis and Overton (2013) for weak Wolfe
    conditions: halve a step that does not decrease the loss enough, double one whose slope is still steep.
    """

    HISTORY = 20
    FIRST_SCALE = 0.5
    """Of the first direction, minus the gradient: a step of a barycenter is matched with at least one of each
    series, so that the Hessian of squared distances has about 2 on its diagonal, or more."""
    DECREASE, CURVATURE = 1e-4, 0.9
    TRIALS = 25

    def __init__(self, evaluate: Evaluate, rate: float) -> None:
        self.evaluate, self.rate = evaluate, rate
        self.history: list[tuple[Tensor, Tensor, Tensor]] = []
        """Steps (k, n), changes of the gradient (k, n), and one over their product (k,), 0 for none."""
        self.scale = torch.zeros(())

    def step(self, at: Points, active: list[bool]) -> tuple[Points, Tensor]:
        if not self.history:
            self.scale = at.loss.new_full(at.loss.shape, self.FIRST_SCALE, dtype=at.z.dtype)
        direction = self._direction(at.gradient)
        slope = _dot(at.gradient, direction)
        # Otherwise rounding hides what the step would gain, or has bent the direction.
        useful = (-slope).double() > LEAST_GAIN * at.rounding
        after = self._search(at, direction, slope.double(), _mask(active, at.z) & useful)
        moved = (after.z != at.z).any(1)
        self._remember(after.z - at.z, after.gradient - at.gradient)
        return after, moved

    def _direction(self, gradient: Tensor) -> Tensor:
        """Minus the approximate inverse Hessian times the gradient: the two loops over the history."""
        q = gradient
        shares = []
        for s, y, inverse in reversed(self.history):
            share = inverse * _dot(s, q)
            q = q - share.unsqueeze(1) * y
            shares.append(share)
        q = q * self.scale.unsqueeze(1)
        for (s, y, inverse), share in zip(self.history, reversed(shares), strict=True):
            q = q + (share - inverse * _dot(y, q)).unsqueeze(1) * s
        return -q

    def _remember(self, s: Tensor, y: Tensor) -> None:
        product, square = _dot(s, y), _dot(y, y)
        # No curvature, as for points that did not move: such a pair takes part with a factor of zero.
        valid = product > torch.finfo(s.dtype).eps * square
        inverse = torch.where(valid, 1 / product, 0.0)
        self.scale = torch.where(valid, product / square, self.scale)
        self.history = [*self.history[1 - self.HISTORY :], (s, y, inverse)]

    def _search(self, at: Points, direction: Tensor, slope: Tensor, pending: Tensor) -> Points:
        found = at
        length = torch.full_like(at.loss, self.rate)
        low, high = torch.zeros_like(length), torch.full_like(length, math.inf)
        for _ in range(self.TRIALS):
            waiting = pending.tolist()
            if not any(waiting):
                break
            step = torch.where(pending, length, 0.0).to(at.z.dtype)
            z = at.z + step.unsqueeze(1) * direction
            trial = self.evaluate(z, waiting)
            lower = trial.loss <= at.loss + self.DECREASE * length * slope + at.rounding
            flat = _dot(trial.gradient, direction).double() >= self.CURVATURE * slope
            found = trial.where(pending & lower, found)
            low = torch.where(lower, length, low)
            high = torch.where(lower, high, length)
            pending = pending & ~(lower & flat)
            length = torch.where(high == math.inf, 2 * length, (low + high) / 2)
        return found


class NewtonCG:
    """Newton's method in a trust region, its steps found by conjugate gradients (Steihaug, 1983).

    Conjugate gradients stop at the region's border, at a direction of negative curvature (which is followed
    to the border), or once the residual is below min(0.5, sqrt(|g| / |g_0|)) |g|.
    """

    PRODUCTS = 50
    """Most Hessian-vector products of a step."""

    def __init__(self, evaluate: Evaluate, hessians: Hessians, rate: float) -> None:
        self.evaluate, self.hessians, self.rate = evaluate, hessians, rate
        self.radius = self.first_norm = torch.zeros(())

    def step(self, at: Points, active: list[bool]) -> tuple[Points, Tensor]:
        norm = _norm(at.gradient)
        if self.radius.dim() == 0:
            self.radius, self.first_norm = self.rate * norm, norm
        running = _mask(active, at.z) & (norm > 0)
        step, gain = self._solve(at, norm, running)
        useful = running & (gain.double() > 0.5 * LEAST_GAIN * at.rounding)
        wanted = useful.tolist()
        if not any(wanted):
            return at, useful
        z = torch.where(useful.unsqueeze(1), at.z + step, at.z)
        trial = self.evaluate(z, wanted)
        # Rounding counts on both sides, so that the ratio of two vanishing numbers is about 1.
        ratio = (at.loss - trial.loss + at.rounding) / (gain.double() + at.rounding)
        accepted = useful & (ratio > 1e-4)
        length = _norm(step)
        grown = torch.where((ratio > 0.75) & (length > 0.99 * self.radius), 2 * self.radius, self.radius)
        # Also where the ratio is NaN.
        radius = torch.where(ratio >= 0.25, grown, 0.25 * length)
        self.radius = torch.where(useful, radius, self.radius)
        # A step that was refused is tried again, shorter: the point is not at its end.
        return trial.where(accepted, at), useful & (accepted | (self.radius > 0))

    def _solve(self, at: Points, norm: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        """(k, n) steps, and (k,) what they gain by the quadratic model."""
        product = self.hessians(at.z, running.tolist())
        enough = norm * (norm / self.first_norm).sqrt().clamp(max=0.5)
        step, image = torch.zeros_like(at.z), torch.zeros_like(at.z)  # image: the Hessian times the step
        residual = at.gradient
        along = -residual
        square = _dot(residual, residual)
        for _ in range(self.PRODUCTS):
            if not bool(running.any()):
                break
            turned = product(along)
            curvature = _dot(along, turned)
            length = square / curvature
            beyond = (curvature <= 0) | (_norm(step + length.unsqueeze(1) * along) >= self.radius)
            length = torch.where(beyond, self._to_border(step, along), length)
            length = torch.where(running, length, 0.0).unsqueeze(1)
            step, image = step + length * along, image + length * turned
            residual = residual + length * turned
            new_square = _dot(residual, residual)
            running = running & ~beyond & (new_square.sqrt() > enough)
            along = (
                torch.where(running.unsqueeze(1), (new_square / square).unsqueeze(1) * along, 0) - residual
            )
            square = new_square
        return step, -(_dot(at.gradient, step) + 0.5 * _dot(step, image))

    def _to_border(self, step: Tensor, along: Tensor) -> Tensor:
        """The positive t with |step + t along| = radius."""
        a, b = _dot(along, along), _dot(step, along)
        c = (self.radius.square() - _dot(step, step)).clamp(min=0)
        return c / (b + (b.square() + a * c).sqrt())


def _mask(active: list[bool], like: Tensor) -> Tensor:
    return torch.tensor(active, device=like.device)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """(k,) products of the rows."""
    return (a * b).sum(1)


def _norm(a: Tensor) -> Tensor:
    return _dot(a, a).sqrt()
