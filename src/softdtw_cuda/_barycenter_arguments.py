"""Arguments of barycenters: the series in their forms, labels, weights and the start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ._lengths import Lengths, check_lengths
from ._options import check_count
from ._problem import value_dtype
from ._series import Array
from ._validation import check_not_packed, fix_dimensions

Labels = Tensor | Sequence[int] | Array


def check_series(
    X: Tensor | Sequence[Tensor], lengths: Lengths | None, device: torch.device | str | None
) -> tuple[Tensor, list[int] | None]:
    """X as (K, N, D) in float32 or float64, and the lengths where they are not all N."""
    if isinstance(X, Tensor):
        if X.dim() != 3:
            raise ValueError(
                f"X must have shape (K, N, D), or be a list of (N_k, D) tensors, got shape {tuple(X.shape)}; "
                f"{fix_dimensions('X', X.dim())}."
            )
        batch = X
    else:
        if not isinstance(X, Sequence) or not all(isinstance(item, Tensor) for item in X):
            check_not_packed("X", X, "lengths")
            raise TypeError(
                f"X must be a (K, N, D) tensor or a list of (N_k, D) tensors, got {type(X).__name__}; "
                "convert arrays with torch.as_tensor, those of a list each."
            )
        if lengths is not None:
            raise ValueError("lengths is given but X is a list, whose tensors know theirs; leave it out.")
        for k, item in enumerate(X):
            if item.dim() != 2 or item.shape[1] != X[0].shape[-1]:
                features = X[0].shape[1] if X[0].dim() == 2 else "features"
                raise ValueError(
                    f"X[{k}] has shape {tuple(item.shape)}, expected (time, {features}): two dimensions, and "
                    "as many features in each series; add a feature axis with unsqueeze(-1)."
                )
            if item.dtype != X[0].dtype or item.device != X[0].device:
                raise ValueError(
                    f"X[{k}] is {item.dtype} on {item.device}, expected {X[0].dtype} on {X[0].device} like "
                    "X[0]; convert it with X[k].to(X[0])."
                )
        lengths = [item.shape[0] for item in X]
        if not X:
            raise ValueError("X is an empty list, expected at least one (N, D) tensor.")
        batch = torch.nn.utils.rnn.pad_sequence(list(X), batch_first=True)
    count, size, features = batch.shape
    if count == 0 or size == 0 or features == 0:
        raise ValueError(
            f"X has shape {tuple(batch.shape)}, expected at least one series, time step and feature; drop "
            "empty series before the call."
        )
    if batch.device.type == "meta":
        raise ValueError("X is on meta, where a tensor has a shape and no numbers; make X on another device.")
    if not batch.is_floating_point():
        raise TypeError(f"X has dtype {batch.dtype}, expected a float type; convert it with X.float().")
    batch = batch.detach().to(device=device, dtype=value_dtype(batch.dtype))
    if batch.is_inference():
        batch = batch.clone()
    # The start is made with lengths on the host; one wait for a GPU before the loop is cheap.
    if isinstance(lengths, Tensor):
        lengths = lengths.cpu()
    _, host = check_lengths(lengths, "lengths", count, count, size, batch.device, batched=True)
    return batch, None if host is None or min(host) == size else host


def check_labels(labels: Labels, n_clusters: int | None, init: object, count: int) -> tuple[Tensor, int]:
    """Labels as (K,) int64 on the CPU, and the number of clusters."""
    if n_clusters is not None:
        n_clusters = check_count("n_clusters", n_clusters)
    elif isinstance(init, Tensor) and init.dim() == 3:
        n_clusters = init.shape[0]
    try:
        given = labels.detach().cpu() if isinstance(labels, Tensor) else torch.from_numpy(np.asarray(labels))
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"labels must be {count} integers, one for each series, got {type(labels).__name__}; pass a "
            "tensor, an array or a list."
        ) from None
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(
            f"labels has dtype {given.dtype}, expected integers; number the clusters from 0 on, for example "
            "with numpy.unique(labels, return_inverse=True)."
        )
    if given.shape != (count,):
        raise ValueError(f"labels has shape {tuple(given.shape)}, expected ({count},): one for each series.")
    given = given.long()
    least, most = int(given.min()), int(given.max())
    if least < 0 or (n_clusters is not None and most >= n_clusters):
        wrong = least if least < 0 else most
        place = int((given == wrong).nonzero()[0])
        last = "" if n_clusters is None else f" to {n_clusters - 1}, the last of {n_clusters} clusters"
        raise ValueError(
            f"labels[{place}] is {wrong}, expected numbers from 0{last}; number the clusters from 0 on, and "
            "leave out series that belong to none."
        )
    return given, most + 1 if n_clusters is None else n_clusters


def check_weights(weights: Tensor | Sequence[float] | None, count: int) -> Tensor:
    """(K,) weights in float64 on the CPU."""
    if weights is None:
        return torch.ones(count, dtype=torch.float64, device="cpu")
    try:
        given = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"weights must be {count} numbers, one for each series, got {weights!r}; pass a list or a tensor."
        ) from None
    total = given.sum()
    if given.shape != (count,) or not (torch.isfinite(total) and total > 0 and (given >= 0).all()):
        raise ValueError(
            f"weights must be {count} non-negative finite numbers, one for each series and not all zero, got "
            f"shape {tuple(given.shape)} and values {given.flatten()[:8].tolist()}."
        )
    return given


def check_init(init: object, length: int | None, count: int, features: int, many: bool) -> None:
    sizes = f"({count}, L, {features})" if many else f"(L, {features})"
    if isinstance(init, Tensor):
        shape = tuple(init.shape if many else init.shape[1:])
        if init.dim() != 3 or init.shape[0] != count or init.shape[2] != features or init.shape[1] == 0:
            what = "clusters, the barycenters' length and" if many else "the barycenter's length and"
            raise ValueError(f"init has shape {shape}, expected {sizes}: {what} the number of features of X.")
        if length is not None and check_count("length", length) != init.shape[1]:
            raise ValueError(
                f"length is {length} but init has {init.shape[1]} time steps, expected the same; leave "
                "length out."
            )
    elif init is not None and not isinstance(init, str):
        raise TypeError(
            f"init must be a {sizes} tensor, 'mean' or None, got {type(init).__name__}; convert an "
            "array with torch.as_tensor."
        )
    elif init is not None and init != "mean":
        raise ValueError(f"init is {init!r}, expected a {sizes} tensor, 'mean' or None.")
