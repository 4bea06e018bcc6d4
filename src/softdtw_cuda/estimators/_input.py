"""X and y of the estimators: every form of series, the classes of y, results in kind."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_array
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from .._distances import DistanceFunction
from .._kmeans import Options
from .._options import check_bandwidth, check_flag, check_gamma, check_metric
from .._problem import value_dtype
from .._processes import check_device, own_device
from .._series import Array, as_batch


class SeriesSet(NamedTuple):
    """A checked X.

    Attributes:
        series: (n, N, D), where X was.
        lengths: of padded series.
        columns: of a 2-D X, whose series are univariate; otherwise None.
        is_array: whether results are to be NumPy arrays.
    """

    series: Tensor
    lengths: list[int] | None
    columns: int | None
    is_array: bool

    def in_kind(self, result: Tensor | Array) -> Any:
        if self.is_array:
            return result.numpy(force=True) if isinstance(result, Tensor) else result
        return torch.as_tensor(result, device=self.series.device)


class SeriesEstimator(BaseEstimator):
    """What all of them have in common: the options of Soft-DTW, the device, and how X is read."""

    gamma: float
    bandwidth: int | None
    normalize: bool
    dist: str | DistanceFunction
    device: str | torch.device

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def _check_options(self) -> Options:
        check_gamma(self.gamma)
        check_bandwidth(self.bandwidth)
        check_metric(self.dist)
        return Options(self.gamma, self.bandwidth, check_flag("normalize", self.normalize), self.dist)

    def _device_of(self, given: SeriesSet) -> torch.device:
        """Where to compute: with "auto" where tensors are, and for arrays on a GPU if there is one."""
        if isinstance(self.device, str) and self.device == "auto":
            return own_device() if given.is_array else given.series.device
        return check_device(self.device)

    def _check_fit_set(self, X: Any) -> SeriesSet:
        """X of `fit`, whose sizes later ones are compared with."""
        given = _read_set(self, X, reset=True)
        self._n_features, self._columns, self._dtype = (
            given.series.shape[2],
            given.columns,
            given.series.dtype,
        )
        self.n_features_in_ = self._n_features if given.columns is None else given.columns
        return given

    def _check_set(self, X: Any) -> SeriesSet:
        """X of any other method, in the type of the fitted one."""
        check_is_fitted(self)
        given = _read_set(self, X, reset=False)
        name, features = type(self).__name__, given.series.shape[2]
        if None not in (given.columns, self._columns) and given.columns != self._columns:
            raise ValueError(
                f"X has {given.columns} features, but {name} is expecting {self._columns} features as input; "
                "series of another length are welcome as an array (n, steps, 1) or as a list."
            )
        if features != self._n_features:
            raise ValueError(
                f"X has {features} features in each time step, but {name} is expecting {self._n_features} "
                "features as input."
            )
        return given._replace(series=given.series.to(self._dtype))


def _read_set(estimator: SeriesEstimator, X: Any, reset: bool) -> SeriesSet:
    """X in one of its forms, with errors in scikit-learn's words."""
    name = type(estimator).__name__
    each = _as_list(X)
    if each is None and not isinstance(X, Tensor):
        validate_data(estimator, X, "no_validation", reset=reset, skip_check_array=True, ensure_2d=False)
        array = check_array(
            X, dtype=[np.float64, np.float32], allow_nd=True, input_name="X", estimator=estimator
        )
        series, lengths = as_batch("X", array, None)
        is_array, columns = True, array.shape[1] if array.ndim == 2 else None
    else:
        if each is not None:
            if isinstance(each[0], np.ndarray):
                types = {one.dtype for one in each}
                each = [one.astype(np.result_type(*types, np.float32), copy=False) for one in each]
            series, lengths = as_batch("X", each, None)
        else:
            series, lengths = X, None
        is_array, columns = isinstance(each, list) and isinstance(each[0], np.ndarray), None
        if isinstance(X, Tensor) and X.dim() == 2:
            columns = X.shape[1]
        if series.is_complex():
            raise ValueError(f"Complex data not supported\n{series.dtype}")
        series = series.detach()
        if len(series) == 0:
            raise ValueError(
                f"Found array with 0 sample(s) (shape={tuple(series.shape)}) while a minimum of 1 is "
                f"required by {name}."
            )
        if not torch.isfinite(series).all():
            found = "NaN" if torch.isnan(series).any() else "infinity or a value too large"
            raise ValueError(f"Input X contains {found}.\n{name} does not accept it; drop such series.")
    if columns is not None:
        series = series.unsqueeze(2)
    if series.dim() != 3 or 0 in series.shape:
        raise ValueError(
            f"X has shape {tuple(series.shape)}; {name} expected a 2D array (series, steps), a 3D array "
            "(series, steps, features), or a list of series (steps,) or (steps, features), no size being 0."
        )
    return SeriesSet(
        series.to(value_dtype(series.dtype)), cast("list[int] | None", lengths), columns, is_array
    )


def _as_list(X: Any) -> list[Any] | None:
    """A list of series (steps, features), or None for anything else, such as rows of numbers."""
    if isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 1:
        X = list(X)
    if not isinstance(X, (list, tuple)) or not X:
        return None
    if not any(isinstance(one, (np.ndarray, Tensor)) and one.ndim > 0 for one in X):
        rows = all(isinstance(one, (list, tuple)) for one in X)
        if not rows or len({len(one) for one in X}) == 1:
            return None
    each = [one if isinstance(one, Tensor) else np.asarray(one) for one in X]
    for k, one in enumerate(each):
        if one.ndim not in (1, 2) or (isinstance(one, np.ndarray) and one.dtype.kind not in "fiub"):
            raise ValueError(
                f"X[{k}] has shape {tuple(one.shape)} and type {one.dtype}, expected a series of numbers, "
                "(steps,) or (steps, features)."
            )
    return [one.reshape(-1, 1) if one.ndim == 1 else one for one in each]


def as_target(y: Any) -> Any:
    return y.numpy(force=True) if isinstance(y, Tensor) else y


def fit_classes(estimator: Any, y: Any) -> Array:
    """Keep the classes of y; y as indices into them."""
    labels = validate_data(estimator, "no_validation", as_target(y))
    check_classification_targets(labels)
    estimator.classes_, codes = np.unique(labels, return_inverse=True)
    return codes


def in_classes(estimator: Any, given: SeriesSet, codes: Array) -> Any:
    """Labels in kind; those that no tensor can hold, such as strings, stay an array."""
    labels = estimator.classes_[codes]
    return given.in_kind(labels) if labels.dtype.kind in "iufb" else labels
