"""Estimators with a center for each class or cluster."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin, ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_consistent_length, check_random_state
from torch import Tensor

from .._distances import DistanceFunction
from .._kmeans import Distances, k_means
from .._options import check_count, check_flag, check_real
from .._processes import ALONE, default_group, in_every_process
from ..barycenters import softdtw_barycenters
from ._input import SeriesEstimator, SeriesSet, as_target, fit_classes, in_classes


class _Centers(SeriesEstimator):
    """What estimators with a center for each class or cluster share."""

    def _keep_centers(self, given: SeriesSet, centers: Tensor) -> Any:
        """As they are shown: in kind, and 2-D for a 2-D X."""
        return given.in_kind(centers.squeeze(2) if given.columns is not None else centers)

    def _distances(self, given: SeriesSet, centers: Any) -> tuple[Distances, Tensor]:
        """What computes the distances of the series, and the centers as it takes them."""
        device = self._device_of(given)
        fitted = torch.as_tensor(centers, device=device)
        if self._columns is not None:
            fitted = fitted.unsqueeze(2)
        options = self._check_options()
        series = given.series.to(device)
        return Distances(series, given.lengths, fitted.shape[1], options), fitted


class SoftDTWNearestCentroid(ClassifierMixin, _Centers):
    """Classes by the nearest barycenter: one average for each class, all fitted in one optimisation.

    Args:
        gamma, bandwidth, dist: as in :func:`softdtw_cuda.softdtw`.
        normalize: barycenters and distances under the divergence, otherwise under Soft-DTW itself.
        max_iter: optimiser steps (L-BFGS) towards the barycenters at most.
        device: where to compute. "auto": where X is, if it is a tensor; for arrays a GPU if there is one.

    Attributes:
        classes_: (C,) sorted labels.
        centroids_: (C, steps) for a 2-D X, otherwise (C, steps, features); of a list the steps are the mean
            length of its series.
        n_iter_: optimiser steps taken, of the class that took most.
        n_features_in_: columns of a 2-D X, otherwise features of a time step.

    Examples:
        >>> X, y = np.random.randn(20, 30).cumsum(1), np.arange(20) % 2
        >>> SoftDTWNearestCentroid(gamma=0.1).fit(X, y).centroids_.shape
        (2, 30)
    """

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        bandwidth: int | None = None,
        normalize: bool = True,
        dist: str | DistanceFunction = "sqeuclidean",
        max_iter: int = 30,
        device: str | torch.device = "auto",
    ) -> None:
        self.gamma = gamma
        self.bandwidth = bandwidth
        self.normalize = normalize
        self.dist = dist
        self.max_iter = max_iter
        self.device = device

    def fit(self, X: Any, y: Any) -> SoftDTWNearestCentroid:
        """Average the series of each label of y (n,)."""
        options = self._check_options()
        codes = fit_classes(self, y)
        given = self._check_fit_set(X)
        check_consistent_length(given.series, codes)
        centers, infos = softdtw_barycenters(
            given.series.to(self._device_of(given)),
            torch.from_numpy(codes),
            len(self.classes_),
            gamma=options.gamma,
            bandwidth=options.bandwidth,
            dist=options.dist,
            divergence="soft" if options.normalize else None,
            lengths=given.lengths,
            max_iter=self.max_iter,
            optimizer="lbfgs",
            return_info=True,
        )
        self.centroids_ = self._keep_centers(given, centers)
        self.n_iter_ = max(info.iterations for info in infos)
        return self

    def predict(self, X: Any) -> Any:
        """(n,) the class whose barycenter is nearest; of equal ones the first of `classes_`."""
        given = self._check_set(X)
        distances, centers = self._distances(given, self.centroids_)
        return in_classes(self, given, distances.nearest(centers)[1])

    def score(self, X: Any, y: Any) -> float:
        """Share of the series whose class is predicted."""
        return float(accuracy_score(as_target(y), as_target(self.predict(X))))


class SoftDTWKMeans(ClusterMixin, TransformerMixin, ClassNamePrefixFeaturesOutMixin, _Centers):
    """k-means with barycenters as centers, under the divergence of Soft-DTW.

    A round moves every center to the barycenter of its members by a few optimiser steps from where it was,
    all of them in one optimisation, and assigns each series to the nearest center. An empty cluster starts
    again from the series that is farthest from its center. Series are copied to the device once.

    Args:
        n_clusters: k.
        init: "k-means++", series drawn in proportion to their distance to those drawn before; "random",
            series drawn alike; or centers, (k, steps) or (k, steps, features).
        n_init: runs, each from a start of its own, of which the one with the least inertia is kept. One is
            enough for centers that are given.
        max_iter: rounds of a run at most.
        tol: a round that lowers the inertia by no more than this share of it is the last.
        max_iter_barycenter: optimiser steps (L-BFGS) of a round.
        gamma, bandwidth, dist: as in :func:`softdtw_cuda.softdtw`.
        normalize: barycenters and distances under the divergence, otherwise under Soft-DTW itself.
        random_state: seed of the starts, or a NumPy RandomState.
        device: where to compute. "auto": where X is, if it is a tensor; for arrays a GPU if there is one.
        progress: show a progress bar of the rounds.
        distributed: divide the work among the processes of torch.distributed's default group, all of which
            call `fit` with the same series and the same integer random_state, which is checked. The results
            are bitwise the same for any number of them. On GPUs each process takes that of its LOCAL_RANK.

    Attributes:
        cluster_centers_: (k, steps) for a 2-D X, otherwise (k, steps, features); of a list the steps are the
            mean length of its series.
        labels_: (n,) the cluster of each series, that of its nearest center.
        inertia_: sum of the distances of the series to their centers.
        n_iter_: rounds of the best run.
        n_features_in_: columns of a 2-D X, otherwise features of a time step.

    Examples:
        >>> X = np.random.randn(40, 30).cumsum(1)
        >>> model = SoftDTWKMeans(3, gamma=0.1, random_state=0).fit(X)
        >>> model.cluster_centers_.shape, model.predict(X[:5]).shape
        ((3, 30), (5,))
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        init: Any = "k-means++",
        n_init: int = 1,
        max_iter: int = 50,
        tol: float = 1e-4,
        max_iter_barycenter: int = 5,
        gamma: float = 1.0,
        bandwidth: int | None = None,
        normalize: bool = True,
        dist: str | DistanceFunction = "sqeuclidean",
        random_state: int | np.random.RandomState | None = None,
        device: str | torch.device = "auto",
        progress: bool = False,
        distributed: bool = False,
    ) -> None:
        self.n_clusters = n_clusters
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.max_iter_barycenter = max_iter_barycenter
        self.gamma = gamma
        self.bandwidth = bandwidth
        self.normalize = normalize
        self.dist = dist
        self.random_state = random_state
        self.device = device
        self.progress = progress
        self.distributed = distributed

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def fit(self, X: Any, y: Any = None) -> SoftDTWKMeans:
        """Find the clusters of the series; y is not used."""
        processes = default_group() if check_flag("distributed", self.distributed) else ALONE
        with in_every_process() if processes.count > 1 else nullcontext():
            options = self._check_options()
            n_clusters = check_count("n_clusters", self.n_clusters)
            given = self._check_fit_set(X)
            if len(given.series) < n_clusters:
                raise ValueError(f"n_samples={len(given.series)} should be >= n_clusters={n_clusters}.")
            if processes.count > 1 and not isinstance(self.random_state, (int, np.integer)):
                raise ValueError(
                    f"random_state is {self.random_state!r}, expected an integer with distributed=True: "
                    "every process has to draw the same starts."
                )
            series = given.series.to(self._device_of(given))
            arguments: dict[str, Any] = {
                "init": self._check_init(series, given),
                "n_init": check_count("n_init", self.n_init),
                "max_iter": check_count("max_iter", self.max_iter),
                "max_iter_barycenter": check_count("max_iter_barycenter", self.max_iter_barycenter),
                "tol": check_real("tol", self.tol, positive=False),
                "random": check_random_state(self.random_state),
            }
        found = k_means(
            series,
            given.lengths,
            n_clusters,
            options,
            **arguments,
            progress=self.progress,
            processes=processes,
        )
        self.cluster_centers_ = self._keep_centers(given, found.centers)
        self.labels_ = given.in_kind(found.labels)
        self.inertia_, self.n_iter_ = found.inertia, found.rounds
        return self

    def predict(self, X: Any) -> Any:
        """(n,) the nearest center of each series; of equally near ones the first."""
        given = self._check_set(X)
        distances, centers = self._distances(given, self.cluster_centers_)
        return given.in_kind(distances.nearest(centers)[1])

    def transform(self, X: Any) -> Any:
        """(n, k) distances of the series to the centers."""
        given = self._check_set(X)
        distances, centers = self._distances(given, self.cluster_centers_)
        return given.in_kind(distances.table(centers))

    def score(self, X: Any, y: Any = None) -> float:
        """Minus the sum of the distances of the series to their nearest centers; y is not used."""
        distances, centers = self._distances(self._check_set(X), self.cluster_centers_)
        return -float(distances.nearest(centers)[0].sum())

    @property
    def _n_features_out(self) -> int:
        return len(self.cluster_centers_)

    def _check_init(self, series: Tensor, given: SeriesSet) -> Tensor | str:
        if isinstance(self.init, str):
            if self.init not in ("k-means++", "random"):
                raise ValueError(
                    f"init is {self.init!r}, expected 'k-means++', 'random' or an array of centers."
                )
            return self.init
        init = self.init
        if isinstance(init, (list, tuple)):
            each = [torch.as_tensor(one, dtype=series.dtype) for one in init]
            shapes = sorted({tuple(one.shape) for one in each})
            if len(shapes) > 1:
                raise ValueError(
                    f"init has centers of shapes {shapes[0]} and {shapes[1]}, expected one shape for all: "
                    "stretch them to one length."
                )
            init = torch.stack(each) if each else torch.empty(0)
        centers = torch.as_tensor(init, device=series.device).detach().to(series)
        if given.columns is not None and centers.dim() == 2:
            centers = centers.unsqueeze(2)
        features = series.shape[2]
        if centers.dim() != 3 or centers.shape[::2] != (self.n_clusters, features) or centers.shape[1] == 0:
            raise ValueError(
                f"init has shape {tuple(init.shape)}, expected ({self.n_clusters}, steps, "
                f"{features}): a center for each cluster, with as many features as X."
            )
        return centers
