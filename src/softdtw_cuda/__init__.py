"""Soft-DTW for PyTorch: accurate gradients in float32, no N x M table, on CPU and CUDA."""

from ._gamma import gamma_heuristic
from .barycenters import BarycenterInfo, softdtw_barycenter, softdtw_barycenters
from .functional import (
    softdtw,
    softdtw_alignment,
    softdtw_divergence,
    softdtw_entropy,
    softdtw_expected_cost,
    softdtw_from_cost,
    softdtw_sharp,
)
from .modules import DilateLoss, SoftDTW
from .neighbours import softdtw_knn
from .pairs import softdtw_cdist, softdtw_pairs

__version__ = "0.1.0"

__all__ = [
    "BarycenterInfo",
    "DilateLoss",
    "SoftDTW",
    "gamma_heuristic",
    "softdtw",
    "softdtw_alignment",
    "softdtw_barycenter",
    "softdtw_barycenters",
    "softdtw_cdist",
    "softdtw_divergence",
    "softdtw_entropy",
    "softdtw_expected_cost",
    "softdtw_from_cost",
    "softdtw_knn",
    "softdtw_pairs",
    "softdtw_sharp",
]
