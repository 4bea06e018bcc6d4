"""How large gamma should be."""

from __future__ import annotations

import math
import random

import torch

from ._lengths import Lengths
from ._migration import explains_arguments
from ._options import check_count
from ._series import Series, as_batch
from ._validation import check_all_pairs


@explains_arguments
def gamma_heuristic(
    X: Series, *, lengths: Lengths | None = None, n_samples: int = 1000, seed: int = 0
) -> float:
    """A gamma on the scale of the data: the median squared distance of two of its time steps.

    Squared Euclidean distances of all pairs of a random sample of steps, from whatever series. With this
    gamma an alignment weighs a detour that costs a typical distance e times less: a starting point, smooth
    rather than sharp. tslearn's `gamma_soft_dtw` is 2 N times as much for series of N steps.

    Args:
        X: (K, N, D), a tensor or a NumPy array, or a list of K series (N_k, D).
        lengths: (K,) true lengths of padded series.
        n_samples: steps to draw, none of them twice; all of them where X has no more.
        seed: of the draw. The same seed gives the same number.

    Returns:
        A positive number.

    Raises:
        TypeError, ValueError: naming the argument, what came, what was expected and how to fix it; also for
            series that are constant or not finite, of which no scale can be told.

    Examples:
        >>> gamma = gamma_heuristic(torch.randn(20, 50, 3))
    """
    batch, lengths = as_batch("X", X, lengths)
    n_samples, seed = check_count("n_samples", n_samples, least=2), check_count("seed", seed, least=0)
    problem = check_all_pairs(batch, None, 1.0, None, "sqeuclidean", None, lengths, None, ("X", "X"))
    series = problem.x.detach()
    count, size, _ = series.shape
    each = (
        torch.full((count,), size, device="cpu")
        if problem.x_lengths is None
        else problem.x_lengths.cpu().long()
    )
    ends = each.cumsum(0)
    total = int(ends[-1]) if count else 0
    if total < 2:
        raise ValueError(f"X has {total} time step(s), expected at least 2 to tell a distance.")
    # Python draws from a range without making it: memory does not grow with the number of steps.
    drawn = random.Random(seed).sample(range(total), n_samples) if n_samples < total else range(total)
    steps = torch.tensor(drawn, device="cpu")
    owner = torch.searchsorted(ends, steps, right=True)
    place = steps - (ends - each)[owner]
    sample = series[owner.to(series.device), place.to(series.device)].double().cpu()
    distances = torch.pdist(sample).square()
    # Most steps may be equal, as in series of blocks.
    gamma = next((float(one) for one in (distances.median(), distances.mean()) if one != 0), 0.0)
    if not 0.0 < gamma < math.inf:
        raise ValueError(
            f"X has a typical squared distance of {gamma} between its time steps, expected a finite number "
            "greater than 0; drop constant series and those with NaN or infinite values."
        )
    return gamma
