"""scikit-learn estimators under Soft-DTW: neighbours, nearest centroid, k-means.

``pip install softdtw-cuda-torch[sklearn]``. Series come as X: (n, steps) for univariate ones, (n, steps,
features), or a list of series (steps,) or (steps, features) of unequal lengths; as NumPy arrays or torch
tensors, and results come back in kind. Numbers are computed in float32 or float64, as they come; narrower
ones in float32, integers in float64.

Distances are values of the divergence of Soft-DTW (``normalize=True``): 0 between a series and itself, and a
cost, that is a squared distance, as the inertia of k-means is.
"""

try:
    from ._centers import SoftDTWKMeans, SoftDTWNearestCentroid
    from ._neighbors import SoftDTWKNeighborsClassifier, SoftDTWKNeighborsRegressor
except ImportError as error:
    if (error.name or "").partition(".")[0] != "sklearn":
        raise
    raise ImportError(
        "softdtw_cuda.estimators needs scikit-learn 1.6 or newer: pip install 'softdtw-cuda-torch[sklearn]'"
    ) from error

__all__ = [
    "SoftDTWKMeans",
    "SoftDTWKNeighborsClassifier",
    "SoftDTWKNeighborsRegressor",
    "SoftDTWNearestCentroid",
]
