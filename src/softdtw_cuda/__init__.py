"""Soft-DTW for PyTorch: accurate gradients in float32, no N x M table, on CPU and CUDA."""

from .barycenters import BarycenterInfo, softdtw_barycenter
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
from .pairs import softdtw_cdist, softdtw_pairs

__version__ = "0.1.0"

__all__ = [
    "BarycenterInfo",
    "DilateLoss",
    "SoftDTW",
    "softdtw",
    "softdtw_alignment",
    "softdtw_barycenter",
    "softdtw_cdist",
    "softdtw_divergence",
    "softdtw_entropy",
    "softdtw_expected_cost",
    "softdtw_from_cost",
    "softdtw_pairs",
    "softdtw_sharp",
]
