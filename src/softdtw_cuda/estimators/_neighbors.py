"""Estimators of nearest neighbours."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_consistent_length
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from .._distances import DistanceFunction
from .._options import check_count
from .._series import Array
from ..neighbours import softdtw_knn
from ._input import SeriesEstimator, SeriesSet, as_target, fit_classes, in_classes


class _KNeighbors(SeriesEstimator):
    """The options and the search that both estimators of neighbours share."""

    def __init__(
        self,
        n_neighbors: int = 5,
        *,
        weights: Literal["uniform", "distance"] = "uniform",
        gamma: float = 1.0,
        bandwidth: int | None = None,
        normalize: bool = True,
        dist: str | DistanceFunction = "sqeuclidean",
        device: str | torch.device = "auto",
        progress: bool = False,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.weights = weights
        self.gamma = gamma
        self.bandwidth = bandwidth
        self.normalize = normalize
        self.dist = dist
        self.device = device
        self.progress = progress

    def _keep(self, X: Any, y: Array) -> None:
        self._check_options()
        check_count("n_neighbors", self.n_neighbors)
        if self.weights not in ("uniform", "distance"):
            raise ValueError(f"weights is {self.weights!r}, expected 'uniform' or 'distance'.")
        if self.weights == "distance" and not self.normalize:
            raise ValueError(
                "weights is 'distance' but normalize is False, and values of Soft-DTW may be negative; "
                "pass normalize=True or weights='uniform'."
            )
        given = self._check_fit_set(X)
        check_consistent_length(given.series, y)
        self._fit_set = given
        self.n_samples_fit_ = len(y)

    def kneighbors(self, X: Any = None, n_neighbors: int | None = None, return_distance: bool = True) -> Any:
        """The nearest of the fitted series.

        Args:
            X: queries. None: the fitted series, each without itself among its neighbours.
            n_neighbors: how many; None: as many as the estimator has been given.
            return_distance: also return the distances.

        Returns:
            distances (n, k), ascending, and indices (n, k) of the fitted series; or the indices alone. Of
            equal distances the smaller index comes first.
        """
        check_is_fitted(self)
        given = self._fit_set if X is None else self._check_set(X)
        values, indices = self._nearest(given, X is None, n_neighbors)
        if not return_distance:
            return given.in_kind(indices)
        return given.in_kind(values), given.in_kind(indices)

    def _nearest(self, given: SeriesSet, own: bool, n_neighbors: int | None = None) -> tuple[Tensor, Tensor]:
        k = check_count("n_neighbors", self.n_neighbors if n_neighbors is None else n_neighbors)
        count = self.n_samples_fit_ - own
        if k > count:
            raise ValueError(
                f"Expected n_neighbors <= n_samples_fit, but n_neighbors = {k}, n_samples_fit = {count}, "
                f"n_samples = {len(given.series)}; fit more series or ask for fewer neighbours."
            )
        device = self._device_of(given)
        database = self._fit_set.series
        if database.device != device and (database.device.type, device.type) != ("cpu", "cuda"):
            database = database.to(device)  # from the host it goes to a GPU block by block
        return softdtw_knn(
            given.series,
            None if own else database,
            k,
            gamma=self.gamma,
            bandwidth=self.bandwidth,
            normalize=self.normalize,
            dist=self.dist,
            query_lengths=given.lengths,
            database_lengths=None if own else self._fit_set.lengths,
            exclude_self=own,
            progress=self.progress,
            device=device,
        )

    def _neighbors_and_weights(self, given: SeriesSet) -> tuple[Array, Array]:
        """Indices (n, k) of the neighbours of each query, and their weights, whose sum is 1."""
        values, indices = (each.numpy(force=True) for each in self._nearest(given, False))
        if self.weights == "uniform":
            shares = np.ones_like(values)
        else:
            # A neighbour at distance 0 outweighs all that are not. Rounding may give less than 0.
            at_zero = values <= 0
            shares = np.where(at_zero, 1.0, 0.0)
            inverse = 1 / np.where(at_zero, 1.0, values)
            shares = np.where(at_zero.any(1, keepdims=True), shares, inverse)
        return indices, shares / shares.sum(1, keepdims=True)


class SoftDTWKNeighborsClassifier(ClassifierMixin, _KNeighbors):
    """Classes by the vote of the nearest fitted series.

    Args:
        n_neighbors: how many of them.
        weights: "uniform", or "distance": the inverse of the distance.
        gamma, bandwidth, dist: as in :func:`softdtw_cuda.softdtw`.
        normalize: distances are values of the divergence, otherwise of Soft-DTW itself.
        device: where to compute. "auto": where X is, if it is a tensor; for arrays a GPU if there is one.
        progress: show a progress bar while searching.

    Attributes:
        classes_: (C,) sorted labels.
        n_samples_fit_: number of fitted series.
        n_features_in_: columns of a 2-D X, otherwise features of a time step.

    Examples:
        >>> X, y = np.random.randn(20, 30).cumsum(1), np.arange(20) % 2
        >>> model = SoftDTWKNeighborsClassifier(n_neighbors=1, gamma=0.1).fit(X, y)
        >>> model.score(X, y)
        1.0
    """

    def fit(self, X: Any, y: Any) -> SoftDTWKNeighborsClassifier:
        """Keep the series and their labels (n,)."""
        codes = fit_classes(self, y)
        self._keep(X, codes)
        self._y = codes
        return self

    def predict_proba(self, X: Any) -> Any:
        """(n, C) share of each class in the weights of the neighbours."""
        given = self._check_set(X)
        return given.in_kind(self._shares(given))

    def predict(self, X: Any) -> Any:
        """(n,) the class with the largest share; of equal ones the first of `classes_`."""
        given = self._check_set(X)
        return in_classes(self, given, self._shares(given).argmax(1))

    def score(self, X: Any, y: Any) -> float:
        """Share of the series whose class is predicted."""
        return float(accuracy_score(as_target(y), as_target(self.predict(X))))

    def _shares(self, given: SeriesSet) -> Array:
        neighbors, weights = self._neighbors_and_weights(given)
        shares = np.zeros((len(neighbors), len(self.classes_)), dtype=weights.dtype)
        rows = np.arange(len(neighbors))
        for k in range(neighbors.shape[1]):
            shares[rows, self._y[neighbors[:, k]]] += weights[:, k]
        return shares


class SoftDTWKNeighborsRegressor(RegressorMixin, _KNeighbors):
    """Numbers as the mean of those of the nearest fitted series.

    Args:
        n_neighbors: how many of them.
        weights: "uniform", or "distance": the inverse of the distance.
        gamma, bandwidth, dist: as in :func:`softdtw_cuda.softdtw`.
        normalize: distances are values of the divergence, otherwise of Soft-DTW itself.
        device: where to compute. "auto": where X is, if it is a tensor; for arrays a GPU if there is one.
        progress: show a progress bar while searching.

    Attributes:
        n_samples_fit_: number of fitted series.
        n_features_in_: columns of a 2-D X, otherwise features of a time step.

    Examples:
        >>> X = np.random.randn(20, 30).cumsum(1)
        >>> model = SoftDTWKNeighborsRegressor(3, weights="distance").fit(X, X.mean(1))
        >>> model.predict(X[:4]).shape
        (4,)
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        # scikit-learn's test set has columns without an order, of whose sum warping loses much.
        tags.regressor_tags.poor_score = True
        return tags

    def fit(self, X: Any, y: Any) -> SoftDTWKNeighborsRegressor:
        """Keep the series and their numbers, (n,) or (n, outputs)."""
        target = validate_data(self, "no_validation", as_target(y), multi_output=True, y_numeric=True)
        self._keep(X, target)
        self._y = target
        return self

    def predict(self, X: Any) -> Any:
        """(n,) or (n, outputs) weighted means."""
        given = self._check_set(X)
        neighbors, weights = self._neighbors_and_weights(given)
        means = np.einsum("nk,nk...->n...", weights, self._y[neighbors])
        return given.in_kind(means)

    def score(self, X: Any, y: Any) -> float:
        """The coefficient of determination R²."""
        return float(r2_score(as_target(y), as_target(self.predict(X))))
